"""Exact environments: the bandit (claim 6), all sequences (claim 5, claim 2), E[ρ] = 1 (all)."""

from __future__ import annotations

import torch
from torch import Tensor

from claim_checks.methods import EPSILON, available, trajectory_method
from claim_checks.table import Run, slope
from megatron_gmc.theory import bounds
from megatron_gmc.theory.bandit import Bandit, exact_moments
from megatron_gmc.theory.sequences import (
    SequenceSpace,
    chi_square,
    group_deficit,
    kept_by_top_p,
    mean_ratio,
    mixed_token_log_probs,
)

BANDIT_SIZES = (2, 3, 4, 6, 8)


def example_bandit() -> Bandit:
    """Four arms; the policy has moved towards the best of them."""
    return Bandit(
        logits=torch.tensor([1.2, 0.3, -0.6, -0.9], dtype=torch.float64),
        behaviour_logits=torch.tensor([-0.2, 0.9, -0.3, 0.2], dtype=torch.float64),
        reward=torch.tensor([1.0, 0.2, 0.6, 0.0], dtype=torch.float64),
    )


def bandit_bias(run: Run) -> None:
    """E7: bias by enumerating all 4ᴳ groups with leave-one-out advantages."""
    bandit = example_bandit()
    names = available(("is", "gmc", "tic_clip", "tic_mask", "none", "snis"))
    bias = {
        name: [exact_moments(bandit, trajectory_method(name), g).bias_norm for g in BANDIT_SIZES]
        for name in names
    }
    run.series["claim6b"] = {"x": [float(g) for g in BANDIT_SIZES], **bias}
    run.at_most((6, "E7"), "plain IS, leave-one-out: largest bias", 1e-12, max(bias["is"]),
                "PROVEN")  # fmt: skip
    text = ", ".join(f"{value:.4f}" for value in bias["gmc"])
    falls = all(a > b for a, b in zip(bias["gmc"], bias["gmc"][1:], strict=False))
    run.holds((6, "E7"), "GMC's bias at G = 2, 3, 4, 6, 8", "falls", text, falls, "NUM")
    for name in ("tic_clip", "tic_mask"):
        spread = max(bias[name]) - min(bias[name])
        run.at_most((6, "E7"), f"{name}: bias {bias[name][0]:.4f}, change over G", 1e-12, spread,
                    "PROVEN")  # fmt: skip
    run.holds((6, "E7"), "at G = 8", "GMC < TIC-clip < TIC-mask",
              f"{bias['gmc'][-1]:.4f}, {bias['tic_clip'][-1]:.4f}, {bias['tic_mask'][-1]:.4f}",
              bias["gmc"][-1] < bias["tic_clip"][-1] < bias["tic_mask"][-1], "NUM")  # fmt: skip
    moments = {n: exact_moments(bandit, trajectory_method(n), 8) for n in ("gmc", "tic_clip", "is")}
    variance = {n: m.variance for n, m in moments.items()}
    run.holds((6, "E7"), "the price, G = 8: variance", "TIC-clip < GMC < IS",
              f"{variance['tic_clip']:.4f}, {variance['gmc']:.4f}, {variance['is']:.4f}",
              variance["tic_clip"] < variance["gmc"] < variance["is"], "NUM")  # fmt: skip
    others = available(("soft_threshold", "water_filling", "snis", "none"))
    at_six = {n: exact_moments(bandit, trajectory_method(n), 6).bias_norm for n in others}
    run.record(
        (6, "E7"),
        "least bound is not least bias, G = 6: GMC and others",
        ", ".join(f"{n} {b:.4f}" for n, b in {"gmc": bias["gmc"][3], **at_six}.items()),
    )
    # |A| ≤ 1 and ‖S‖ ≤ √2.
    inside = all(m.bias_norm <= 2**0.5 * m.distance for m in moments.values() if m.distance > 0)
    run.holds((6, "E7"), "‖bias‖ ≤ B · deficit", "GMC and TIC-clip", str(inside), inside, "PROVEN")


def random_table(space: SequenceSpace, seed: int, scale: float = 1.0) -> Tensor:
    """Logits of every prefix, float64 [prefixes, V]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (space.prefixes, space.vocabulary)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def overlap(run: Run) -> None:
    """E10: χ² against the distance of two policies, and deficits under their bounds."""
    space = SequenceSpace()
    start, direction = random_table(space, 10), random_table(space, 11)
    direction /= direction.norm()

    def law(logits: Tensor) -> Tensor:
        return space.token_log_probs(logits.log_softmax(-1)).sum(1)

    behaviour = law(start)
    distances = [0.25 * 2**k for k in range(6)]
    squares = [chi_square(law(start + d * direction), behaviour) for d in distances]
    run.series["claim5b"] = {"x": distances, "χ²": squares}
    run.near((5, "E10"), "all 4096 sequences: slope of χ² against ‖Δθ‖", 2.0,
             slope(distances, squares), 0.1, "PROVEN")  # fmt: skip
    moved = law(start + 12 * direction)
    variance = chi_square(moved, behaviour)
    ratio = (moved - behaviour).exp()
    chance = behaviour.exp()
    above = ratio > 1 + EPSILON
    cases = (
        ("GMC, G=8", group_deficit(moved, behaviour, 8, EPSILON).value,
         bounds.deficit_bound(variance, 8, EPSILON)),
        ("TIC-clip", float(chance @ (ratio - 1 - EPSILON).clamp(min=0.0)),
         bounds.tic_clip_bound(variance, EPSILON)),
        ("TIC-mask", float(chance[above] @ ratio[above]),
         bounds.tic_mask_bound(variance, EPSILON)),
    )  # fmt: skip
    for name, deficit, limit in cases:
        run.at_most((5, "E10"), f"χ² = {variance:.2f}: deficit of {name} ≤ its bound", limit,
                    deficit, "PROVEN")  # fmt: skip


def drift(run: Run) -> None:
    """E11's other half: along a run's path the delay term v² grows as (lag · step size)⁴."""
    space = SequenceSpace()
    generator = torch.Generator().manual_seed(5)
    reward = torch.rand(space.vocabulary**space.length, generator=generator, dtype=torch.float64)
    path = [random_table(space, 10)]
    for _ in range(16):
        logits = path[-1].clone().requires_grad_()
        value = space.token_log_probs(logits.log_softmax(-1)).sum(1).exp() @ reward
        (gradient,) = torch.autograd.grad(value, logits)
        path.append(path[-1] + 0.05 * gradient)
    law = [space.token_log_probs(logits.log_softmax(-1)).sum(1) for logits in path]
    lags = [1, 2, 4, 8, 16]
    terms = [chi_square(law[lag], law[0]) ** 2 for lag in lags]
    run.series["claim2"] = {"x": [float(lag) for lag in lags], "v²": terms}
    run.near((2, "E11"), "gradient ascent, exact: slope of v² against lag", 4.0,
             slope([float(lag) for lag in lags], terms), 0.1, "RECON")  # fmt: skip


def unit_mean(run: Run) -> None:
    """E14: E[ρ] = 1 for the log-probs recorded with the tokens, and for nothing else."""
    space = SequenceSpace()
    logits = [random_table(space, 20)]
    logits += [logits[0] + 0.4 * random_table(space, 21 + i) for i in range(2)]
    first, latest, current = (table.log_softmax(-1) for table in logits)
    policy = space.token_log_probs(current).sum(1)

    def switched(tokens: Tensor) -> Tensor:
        # The second version takes over after the first token 0: it looks at the past alone.
        seen = (tokens == 0).long().cumsum(1).clamp(max=1)
        return torch.cat([torch.zeros_like(seen[:, :1]), seen[:, :-1]], 1)

    recorded = mixed_token_log_probs(space, [first, latest], switched).sum(1)
    chance = recorded.exp()
    run.near((0, "E14"), "log-probs recorded with each token, two versions: E ρ", 1.0,
             mean_ratio(policy, recorded, chance), 1e-9, "PROVEN")  # fmt: skip
    one = space.token_log_probs(first).sum(1)
    survive = 0.5 ** (space.tokens() == 0).sum(1).double()
    filtered = one.exp() * survive / (one.exp() @ survive)
    warm = (logits[0] / 1.3).log_softmax(-1)
    kept = kept_by_top_p(first, 0.8)
    nucleus = torch.where(kept, first, -torch.inf).log_softmax(-1)
    nucleus_law = space.token_log_probs(nucleus).sum(1)
    wrong = {
        "latest version's log-probs": (space.token_log_probs(latest).sum(1), chance),
        "first version's log-probs": (one, chance),
        "dropping samples by how they end": (one, filtered),
        "sampled at temperature 1.3, recorded at 1":
            (one, space.token_log_probs(warm).sum(1).exp()),
        "top-p 0.8, raw log-probs": (one, nucleus_law.exp()),
        "top-p 0.8, renormalised log-probs": (nucleus_law, nucleus_law.exp()),
    }  # fmt: skip
    for name, (denominator, probability) in wrong.items():
        value = mean_ratio(policy, denominator, probability)
        run.holds((0, "E14"), f"{name}: E ρ", "not 1", f"{value:.3f}", abs(value - 1) > 2e-3,
                  "NUM", "2e-3")  # fmt: skip
    support = float(policy.exp()[nucleus_law > -torch.inf].sum())
    run.near((0, "E14"), "top-p renormalised: E ρ is the policy's mass on what it keeps",
             support, mean_ratio(policy, nucleus_law, nucleus_law.exp()), 1e-9,
             "PROVEN")  # fmt: skip
