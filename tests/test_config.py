"""What a config may not say, each told in one line with field, value and what is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_gmc.config import Config, SftConfig
from megatron_gmc.errors import ConfigError
from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag
from megatron_gmc.settings import load_config
from tests.distributed import ROOT
from tests.runs import environment, sft_tree, train_tree, write_config


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path / "train.yaml", train_tree(tmp_path, tmp_path / "run"))


def message(path: Path, *overrides: str, kind: type[Config | SftConfig] = Config) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(kind, path, overrides)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


ABOVE_0, AT_LEAST_0 = "input should be greater than 0", "input should be greater than or equal to 0"
FINITE = "input should be a finite number"


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("train.steps", "0", ABOVE_0),
        ("train.steps", "-3", ABOVE_0),
        ("train.prompts_per_step", "0", ABOVE_0),
        ("train.seed", "-1", AT_LEAST_0),
        ("train.save_every", "0", ABOVE_0),
        ("train.keep_checkpoints", "0", ABOVE_0),
        ("mesh.tensor", "0", ABOVE_0),
        ("mesh.pipeline", "-1", ABOVE_0),
        ("mesh.context", "0", ABOVE_0),
        ("mesh.expert", "0", ABOVE_0),
        ("mesh.virtual_pipeline", "0", ABOVE_0),
        ("rollout.group_size", "0", ABOVE_0),
        ("rollout.max_response_tokens", "0", ABOVE_0),
        ("rollout.lag.exact", "-1", AT_LEAST_0),
        ("rollout.lag.bounded", "-16", AT_LEAST_0),
        ("rollout.temperature", ".nan", FINITE),
        ("rollout.start_timeout_s", "0", ABOVE_0),
        ("optim.lr", "0", ABOVE_0),
        ("optim.lr", ".inf", FINITE),
        ("optim.clip_grad", "0", ABOVE_0),
        ("optim.weight_decay", "-0.1", AT_LEAST_0),
        ("optim.warmup_steps", "-1", AT_LEAST_0),
        ("evaluation.every", "0", ABOVE_0),
        ("learner.micro_batch_tokens", "0", ABOVE_0),
    ],
)
def test_a_number_out_of_range(config_file: Path, field: str, value: str, right: str) -> None:
    """C8 (no steps), a negative lag, and their like."""
    assert message(config_file, f"--{field}", value) == f"{field}: {right}, got {value.strip('.')}"


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("train.steps", "true", "a valid integer, got True"),
        ("train.steps", "'5'", "a valid integer, got '5'"),
        ("train.steps", "1.5", "a valid integer, got 1.5"),
        ("optim.lr", "true", "a valid number, got True"),
        ("optim.lr", "fast", "a valid number, got 'fast'"),
        ("optim.distributed", "1", "a valid boolean, got 1"),
        ("policy.path", "5", "a valid string, got 5"),
        ("policy.path", "null", "a valid string, got None"),
        ("rollout", "5", "an object, got 5"),
        ("rollout.lag", "16", "an object, got 16"),
        ("rollout.engine", "vllm", "'embedded' or 'sglang', got 'vllm'"),
        ("optim.schedule", "cosin", "'constant', 'linear', 'cosine' or 'wsd', got 'cosin'"),
        ("objective.aggregation", "sum", "'token_sum', 'trajectory_mean' or 'token_mean', got 's"),
        ("learner.passes", "three", "'auto', 'single_pass' or 'two_pass', got 'three'"),
    ],
)
def test_a_wrong_type(config_file: Path, field: str, value: str, right: str) -> None:
    assert message(config_file, f"--{field}", value).startswith(f"{field}: input should be {right}")


@pytest.mark.parametrize(
    ("value", "got"), [("0", "0"), ("-1", "-1"), (".nan", "nan"), (".inf", "inf")]
)
@pytest.mark.parametrize("name", ["gmc", "tic_clip", "tic_mask"])
def test_epsilon_above_0(config_file: Path, name: str, value: str, got: str) -> None:
    text = message(config_file, "--estimator.name", name, "--estimator.epsilon", value)
    assert text.startswith("estimator")
    assert "epsilon" in text
    assert text.endswith(f"got {got}")


def test_temperature_0(config_file: Path) -> None:
    """T2."""
    for value in ("0", "0.0", "-1.0"):
        assert message(config_file, "--rollout.temperature", value) == (
            f"rollout.temperature: {float(value)} has no log-probs to weight with; training needs "
            "a temperature above 0 (1.0 is the usual one)"
        )


@pytest.mark.parametrize(("field", "value"), [("top_p", "0.9"), ("top_p", "0.0"), ("top_k", "50")])
def test_a_truncated_distribution(config_file: Path, field: str, value: str) -> None:
    """T9: under it the mean ratio is the kept mass."""
    text = message(config_file, f"--rollout.{field}", value)
    assert text.startswith(f"rollout.{field}: {value} samples from a truncated distribution")
    assert "the mean ratio is the kept mass and not 1" in text
    assert f"train with {field} {'1.0' if field == 'top_p' else '0'}" in text


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_mean", "group_mean_std"])
def test_a_group_of_one_with_a_baseline(config_file: Path, advantage: str) -> None:
    """G2."""
    overrides = ("--rollout.group_size", "1", "--objective.advantage", advantage)
    assert message(config_file, *overrides) == (
        f"rollout.group_size: 1 with objective.advantage {advantage}, which needs a second "
        "trajectory to compare with; use group_size 2 or more"
    )


def test_a_group_of_one_without_a_baseline(config_file: Path) -> None:
    """G2: then it is allowed."""
    overrides = ("--rollout.group_size", "1", "--objective.advantage", "none")
    assert load_config(Config, config_file, overrides).rollout.group_size == 1


@pytest.mark.parametrize(
    ("lag", "got"), [("{}", "exact=None, bounded=None"), ("{exact: 2, bounded: 3}", "exact=2, bou")]
)
def test_both_lags_or_none(config_file: Path, lag: str, got: str) -> None:
    text = message(config_file, "--rollout.lag", lag)
    assert text.startswith("rollout.lag: give one of exact or bounded, as in 'lag: {exact: 16}'")
    assert f"got {got}" in text


@pytest.mark.parametrize(
    ("lag", "built"),
    [
        ("{exact: 0}", ExactLag(0)),
        ("{bounded: 3}", BoundedLag(3)),
        (
            "{bounded: 3, order: earliest_deadline}",
            BoundedLag(3, order="earliest_deadline"),
        ),
        ("{exact: 3, first: [0, 0, 1, 2]}", ExactLag(3, first=(0, 0, 1, 2))),
        ("{exact: 2, ramp: {start: 0, steps: 4}}", ExactLag(2, first=(0, 0, 1, 1))),
        ("{bounded: 0, ramp: {start: 3, steps: 3}}", BoundedLag(0, first=(3, 2, 1))),
    ],
)
def test_each_lag_is_built(config_file: Path, lag: str, built: Lag) -> None:
    assert load_config(Config, config_file, ("--rollout.lag", lag)).scheduler().lag == built


def test_a_ramp_moves_in_whole_batches(config_file: Path) -> None:
    words = ("--optim.steps_per_batch", "2", "--evaluation.every", "2", "--train.steps", "10")
    lag = "{exact: 4, ramp: {start: 0, steps: 7}}"
    config = load_config(Config, config_file, (*words, "--rollout.lag", lag))
    assert config.scheduler().lag == ExactLag(4, first=(0, 0, 0, 0, 2, 2, 2, 2))


@pytest.mark.parametrize(
    ("lag", "expected"),
    [
        ("{exact: 2, order: earliest_deadline}", "order: earliest_deadline needs a bounded lag; "),
        ("{bounded: 2, order: lifo}", "order: input should be 'submission' or 'earliest_deadline'"),
        (
            "{bounded: 2, order: earliest_deadline, first: [0]}",
            "order: earliest_deadline keeps one bound for the whole run; leave ramp and first out",
        ),
        ("{exact: 2, first: [0], ramp: {start: 0, steps: 2}}", "ramp: given beside first, "),
        ("{exact: 2, first: [0, -1]}", f"first[1]: {AT_LEAST_0}, got -1"),
        ("{exact: 2, ramp: {start: 0}}", "ramp.steps: missing, and it has no default"),
        ("{exact: 2, ramp: {start: 0, stpes: 3}}", "ramp.stpes: unknown key; did you mean steps?"),
    ],
)
def test_a_lag_that_contradicts_itself(config_file: Path, lag: str, expected: str) -> None:
    assert message(config_file, "--rollout.lag", lag).startswith(f"rollout.lag.{expected}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--train.steps", "7"), "train.steps: 7 is no multiple of optim.steps_per_batch 2, and "),
        (("--train.save_every", "3"), "train.save_every: 3 is no multiple of optim.steps_per_b"),
        (("--evaluation.every", "5"), "evaluation.every: 5 is no multiple of optim.steps_per_b"),
        (("--rollout.lag", "{exact: 3}"), "rollout.lag: an exact lag must be a multiple of the 2"),
        (("--rollout.lag", "{bounded: 0}"), "rollout.lag: a bound of 0 at step 1 cannot be kept"),
    ],
)
def test_what_does_not_fit_two_steps_a_batch(
    config_file: Path, words: tuple[str, ...], expected: str
) -> None:
    """L4."""
    fitting = ("--optim.steps_per_batch", "2", "--evaluation.every", "2")
    assert load_config(Config, config_file, fitting).optim.steps_per_batch == 2
    assert message(config_file, *fitting, *words).startswith(expected)


def test_an_exact_lag_that_rises_too_fast(config_file: Path) -> None:
    text = message(config_file, "--rollout.lag", "{exact: 4, first: [0, 0, 0]}")
    assert text.startswith("rollout.lag: an exact lag may rise by 1 a batch at most, and it rises")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("--optim.schedule", "wsd"), "optim.decay_steps: None with schedule wsd; "),
        (("--optim.decay_steps", "3"), "optim.decay_steps: 3 with schedule constant; "),
        (
            ("--optim.schedule", "wsd", "--optim.decay_steps", "3"),
            "optim.decay_steps: 3 and optim.warmup_steps 4 are together more than train.steps 6",
        ),
        (
            ("--optim.name", "sgd", "--optim.betas", "[0.9, 0.9]"),
            "optim.betas: optimizer sgd does not read it; remove it",
        ),
        (
            ("--optim.name", "sgd", "--optim.eps", "1e-6"),
            "optim.eps: optimizer sgd does not read it; remove it",
        ),
        (
            ("--optim.name", "sgd", "--optim.distributed", "true"),
            "optim.distributed: sgd keeps no state that megatron-core could shard; use adamw",
        ),
        (("--optim.momentum", "0.9"), "optim.momentum: optimizer adamw does not read it; remove"),
        (("--optim.betas", "[0.9, 1.0]"), "optim.betas[1]: input should be less than 1, got 1.0"),
    ],
)
def test_what_the_optimizer_would_not_read(
    config_file: Path, overrides: tuple[str, ...], expected: str
) -> None:
    assert message(config_file, *overrides).startswith(expected)


def test_two_held_out_sets(config_file: Path) -> None:
    assert message(config_file, "--task.held_out", "4") == (
        "task: held_out is 4 and held_out_source is set: give only one of them"
    )


def test_a_supervised_config(tmp_path: Path) -> None:
    path = write_config(tmp_path / "sft.yaml", sft_tree(tmp_path, tmp_path / "run"))
    for overrides, expected in (
        (("--train.batch_sise", "3"), "train.batch_sise: unknown key; did you mean batch_size?"),
        (("--train.batch_size", "0"), f"train.batch_size: {ABOVE_0}, got 0"),
        (
            ("--policy.initial", "random_"),
            "policy.initial: input should be 'random' or 'pretrained', got 'random_'",
        ),
        (("--optim.schedule", "wsd", "--optim.decay_steps", "3"), "optim.decay_steps: 3 and"),
        (("--optim.steps_per_batch", "2"), "optim.steps_per_batch: unknown key; known here: "),
    ):
        assert message(path, *overrides, kind=SftConfig).startswith(expected)


def test_a_faulty_config_is_refused_before_megatron_is_loaded(tmp_path: Path) -> None:
    """At the command line: exit code 2, a line of text, and nothing made or built."""
    task = tmp_path / "nowhere"
    faults = {
        "tempreture": ("rollout", {"tempreture": 1.0}),
        "lag": ("rollout", {"lag": {"exact": -1}}),
    }
    program = (
        "import sys\n"
        "from megatron_gmc.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'megatron' not in sys.modules and 'transformers' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    for word, (section, change) in faults.items():
        tree = train_tree(task, tmp_path / "run")
        tree[section] = {**yaml.safe_load(yaml.safe_dump(tree[section])), **change}
        path = write_config(tmp_path / f"{word}.yaml", tree)
        done = subprocess.run(
            [sys.executable, "-c", program, "train", str(path)],
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("error: rollout.")
        assert word in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "run").exists()
