#!/bin/bash
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1              # one torchrun per machine, which starts a rank per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300              # to this script, five minutes before the time is up
#SBATCH --open-mode=append               # one log through all of the job's lives
#SBATCH --output=slurm-%j.out

save_and_requeue() {
    trap '' USR1                         # once is enough: a second signal would end the run at once
    kill -USR1 "$training"               # srun passes it to every torchrun, these to the ranks
    wait "$training"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap save_and_requeue USR1

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))   # two jobs on one machine need two
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"   # srun does not take it from the job by itself
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1        # else a machine cannot come back
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240     # for step, evaluation, save; torchrun kills after 30 s

srun torchrun --nnodes="$SLURM_NNODES" --nproc_per_node=8 --max_restarts=10 \
    --rdzv_backend=c10d --rdzv_endpoint="$head:$port" --rdzv_id="$SLURM_JOB_ID" \
    --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    train.py --config gpt2_124m.yaml --batch_size 32 --resume auto \
    --data_dir /shared/data --log_dir /shared/logs &
training=$!
wait "$training"
