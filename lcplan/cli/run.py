"""``lcplan run``: check everything, write the job folder, start it, and hold what it measured against the plan."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from lcplan.backends import inputs, launch
from lcplan.backends.job import COMMAND, RESULT_FILE, JobSpec, TrainingOptions, render_job
from lcplan.backends.job import DataSource, Device, check_job, check_output_dir
from lcplan.cli.output import check_choice
from lcplan.cli.plan_options import (
    ConfigOption,
    Job,
    ModelArgument,
    PresetOption,
    TrustOption,
    UnitsOption,
    read_base,
    read_job,
    read_spec,
    with_plan_flags,
)
from lcplan.errors import EnvironmentProblem, InputError
from lcplan.ledger import MemoryReport, RopeParameters
from lcplan.model_spec import ModelSpec
from lcplan.presets import Preset
from lcplan.rope import position_limit, resolve_rope
from lcplan.train_plan import TrainPlan, resolve
from lcplan.units import ByteUnits, format_bytes

Init = Literal["pretrained", "random"]


@with_plan_flags
def command(
    given: dict[str, Any],
    model: ModelArgument = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    data: Annotated[
        str | None,
        typer.Option(help="A .txt, .jsonl or .parquet file, a folder of them, a Hub dataset, or python-docs."),
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="New folder for the job and its results.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the folder, start nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start a plan that does not fit; write into a folder in use.")
    ] = False,
    init: Annotated[str | None, typer.Option(help="pretrained or random weights.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the model on the Hub.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of another tokenizer.")] = None,
    text_column: Annotated[str, typer.Option(help="Column of --data that holds the text.")] = "text",
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: one pass.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and dropout.")] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write the trained model.")] = True,
    units: UnitsOption = "GiB",
    trust_remote_code: TrustOption = False,
) -> None:
    """Generate the TRL job of a plan and start it. Exit 0 when it has trained, else the job's own code.

    Example: lcplan run --preset smoke --output-dir runs/smoke
    """
