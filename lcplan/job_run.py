"""From a resolved plan to a finished job: check everything, write the folder, start it, read what it measured."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lcplan.backends import inputs, launch, slurm
from lcplan.backends.job import COMMAND, RESULT_FILE, JobSpec, check_job, check_output_dir, render_job
from lcplan.backends.templates import checkpoints, journal
from lcplan.backends.templates.causes import EXIT_STOPPED
from lcplan.doctor import Finding, Need, reds
from lcplan.errors import EnvironmentProblem, InputError, PlanError
from lcplan.job_options import DataSource, Device, Init, TrainingOptions
from lcplan.ledger import RopeParameters
from lcplan.model_spec import ModelSpec
from lcplan.preflight import Launcher, check_machine, need_of
from lcplan.probing import allocator_bytes, check_probe, compare, host_memory_available, start_probe, write_record
from lcplan.rope import position_limit
from lcplan.run_report import write_report
from lcplan.train_plan import TrainPlan
from lcplan.units import ByteUnits
from lcplan.watching import is_gone


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
    need: Need | None = None,
    refusal: str | None = None,
    step_time_s: float | None = None,
    launcher: Launcher = "local",
    slurm_options: Mapping[str, str] | None = None,
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
    fit, if it does not; ``need`` is what it takes of the machine. Nothing is written before every check has passed;
    with ``force`` a refused plan starts, and the folder may hold other files, which stay.
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
    _check(job, folder, force=force)
    if refusal is not None and not force:
        _say(f"does not fit: {refusal} --force starts it all the same.")
        return 1
    need = need or need_of(model, plan, None, job.training, device=device, launcher=launcher)
    if probe and not dry_run:
        launch.check_packages(job.plan)
        launch.check_gpus(num_gpus=1, gpus_per_node=1)
    elif not dry_run and launcher != "print":
        _preflight(check_machine(job, need, model, folder), force=force)
    render_job(job, folder, force=force)
    if launcher == "slurm":
        notice = slurm.notice_seconds(step_time_s, need.checkpoint_bytes)
        script = slurm.batch_script(job, folder, options=slurm_options or {}, notice_s=notice)
        (folder / slurm.SCRIPT).write_text(script, "utf-8")
    _say_what_is_there(job, folder)
    if dry_run or launcher == "print":
        print("\n".join(_by_hand(job, folder, launcher)))  # noqa: T201
        return 0
    if launcher == "slurm":
        number = slurm.submit(folder)
        _say(f"Submitted as Slurm job {number}. It queues again by itself after a preemption, and resumes.")
        _say(f"Follow it: lcplan watch {shlex.quote(str(folder))}")
        print(number)  # noqa: T201
        return 0
    if probe:
        return _probe(model, job, folder, rank, capacity_bytes, units)
    return _start(job, folder, units=units)


def resume_job(folder: Path, *, force: bool = False, units: ByteUnits = "GiB") -> int:
    """Continue a job from its newest whole checkpoint, with the scripts and the plan in its folder.

    Raises:
        InputError: where there is no job, no whole checkpoint, or the job has finished or still runs.
        PlanError: for a plan that cannot be resumed.
    """
    folder = folder.expanduser().absolute()
    job = read_job_folder(folder)
    if job.plan.sp_size > 1:
        raise PlanError(
            "resume-ulysses",
            f"{folder} splits sequences by Ulysses (sp_size {job.plan.sp_size}), and transformers cannot skip the rows "
            "that such a job has trained on. Start it again with a new --output-dir.",
        )
    result = _read_result(folder)
    if result is not None and result["exit_code"] == 0:
        raise InputError("already-finished", f"{folder} holds a job that has finished. There is nothing to resume.")
    events = journal.read_events(folder)
    if events and result is None and events[0].get("host") == socket.gethostname() and not is_gone(events):
        raise InputError(
            "still-running",
            f"the job in {folder} still runs, as process {events[0]['pid']}. Follow it with lcplan watch, or end it.",
        )
    checkpoint = checkpoints.newest_complete(folder)
    if checkpoint is None:
        raise InputError(
            "no-checkpoint",
            f"{folder / checkpoints.CHECKPOINTS} holds no whole checkpoint to continue from. Start the job again with "
            "a new --output-dir, and with --save-steps N to have some.",
        )
    model = ModelSpec.from_config(job.model.config, job.model.id) if job.model.config else None
    if model is not None:
        prediction = job.prediction or {}
        need = need_of(model, job.plan, None, job.training, device=job.device).model_copy(
            update={"device_peak_bytes": prediction.get("device_peak_bytes")}
        )
        _preflight(check_machine(job, need, model, folder), force=force)
    _say(f"Resuming {folder} from {checkpoint.name}.")
    return _start(job, folder, resume=True, units=units)


def read_job_folder(folder: Path) -> JobSpec:
    """The job that a folder's plan.json describes.

    Raises:
        InputError: where it describes none.
    """
    try:
        document = json.loads((folder / "plan.json").read_text("utf-8"))
        return JobSpec.model_validate({key: value for key, value in document.items() if key != "schema_version"})
    except (OSError, ValueError, AttributeError) as error:
        why = "it has no plan.json" if isinstance(error, OSError) else "its plan.json cannot be read"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why += f" ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        raise InputError("not-a-job", f"{folder} is no job folder: {why}. Give the --output-dir of a run.") from None


def _start(job: JobSpec, folder: Path, *, resume: bool = False, units: ByteUnits) -> int:
    """Run the job on this machine, show how it is doing, and return its exit code."""
    from lcplan.reports.live import live_job

    (folder / RESULT_FILE).unlink(missing_ok=True)
    (folder / journal.STOP_FILE).unlink(missing_ok=True)
    environment = launch.job_environment(job.device, offline=not launch.needs_hub(job))
    with live_job(folder, units=units) as show:
        code = launch.launch(
            folder,
            environment,
            num_processes=job.plan.num_gpus,
            resume=resume,
            saves=job.training.save_strategy != "no",
            show=show,
        )
    return _finish(job, folder, code, units)


def _preflight(findings: tuple[Finding, ...], *, force: bool) -> None:
    """Say what is yellow, and refuse what is red.

    Raises:
        EnvironmentProblem: with the first red finding's code and all of their messages.
    """
    red = reds(findings)
    for finding in findings:
        if finding.level == "yellow" or (finding.level == "red" and force):
            _say(f"warning [{finding.code}]: {finding.message} {finding.fix}")
    if red and not force:
        problems = " ".join(f"{finding.message} {finding.fix}".strip() for finding in red)
        raise EnvironmentProblem(red[0].code, f"{problems} --force starts it all the same.")


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


def _check(job: JobSpec, folder: Path, *, force: bool) -> None:
    """Everything that can be refused without looking at the machine."""
    launch.check_loss(job.plan.loss, launch.installed_versions().get("trl"))
    check_job(job)
    check_output_dir(folder, force=force)
    inputs.check_data(job.data, job.plan)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _by_hand(job: JobSpec, folder: Path, launcher: Launcher = "local") -> list[str]:
    """The commands that start the job without lcplan."""
    if launcher == "slurm":
        return [f"cd {shlex.quote(str(folder))} && sbatch {slurm.SCRIPT}"]
    return slurm.node_commands(job, folder)


def _say_what_is_there(job: JobSpec, folder: Path) -> None:
    _say(f"Job folder: {folder}")
    if job.tokenizer.kind == "train-bpe":
        _say(f"Tokenizer: a byte-level BPE of {job.tokenizer.vocab_size:,} tokens, trained on the data.")
    _say(f"Command: cd {shlex.quote(str(folder))} && {shlex.join(COMMAND)}")


def _finish(job: JobSpec, folder: Path, code: int, units: ByteUnits) -> int:
    """Read result.json: an exit code of 0 proves nothing, launchers return it for runs that never were."""
    from lcplan.reports.run_result import print_result

    result = _read_result(folder)
    if result is None:
        if code == 0:
            raise EnvironmentProblem(
                "no-result",
                f"the launcher reported success, and the job left no {RESULT_FILE}: it never ran. "
                f"Start it by hand to see why: {_by_hand(job, folder)[0]}",
            )
        _leave_word(folder, code)
        return code
    if result["error"] is not None:
        again = f"Continue with: lcplan run --resume {shlex.quote(str(folder))}"
        stopped = result["exit_code"] == EXIT_STOPPED
        _say(f"The job was {result['error']}" if stopped else f"The job failed: {result['error']}")
        if stopped or checkpoints.newest_complete(folder) is not None:
            _say(again)
        return int(result["exit_code"])
    if result["world_size"] != job.plan.num_gpus:
        raise EnvironmentProblem(
            "wrong-world-size",
            f"the job ran as {result['world_size']} process(es), planned {job.plan.num_gpus}: its numbers are "
            f"not those of the plan. Start it with: {_by_hand(job, folder)[0]}",
        )
    report = write_report(folder, job, result)
    title = f"{job.model.id}, {job.plan.max_length:,} tokens"
    print_result(title, job.prediction, result, report.compared if report else (), units=units)
    return code


def _leave_word(folder: Path, code: int) -> None:
    """Say why a job left no result, and write one, so that whoever watches the folder knows."""
    error = (
        f"the job ended with exit code {code} and without a result: it was killed from outside, or could not start; "
        "the messages above say which. Where host memory has run out, the kernel kills without a word: see dmesg."
    )
    _say(f"The job failed: {error}")
    if checkpoints.newest_complete(folder) is not None:
        _say(f"Continue with: lcplan run --resume {shlex.quote(str(folder))}")
    journal.write_result(folder / RESULT_FILE, {"exit_code": code, "error": error, "steps": []})
    journal.append_event(folder, "end", exit_code=code, error=error)


def _read_result(folder: Path) -> dict[str, Any] | None:
    path = folder / RESULT_FILE
    if not path.is_file():
        return None
    return dict(json.loads(path.read_text(encoding="utf-8")))
