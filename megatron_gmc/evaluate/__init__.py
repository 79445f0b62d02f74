"""Evaluation of a checkpoint or a running engine on tasks: sampling, votes, statistics, record."""
