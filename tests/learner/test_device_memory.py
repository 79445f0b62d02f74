"""What a learner lends comes back: the steps after it are those of a learner that lent nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_gmc.learner.device_memory import lend, take_back
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.optim_config import OptimConfig
from tests.learner.steps import ADAMW, DISTRIBUTED, imitate, new_learner, weights_of


@pytest.mark.parametrize("optim", [ADAMW, DISTRIBUTED], ids=["adamw", "distributed"])
def test_lending_between_steps_changes_no_bit(folder: Path, mesh: Mesh, optim: OptimConfig) -> None:
    lending, keeping = (new_learner(folder, mesh, optim) for _ in range(2))
    for seed in range(3):
        assert imitate(lending, seed) == imitate(keeping, seed)
        before = weights_of(lending)
        size = sum(parameter.numel() for parameter in lending.chunks[0].parameters())
        freed = lend(lending)
        assert freed >= 3 * 4 * size  # gradients and two moments, fp32
        assert all(b.grad_data.untyped_storage().nbytes() == 0 for b in lending.model[0].buffers)
        # the weights can be handed over meanwhile
        for name, tensor in weights_of(lending).items():
            assert torch.equal(tensor, before[name])
        take_back(lending)
    expected = weights_of(keeping)
    for name, tensor in weights_of(lending).items():
        assert torch.equal(tensor, expected[name])
