"""TRL's experimental `AsyncGRPOTrainer` with group-level weights.

    from megatron_gmc.estimators import GMC
    from megatron_gmc.integrations.trl_async import AsyncGMCTrainer

    trainer = AsyncGMCTrainer(..., estimator=GMC(epsilon=0.2))

TRL's loss clips the ratio of the current to the sampling policy token by token. Here each
micro-batch is scored once without gradient, whole groups are weighted by what that gives, and the
loss is handed the current log-probs as the old ones, so that its own ratio is 1. A group must lie
in one micro-batch, on whatever ranks: `token_budget=0`, with a
`per_device_train_batch_size` × ranks that is a multiple of `num_generations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOTrainer

from megatron_gmc.estimators import GMC, AnyEstimator
from megatron_gmc.integrations.folding import check_estimator, fold
from megatron_gmc.integrations.gathering import gather_over
from megatron_gmc.integrations.hosts import check_signature, check_version, refuse
from megatron_gmc.integrations.trl import wrong_sampling

TRIED = ("1.16",)

_GROUP = "group_ids"
_NO_GROUP = -1
_TREE = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")

check_version("trl", TRIED)
check_signature("trl", AsyncGRPOTrainer.compute_loss, ("model", "inputs"))


class AsyncGMCTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` with weights; `estimator` (default `GMC()`) is the one argument more.

    The aggregation is TRL's, the token mean of the micro-batch. Raises ValueError when it is made
    for settings that cut groups in two.
    """

    def __init__(self, *args: Any, estimator: AnyEstimator | None = None, **kwargs: Any):
        self._estimator: AnyEstimator = GMC() if estimator is None else estimator
        check_estimator(self._estimator)
        super().__init__(*args, **kwargs)
        refuse("TRL", _wrong_settings(self.args, self.accelerator.num_processes))

    def get_train_dataloader(self) -> Any:
        """TRL's loader, whose batches also hold the group of each completion."""
        loader = super().get_train_dataloader()
        base = loader.base_dataloader
        base.collate_fn = _with_groups(base.collate_fn)
        return loader

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *args: object, **kwargs: object
    ) -> Any:
        """TRL's loss on weighted advantages, its own ratio being 1."""
        selected = inputs["token_index"] >= 0
        current = self._score(model, inputs)
        segment = inputs["segment_id"][selected]
        group = inputs[_GROUP][inputs[_GROUP] != _NO_GROUP]
        difference = current.double() - inputs["old_log_probs"][selected].double()
        log_ratio = torch.zeros(len(group), dtype=torch.float64, device=current.device)
        log_ratio = log_ratio.index_add(0, segment, difference)
        weights, metrics = fold(
            torch.ones(len(group), device=current.device),
            log_ratio,
            group,
            self._estimator,
            gather_over(),
            group_size=self.args.num_generations,
        )
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        advantages, old = inputs["advantages"].clone(), inputs["old_log_probs"].clone()
        advantages[selected] = advantages[selected] * weights[segment].to(advantages.dtype)
        old[selected] = current.to(old.dtype)
        weighted = {**inputs, "advantages": advantages, "old_log_probs": old}
        return super().compute_loss(model, weighted, *args, **kwargs)

    @torch.no_grad()
    def _score(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Current log-prob of each loss token of this rank's row, as TRL's loss takes it."""
        kept = inputs["attention_mask"].bool()
        tree = {name: inputs[name][inputs[name] >= 0] for name in _TREE}
        longest_q, longest_k = inputs["tree_max_seqlens"][0].tolist()
        output = model(
            **{k: inputs[k][kept][None] for k in ("input_ids", "position_ids", "shift_labels")},
            fused_lm_head=True,
            **tree,
            tree_max_seqlen_q=longest_q,
            tree_max_seqlen_k=longest_k,
        )
        token_index = inputs["token_index"]
        log_probs: Tensor = output.log_probs.flatten()[token_index[token_index >= 0]]
        return log_probs


def _with_groups(collate: Callable[[list[Any]], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The collator, with one row of group ids a rank, in the order of its segments."""

    def with_groups(examples: list[Any]) -> dict[str, Any]:
        (rows,) = examples
        batch = collate(examples)
        groups = [[int(sample["group_id"]) for sample in row.samples] for row in rows]
        longest = max(len(row) for row in groups)
        filled = [row + [_NO_GROUP] * (longest - len(row)) for row in groups]
        return {**batch, _GROUP: torch.tensor(filled)}

    return with_groups


def _wrong_settings(args: Any, ranks: int) -> dict[str, str]:
    wrong = {}
    if args.token_budget != 0:
        wrong["token_budget"] = "must be 0: a budget cuts groups between micro-batches"
    rows = args.per_device_train_batch_size * ranks
    if rows % args.num_generations:
        wrong["per_device_train_batch_size"] = (
            f"times {ranks} ranks must be a multiple of num_generations ({args.num_generations}), "
            f"got {rows}: groups would be cut between micro-batches"
        )
    return wrong | wrong_sampling(vars(args))
