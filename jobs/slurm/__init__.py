"""A run inside a Slurm allocation. Imports no torch."""
