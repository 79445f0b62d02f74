"""StepRecord groups as Parquet: one row a trajectory, with what the learner made of it.

The files open as they are in pandas, polars and DuckDB. Lists have one entry per response token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_gmc.errors import ConfigError
from megatron_gmc.learner.policy_step import StepRecord
from megatron_gmc.rollout.types import Group

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        # The learner's, at consumption; the step's own number unless steps were skipped over.
        ("version", pa.int64()),
        ("group", pa.int64()),  # submission number
        ("member", pa.int32()),
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),  # whether the token carries loss
        ("behaviour_log_probs", pa.list_(pa.float32())),
        ("log_probs", pa.list_(pa.float32())),  # the learner's; null without loss
        ("versions", pa.list_(pa.int64())),  # that sampled the token
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("weight", pa.float64()),  # a token method's mean over the trajectory
        ("log_ratio", pa.float64()),
        ("lag", pa.int64()),  # from the oldest token
        ("finish_reason", pa.string()),
    ]
)
NON_FINITE = "non_finite_step_{}.parquet"


def table_of(
    groups: Sequence[Group],
    consumed: StepRecord,
    *,
    step: int,
    version: int,
    decode: Callable[[Sequence[int]], str],
) -> pa.Table:
    """The rows of one optimizer step's groups, which the learner consumed at `version`."""
    log_probs = _log_probs(groups, consumed)
    members = [(g, m, one) for g in groups for m, one in enumerate(g.trajectories)]
    rows = []
    for place, (group, member, trajectory) in enumerate(members):
        sample = trajectory.sample
        rows.append(
            {
                "step": step,
                "version": version,
                "group": group.id,
                "member": member,
                "prompt_id": group.prompt.id,
                "prompt": group.prompt.text,
                "response": decode(sample.tokens.tolist()),
                "tokens": sample.tokens,
                "mask": trajectory.mask,
                "behaviour_log_probs": sample.log_probs,
                "log_probs": next(log_probs),
                "versions": sample.versions,
                "reward": trajectory.reward,
                "advantage": float(consumed.advantage_N[place]),
                "weight": float(consumed.weight_N[place]),
                "log_ratio": float(consumed.log_ratio_N[place]),
                "lag": version - trajectory.oldest_version,
                "finish_reason": sample.finish_reason,
            }
        )
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _log_probs(groups: Sequence[Group], consumed: StepRecord) -> Iterator[list[float | None]]:
    """The learner's log-probs of each trajectory's tokens, null where a token carries no loss."""
    flat = iter(consumed.log_prob_K.tolist())
    for trajectory in (one for group in groups for one in group.trajectories):
        yield [next(flat) if carries else None for carries in trajectory.mask]


def write_table(table: pa.Table, path: Path) -> None:
    """Write `table` so that a reader, or a crash, sees the whole file or none."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(path)


def read_records(path: Path, step: int | None = None) -> pa.Table:
    """Read a file, or every file of a run's trajectories/; raises ConfigError where there is none.

    `step` keeps the rows of that step alone.
    """
    files = [path] if path.is_file() else sorted((path / "trajectories").glob("step_*.parquet"))
    if not files:
        raise ConfigError(
            f"{path} holds no trajectories/step_*.parquet; a run keeps them with "
            "train.save_trajectories: 10 (every tenth step)"
        )
    try:
        table = pa.concat_tables([pq.read_table(file, schema=SCHEMA) for file in files])
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is no record of trajectories: {error}") from error
    if step is None:
        return table
    kept = table.filter(pc.equal(table["step"], step))
    if not len(kept):
        steps = np.unique(table["step"].to_numpy()).tolist()
        raise ConfigError(f"--step {step}: not recorded; {path} has the steps {steps}")
    return kept
