"""Training at a lag in the small environment: what a step size hides (claims 2 and 7)."""

from __future__ import annotations

import math

from torch import Tensor

from claim_checks.methods import EPSILON, available, method
from claim_checks.table import Run
from megatron_gmc.estimators import ESTIMATORS, GMC, Estimator
from megatron_gmc.theory.delays import OptimizerKind, Training, make_environment, train

COMPARED = (
    "gmc", "tic_clip", "tic_mask", "none", "is", "snis", "soft_threshold", "water_filling",
    "grpo", "gspo", "cispo", "tis_sequence", "mis",
)  # fmt: skip
STEP_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


def last(value: Tensor) -> Tensor:
    """Mean J of the last 50 steps of each seed, float64 [R]."""
    return value[-50:].mean(0)


def standard_error(value: Tensor) -> float:
    return float(value.std()) / math.sqrt(len(value))


def lag_zero(run: Run) -> None:
    """E11: without lag every method takes exactly the same steps."""
    environment = make_environment()
    # gepo divides by a group expectation of the behaviour probability, which is not π at lag 0.
    names = [name for name in ESTIMATORS if name != "gepo"]
    training = Training(lag=0, step_size=2.0, steps=40, seeds=run.pick(2, 6))
    courses = {name: train(environment, method(name), training).value for name in names}
    gap = max(float((v - courses["gmc"]).abs().max()) for v in courses.values())
    run.at_most((2, "E11"), f"lag 0, 40 steps, {len(courses)} methods: largest difference in J",
                1e-12, gap, "PROVEN")  # fmt: skip
    start, end = (float(courses["gmc"][k].mean()) for k in (0, -1))
    run.holds((2, "E11"), "… while J moves", "rises", f"{start:.4f} to {end:.4f}", end > start,
              "NUM")  # fmt: skip
    run.record((2, "E11"), "lag 0: gepo", "not compared: its weight is not 1 at equal policies")


def lag_grid(run: Run) -> None:
    """E11: the same at lags 8 and 32; what is asked is only what the noise lets tell."""
    environment = make_environment()
    for lag in (8, 32):
        training = Training(lag=lag, step_size=2.0, seeds=6)
        scores = {n: last(train(environment, method(n), training).value)
                  for n in available(COMPARED)}  # fmt: skip
        text = " ".join(f"{n} {float(v.mean()):.3f}" for n, v in scores.items())
        apart = scores["gmc"] - scores["tic_mask"]
        good = float(apart.mean()) > 3 * standard_error(apart)
        run.holds((2, "E11"), f"lag {lag}, SGD η=2, 6 seeds, last-50 J: GMC above TIC-mask",
                  "> 3 s.e.", text, good, "NUM", "3 s.e.")  # fmt: skip


def paired(run: Run) -> None:
    """E16: GMC minus the others over 32 paired seeds at lag 32, with SGD and with Adam."""
    environment = make_environment()
    cases: tuple[tuple[OptimizerKind, float], ...] = (("sgd", 2.0), ("adam", 0.05))
    for kind, step_size in cases:
        training = Training(lag=32, step_size=step_size, seeds=32, optimizer=kind)
        names = available(("gmc", "tic_clip", "tic_mask", "none", "is", "water_filling", "snis"))
        scores = {n: last(train(environment, method(n), training).value) for n in names}
        gaps = {n: scores["gmc"] - scores[n] for n in names if n != "gmc"}
        _report_pairs(run, f"{kind.upper()} η={step_size:g}, lag 32, 32 seeds", kind, gaps)


def _report_pairs(run: Run, setting: str, kind: OptimizerKind, gaps: dict[str, Tensor]) -> None:
    for name, gap in gaps.items():
        mean, error = float(gap.mean()), standard_error(gap)
        text = f"{mean:+.3f} ± {error:.3f}"
        ahead = mean > 3 * error
        what = f"{setting}: last-50 J, GMC − {name}"
        if kind == "adam" and name == "tic_clip":
            run.refuted((7, "E16"), what, "GMC ahead", text, not ahead)
        elif name in ("tic_mask",) or (kind == "sgd" and name in ("tic_clip", "none")):
            run.holds((7, "E16"), what, "> 3 s.e.", text, ahead, "NUM", "3 s.e.")
        else:
            run.record((7, "E16"), what, text)


def step_size_grid(run: Run) -> None:
    """E17: each method over a grid of step sizes at lag 32, 16 seeds.

    The grid goes on until the methods that fall off have done so: one that ends at 32 would show
    GMC as unharmed.
    """
    environment = make_environment()
    names = ("gmc", "tic_clip", "tic_mask", "none", "is")
    methods: dict[str, Estimator] = {name: method(name) for name in names}
    methods["gmc, member limit G^(1/3)"] = GMC(epsilon=EPSILON, member_limit=f"G^{1 / 3:.4f}")
    courses = {
        name: [train(environment, m, Training(lag=32, step_size=size)) for size in STEP_SIZES]
        for name, m in methods.items()
    }
    scores = {name: [last(course.value) for course in each] for name, each in courses.items()}
    kept = {name: [float(c.weight.nanmean()) for c in each] for name, each in courses.items()}
    means = {name: [float(v.mean()) for v in values] for name, values in scores.items()}
    run.series["claim7"] = {"x": list(STEP_SIZES), **means}
    run.series["claim7b"] = {"x": list(STEP_SIZES), **kept}
    for name, values in scores.items():
        _report_fall(run, name, values, means[name])
    top = {n: max(scores[n], key=lambda v: float(v.mean())) for n in ("gmc", "tic_clip")}
    gap = top["gmc"] - top["tic_clip"]
    mean, error = float(gap.mean()), standard_error(gap)
    run.refuted((7, "E17"), "each at its best step size: GMC − TIC-clip", "GMC ahead",
                f"{mean:+.3f} ± {error:.3f}", mean <= 3 * error)  # fmt: skip


def _report_fall(run: Run, name: str, values: list[Tensor], means: list[float]) -> None:
    where, what = (7, "E17"), f"lag 32, SGD grid, 16 seeds, last-50 J: {name}"
    best = max(range(len(means)), key=means.__getitem__)
    if best == len(means) - 1:
        run.record(where, what, f"best {means[best]:.3f} at the grid's end: not bracketed")
        return
    fall = values[best] - values[-1]
    mean, error = float(fall.mean()), standard_error(fall)
    text = f"best {means[best]:.3f} at η={STEP_SIZES[best]:g}, "
    text += f"{mean:.3f} ± {error:.3f} lower at {STEP_SIZES[-1]:g}"
    falls = mean > 3 * error
    if name in ("none", "is"):
        run.holds(where, what, "falls off at large η", text, falls, "NUM", "3 s.e.")
    elif name == "tic_clip":
        run.holds(where, what, "does not fall off", text, not falls, "NUM", "3 s.e.")
    elif name == "gmc":
        run.refuted(where, what, "does not fall off", text, falls)
    else:
        run.record(where, what, text)


def language_models(run: Run) -> None:
    """Claim 7 itself needs GPUs."""
    run.not_run((7, "–"), "Qwen3 at large rollout delay", "needs GPUs; the small environment's "
                "E16 and E17 do not stand for it")  # fmt: skip
