#!/usr/bin/env bash
# Everything that this project measures on a GPU, in nine minutes at most.
#
#     measure/gpu.sh OUT                  all parts: OUT/results.tgz unpacks to logs/results/<gpu>/
#     measure/gpu.sh OUT peers memory     some of them, with more time for each: tests gpu_ms peers memory profile speedup
#     LIMIT=3600 measure/gpu.sh OUT       in an hour at most
#     TINY=1 measure/gpu.sh OUT           a rehearsal on the CPU with a tiny model
#
# Needs Python 3.11 or newer with PyTorch 2.11 or newer, and no network: packages that are missing are installed from a folder wheels/
# here, if there is one, and corpora are used where they are (data/shakespeare; python data/shakespeare.py --source FILE). Each part has
# its share of the time that is left, so that a slow one loses itself only, and a fast one leaves more to the others. What a part
# prints is in OUT/<part>.txt; what is finished is in the archive after each.

set -uo pipefail
[[ $# -gt 0 ]] || { sed -n '2,13s/^# \?//p' "$0"; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
shift
all=(tests gpu_ms peers memory profile speedup)
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=("${all[@]}")
declare -A weights=([tests]=6 [gpu_ms]=13 [peers]=11 [memory]=8 [profile]=4 [speedup]=16)
begun=$SECONDS limit=${LIMIT:-540}
trap 'exit 130' INT
python=${PYTHON:-python3}

if [[ -d wheels ]]; then
    missing=$("$python" - <<'END'
import importlib.metadata, re
for line in [*open("requirements.txt"), *open("requirements-dev.txt")]:
    if name := re.match(r"\w[\w-]*", line):
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
    local name=$1 seconds=$(($2 > 1 ? $2 : 1)) start=$SECONDS status
    shift 2
    echo "\$ $*" >>"$out/$name.txt"
    timeout --foreground --signal=INT --kill-after=15 "$seconds" "$@" >>"$out/$name.txt" 2>&1
    status=$?
    echo "$name: ended with status $status after $((SECONDS - start)) s of at most $seconds"
}

# ladder NAME SECONDS STAGE...: the losses first, then the interleaved rounds as far as the time goes; and a report of what is finished
ladder() {
    local name=$1 seconds=$2
    shift 2
    part "$name" $((seconds - 20)) "$python" ladder.py "$@" --log_dir "$logs" "${rounds[@]}"
    part "$name" 20 "$python" ladder.py "$@" --log_dir "$logs" --report_only
}

run_tests() { part tests "$1" "$python" -m pytest -q "${tests[@]}"; }
run_gpu_ms() { ladder gpu_ms "$1" "${gpu_ms[@]}"; }
run_speedup() { ladder speedup "$1" "${speedup[@]}"; }
run_profile() { part profile "$1" "$python" bench.py --log_dir "$logs" "${profile[@]}"; }

run_peers() {
    local batch_size more=("${peers[@]}")
    for batch_size in "${batches[@]}"; do
        part peers $(($1 / ${#batches[@]})) "$python" -m measure.peers --config "$config" --batch_size "$batch_size" \
            --log_dir "$logs/b$batch_size" --no-settings "${rounds[@]}" "${more[@]}"
        more=("${peers[@]}" --no-baseline)  # one is enough: with all its scores in fp32 a large batch has no room
    done
}

run_memory() {  # three passes first: the second records the CUDA graphs
    part memory $(($1 / 2)) "$python" -m measure.interleaved "$config" "$config --recompute_cheap" --output "$logs/recompute_cheap.json" \
        "${rounds[@]}" -- --compile_mode default
    part memory $(($1 / 2)) "$python" bench.py --config "$config" --computation training_step --warmup_steps 3 --steps 5 --loss_chunks 8 \
        --scan "batch_size=$(IFS=, && echo "${batches[*]}")" --log_dir "$logs"
}

pack() {
    cp "$out"/*.txt "$logs"
    tar -C "$out" -czf "$out/packing.tgz" "logs/results/$gpu" && mv "$out/packing.tgz" "$out/results.tgz"
}

left=0  # of the weights
for name in "${parts[@]}"; do
    declare -F "run_$name" >/dev/null || { echo "no part is called $name; there are: ${all[*]}"; exit 2; }
    left=$((left + weights[$name]))
done
for name in "${parts[@]}"; do
    "run_$name" $(((limit - 15 - (SECONDS - begun)) * weights[$name] / left))  # 15: for one that does not end when it is told to
    left=$((left - weights[$name]))
    pack && echo "$out/results.tgz has it, after $((SECONDS - begun)) s"
done
