#!/bin/bash
#SBATCH --job-name=golden
#SBATCH --output=/runs/golden/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@300
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --partition=gpu
#SBATCH --account=ab123
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --partition=gpu
#SBATCH --account=ab123
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=24:00:00

export PYTHONPATH=/runs/golden/code${PYTHONPATH:+:$PYTHONPATH}
exec env PYTHONSAFEPATH=1 /venv/bin/python -u -m towline.jobs.slurm.batch_entry /runs/golden/slurm
