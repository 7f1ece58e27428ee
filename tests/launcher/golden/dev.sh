#!/bin/bash
#SBATCH --job-name=golden
#SBATCH --output=/runs/golden/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@90
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=main
#SBATCH --time=00:30:00
#SBATCH --mem=4000
#SBATCH --nodelist="trainer[0-1]"
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=main
#SBATCH --time=00:30:00
#SBATCH --mem=4000
#SBATCH --nodelist="rollout[0-1]"

export PYTHONPATH=/runs/golden/code${PYTHONPATH:+:$PYTHONPATH}
exec env PYTHONSAFEPATH=1 /venv/bin/python -u -m towline.jobs.slurm.batch_entry /runs/golden/slurm
