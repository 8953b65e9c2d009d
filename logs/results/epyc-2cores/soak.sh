#!/usr/bin/env bash
# Kill a run with kill -9 again and again, at random moments, and let it resume each time: it has to
# end like an undisturbed one.
#
#     bash logs/results/epyc-2cores/soak.sh 1200
#     bash logs/results/epyc-2cores/soak.sh 600 torchrun --nproc_per_node=2 --max_restarts=1000 \
#         train.py --fsdp
#
# A small model, shuffled data, dropout, and a checkpoint after every step, so that many kills fall
# into a write. torchrun starts all its ranks again when one dies; if it is killed itself, the same
# command is started again.
set -eu
steps=$1
runs=logs/soak
command=("${@:2}")
[[ $# -gt 1 ]] || command=(python train.py)
command+=(--config=quickstart.yaml --optimizer=adamw --n_layer=1 --n_embd=16 --block_size=32
    --seq_len=32 --dropout=0.1 --log_every=1 --checkpoint_every=1 --eval_every=10
    --eval_tokens=1024 --sample_every=0 --reference=none "--max_steps=$steps" --resume=auto
    "--log_dir=$runs")
rm -rf "$runs"
mkdir -p "$runs"

train() {
    exec "${command[@]}" "--run_name=$1" >> "$runs/$1.txt" 2>&1
}
is_there() {
    kill -0 "$@" 2>> "$runs/gone.txt"
}
newest() {
    find "$runs" -path '*/killed/*' -name 'step_*' 2>> "$runs/gone.txt" | sort | tail -n 1
}
end_of() {
    cut -d, -f1-4 "$1/log.csv"  # all but the times
    cat "$1/eval.csv"
    grep safetensors "$1/checkpoints/step_$(printf %06d "$steps")/SHA256SUMS"
}

(train straight)
train killed & process=$!
kills=0
while is_there "$process"; do
    # Most lives count from their first step, some from the start.
    before=$(newest)
    while (( RANDOM % 400 )) && is_there "$process" && [[ $(newest) == "$before" ]]; do
        sleep 0.02
    done
    sleep "$(( RANDOM % 2 )).$(( RANDOM % 10 ))"
    is_there "$process" || break
    kind=$(( RANDOM % 4 ))
    ranks=$(pgrep -P "$process") || kind=0  # without torchrun there is one process
    case $kind in
        0) victims=$process ;;
        1) victims="$ranks $process" ;;
        2) victims=$ranks ;;
        3) victims=${ranks%%$'\n'*} ;;  # the first one
    esac
    kill -KILL $victims 2>> "$runs/gone.txt" && kills=$(( kills + 1 ))
    find "$runs" -name '.*.unfinished' >> "$runs/unfinished.txt" || true
    if (( kind < 2 )); then
        wait "$process" || true
        while [[ $ranks ]] && is_there $ranks; do
            sleep 0.1
        done
        train killed & process=$!
    fi
done
wait "$process"
echo "$kills kills, $(sort -u "$runs/unfinished.txt" | wc -l) of them during a save"
diff <(end_of "$runs/straight") <(end_of "$runs/killed") && echo "the runs are equal"
