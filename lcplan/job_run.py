"""From a resolved plan to a finished job: check everything, write the folder, start it, read what it measured."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from lcplan.backends import inputs, launch
from lcplan.backends.job import COMMAND, RESULT_FILE, JobSpec, check_job, check_output_dir, render_job
from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.job_options import DataSource, Device, Init, TrainingOptions
from lcplan.ledger import RopeParameters
from lcplan.model_spec import ModelSpec
from lcplan.probing import allocator_bytes, check_probe, compare, host_memory_available, start_probe, write_record
from lcplan.rope import position_limit
from lcplan.train_plan import TrainPlan
from lcplan.units import ByteUnits


def run_job(
    *,
    model: ModelSpec,
    plan: TrainPlan,
    rope: RopeParameters | None,
    prediction: dict[str, int] | None,
    data: DataSource,
    output_dir: Path,
    init: Init = "pretrained",
    revision: str | None = None,
    tokenizer: str | None = None,
    tokenizer_vocab_size: int | None = None,
    training: TrainingOptions | None = None,
    device: Device = "gpu",
    stack: dict[str, str | None] | None = None,
    refusal: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    probe: bool = False,
    rank: int = 0,
    capacity_bytes: int | None = None,
    units: ByteUnits = "GiB",
) -> int:
    """Render one job, launch it unless ``dry_run``, and return the exit code of ``lcplan run``.

    With ``probe`` one step of it runs on one GPU, as ``rank`` of its ranks, capped at ``capacity_bytes``.

    ``prediction``, ``rope`` and ``stack`` come from the plan's report, and ``refusal`` says why the plan does not
    fit, if it does not. Nothing is written before every check has passed; with ``force`` a refused plan starts, and
    the folder may hold other files, which stay.
    """
    source = inputs.model_source(model, init=init, revision=revision)
    job = JobSpec(
        plan=plan,
        model=source,
        rope=rope,
        max_position_embeddings=position_limit(model, plan.max_length, rope),
        data=data,
        tokenizer=inputs.tokenizer_source(
            source, asked=tokenizer, vocab_size=model.vocab_size, trained_size=tokenizer_vocab_size
        ),
        training=training or TrainingOptions(),
        prediction=prediction,
        device=device,
        stack=stack or {},
    )
    folder = output_dir.expanduser().absolute()
    if probe and job.training.save_strategy != "no":
        raise PlanError(
            "probe-saves",
            f"save_strategy {job.training.save_strategy}: a probe has no other ranks that could save theirs. Probe "
            "with save_strategy: no.",
        )
    if probe:
        check_probe(model, plan, rank=rank, host_available=plan.host_memory_bytes or host_memory_available())
    gpus = _check(job, folder, dry_run=dry_run, force=force, probe=probe)
    if refusal is not None and not force:
        _say(f"does not fit: {refusal} --force starts it all the same.")
        return 1
    render_job(job, folder, force=force)
    _say_what_starts(job, folder, gpus)
    if dry_run:
        print(_by_hand(folder))  # noqa: T201
        return 0
    if probe:
        return _probe(model, job, folder, rank, capacity_bytes, units)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    code = launch.launch(folder, launch.job_environment(device, offline=not launch.needs_hub(job)))
    return _finish(job, folder, code, units)


def _probe(
    model: ModelSpec, job: JobSpec, folder: Path, rank: int, capacity_bytes: int | None, units: ByteUnits
) -> int:
    """One step of the job on one GPU, and its record; 1 where it failed."""
    from lcplan.reports.probe_result import print_failure, print_probe

    cap = None if capacity_bytes is None else allocator_bytes(job.plan, capacity_bytes)
    found = start_probe(folder, rank=rank, cap=cap)
    if found.error is not None:
        print_failure(found, folder)
        return found.exit_code
    write_record(folder, model, job.plan, rank, found)
    print_probe(found, compare(model, job.plan, rank, found), folder, units=units)
    return 0


def _check(job: JobSpec, folder: Path, *, dry_run: bool, force: bool, probe: bool) -> list[str]:
    """Everything that can be refused before a file is written, the slowest last; returns the GPUs' names."""
    launch.check_loss(job.plan.loss, launch.installed_versions().get("trl"))
    check_job(job)
    check_output_dir(folder, force=force)
    inputs.check_data(job.data, job.plan)
    if dry_run:
        return []
    launch.check_packages(job.plan)
    if job.device == "cpu":
        return []
    if probe:
        return launch.check_gpus(num_gpus=1, gpus_per_node=1)
    return launch.check_gpus(num_gpus=job.plan.num_gpus, gpus_per_node=job.plan.gpus_per_node)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _by_hand(folder: Path) -> str:
    return f"cd {shlex.quote(str(folder))} && {shlex.join(COMMAND)}"


def _say_what_starts(job: JobSpec, folder: Path, gpus: list[str]) -> None:
    _say(f"Job folder: {folder}")
    if job.tokenizer.kind == "train-bpe":
        _say(f"Tokenizer: a byte-level BPE of {job.tokenizer.vocab_size:,} tokens, trained on the data.")
    if gpus:
        _say(f"GPUs: {', '.join(gpus[: job.plan.num_gpus])} (planned for {job.plan.gpu}).")
    if gpus and (where := launch.hidden_cudnn(os.environ)):
        _say(
            f"warning [hidden-cudnn]: LD_LIBRARY_PATH has a cuDNN in {where}, before the one that torch brings. "
            "Attention may fall back to a kernel that is 1.6 times slower on an H100. Take it out of LD_LIBRARY_PATH."
        )
    _say(f"Command: {_by_hand(folder)}")


def _finish(job: JobSpec, folder: Path, code: int, units: ByteUnits) -> int:
    """Read result.json: an exit code of 0 proves nothing, launchers return it for runs that never were."""
    from lcplan.reports.run_result import print_result

    result = _read_result(folder)
    if result is None:
        if code == 0:
            raise EnvironmentProblem(
                "no-result",
                f"the launcher reported success, and the job left no {RESULT_FILE}: it never ran. "
                f"Start it by hand to see why: {_by_hand(folder)}",
            )
        _say(f"The job ended with exit code {code}; the messages above say why.")
        return code
    if result["error"] is not None:
        _say(f"The job failed: {result['error']}")
        return int(result["exit_code"])
    if result["world_size"] != job.plan.num_gpus:
        raise EnvironmentProblem(
            "wrong-world-size",
            f"the job ran as {result['world_size']} process(es), planned {job.plan.num_gpus}: its numbers are "
            f"not those of the plan. Start it with: {_by_hand(folder)}",
        )
    print_result(f"{job.model.id}, {job.plan.max_length:,} tokens", job.prediction, result, units=units)
    return code


def _read_result(folder: Path) -> dict[str, Any] | None:
    path = folder / RESULT_FILE
    if not path.is_file():
        return None
    return dict(json.loads(path.read_text(encoding="utf-8")))
