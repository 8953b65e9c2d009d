#!/usr/bin/env bash
# Everything that this project measures on a GPU: one part, or all parts in order.
#
#     measure/gpu.sh peers                one of: tests gpu_ms quick peers memory profile fast modern modern_2 speedup autotune
#     measure/gpu.sh                      all of them
#     LIMIT=3600 measure/gpu.sh speedup   in an hour at most; without LIMIT, each part in nine minutes at most
#     OUT=/tmp/out measure/gpu.sh         results go there, not to out/: OUT/results.tgz unpacks to logs/results/<gpu>/
#     TINY=1 measure/gpu.sh               a rehearsal on the CPU with a tiny model
#
# Needs Python 3.11 or newer with PyTorch, and no network: packages that are missing are installed from a folder wheels/
# here, if there is one, and corpora are used where they are (data/shakespeare; python data/shakespeare.py --source FILE). What a part
# prints is in OUT/<part>.txt; what is finished is in the archive after each.
#
# torch.compile runs first, in its default mode: max-autotune takes 2 to 4 minutes for each model that it has not compiled before, so
# only the part autotune uses it. PyTorch keeps what it compiled, so another call of the same part measures all the longer.

set -uo pipefail
all=(tests gpu_ms quick peers memory profile fast modern modern_2 speedup autotune)
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=("${all[@]}")
for name in "${parts[@]}"; do
    [[ " ${all[*]} " == *" $name "* ]] || { echo "no part is called $name; there are: ${all[*]}"; exit 2; }
done
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
limit=$((${LIMIT:-540} - 15))  # 15: for a command that does not end when it is told to
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
    corpus=shakespeare tests=(-m gpu) rounds=(--rounds 12) peers=() profile=(--compare logs/reference/timeit.csv)
    autotune=(speedup5.yaml speedup5_max_autotune.yaml)
    quick=(speedup --quick) fast=(gpt2_124m_fast.yaml --dataset shakespeare --total_batch_tokens 262144 --compile_mode default) minutes=5
    modern=(modern/{base,rope,rmsnorm,muon,relu2,zero_init}.yaml) modern_2=(modern/{zero_init,qk_norm,untied,value_residual,embed_shortcut,softcap}.yaml)
else
    export TURN_SECONDS=0.01 corpus=pydocs
    gpu=tiny config=$out/tiny.yaml batches=(2) gpu_ms=("$out/tiny.yaml" "$out/untied.yaml") speedup=("$out/tiny.yaml")
    tests=(-m gpu --collect-only tests/test_train.py) rounds=(--rounds 6) peers=(--seq_len 32 --no-baseline) profile=(--config "$config" --computation forward --steps 1)
    autotune=("$out/tiny.yaml" "$out/untied.yaml") quick=("${gpu_ms[@]}") modern=("${gpu_ms[@]}") modern_2=("${gpu_ms[@]}")
    fast=("$config") minutes=0.02
    cat >"$config" <<'END'
{device: cpu, dataset: pydocs, n_layer: 1, n_head: 2, n_embd: 32, block_size: 32, seq_len: 32, batch_size: 2, vocab_size: 50304,
 tie_weights: true, flash: true, fused_adamw: true, max_steps: 3}
END
    echo "{base: $config, tie_weights: false}" >"$out/untied.yaml"
fi
default=$out/best.yaml
echo "{base: $config, compile_mode: default}" >"$default"
logs=$out/logs/results/$gpu
mkdir -p "$logs"

# run PERCENT COMMAND...: run a command in so much of the part's time, at whose end it gets Ctrl-C's signal and keeps what it has finished
run() {
    local seconds=$((limit * $1 / 100)) start=$SECONDS status
    shift
    echo "\$ $*" >>"$out/$name.txt"
    timeout --foreground --signal=INT --kill-after=15 "$seconds" "$@" >>"$out/$name.txt" 2>&1
    status=$?
    echo "$name: ended with status $status after $((SECONDS - start)) s of at most $seconds"
}

# compile PERCENT OPTION...: compile the model of a training run, for the processes that measure it
compile() { run "$1" "$python" train.py --config "$default" "${@:2}" --max_steps 2 --keep_last 0 --log_dir "$out/compiled"; }

# ladder STAGE...: the losses first, which compiles, then interleaved rounds as far as the time goes; and a report of what is finished
ladder() {
    run 95 "$python" ladder.py --log_dir "$logs" "${rounds[@]}" "$@"
    run 5 "$python" ladder.py --log_dir "$logs" --report_only "$@"
}

# of_modern FOLDER CONFIG...: the speed of the modern rungs, in a folder of their own; what they learn is the same on every device
of_modern() {
    run 100 "$python" ladder.py --log_dir "$logs/$1" "${rounds[@]}" "${@:2}" -- --dataset "$corpus" --max_steps 20 --eval_every 0
}

run_tests() { run 100 "$python" -m pytest -q "${tests[@]}"; }
run_gpu_ms() { ladder "${gpu_ms[@]}"; }
run_quick() { run 100 "$python" ladder.py --log_dir "$logs" "${quick[@]}"; }
run_fast() { run 100 "$python" train.py --config "${fast[@]}" --max_minutes "$minutes" --eval_every 0 --hellaswag_every 0 --sample_every 0 --keep_last 0 --log_dir "$logs"; }
run_modern() { of_modern modern "${modern[@]}"; }
run_modern_2() { of_modern modern_2 "${modern_2[@]}"; }
run_speedup() { ladder "${speedup[@]}" -- --compile_mode default; }
run_profile() { run 100 "$python" bench.py --log_dir "$logs" "${profile[@]}"; }
run_autotune() { run 100 "$python" -m measure.interleaved "${autotune[@]}" --output "$logs/max_autotune.json" "${rounds[@]}"; }

run_peers() {
    local batch_size more=("${peers[@]}") share=$((100 / ${#batches[@]}))
    for batch_size in "${batches[@]}"; do
        compile $((share * 2 / 5)) --batch_size "$batch_size"
        run $((share * 3 / 5)) "$python" -m measure.peers --config "$default" --batch_size "$batch_size" \
            --log_dir "$logs/b$batch_size" "${rounds[@]}" "${more[@]}"
        more=("${peers[@]}" --no-baseline)  # one is enough: with all its scores in fp32 a large batch has no room
    done
}

run_memory() {
    compile 20
    compile 20 --recompute_cheap
    run 20 "$python" -m measure.interleaved "$default" "$default --recompute_cheap" --output "$logs/recompute_cheap.json" "${rounds[@]}"
    run 40 "$python" bench.py --config "$default" --computation training_step --steps 5 --loss_chunks 8 \
        --scan "batch_size=$(IFS=, && echo "${batches[*]}")" --log_dir "$logs"
}

for name in "${parts[@]}"; do
    "run_$name"
    cp "$out"/*.txt "$logs"
    tar -C "$out" -czf "$out/packing.tgz" "logs/results/$gpu" && mv "$out/packing.tgz" "$out/results.tgz"
    echo "$out/results.tgz has it, after $SECONDS s"
done
