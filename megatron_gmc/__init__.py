"""Reinforcement learning of language models whose rollouts lag behind the policy."""

__version__ = "0.1.0"
