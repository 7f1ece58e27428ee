"""Prompts to scored rollouts: inference engines, sampling, rewards, weight receiver."""
