"""Causal attention over packs, for megatron-core's layer spec where transformer-engine is absent.

megatron-core's own attention of that spec refuses packs and context parallelism. Here trajectories
of one length make a batch for torch's scaled_dot_product_attention, so the work is the sum over
the trajectories' own. The rows are split once into all batches: a slice for each trajectory would
have backward write a gradient of the whole pack for each. Context ranks gather keys and values,
which grouped queries keep small, and attend with their own queries (see pack.py).

It has run on CPUs alone so far: float32 and float64, gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch import device as Device


@dataclass(frozen=True, eq=False)
class Block:
    """As many queries for each of `entries` trajectories, with as many of its own keys."""

    entries: int
    queries: int
    keys: int
    late: bool
    """Whether the queries are the last ones among the keys, and in reverse order; else both are
    the trajectory's first ones."""

    def mask(self, like: Tensor) -> Tensor | None:
        """What is added to the scores [queries, keys] of a late block, of `like`'s dtype.

        In reverse, query i sees key k where i + k < keys: so the mask is a view on one line.
        """
        if not self.late:
            return None
        line = like.new_zeros(self.queries + self.keys - 1)
        line[self.keys :] = -torch.inf
        return line.as_strided((self.queries, self.keys), (1, 1))


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Which rows of a pack attend together."""

    blocks: tuple[Block, ...]
    order: Order | None
    """None where the rows lie block after block already: see `plan_rows`."""


@dataclass(frozen=True, eq=False)
class Order:
    """How a pack's rows come into the order of the blocks, and back; int64 row numbers."""

    query_rows: Tensor
    """Of this rank's queries, block after block: each row once."""
    key_rows: Tensor
    """Of the keys and values that all context ranks hold, rank after rank."""
    output_rows: Tensor
    """Where each of this rank's rows lies among the blocks' outputs."""


@dataclass
class Pack(PackedSeqParams):
    """Where a pack's trajectories lie, for megatron-core and for `CoreAttention`."""

    rows: RowPlan | None = None


def pack_of(padded: Sequence[int], *, size: int, rank: int, device: Device) -> Pack:
    """Describe a pack of trajectories that take `padded` tokens, to context rank `rank` of `size`.

    Every rank is told of the whole pack. Rotary embeddings follow from it.
    """
    ends = torch.tensor([0, *padded], dtype=torch.int32).cumsum(0).to(device, torch.int32)
    return Pack(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        # Rotary tables are cut to this: too small a number would repeat positions silently.
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
        rows=plan_rows(padded, size=size, rank=rank, device=device),
    )


def plan_rows(padded: Sequence[int], *, size: int, rank: int, device: Device) -> RowPlan:
    """Batches of equal lengths, the longest first.

    Without other context ranks nothing moves where trajectories lie in that order already.
    """
    places: dict[int, list[int]] = {}
    start = 0
    for length in padded:
        places.setdefault(length, []).append(start)
        start += length
    queries, keys, blocks = [], [], []
    for length in sorted(places, reverse=True):
        starts = torch.tensor(places[length])[:, None]
        for block, query_rows, key_rows in _blocks(starts, length, start, size, rank):
            blocks.append(block)
            queries.append(query_rows.flatten())
            keys.append(key_rows.flatten())
    query_rows, key_rows = torch.cat(queries), torch.cat(keys)
    if size == 1 and torch.equal(query_rows, torch.arange(start)):
        return RowPlan(tuple(blocks), None)
    order = Order(query_rows.to(device), key_rows.to(device), query_rows.argsort().to(device))
    return RowPlan(tuple(blocks), order)


def _blocks(
    starts: Tensor, length: int, total: int, size: int, rank: int
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """This rank's blocks of the trajectories of one length, with their query and key rows.

    `starts` [trajectories, 1] are their first rows in the pack, whose length is `total`.
    """
    entries = len(starts)
    if size == 1:
        rows = starts + torch.arange(length)
        yield Block(entries, length, length, late=False), rows, rows
        return
    part = length // (2 * size)
    local = starts // size
    for half, place in enumerate((rank, 2 * size - 1 - rank)):
        late = place > 0
        in_part = torch.arange(part).flip(0) if late else torch.arange(part)
        query_rows = local + half * part + in_part
        position = torch.arange((place + 1) * part)
        of = position // part
        holder = torch.where(of < size, of, 2 * size - 1 - of)
        in_second_half = (of >= size) * part
        key_rows = holder * (total // size) + local + in_second_half + position % part
        yield Block(entries, part, len(position), late), query_rows, key_rows


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scale: float
) -> Tensor:
    """Attention of each trajectory alone, [rows, heads, size], differentiable.

    `query` [rows, heads, size] are this context rank's; `key` and `value` [rows · context ranks,
    query groups, size] are all ranks', rank after rank.
    """
    grouped = query.shape[1] != key.shape[1]
    order = plan.order
    if order is not None:
        query = query.index_select(0, order.query_rows)
        key, value = (part.index_select(0, order.key_rows) for part in (key, value))
    queries = [(block.entries, block.queries) for block in plan.blocks]
    keys = [(block.entries, block.keys) for block in plan.blocks]
    batches = zip(
        plan.blocks,
        _batches(query, queries),
        _batches(key, keys),
        _batches(value, keys),
        strict=True,
    )
    outputs = [
        F.scaled_dot_product_attention(
            q, k, v, block.mask(q), is_causal=not block.late, scale=scale, enable_gqa=grouped
        )
        .transpose(1, 2)
        .flatten(0, 1)
        for block, q, k, v in batches
    ]
    output = torch.cat(outputs)
    return output if order is None else output.index_select(0, order.output_rows)


def _batches(rows: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """[entries, heads, length, size] of each block."""
    parts = rows.split([entries * length for entries, length in sizes])
    return [
        part.unflatten(0, size).transpose(1, 2) for part, size in zip(parts, sizes, strict=True)
    ]


class CoreAttention(nn.Module):
    """Attention between megatron-core's projections; it has no parameters.

    megatron-core calls it with [rows, heads, size] for a pack, whose `Pack` it needs, and with
    [s, b, heads, size] for b sequences of one length, which context ranks cannot share.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        assert attention_type == "self", attention_type
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout)
        assert config.window_size is None, config.window_size
        self.group = (
            pg_collection.cp
            if pg_collection is not None
            else parallel_state.get_context_parallel_group()
        )
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[rows, heads · size], or [s, b, heads · size]."""
        assert attention_mask is None
        assert attention_bias is None
        if packed_seq_params is None:
            return self._of_equal_lengths(query, key, value)
        assert isinstance(packed_seq_params, Pack)
        plan = packed_seq_params.rows
        assert plan is not None
        if self.group.size() > 1:
            both = torch.stack((key, value), 1)
            key, value = gather_from_sequence_parallel_region(both, group=self.group).unbind(1)
        return packed_attention(query, key, value, plan, self.scale).flatten(1)

    def _of_equal_lengths(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert self.group.size() == 1, "only packs are shared between context ranks"
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return output.permute(2, 0, 1, 3).flatten(2)


def with_core_attention(spec: ModuleSpec) -> ModuleSpec:
    """The local layer spec with `CoreAttention` in the place of megatron-core's own."""
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    return spec
