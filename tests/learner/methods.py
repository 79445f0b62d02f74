"""Every estimator with the parameters that the learner's tests give it."""

from __future__ import annotations

ESTIMATORS: dict[str, dict[str, float]] = {
    "gmc": {"epsilon": 0.2},
    "none": {},
    "is": {},
    "tic_clip": {"epsilon": 0.2},
    "tic_mask": {"epsilon": 0.2},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "snis": {},
    "mis": {"upper": 2.0, "lower": 0.5},
    "tis_sequence": {"cap": 2.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gepo": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"weight_max": 5.0},
    "tis_token": {"cap": 1.2},
    "icepop": {"lower": 0.8, "upper": 5.0},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "m2po": {"second_moment": 0.04},
    "water_filling": {"epsilon": 0.2},
    "soft_threshold": {"epsilon": 0.2},
    "gmc_pooled": {"epsilon": 0.2},
    "gmc_differentiable": {"epsilon": 0.2},
}
# Aggregation and advantage go along with the estimators, so that each is seen on every mesh.
SETTINGS = {
    "gmc": ("token_sum", "leave_one_out"),
    "none": ("trajectory_mean", "group_mean_std"),
    "is": ("token_mean", "group_mean"),
    "tic_clip": ("token_sum", "leave_one_out"),
    "tic_mask": ("trajectory_mean", "leave_one_out"),
    "grpo": ("token_mean", "group_mean_std"),
    "snis": ("token_sum", "leave_one_out"),
    "mis": ("trajectory_mean", "group_mean"),
    "tis_sequence": ("token_sum", "leave_one_out"),
    "gspo": ("trajectory_mean", "group_mean_std"),
    "gepo": ("trajectory_mean", "leave_one_out"),
    "cispo": ("token_mean", "group_mean_std"),
    "tis_token": ("token_sum", "leave_one_out"),
    "icepop": ("token_mean", "whitened"),
    "decoupled_ppo": ("token_sum", "group_mean"),
    "m2po": ("token_mean", "leave_one_out"),
    "water_filling": ("token_sum", "leave_one_out"),
    "soft_threshold": ("token_sum", "group_mean"),
    "gmc_pooled": ("trajectory_mean", "leave_one_out"),
    "gmc_differentiable": ("token_sum", "leave_one_out"),
}
