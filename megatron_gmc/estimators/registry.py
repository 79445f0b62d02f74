"""Every method by its name.

How to add an estimator:

1. Write a frozen dataclass in its own small module (or beside its family): a field
   `name: Literal["my_method"] = "my_method"`, its parameters with their source's defaults, and a
   `__post_init__` that raises ValueError naming field, value and what is right.
2. Derive from `TrajectoryEstimator` (one weight a trajectory) or from `TokenEstimator` (one weight
   a token); say in `scope` whether the other members of the group, or the whole batch, matter;
   and implement `log_weights`: log w in float64, −inf for a weight of 0. The base class detaches,
   exponentiates, gives 0 for a ratio of 0 and keeps NaN visible. A method whose gradient is not
   weight × advantage overrides `coefficients` as well.
3. Add the class to `AnyEstimator` below. The config tree, `ESTIMATORS` and the tests that run over
   all methods read it from there.
4. Give it an oracle in tests/estimators/oracle.py, written from its source and not from its code.
"""

from __future__ import annotations

from typing import get_args

from megatron_gmc.estimators.base import Estimator
from megatron_gmc.estimators.gmc import GMC, GMCDifferentiable, GMCPooled
from megatron_gmc.estimators.grpo import CISPO, GRPO
from megatron_gmc.estimators.gspo import GEPO, GSPO
from megatron_gmc.estimators.m2po import M2PO
from megatron_gmc.estimators.members import SoftThreshold, WaterFilling
from megatron_gmc.estimators.plain import SNIS, NoCorrection, PlainIS
from megatron_gmc.estimators.proximal import DecoupledPPO, IcePop, TISToken
from megatron_gmc.estimators.sequence import MIS, TISSequence
from megatron_gmc.estimators.tic import TICClip, TICMask

AnyEstimator = (
    GMC
    | NoCorrection
    | PlainIS
    | SNIS
    | TICClip
    | TICMask
    | TISSequence
    | MIS
    | GSPO
    | GEPO
    | GRPO
    | CISPO
    | TISToken
    | IcePop
    | DecoupledPPO
    | M2PO
    | WaterFilling
    | SoftThreshold
    | GMCPooled
    | GMCDifferentiable
)
"""The union that a config field discriminates by `name`."""

ESTIMATORS: dict[str, type[Estimator]] = {method.name: method for method in get_args(AnyEstimator)}

assert len(ESTIMATORS) == len(get_args(AnyEstimator)), "two estimators share a name"
