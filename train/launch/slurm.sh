#!/bin/bash
# sbatch train/launch/slurm.sh --config train/config.yaml --out_dir /shared/out
# After a preemption, and 5 minutes before the time limit, the job saves, is requeued and continues.
#SBATCH --job-name=irongpt --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
#SBATCH --time=24:00:00 --requeue --open-mode=append --signal=B:TERM@300
requeue() {
    scancel --signal=TERM "$SLURM_JOB_ID"  # to torchrun and its ranks, not to this script
    wait "$job"
    scontrol requeue "$SLURM_JOB_ID"
}
trap requeue TERM
head=${HEAD:-$(hostname -I | cut -d " " -f 1)}  # this script runs on the first node
srun --kill-on-bad-exit=1 bash -c 'exec train/launch/node.sh "$SLURM_NNODES" "$SLURM_NODEID" "$@"' \
    node "$head" "$@" &
job=$!
wait "$job"
