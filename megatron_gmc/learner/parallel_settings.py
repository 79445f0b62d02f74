"""What megatron-core's config is told about the mesh."""

from __future__ import annotations

from typing import TypedDict

from megatron_gmc.learner.mesh import Mesh


class ParallelSettings(TypedDict):
    """Fields of megatron-core's ModelParallelConfig."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    sequence_parallel: bool
    variable_seq_lengths: bool
    overlap_p2p_comm: bool
    batch_p2p_comm: bool


def parallel_settings(mesh: Mesh) -> ParallelSettings:
    """The fields of the config that follow from the mesh."""
    interleaved = mesh.virtual_size > 1
    return ParallelSettings(
        tensor_model_parallel_size=mesh.tensor_size,
        pipeline_model_parallel_size=mesh.pipeline_size,
        virtual_pipeline_model_parallel_size=mesh.virtual_size if interleaved else None,
        context_parallel_size=mesh.context_size,
        expert_model_parallel_size=mesh.expert_size,
        sequence_parallel=mesh.sequence_parallel,
        # Packs are of any length, so stages tell each other how long the next one is.
        variable_seq_lengths=mesh.pipeline_size > 1,
        # With two stages, both neighbours are the same rank: sent in one batch, what goes to the
        # next stage and what goes to the previous one are taken for each other, silently.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )
