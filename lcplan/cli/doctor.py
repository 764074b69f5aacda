"""``lcplan doctor``: what this machine lacks, for any job or for one plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lcplan.cli.plan_options import (
    ConfigOption,
    JsonOption,
    ModelArgument,
    PresetOption,
    TrustOption,
    read_base,
    read_job,
    read_spec,
    with_plan_flags,
)


@with_plan_flags
def command(
    given: dict[str, Any],
    model: ModelArgument = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    data: Annotated[str | None, typer.Option(help="Data of the job, as run takes it.")] = None,
    text_column: Annotated[str, typer.Option(help="Column of --data that holds the text.")] = "text",
    output_dir: Annotated[Path, typer.Option(help="Where the job's folder would be.")] = Path(),
    json: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """What this machine lacks for a plan, or for any job. Exit 0 if nothing is red, 1 if something is.

    Example: lcplan doctor --preset qwen3-8b-1m
    """
    from lcplan.cli.output import print_json
    from lcplan.doctor import DoctorReport, diagnose, reds
    from lcplan.preflight import look
    from lcplan.reports.doctor_result import print_doctor

    if model is None and preset is None and not config:
        plan, findings = None, diagnose(None, look(output_dir))
    else:
        plan, findings = _of_a_plan(
            model, preset, config, given, data, text_column, output_dir, trust_remote_code=trust_remote_code
        )
    report = DoctorReport(plan=plan, findings=findings, passed=not reds(findings))
    if json:
        print_json(report)
    else:
        print_doctor(report)
    raise typer.Exit(0 if report.passed else 1)


def _of_a_plan(
    model: str | None,
    preset: str | None,
    config: list[Path] | None,
    given: dict[str, Any],
    data: str | None,
    text_column: str,
    output_dir: Path,
    *,
    trust_remote_code: bool,
) -> tuple[dict[str, Any], Any]:
    from lcplan.backends.inputs import model_source, parse_data, tokenizer_source
    from lcplan.doctor import diagnose
    from lcplan.errors import DataError, ModelError
    from lcplan.estimation import estimate
    from lcplan.job_options import TrainingOptions
    from lcplan.preflight import look, need_of, refusal_of, with_inputs
    from lcplan.train_plan import resolve

    base = read_base(model, preset, config)
    device = base.device if base is not None else "gpu"
    report = None
    if device == "cpu":
        spec = read_spec(model, base, trust_remote_code=trust_remote_code)
        plan, _ = resolve(spec, {**(base.plan if base else {}), **given}, usual_gpus_per_node=1)
    else:
        job = read_job(model, preset, config, given, trust_remote_code=trust_remote_code)
        spec, plan = job.spec, job.plan
        report = estimate(spec, plan, job.gpu)
    refusal = None if report is None else refusal_of(report)
    training = base.training if base is not None else TrainingOptions()
    need = need_of(spec, plan, report, training, device=device, refusal=refusal)
    facts = look(output_dir, plan=plan, spec=spec, device=device)
    problem, weights, tokenizer = None, None, None
    source = base.data if base is not None else None
    try:
        source = parse_data(data, text_column=text_column) if data is not None else source
        weights = model_source(spec, init=base.init if base is not None else "pretrained")
        asked = base.tokenizer.id if base is not None and base.tokenizer else None
        tokenizer = tokenizer_source(weights, asked=asked, vocab_size=spec.vocab_size)
    except (DataError, ModelError) as error:
        problem = (error.code, error.message)
    facts = with_inputs(facts, plan, model=weights, tokenizer=tokenizer, data=source)
    if problem is not None:
        facts = facts.model_copy(update={"data_problem": problem})
    return plan.model_dump(mode="json"), diagnose(need, facts)
