#!/bin/bash
#SBATCH --job-name=golden
#SBATCH --output=/runs/golden/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@45
#SBATCH --requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=debug
#SBATCH --time=00:15:00
#SBATCH --mem=4000

export PYTHONPATH=/runs/golden/code${PYTHONPATH:+:$PYTHONPATH}
exec env PYTHONSAFEPATH=1 /venv/bin/python -u -m towline.jobs.slurm.batch_entry /runs/golden/slurm
