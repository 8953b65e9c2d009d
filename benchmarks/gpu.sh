#!/usr/bin/env bash
# Everything that this project measures on a GPU, in about nine minutes at most.
#
#     benchmarks/gpu.sh OUT                  all parts: OUT/results.tgz unpacks to logs/results/<gpu>/
#     benchmarks/gpu.sh OUT peers memory     some of them: tests gpu_ms peers memory profile speedup
#     TINY=1 benchmarks/gpu.sh OUT           a rehearsal on the CPU with a tiny model
#
# Needs Python 3.11 or newer with PyTorch 2.11 or newer, and no network: packages that are missing are installed from a folder wheels/
# here, if there is one, and corpora are used where they are (data/shakespeare; python data/shakespeare.py --source FILE). Each part has
# a limit of time, so that a slow one loses itself only. What it prints is in OUT/<part>.txt.

set -uo pipefail
[[ $# -gt 0 ]] || { sed -n '2,11s/^# \?//p' "$0"; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
shift
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(tests gpu_ms peers memory profile speedup)
begun=$SECONDS
trap 'exit 130' INT
python=${PYTHON:-python3}

if [[ -d wheels ]]; then
    missing=$("$python" - <<'END'
import importlib.metadata, re
for line in [*open("requirements.txt"), *open("requirements-dev.txt")]:
    if name := re.match(r"[\w-]+", line):
        try:
            importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            print(name[0])
END
    )
    # whatever version is there: one that does not fit this Python loses its part only
    for package in $missing; do
        "$python" -m pip install -q --no-index --find-links wheels "$package" || echo "no wheel of $package"
    done
fi

if [[ -z ${TINY:-} ]]; then
    gpu=$("$python" -c "import re, torch; print(re.sub('[^a-z0-9]+', '-', torch.cuda.get_device_name().lower()).strip('-'))") || exit 1
    config=speedup10.yaml batches=(32 64) gpu_ms=(gpu_ms) speedup=(speedup)
    tests=(-m gpu) rounds=(--rounds 12) peers=() profile=(--compare logs/reference/timeit.csv)
else
    export TURN_SECONDS=0.01
    gpu=tiny config=$out/tiny.yaml batches=(2) gpu_ms=("$out/tiny.yaml" "$out/untied.yaml") speedup=("$out/tiny.yaml")
    tests=(-m gpu --collect-only tests/test_train.py) rounds=(--rounds 6) peers=(--seq_len 32 --no-baseline) profile=(--config "$config" --computation forward --steps 1)
    cat >"$config" <<'END'
{device: cpu, dataset: pydocs, n_layer: 1, n_head: 2, n_embd: 32, block_size: 32, seq_len: 32, batch_size: 2, vocab_size: 50304,
 tie_weights: true, flash: true, fused_adamw: true, max_steps: 3}
END
    echo "{base: $config, tie_weights: false}" >"$out/untied.yaml"
fi
logs=$out/logs/results/$gpu
mkdir -p "$logs"

# part NAME SECONDS COMMAND...: run a command with a limit of time, at which it gets Ctrl-C's signal and keeps what it has finished
part() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    echo "\$ $*" >>"$out/$name.txt"
    timeout --foreground --signal=INT --kill-after=15 "$limit" "$@" >>"$out/$name.txt" 2>&1
    status=$?
    echo "$name: ended with status $status after $((SECONDS - start)) s of at most $limit"
}

# ladder NAME SECONDS STAGE...: the losses first, then the stages in turn as far as the time goes; and a report of what is finished
ladder() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" ladder.py "$@" --log_dir "$logs" "${rounds[@]}"
    part "$name" 20 "$python" ladder.py "$@" --log_dir "$logs" --report_only
}

run_tests() { part tests 60 "$python" -m pytest -q "${tests[@]}"; }
run_gpu_ms() { ladder gpu_ms 110 "${gpu_ms[@]}"; }
run_speedup() { ladder speedup 150 "${speedup[@]}"; }
run_profile() { part profile 35 "$python" bench.py --log_dir "$logs" "${profile[@]}"; }

run_peers() {
    local batch_size
    for batch_size in "${batches[@]}"; do
        part peers 50 "$python" -m benchmarks.peers --config "$config" --batch_size "$batch_size" --log_dir "$logs/b$batch_size" \
            --no-starts --no-settings "${rounds[@]}" "${peers[@]}"
    done
}

run_memory() {
    part memory 35 "$python" bench.py --config "$config" --computation training_step --steps 2 --loss_chunks 8 \
        --scan "batch_size=$(IFS=, && echo "${batches[*]}")" --log_dir "$logs"
}

for name in "${parts[@]}"; do
    declare -F "run_$name" >/dev/null || { echo "no part is called $name; there are: tests gpu_ms peers memory profile speedup"; exit 2; }
done
for name in "${parts[@]}"; do
    "run_$name"
done
cp "$out"/*.txt "$logs"
tar -C "$out" -czf "$out/results.tgz" "logs/results/$gpu" && echo "$out/results.tgz after $((SECONDS - begun)) s"
