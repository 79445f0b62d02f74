"""The estimators inside frameworks that people already run, through their own extension points.

`fold` is all that a framework needs: a detached weight for each trajectory goes into its advantage,
and the framework's loss stays as it is. The modules beside it are thin adapters, one a framework;
importing one imports that framework, which is therefore never imported from here.
"""

from megatron_gmc.integrations.folding import Gather, fold, log_ratio_sums
from megatron_gmc.integrations.gathering import gather_over

__all__ = ["Gather", "fold", "gather_over", "log_ratio_sums"]
