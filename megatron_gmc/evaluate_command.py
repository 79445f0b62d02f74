"""`evaluate`: a checkpoint or a running engine on one or more tasks."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_gmc.convert.hf_config import ModelShape, load_shape
from megatron_gmc.convert.hugging_face import tensor_shapes
from megatron_gmc.convert.inventory import check_tensors
from megatron_gmc.convert_command import convert
from megatron_gmc.errors import ConfigError, blamed_on
from megatron_gmc.evaluate.config import EvaluateConfig, HttpConfig
from megatron_gmc.evaluate.record import Done, EvaluationFolder, append
from megatron_gmc.evaluate.sampling import PromptSampler
from megatron_gmc.evaluate.statistics import Estimate, Outcome, Summary, summarise
from megatron_gmc.rollout.embedded.engine import EmbeddedEngine
from megatron_gmc.rollout.engine import Engine
from megatron_gmc.rollout.http_engine import HttpEngine
from megatron_gmc.rollout.types import Prompt
from megatron_gmc.run_folder import write_atomically
from megatron_gmc.setup_checks import Task, load_tokenizer, stop_token_ids
from megatron_gmc.tasks.graders import Grader
from megatron_gmc.tasks.prompts import fingerprint, load_task


@dataclass(frozen=True)
class _Job:
    """A task with the prompts that are evaluated."""

    name: str
    task: Task
    prompts: Sequence[Prompt]


def evaluate(config: EvaluateConfig) -> int:
    """Sample what is missing, write evaluation.json, print the table; returns the exit code.

    Raises ConfigError for a fault of the input, EngineError where the engine fails for good; what
    was finished by then is kept and not sampled again.
    """
    torch.set_num_threads(1)
    folder = EvaluationFolder(config.output_dir)
    source = config.model.like or config.model.path
    with blamed_on("model.like" if config.model.like else "model.path"):
        shape = load_shape(source)
    jobs = [_job(config, name, source, shape) for name in config.tasks]
    folder.open(config)
    weights = _weights(config, shape, folder)
    try:
        done = asyncio.run(_sample(config, shape, weights, folder, jobs))
    finally:
        for job in jobs:
            job.task.grader.close()
    summaries = {
        job.name: summarise(
            [done[job.name, place] for place in range(len(job.prompts))],
            config.sampling.k,
            config.sampling.pass_reward,
        )
        for job in jobs
    }
    result = {
        "model": str(config.model.path),
        "temperature": config.sampling.temperature,
        "seed": config.sampling.seed,
        "tasks": {name: asdict(summary) for name, summary in summaries.items()},
    }
    write_atomically(folder.result, json.dumps(result, indent=2) + "\n")
    Console(highlight=False, markup=False).print(_table(config, summaries))
    print(f"results: {folder.result}; finished prompts: {folder.samples}")
    return 0


def _job(config: EvaluateConfig, name: str, source: Path, shape: ModelShape) -> _Job:
    """Read and check a task against the model."""
    room = shape.max_positions - config.sampling.max_response_tokens
    if room < 1:
        raise ConfigError(
            f"sampling.max_response_tokens: {config.sampling.max_response_tokens} leaves no room "
            f"for a prompt in the model's context of {shape.max_positions} tokens; lower it"
        )
    tokenizer = load_tokenizer(source)
    chosen = config.tasks[name]
    with blamed_on(f"tasks.{name}"):
        prompts = load_task(chosen, tokenizer, vocabulary=shape.vocab_size, max_prompt_tokens=room)
        grader = Grader(chosen.grader, workers=config.grader_workers)
    stop = stop_token_ids(source, tokenizer, shape.vocab_size)
    task = Task(tokenizer, prompts, grader, stop)
    return _Job(name, task, prompts.held_out or prompts.train)


def _weights(config: EvaluateConfig, shape: ModelShape, folder: EvaluationFolder) -> Path:
    """The Hugging Face folder to sample from; a Megatron checkpoint is converted first."""
    if isinstance(config.engine, HttpConfig):
        return config.model.path
    if config.model.like is None:
        with blamed_on("model.path"):
            check_tensors(tensor_shapes(config.model.path), shape)
        return config.model.path
    target = folder.path / "huggingface"
    if not target.exists():
        convert(config.model.path, target, like=config.model.like)
    return target


async def _sample(
    config: EvaluateConfig,
    shape: ModelShape,
    weights: Path,
    folder: EvaluationFolder,
    jobs: Sequence[_Job],
) -> Done:
    """All outcomes, those of an earlier, interrupted call included."""
    sampler = PromptSampler(
        _engine(config, shape, weights, folder), config.sampling, shape.vocab_size
    )
    subject: dict[str, object] = {"prompts": {job.name: fingerprint(job.prompts) for job in jobs}}
    running = isinstance(config.engine, HttpConfig)
    if not running:
        folder.check_subject({**subject, "weights": _files(weights)})
    done = folder.finished()
    if not running and len(done) == sum(len(job.prompts) for job in jobs):
        return done
    try:
        version = await sampler.start()
        if running:
            folder.check_subject({**subject, "weights": {"version": version}})
        with folder.samples.open("a", encoding="utf-8", buffering=1) as file, _progress() as bar:
            for job in jobs:
                await _sample_task(config, sampler, job, done, file, bar)
        for reason, count in sampler.refused().items():
            print(f"{reason}: {count:.0f} samples, each sampled again")
        return done
    finally:
        await sampler.close()


async def _sample_task(
    config: EvaluateConfig,
    sampler: PromptSampler,
    job: _Job,
    done: Done,
    file: TextIO,
    bar: Progress,
) -> None:
    places = range(len(job.prompts))
    missing = [place for place in places if (job.name, place) not in done]
    line = bar.add_task(job.name, total=len(places), completed=len(places) - len(missing))

    def finished(place: int, outcome: Outcome) -> None:
        append(file, job.name, place, outcome)
        done[job.name, place] = outcome
        bar.advance(line)

    grader = config.tasks[job.name].grader
    await sampler.sample(job.task, grader, job.prompts, missing, finished)


def _engine(
    config: EvaluateConfig, shape: ModelShape, weights: Path, folder: EvaluationFolder
) -> Engine:
    if isinstance(config.engine, HttpConfig):
        variable = config.engine.token_env
        token = os.environ.get(variable, "") if variable else ""
        if variable and not token:
            raise ConfigError(f"engine.token_env: the environment has no {variable}")
        return HttpEngine(
            "engine",
            config.engine.address,
            token,
            vocabulary=shape.vocab_size,
            sample_timeout_s=config.sampling.request_timeout_s,
        )
    return EmbeddedEngine(
        "embedded engine",
        weights,
        version=0,
        vocabulary=shape.vocab_size,
        log=folder.path / "engine.log",
        start_timeout_s=config.engine.start_timeout_s,
        sample_timeout_s=config.sampling.request_timeout_s,
    )


def _files(weights: Path) -> dict[str, object]:
    """What tells these weights from others without reading them: sizes and times of the files."""
    found = ((path.name, path.stat()) for path in sorted(weights.glob("*.safetensors")))
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found}


def _progress() -> Progress:
    console = Console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _table(config: EvaluateConfig, summaries: Mapping[str, Summary]) -> Table:
    """One column a task; means ± their standard errors over prompts."""
    sampling = config.sampling
    table = Table(title=f"{config.model.path}")
    table.add_column(
        f"n = {sampling.samples}, temperature {sampling.temperature:g}, seed {sampling.seed}"
    )
    for name in summaries:
        table.add_column(name, justify="right")
    found = list(summaries.values())
    table.add_row("prompts", *(str(one.prompts) for one in found))
    table.add_row("accuracy (mean reward)", *(_shown(one.accuracy) for one in found))
    for k in sampling.k:
        table.add_row(f"pass@{k}", *(_shown(one.passes[k]) for one in found))
    table.add_row(
        "majority vote", *("–" if one.majority is None else _shown(one.majority) for one in found)
    )
    table.add_row("response tokens", *(_shown(one.response_tokens, 1) for one in found))
    table.add_row("truncated share", *(_shown(one.truncated_share) for one in found))
    return table


def _shown(value: Estimate, digits: int = 3) -> str:
    error = "" if value.error is None else f" ± {value.error:.{digits}f}"
    return f"{value.mean:.{digits}f}{error}"
