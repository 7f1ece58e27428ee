"""Towline post-trains language models on a Slurm cluster: SFT, DPO and GRPO."""

__version__ = "0.1.0"
