"""What each patch repairs, in the least code: `python -m tests.patches.reproductions NAME`.

Which megatron-core is seen is a matter of PYTHONPATH. Both run on a CPU, alone.
"""

from __future__ import annotations

import json
import os
import sys


def adamw_step() -> list[float]:
    """`step` of every parameter after one step, a save, a load and another: 2 each if right."""
    from megatron_gmc.learner import cpu_compat
    from megatron_gmc.learner.mesh import Mesh
    from tests.distributed import free_port
    from tests.learner.test_cpu_compat import adam_step, distributed_optimizer

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    mesh = Mesh.create(1, 1)
    # Without the repair that the learner does itself.
    with cpu_compat._without("optimizer_step_shared"):
        _, optimizer = distributed_optimizer(mesh)
        adam_step(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        adam_step(optimizer)
    steps = [float(state["step"]) for state in optimizer.optimizer.state.values()]
    mesh.close()
    return steps


def router() -> float:
    """Largest difference of the router's gating and its gradients from a plain product."""
    import torch
    from megatron.core.transformer.moe.moe_utils import RouterGatingLinearFunction

    torch.manual_seed(0)
    inputs = [torch.randn(5, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)]
    cotangent = torch.randn(5, 3)
    found = RouterGatingLinearFunction.apply(*inputs, None, torch.float32)
    gradients = torch.autograd.grad(found, inputs, cotangent)
    expected = inputs[0] @ inputs[1].T
    references = torch.autograd.grad(expected, inputs, cotangent)
    pairs = [(found, expected), *zip(gradients, references, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    print(json.dumps({"adamw_step": adamw_step, "router": router}[sys.argv[1]]()))
