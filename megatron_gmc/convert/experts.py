"""A mixture's experts as transformers stacks them in memory, taken apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator

from torch import Tensor

from megatron_gmc.convert.hf_config import ModelShape

_GATE_UP = ".mlp.experts.gate_up_proj"
_DOWN = ".mlp.experts.down_proj"
_SINGLE = re.compile(r"(.+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def separated(name: str, tensor: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The tensors of single experts that a stacked one holds, or the tensor itself.

    Published folders hold three matrices for each expert, and so does what `save_pretrained`
    writes. A state dict of transformers 5 stacks them: gate_up_proj [experts, 2 · ffn, hidden], the
    gate first, and down_proj [experts, hidden, ffn]. Raises ValueError for a stack of another
    shape.
    """
    stacks = {
        _GATE_UP: (shape.experts, 2 * shape.ffn, shape.hidden),
        _DOWN: (shape.experts, shape.hidden, shape.ffn),
    }
    kind = next((ending for ending in stacks if name.endswith(ending)), None)
    if kind is None or not shape.experts:
        yield name, tensor
        return
    if tuple(tensor.shape) != stacks[kind]:
        raise ValueError(
            f"tensor {name}: its shape is {tuple(tensor.shape)}, and by config.json it should be "
            f"{stacks[kind]}"
        )
    prefix = name.removesuffix(kind) + ".mlp.experts"
    for expert, matrix in enumerate(tensor):
        if kind == _DOWN:
            yield f"{prefix}.{expert}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up


def single(name: str, names: Container[str], get: Callable[[str], Tensor]) -> Tensor:
    """Tensor `name` from a source that holds `names`, where it may be part of a stacked one."""
    match = _SINGLE.fullmatch(name)
    if match is None or name in names:
        return get(name)
    prefix, expert, kind = match[1], int(match[2]), match[3]
    if kind == "down":
        return get(prefix + _DOWN)[expert]
    return get(prefix + _GATE_UP)[expert].chunk(2)[0 if kind == "gate" else 1]
