#!/bin/bash
# Two nodes of eight GPUs: sbatch examples/cluster/slurm.sh
#SBATCH --job-name=zcompile
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue

set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=1
# The network interface that reaches the other nodes, for the hosts' messages; NCCL finds its own.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-eth0}
# A folder of each node: compiled steps are pickles, so nobody else may write there.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/$USER/inductor}

# The signal comes five minutes before the time is over. train.py resumes from its last checkpoint.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
    "${SCRIPT:-train.py}" "$@" &
wait $!
