"""Tests of the learner. Its package comes first, since it must be imported before megatron."""

import megatron_gmc.learner  # noqa: F401
