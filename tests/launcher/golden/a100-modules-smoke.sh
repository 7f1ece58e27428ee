#!/bin/bash
#SBATCH --job-name=golden
#SBATCH --output=/runs/golden/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@45
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=debug
#SBATCH --account=ab123
#SBATCH --gres=gpu:a100:2
#SBATCH --cpus-per-task=16
#SBATCH --time=00:15:00

module load cudatoolkit || exit 1
module load aws-ofi-nccl || exit 1
source /project/ab123/towline/.venv/bin/activate
export PYTHONPATH=/runs/golden/code${PYTHONPATH:+:$PYTHONPATH}
exec env PYTHONSAFEPATH=1 /venv/bin/python -u -m towline.jobs.slurm.batch_entry /runs/golden/slurm
