"""Reward functions: one completion and its gold answer to a verdict."""
