"""Judging a policy on held-out prompts."""
