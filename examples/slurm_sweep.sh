#!/bin/bash
# A study on a SLURM cluster, one shard of it for each task of an array:
#   sbatch examples/slurm_sweep.sh configs/exp2_robust.yaml
# Again, for tasks that failed or ran out of time (SHARDS is the number of the first time):
#   SHARDS=8 sbatch --array=3,5 examples/slurm_sweep.sh configs/exp2_robust.yaml
#SBATCH --job-name=sweep
#SBATCH --array=1-8
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --output=slurm-%A_%a.out
set -euo pipefail
study=${1:?the study file}
shift
shards=${SHARDS:-$SLURM_ARRAY_TASK_COUNT}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# exec: three minutes before the end, SLURM's signal reaches the sweep, which has its cells write checkpoints
exec python -m fl_lightning sweep --config "$study" --shard "$SLURM_ARRAY_TASK_ID/$shards" --logger false "$@"
