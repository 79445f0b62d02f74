"""The learner: the policy on a Megatron-core mesh, and the step that changes it."""

from megatron_gmc.learner import cpu_compat

# Before any module here imports megatron, which decides at import what it compiles.
cpu_compat.install()
