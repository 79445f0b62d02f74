"""Sweeps: a grid over any fields of a training config, each combination a run of its own."""
