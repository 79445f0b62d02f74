"""Reading a config: YAML, overrides, and faults in one line that names field and value."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gmc.config import Config, SftConfig
from megatron_gmc.errors import ConfigError
from megatron_gmc.estimators import GMC
from megatron_gmc.estimators.plain import NoCorrection
from megatron_gmc.estimators.tic import TICClip
from megatron_gmc.settings import dump_config, load_config
from tests.runs import Tree, sft_tree, train_tree, write_config


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path / "train.yaml", train_tree(tmp_path, tmp_path / "run"))


def load(path: Path, *overrides: str) -> Config:
    return load_config(Config, path, overrides)


def edited(path: Path, **sections: object) -> Path:
    return write_config(path, yaml.safe_load(path.read_text()) | sections)


def message(path: Path, *overrides: str) -> str:
    """What a faulty config is told: one line."""
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


def test_the_resolved_config_can_be_run_again(config_file: Path, tmp_path: Path) -> None:
    """Every default is written out, and that must not count as setting a field nobody reads."""
    for overrides in ((), ("--optim.name", "sgd"), ("--estimator.name", "grpo")):
        config = load(config_file, *overrides)
        saved = tmp_path / "config.yaml"
        saved.write_text(dump_config(config))
        assert load(saved) == config
    supervised = write_config(tmp_path / "sft.yaml", sft_tree(tmp_path, tmp_path / "sft"))
    config = load_config(SftConfig, supervised)
    saved.write_text(dump_config(config))
    assert load_config(SftConfig, saved) == config


@pytest.mark.parametrize("form", [("--optim.lr", "{}"), ("--optim.lr={}",)])
@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "0.0003", "3E-4", "+3e-04"])
def test_numbers_with_an_exponent_in_overrides(
    config_file: Path, form: tuple[str, ...], text: str
) -> None:
    assert load(config_file, *(part.format(text) for part in form)).optim.lr == 3e-4


def test_numbers_with_an_exponent_in_yaml(config_file: Path) -> None:
    config_file.write_text(config_file.read_text().replace("lr: 0.001", "lr: 3e-4"))
    assert load(config_file).optim.lr == 3e-4


def test_what_only_looks_like_a_number_stays_text(config_file: Path) -> None:
    config = load(config_file, "--policy.path", "3e-4x", "--train.output_dir=e5")
    assert (config.policy.path, config.train.output_dir) == (Path("3e-4x"), Path("e5"))


def test_overrides_reach_sections_that_the_file_leaves_out(config_file: Path) -> None:
    config = load(config_file, "--mesh.tensor", "2", "--rollout.lag", "{bounded: 3}")
    assert config.mesh.tensor == 2
    assert config.rollout.lag.bounded == 3
    assert config.rollout.lag.exact is None


def test_an_estimators_parameter_needs_no_name_beside_it(config_file: Path) -> None:
    """The section is missing in the file: its default is gmc."""
    assert load(config_file).estimator == GMC()
    assert load(config_file, "--estimator.epsilon", "0.1").estimator == GMC(epsilon=0.1)


def test_another_estimator_replaces_the_section(config_file: Path) -> None:
    edited(config_file, estimator={"name": "gmc", "epsilon": 0.3})
    assert load(config_file).estimator == GMC(epsilon=0.3)
    assert load(config_file, "--estimator.name", "none").estimator == NoCorrection()
    assert load(config_file, "--estimator.name", "gmc").estimator == GMC(epsilon=0.3)


@pytest.mark.parametrize(
    "overrides",
    [
        ("--estimator.name", "tic_clip", "--estimator.epsilon", "0.5"),
        ("--estimator.epsilon", "0.5", "--estimator.name", "tic_clip"),
    ],
)
def test_the_order_of_overrides_loses_none(config_file: Path, overrides: tuple[str, ...]) -> None:
    edited(config_file, estimator={"name": "gmc", "epsilon": 0.3})
    assert load(config_file, *overrides).estimator == TICClip(epsilon=0.5)


def test_a_name_that_is_no_unions_tag_leaves_its_section(config_file: Path) -> None:
    """optim.name picks no class of its own, and a Hugging Face dataset has a name beside a type."""
    tree = yaml.safe_load(config_file.read_text())
    tree["optim"] = {"name": "adamw", "lr": 0.1, "clip_grad": 2.0}
    tree["task"]["source"] = {"type": "hugging_face", "name": "a/b", "subset": "main"}
    write_config(config_file, tree)
    config = load(config_file, "--optim.name", "sgd", "--task.source.name", "c/d")
    assert (config.optim.name, config.optim.lr, config.optim.clip_grad) == ("sgd", 0.1, 2.0)
    source = config.task.source.model_dump()
    assert (source["type"], source["name"], source["subset"]) == ("hugging_face", "c/d", "main")


def test_the_type_of_a_source_that_may_be_absent_replaces_it(config_file: Path) -> None:
    overrides = (
        "--task.held_out_source.name",
        "c/d",
        "--task.held_out_source.type",
        "hugging_face",
    )
    source = load(config_file, *overrides).task.held_out_source
    assert source is not None
    assert source.model_dump()["name"] == "c/d"


UNKNOWN_KEYS = {
    "--trian.steps": "trian: unknown key; did you mean train?",
    "--rollout.temprature": "rollout.temprature: unknown key; did you mean temperature?",
    "--estimator.epsilom": "estimator.epsilom: unknown key; did you mean epsilon?",
    "--rollout.lag.exct": "rollout.lag.exct: unknown key; did you mean exact?",
    "--task.source.pth": "task.source.pth: unknown key; did you mean path?",
    "--task.held_out_source.pth": "task.held_out_source.pth: unknown key; did you mean path?",
    "--task.grader.pathe": "task.grader.pathe: unknown key; did you mean path?",
    "--mesh.colour": "mesh.colour: unknown key; known here: "
    "tensor, pipeline, virtual_pipeline, context, expert, sequence_parallel",
}


@pytest.mark.parametrize("key", UNKNOWN_KEYS)
def test_an_unknown_key_and_the_nearest_known_one(config_file: Path, key: str) -> None:
    assert message(config_file, key, "1") == UNKNOWN_KEYS[key]


def test_a_typo_in_a_field_without_default_is_said_once(config_file: Path) -> None:
    tree = yaml.safe_load(config_file.read_text())
    tree["train"]["stpes"] = tree["train"].pop("steps")
    write_config(config_file, tree)
    assert message(config_file) == "train.stpes: unknown key; did you mean steps?"


def test_a_parameter_of_another_estimator(config_file: Path) -> None:
    overrides = ("--estimator.name", "none", "--estimator.epsilon", "0.2")
    assert message(config_file, *overrides) == "estimator.epsilon: unknown key; known here: name"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("--estimator.name", "gmcc"), "estimator.name: 'gmcc' is unknown; did you mean gmc?"),
        (
            ("--estimator.name", "7"),
            "estimator.name: '7' is unknown; known here: gmc, none, is, ",
        ),
        (
            ("--task.source.type", "json"),
            "task.source.type: 'json' is unknown; did you mean jsonl?",
        ),
        (
            ("--task.grader", "{after: '>'}"),
            "task.grader.type: missing; known here: exact, numeric, math_verify, reasoning_gym, "
            "function",
        ),
    ],
)
def test_an_unknown_kind(config_file: Path, overrides: tuple[str, ...], expected: str) -> None:
    assert message(config_file, *overrides).startswith(expected)


def test_every_missing_field_gets_its_line(config_file: Path) -> None:
    edited(config_file, train={})
    with pytest.raises(ConfigError) as caught:
        load(config_file)
    assert str(caught.value).splitlines() == [
        f"train.{field}: missing, and it has no default"
        for field in ("output_dir", "steps", "prompts_per_step")
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("train.steps", "3"), "'train.steps' is not an override; write --section.field value"),
        (("--train.steps",), "--train.steps: a value must follow"),
        (
            ("--train.steps.first", "3"),
            "--train.steps.first: train.steps is 6, which has no fields",
        ),
        (("--train.steps", "[1"), "--train.steps: '[1' is not a YAML value: line 1, column 3: "),
    ],
)
def test_overrides_that_are_none(
    config_file: Path, overrides: tuple[str, ...], expected: str
) -> None:
    assert message(config_file, *overrides).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no mapping of sections such as 'train:' and 'policy:'"),
        ("- train", "holds no mapping of sections such as 'train:' and 'policy:'"),
        ("train: {steps: 5\npolicy: 3\n", "is not YAML: line 2, column 7: expected ',' or '}', "),
        ("train:\n\tsteps: 5\n", "is not YAML: line 2, column 1: found character '\\t' that"),
    ],
)
def test_a_file_that_is_no_config(config_file: Path, text: str, expected: str) -> None:
    config_file.write_text(text)
    assert message(config_file).startswith(f"{config_file} {expected}")


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    assert message(missing) == f"cannot read the config {missing}: No such file or directory"
    assert message(tmp_path) == f"cannot read the config {tmp_path}: Is a directory"


def test_dates_and_numbers_as_keys_are_plain_faults(config_file: Path) -> None:
    """YAML has more types than JSON, which the tree is validated as."""
    tree: Tree = yaml.safe_load(config_file.read_text())
    config_file.write_text(yaml.safe_dump(tree) + "5: 2024-01-01\n")
    assert message(config_file).startswith("5: unknown key; known here: train, ")
