"""Tensors through buckets: the same bits, in bounded pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_gmc.rollout.sglang.buckets import buckets

Named = list[tuple[str, Tensor]]


def tensors() -> Named:
    torch.manual_seed(0)
    shapes = [(3, 5), (7,), (2, 2, 2), (40,), (1,), (9, 4), ()]
    plain = [(f"plain.{i}", torch.randn(shape)) for i, shape in enumerate(shapes)]
    half = [(f"half.{i}", torch.randn(5).bfloat16()) for i in range(3)]
    return [*plain[:3], *half, *plain[3:], ("transposed", torch.randn(4, 6).T)]


@pytest.mark.parametrize("limit", [1, 64, 100, 10**6])
def test_every_tensor_arrives_whole_and_in_order(limit: int) -> None:
    """Also where the one after a bucket is filled before it is read, as a sender does."""
    expected = tensors()
    found: Named = []
    lasts = []
    held = None
    for bucket in buckets(iter(expected), limit):
        if held is not None:
            found += [(name, tensor.clone()) for name, tensor in held.tensors()]
        alone = len(bucket.names) == 1
        assert bucket.flat.dtype == torch.uint8 and bucket.flat.is_shared()
        assert bucket.flat.nbytes <= limit or alone
        assert len(set(bucket.dtypes)) == 1
        lasts.append(bucket.last)
        held = bucket
    assert held is not None
    found += held.tensors()
    assert lasts == [False] * (len(lasts) - 1) + [True]
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, tensor), (_, original) in zip(found, expected, strict=True):
        assert tensor.dtype == original.dtype and torch.equal(tensor, original)


def test_two_buffers_serve_all_buckets() -> None:
    named = [(str(number), torch.full((8,), float(number))) for number in range(10)]
    addresses = [bucket.flat.data_ptr() for bucket in buckets(iter(named), 32)]
    assert len(addresses) == 10
    assert len(set(addresses)) == 2


def test_nothing_to_send_is_said() -> None:
    with pytest.raises(ValueError, match="no weight to send"):
        next(buckets(iter([]), 10))
