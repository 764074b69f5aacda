"""One training job as data, and the folder it is rendered into.

The folder holds the job's own scripts, ``plan.json`` with every choice, accelerate's YAML and a README. It
needs no lcplan to run. User strings only ever become JSON or YAML values, never code and never shell text.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from lcplan._record import Record
from lcplan.backends import accelerate_yaml
from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.job_options import DataSource, Device, Init, TokenizerSource, TrainingOptions
from lcplan.ledger import RopeParameters
from lcplan.train_plan import TrainPlan
from lcplan.units import format_bytes

SCHEMA_VERSION = 1
COMMAND = ("accelerate", "launch", "--config_file", "accelerate.yaml", "train.py")
"""Starts the job from inside its folder."""
SCRIPTS = (
    "train.py", "probe.py", "arguments.py", "model.py", "data.py", "rows.py", "tokenization.py", "checks.py",
    "tiling.py", "host_offload.py", "ring_attention.py", "measure.py", "attempt.py", "guard.py", "causes.py",
    "checkpoints.py", "first_step.py", "journal.py",
)  # fmt: skip
BITSANDBYTES_OPTIMIZERS = ("adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit")
TEMPLATES = files("lcplan.backends") / "templates"
RESULT_FILE = "result.json"


class ModelSource(Record):
    """Where the job takes its model from."""

    id: str
    """Hub id or folder; with ``init="random"`` only a name."""
    init: Init = "pretrained"
    revision: str | None = None
    config: dict[str, Any] | None = Field(default=None, repr=False)
    """The whole config.json; needed to start from random weights."""


class JobSpec(Record):
    """Everything that a job folder is rendered from."""

    plan: TrainPlan
    model: ModelSource
    rope: RopeParameters | None = None
    """None leaves the model's own."""
    max_position_embeddings: int = Field(gt=0)
    data: DataSource
    tokenizer: TokenizerSource
    training: TrainingOptions = Field(default_factory=TrainingOptions)
    prediction: dict[str, int] | None = None
    device: Device = "gpu"
    stack: dict[str, str | None] = Field(default_factory=dict)
    """Versions that the plan was made for."""


def plan_document(job: JobSpec) -> dict[str, Any]:
    """The content of plan.json."""
    return {"schema_version": SCHEMA_VERSION, **job.model_dump(mode="json")}


def packages(plan: TrainPlan) -> tuple[str, ...]:
    """What a plan needs beside the train extra."""
    needed = {
        "peft": plan.lora_r is not None,
        "bitsandbytes": plan.quantize != "none" or plan.optim in BITSANDBYTES_OPTIMIZERS,
        "deepspeed": plan.backend == "deepspeed",
        "torchao": plan.optim == "adamw_torch_8bit",
        "liger-kernel": plan.kernels == "liger",
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def accelerate_config(job: JobSpec) -> dict[str, Any]:
    """The content of accelerate.yaml."""
    return accelerate_yaml.accelerate_config(job.plan, device=job.device)


def check_job(job: JobSpec) -> None:
    """Refuse what the generated scripts cannot do, before anything is written."""
    accelerate_config(job)
    plan = job.plan
    for is_set, code, message in _refusals(job):
        if is_set:
            raise PlanError(code, message)
    if rest := plan.max_length % plan.length_multiple:
        raise PlanError(
            "length-multiple",
            f"max_length={plan.max_length} is not a multiple of {plan.length_multiple}, into which this plan "
            f"cuts a sequence. Use --max-length {plan.max_length - rest + plan.length_multiple}.",
        )


def _joins_texts(job: JobSpec) -> bool:
    """Whether the data is known to be joined end to end; with ``auto`` its first record decides."""
    return job.data.kind == "python-docs" or job.data.format in ("text", "input_ids")


def _refusals(job: JobSpec) -> tuple[tuple[bool, str, str], ...]:
    """What neither TRL nor the scripts can do: whether it is asked for, a code, a message."""
    plan = job.plan
    joined = _joins_texts(job)
    return (
        (
            plan.mlp_tile_size is not None and plan.backend in ("ddp", "deepspeed"),
            "tiles-backend",
            f"--mlp-tile-size {plan.mlp_tile_size} with --backend {plan.backend}: a tile's backward needs the weights "
            "that ZeRO gathers for a whole forward only, and nobody has tried it with DDP. Use --backend fsdp2, or "
            "leave it out.",
        ),
        (
            plan.kernels == "liger" and (job.device == "cpu" or plan.backend == "deepspeed"),
            "kernels-liger",
            "--kernels liger: its kernels run on CUDA alone, and nobody has tried them here with ZeRO. Use a GPU and "
            "--backend single or fsdp2, or leave it out.",
        ),
        (
            plan.packing,
            "lever-not-available",
            "--packing: texts are joined end to end into full rows, and examples are rows of their own. Leave it out.",
        ),
        (
            plan.quantize != "none" and plan.backend == "deepspeed",
            "quantize-deepspeed",
            "--quantize nf4 with --backend deepspeed: ZeRO shards weights as it finds them, and 4-bit ones come packed "
            "with scales. Use --backend fsdp2, or --quantize none.",
        ),
        (
            plan.per_device_eval_batch_size is not None and plan.sp_size > 1,
            "eval-with-sp",
            f"--per-device-eval-batch-size with --sp-size {plan.sp_size}: the generated job does not evaluate under "
            "Ulysses. Leave it out.",
        ),
        (
            plan.padding and joined,
            "padding-joined",
            "--padding: this data is joined end to end into full rows, which need none. Leave it out.",
        ),
        (
            plan.scored_fraction < 1 and joined,
            "scored-fraction-joined",
            f"--scored-fraction {plan.scored_fraction}: every token of joined texts has a label. Leave it out, or name "
            "data with prompts and completions.",
        ),
        (
            job.device == "cpu" and plan.backend == "fsdp2",
            "cpu-plan",
            "A CPU job runs as one process, or with --backend ddp or deepspeed: accelerate has no FSDP on a CPU.",
        ),
    )


def readme_text(job: JobSpec) -> str:
    """README.md of the job folder."""
    from jinja2 import Environment, StrictUndefined

    template = (TEMPLATES / "README.md.j2").read_text(encoding="utf-8")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["bytes"] = format_bytes
    return environment.from_string(template).render(
        job=job,
        command=shlex.join(COMMAND),
        plan=job.plan.model_dump(mode="json"),
        rope=job.rope and job.rope.model_dump(mode="json"),
        packages=packages(job.plan),
        joined=_joins_texts(job),
    )


def check_output_dir(folder: Path, *, force: bool = False) -> None:
    """Refuse a folder that holds anything, and anything that is not a folder."""
    if folder.is_file():
        raise PlanError("output-not-a-folder", f"{folder} is a file. Name a new folder with --output-dir.")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise PlanError(
            "output-not-empty",
            f"{folder} is not empty, and a job folder never mixes with other files. "
            "Name a new folder with --output-dir, or write into this one with --force.",
        )


def render_job(job: JobSpec, folder: Path, *, force: bool = False) -> Path:
    """Write the job folder whole or not at all, and return it.

    The files are written beside the target and renamed into place. With ``force`` they replace files of the
    same name in an existing folder; everything else in there stays.
    """
    check_job(job)
    check_output_dir(folder, force=force)
    unfinished = folder.parent / f".{folder.name}.{os.getpid()}.unfinished"
    try:
        unfinished.mkdir(parents=True)
        _write_files(job, unfinished)
        if folder.is_dir() and any(folder.iterdir()):
            for path in unfinished.iterdir():
                path.replace(folder / path.name)
        else:
            unfinished.rename(folder)
    except OSError as error:
        raise EnvironmentProblem(
            "output-not-writable",
            f"{folder} cannot be written ({error.strerror}). Name another --output-dir.",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write_files(job: JobSpec, folder: Path) -> None:
    for name in SCRIPTS:
        (folder / name).write_bytes((TEMPLATES / name).read_bytes())
    config = yaml.safe_dump(accelerate_config(job), sort_keys=False)
    (folder / "accelerate.yaml").write_text(config, encoding="utf-8")
    document = json.dumps(plan_document(job), indent=2) + "\n"
    (folder / "plan.json").write_text(document, encoding="utf-8")
    (folder / "README.md").write_text(readme_text(job), encoding="utf-8")
