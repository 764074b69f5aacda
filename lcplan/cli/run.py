"""``lcplan run``: generate the TRL job of a plan, start it, and hold what it measured against the plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from lcplan.cli import completion
from lcplan.cli.plan_options import (
    ConfigOption,
    ModelArgument,
    PresetOption,
    TrustOption,
    UnitsOption,
    read_base,
    read_job,
    read_spec,
    with_plan_flags,
)
from lcplan.errors import InputError
from lcplan.units import parse_bytes

if TYPE_CHECKING:
    from lcplan.cli.plan_options import Base


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
    text_column: Annotated[str, typer.Option(help="Column of --data that holds the text.")] = "text",
    data_format: Annotated[
        str, typer.Option(help="auto, text, input_ids, labelled, messages or prompt-completion.")
    ] = "auto",
    split: Annotated[str, typer.Option(help="Split of a Hub dataset.")] = "train",
    data_config: Annotated[str | None, typer.Option(help="Configuration of a Hub dataset.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="New folder for the job and its results.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the folder, start nothing.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Start a plan that does not fit, or what doctor calls red; write into a folder in use."
        ),
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the job of this folder from its newest checkpoint.")
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            help="local, slurm (submits job.sbatch), or print (the command of each node).",
            autocompletion=completion.one_of("local", "slurm", "print"),
        ),
    ] = "local",
    slurm: Annotated[
        list[str] | None, typer.Option(help="An option of sbatch, such as partition=long; may be given several times.")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="pretrained or random weights.", autocompletion=completion.one_of("pretrained", "random")),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the model on the Hub.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of another tokenizer.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps; one pass if not given.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights and the order of the rows.")] = None,
    lora_alpha: Annotated[int | None, typer.Option(help="Scale of the adapters; 2 x --lora-r if not given.")] = None,
    completion_only_loss: Annotated[
        bool | None, typer.Option(help="Whether prompts have no label; TRL's default: yes, with prompt and completion.")
    ] = None,
    assistant_only_loss: Annotated[
        bool | None, typer.Option("--assistant-only-loss", help="Of a chat only the assistant's turns have labels.")
    ] = None,
    eval_rows: Annotated[int | None, typer.Option(help="Rows held out for evaluation.")] = None,
    eval_steps: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure one step on one GPU, as one rank of the job.")
    ] = False,
    rank: Annotated[int | None, typer.Option(help="Rank that the probe stands for.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Memory of another GPU that the probe must not exceed.")] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write the trained model.")] = True,
    save_steps: Annotated[
        int | None, typer.Option(help="Write a checkpoint to resume from every so many steps.")
    ] = None,
    units: UnitsOption = "GiB",
    trust_remote_code: TrustOption = False,
) -> None:
    """Generate the TRL job of a plan and start it. Exit 1 if it would not fit, else the job's own code.

    75 is a job that was stopped on request and can be resumed.

    Example: lcplan run --preset smoke --output-dir runs/smoke
    """
    from lcplan.backends.slurm import parse_options
    from lcplan.cli.output import check_choice, check_units
    from lcplan.job_options import DataFormat
    from lcplan.job_run import resume_job, run_job

    size_units = check_units(units)
    if resume is not None:
        others = {"MODEL": model, "--preset": preset, "--config": config, "--data": data, "--output-dir": output_dir}
        named = [name for name, value in others.items() if value] + [f"--{name.replace('_', '-')}" for name in given]
        if named or probe or dry_run or launcher != "local":
            raise InputError(
                "resume-alone",
                f"--resume takes everything from the job's folder{': leave out ' + ', '.join(named) if named else ''}. "
                "Only --force and --units go with it.",
            )
        raise typer.Exit(resume_job(resume, force=force, units=size_units))
    check_choice("--launcher", launcher, ("local", "slurm", "print"))
    slurm_options = parse_options(slurm or [])
    if slurm_options and launcher != "slurm":
        raise InputError("slurm-only", "--slurm goes with --launcher slurm. Add it, or leave --slurm out.")
    base = read_base(model, preset, config)
    chosen_init = init or (base.init if base else "pretrained")
    check_choice("--init", chosen_init, ("pretrained", "random"))
    if output_dir is None:
        raise InputError("no-output-dir", "No folder is named for the job. Add --output-dir FOLDER.")
    if not probe and (rank is not None or capacity is not None):
        raise InputError("probe-only", "--rank and --capacity are of a probe. Add --probe, or leave them out.")
    if probe and launcher != "local":
        raise InputError("probe-only", f"--probe runs here, not with --launcher {launcher}. Leave one of them out.")
    options: dict[str, Any] = {
        "max_steps": max_steps,
        "learning_rate": learning_rate,
        "seed": seed,
        "lora_alpha": lora_alpha,
        "completion_only_loss": completion_only_loss,
        "assistant_only_loss": assistant_only_loss,
        "eval_rows": eval_rows,
        "eval_steps": eval_steps,
        "save_steps": save_steps,
        "save_strategy": None if save_steps is None else "steps",
    }
    check_choice("--data-format", data_format, get_args(DataFormat))
    where = {"text_column": text_column, "format": data_format, "split": split, "config": data_config}
    settings: dict[str, Any] = {
        "data": _data(data, where, base),
        "training": _training(base, {**options, "save_model": None if save else False}),
        "device": base.device if base else "gpu",
        "tokenizer_vocab_size": base.tokenizer.vocab_size if base and base.tokenizer else None,
    }
    planned = _plan(
        model, preset, config, given, base, settings["training"], launcher, trust_remote_code=trust_remote_code
    )
    code = run_job(
        **planned,
        **settings,
        output_dir=output_dir,
        init=cast("Any", chosen_init),
        revision=revision,
        tokenizer=tokenizer or (base.tokenizer.id if base and base.tokenizer else None),
        launcher=cast("Any", launcher),
        slurm_options=slurm_options,
        dry_run=dry_run,
        force=force,
        probe=probe,
        rank=rank or 0,
        capacity_bytes=None if capacity is None else parse_bytes(capacity),
        units=size_units,
    )
    raise typer.Exit(code)


def _plan(
    model: str | None,
    preset: str | None,
    config: list[Path] | None,
    given: dict[str, Any],
    base: Base | None,
    training: Any,
    launcher: str,
    *,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """What the plan says of the job: model, rotary scaling, prediction, what it needs, and whether it fits."""
    from lcplan.estimation import estimate
    from lcplan.preflight import need_of, refusal_of
    from lcplan.rope import resolve_rope
    from lcplan.train_plan import resolve
    from lcplan.units import format_bytes

    if base is not None and base.device == "cpu":
        spec = read_spec(model, base, trust_remote_code=trust_remote_code)
        plan, _ = resolve(spec, {**base.plan, **given}, usual_gpus_per_node=1)
        rope = resolve_rope(spec, plan.max_length, plan.rope)
        return {"model": spec, "plan": plan, "rope": rope, "prediction": None}
    job = read_job(model, preset, config, given, trust_remote_code=trust_remote_code)
    report = estimate(job.spec, job.plan, job.gpu, assumptions=job.assumptions)
    needed, there = format_bytes(report.device_peak_bytes), format_bytes(report.gpu.usable_bytes)
    print(f"Planned: {needed} of {there} on a {report.gpu.id}.", file=sys.stderr)  # noqa: T201
    prediction = {
        "peak_allocated_bytes": report.peak_allocated_bytes,
        "device_peak_bytes": report.device_peak_bytes,
        "pinned_bytes_per_rank": report.host.pinned_bytes_per_rank,
    }
    return {
        "model": job.spec,
        "plan": job.plan,
        "rope": report.rope,
        "prediction": prediction,
        "stack": report.stack,
        "step_time_s": report.step_time_s,
        "need": need_of(job.spec, job.plan, report, training, launcher=cast("Any", launcher)),
        "refusal": refusal_of(report),
    }


def _data(asked: str | None, where: dict[str, Any], base: Base | None) -> Any:
    from lcplan.backends.inputs import parse_data

    if asked is not None:
        return parse_data(asked, **where)
    if base is None or base.data is None:
        raise InputError("no-data", "No data is named. Add --data with a file, a folder, a Hub dataset or python-docs.")
    return base.data


def _training(base: Base | None, given: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from lcplan.job_options import TrainingOptions

    own = base.training.model_dump(exclude_unset=True) if base else {}
    try:
        return TrainingOptions.model_validate(own | {k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-")
        raise InputError("bad-value", f"{flag} {first['input']!r}: {first['msg']}.") from None
