"""`megatron-gmc slurm`: the batch script of a run, printed or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_gmc.config import Config
from megatron_gmc.errors import ConfigError, blamed_on
from megatron_gmc.launch.slurm import SlurmJob, render
from megatron_gmc.settings import load_config, validate


def slurm(
    path: Path, overrides: Sequence[str], options: Mapping[str, object], output: Path | None
) -> int:
    """Render the script of the config at `path`; returns the exit code.

    Without `output` the script goes to standard output. Raises ConfigError for a faulty config or
    option, and where the mesh does not fit the ranks.
    """
    config = load_config(Config, path, overrides)
    job = validate(SlurmJob, {name: value for name, value in options.items() if value is not None})
    with blamed_on("slurm"):
        script = render(job, config, path, overrides, Path.cwd())
    if output is None:
        print(script, end="")
        return 0
    try:
        output.write_text(script, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error
    print(f"wrote {output}; submit it with: sbatch {output}")
    return 0
