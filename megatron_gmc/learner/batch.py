"""The batch of one optimizer step as the learner sees it, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gmc.learner.mesh import Mesh


@dataclass(frozen=True)
class Row:
    """One trajectory on its way into a batch; the lists have one entry per response token."""

    id: int
    group: int
    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    loss_mask: Sequence[bool]
    behaviour_log_probs: Sequence[float]
    reward: float
    oldest_version: int


@dataclass(frozen=True)
class Batch:
    """Whole groups, ragged and flat. S: all tokens, prompts included; N: trajectories.

    `behaviour_log_prob_S` is read only where `loss_mask_S` is set; elsewhere it may be anything.
    """

    tokens_S: Tensor  # int64
    loss_mask_S: Tensor  # bool
    behaviour_log_prob_S: Tensor  # float32
    length_N: Tensor  # int64, prompt and response
    group_N: Tensor  # int64, dense: 0 … groups − 1, in order of first appearance
    reward_N: Tensor  # float32
    oldest_version_N: Tensor  # int64
    id_N: Tensor  # int64

    @property
    def trajectories(self) -> int:
        return len(self.length_N)

    @property
    def groups(self) -> int:
        return int(self.group_N.max()) + 1 if len(self.group_N) else 0

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Batch:
        """Flatten `rows`; raises ValueError for a row whose lists do not agree."""
        dense: dict[int, int] = {}
        for row in rows:
            sizes = (len(row.response_tokens), len(row.loss_mask), len(row.behaviour_log_probs))
            if len(set(sizes)) != 1:
                raise ValueError(
                    f"trajectory {row.id}: {sizes[0]} response tokens, {sizes[1]} mask entries, "
                    f"{sizes[2]} log-probs; they must agree"
                )
            if not row.prompt_tokens:
                # The first response token is predicted from the last prompt token.
                raise ValueError(f"trajectory {row.id}: the prompt has no token")
            dense.setdefault(row.group, len(dense))
        tokens = [t for r in rows for t in (*r.prompt_tokens, *r.response_tokens)]
        mask = [m for r in rows for m in (*[False] * len(r.prompt_tokens), *r.loss_mask)]
        log_probs = [
            p for r in rows for p in (*[0.0] * len(r.prompt_tokens), *r.behaviour_log_probs)
        ]
        lengths = [len(r.prompt_tokens) + len(r.response_tokens) for r in rows]
        return cls(
            tokens_S=torch.tensor(tokens, dtype=torch.int64),
            loss_mask_S=torch.tensor(mask, dtype=torch.bool),
            behaviour_log_prob_S=torch.tensor(log_probs, dtype=torch.float32),
            length_N=torch.tensor(lengths, dtype=torch.int64),
            group_N=torch.tensor([dense[r.group] for r in rows], dtype=torch.int64),
            reward_N=torch.tensor([r.reward for r in rows], dtype=torch.float32),
            oldest_version_N=torch.tensor([r.oldest_version for r in rows], dtype=torch.int64),
            id_N=torch.tensor([r.id for r in rows], dtype=torch.int64),
        )

    def trajectory_of_loss_tokens(self) -> Tensor:
        """The trajectory of each loss token of the batch, in the batch's order; int64."""
        trajectory_S = torch.repeat_interleave(torch.arange(self.trajectories), self.length_N)
        return trajectory_S[self.loss_mask_S]

    def loss_tokens_N(self) -> Tensor:
        """Number of loss tokens of each trajectory, int64 [N]."""
        return torch.bincount(self.trajectory_of_loss_tokens(), minlength=self.trajectories)


def broadcast_batch(batch: Batch | None, mesh: Mesh) -> Batch:
    """Give every rank the batch that rank 0 holds; the other ranks pass None."""
    if mesh.world_size == 1:
        assert batch is not None
        return batch
    empty = Batch.from_rows([])
    sizes = torch.zeros(2, dtype=torch.int64, device=mesh.device)
    if batch is not None:
        sizes = torch.tensor(
            [len(batch.tokens_S), batch.trajectories], dtype=torch.int64, device=mesh.device
        )
    dist.broadcast(sizes, src=0)
    tokens, trajectories = (int(n) for n in sizes)
    received: dict[str, Tensor] = {}
    for name in (field.name for field in fields(Batch)):
        size = tokens if name.endswith("_S") else trajectories
        value = (
            torch.empty(size, dtype=getattr(empty, name).dtype, device=mesh.device)
            if batch is None
            else getattr(batch, name).to(mesh.device)
        )
        dist.broadcast(value, src=0)
        received[name] = value.cpu()
    return Batch(**received)
