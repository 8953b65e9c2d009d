#!/usr/bin/env bash
# Everything that this project measures on a GPU, in under nine minutes.
#
#     benchmarks/gpu.sh OUT                  all parts; results go to OUT/results.tgz, which unpacks to logs/results/<gpu>/
#     benchmarks/gpu.sh OUT peers memory     some parts: tests gpu_ms speedup peers profile memory
#     TINY=1 benchmarks/gpu.sh OUT           a rehearsal on the CPU with tiny models
#
# Needs Python 3.11 or newer with PyTorch 2.11 or newer, and no network: what else is missing is installed from a folder wheels/ here,
# if there is one. The corpora data/shakespeare and data/pydocs are used where they are, else written from what is there. Each part has
# a limit of time, so that a slow one loses itself only, and its output in OUT/<part>.txt.

set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
shift
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(tests gpu_ms peers memory profile speedup)
begun=$SECONDS
python=${PYTHON:-python3}

if [[ -d wheels ]]; then
    for name in pydantic yaml numpy safetensors filelock rich matplotlib tiktoken pytest pytest_timeout transformers huggingface_hub; do
        "$python" -c "import $name" 2>/dev/null || missing+=("${name/yaml/PyYAML}")
    done
    [[ -z ${missing:-} ]] || "$python" -m pip install -q --no-index --find-links wheels "${missing[@]//_/-}" || exit 1
fi

if [[ -n ${TINY:-} ]]; then
    gpu=tiny-cpu
    small=(--device cpu --n_layer 1 --n_head 2 --n_embd 32 --seq_len 32 --block_size 32 --batch_size 2 --no-compile --no-bf16 --max_steps 3)
    sizes=(--batch_size 2)
    stages=(--rounds 6)
else
    gpu=$("$python" -c "import re, torch; print(re.sub('[^a-z0-9]+', '-', torch.cuda.get_device_name().lower()).strip('-'))") || exit 1
    small=()
    stages=(--rounds 12)
fi
logs=$out/logs/results/$gpu
mkdir -p "$logs"

# part NAME SECONDS COMMAND...: run a command with a limit of time; Ctrl-C's signal lets it keep what it has finished
part() {
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    echo "\$ $*" >>"$out/$name.txt"
    timeout --signal=INT --kill-after=15 "$limit" "$@" >>"$out/$name.txt" 2>&1
    local status=$?
    echo "$name: $([[ $status == 0 ]] && echo done || echo "ended with status $status") after $((SECONDS - start)) s of at most $limit"
}

tests() {
    part tests 75 "$python" -m pytest -q -m gpu ${TINY:+--collect-only}
    cp "$out/tests.txt" "$logs/gpu_tests.txt"
}

# ladder SERIES SECONDS: the losses first, then as many stages in turn as the time allows; and a report of what is finished
ladder() {
    local series=$1 limit=$2
    shift 2
    part "$series" "$limit" "$python" ladder.py "$series" --log_dir "$logs" "${stages[@]}" -- "${small[@]}"
    part "$series" 30 "$python" ladder.py "$series" --log_dir "$logs" --report_only -- "${small[@]}"
    find "$logs/$series" -name checkpoints -prune -exec rm -r {} +
}

gpu_ms() { ladder gpu_ms 110; }
speedup() { ladder speedup 170; }

peers() {
    for batch_size in 32 64; do
        part peers 60 "$python" -m benchmarks.peers --log_dir "$logs/b$batch_size" --batch_size "$batch_size" --rounds 12
    done
}

profile() {
    part profile 40 "$python" bench.py --log_dir "$logs" --compare logs/reference/timeit.csv
}

memory() {
    part memory 40 "$python" bench.py --config speedup10.yaml --loss_chunks 8 --scan batch_size=16,32,64 --log_dir "$logs"
}

for name in "${parts[@]}"; do
    "$name"
done
tar -C "$out" -czf "$out/results.tgz" logs/results && echo "$out/results.tgz after $((SECONDS - begun)) s:"
tar -tzf "$out/results.tgz" | grep -E "report.md|\.png|\.txt"
