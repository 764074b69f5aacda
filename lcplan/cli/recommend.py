"""``lcplan recommend``: the fastest plan that fits, the longest length that does, or the fewest GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lcplan.cli import completion
from lcplan.cli.plan_options import (
    ConfigOption,
    EmitOption,
    JsonOption,
    ModelArgument,
    PresetOption,
    TokenBudgetOption,
    TrustOption,
    UnitsOption,
    check_foreign,
    emit_plan,
    parse_token_budget,
    read_base,
    read_spec,
    with_plan_flags,
)
from lcplan.errors import InputError

if TYPE_CHECKING:
    from lcplan.recommendation import Goal, Recommendation

OBJECTIVES = ("fastest", "smallest")


@with_plan_flags
def command(
    given: dict[str, Any],
    model: ModelArgument = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="GPU id; give several to compare them.", autocompletion=completion.gpus)
    ] = None,
    longest: Annotated[bool, typer.Option("--longest", help="Find the largest max_length that fits.")] = False,
    objective: Annotated[
        str,
        typer.Option(
            help="fastest, or smallest: the plan that needs least memory.",
            autocompletion=completion.one_of(*OBJECTIVES),
        ),
    ] = "fastest",
    min_gpus: Annotated[bool, typer.Option("--min-gpus", help="Take as few of --num-gpus as will do.")] = False,
    headroom: Annotated[
        str | None,
        typer.Option(help="Memory that must stay free on a GPU; if not given 5%, where the fastest plan can have it."),
    ] = None,
    disk: Annotated[str | None, typer.Option(help="Disk that a checkpoint may take, such as 200GB.")] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(help="Price of one GPU an hour: 2.50, or h100-80gb=2.50 where there are several."),
    ] = None,
    token_budget: TokenBudgetOption = None,
    emit: EmitOption = None,
    json: JsonOption = False,
    units: UnitsOption = "GiB",
    trust_remote_code: TrustOption = False,
) -> None:
    """The fastest plan that fits, with a reason for each lever. Exit 0 if one does, 1 if none.

    Example: lcplan recommend Qwen/Qwen3-8B --max-length 1048576 --gpu h100-80gb --num-gpus 8
    """
    from lcplan.cli.output import check_choice, check_units, print_json
    from lcplan.config_writing import WRITABLE
    from lcplan.hardware import load_gpu
    from lcplan.recommendation import SEARCHED, Goal, compare_gpus, recommend
    from lcplan.reports.terminal import print_recommendation
    from lcplan.units import parse_bytes

    size_units = check_units(units)
    check_choice("--objective", objective, OBJECTIVES)
    base = read_base(model, preset, config)
    spec = read_spec(model, base, trust_remote_code=trust_remote_code)
    decided = {k: v for k, v in (base.plan if base else {}).items() if k not in SEARCHED}
    fixed = decided | given
    if emit is not None:
        fixed = WRITABLE | fixed
    length = fixed.pop("max_length", None)
    if longest and "max_length" in given:
        raise InputError("two-lengths", "--longest looks for a length, --max-length gives one. Use one of them.")
    if not longest and length is None:
        raise InputError("no-length", "No length is given. Use --max-length N, or --longest to find the largest.")
    ids = gpu or ([str(fixed["gpu"])] if "gpu" in fixed else [])
    fixed.pop("gpu", None)
    if not ids:
        raise InputError("missing-value", "--gpu is not given. Add --gpu h100-80gb (`lcplan list gpus`).")
    if base is not None and ids == [base.device] == ["cpu"]:
        raise InputError("cpu-preset", f"{base.name} is a CPU job; name the GPU to plan it for with --gpu.")
    num_gpus = fixed.pop("num_gpus", 1)
    if num_gpus < 1:
        raise InputError("bad-value", f"--num-gpus {num_gpus} is not a positive whole number.")
    gpus = [load_gpu(id) for id in ids]
    prices = parse_prices(price or [], [found.id for found in gpus])

    def goal_of(id: str) -> Goal:
        return Goal(
            max_length=None if longest else length,
            gpu=id,
            num_gpus=num_gpus,
            fixed=fixed,
            objective="smallest" if objective == "smallest" else "fastest",
            min_gpus=min_gpus,
            writable=emit is not None,
            headroom_bytes=None if headroom is None else parse_bytes(headroom),
            disk_bytes=None if disk is None else parse_bytes(disk),
            price_per_hour=prices.get(id),
        )

    answer = compare_gpus([recommend(spec, goal_of(found.id), found, units=size_units) for found in gpus])
    answer = _with_budget(answer, parse_token_budget(token_budget))
    if json:
        print_json(answer)
    else:
        print_recommendation(answer, units=size_units)
    if answer.plans:
        check_foreign(base, spec, answer.plans[0].plan)
        emit_plan(spec, answer.plans[0].plan, emit)
    raise typer.Exit(0 if answer.plans else 1)


def parse_prices(texts: list[str], gpus: list[str]) -> dict[str, float]:
    """GPU id -> price an hour, from ``2.50`` (for all of them) and ``h200=3.10``.

    Raises:
        InputError: for what is no positive number, and for a GPU that is not compared.
    """
    found: dict[str, float] = {}
    for text in texts:
        id, _, value = text.rpartition("=")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not 0 < price < 1e6:
            raise InputError("bad-price", f"--price {text!r:.60} is no price. Write 2.50, or h100-80gb=2.50.")
        if id and id.casefold() not in gpus:
            raise InputError("bad-price", f"--price {text!r:.60}: {id} is not among --gpu {', '.join(gpus)}.")
        found |= {id.casefold(): price} if id else dict.fromkeys(gpus, price)
    return found


def _with_budget(answer: Recommendation, tokens: int | None) -> Recommendation:
    from lcplan.estimation import with_token_budget

    if tokens is None:
        return answer
    plans = tuple(
        ranked.model_copy(update={"report": with_token_budget(ranked.report, tokens)}) for ranked in answer.plans
    )
    return answer.model_copy(update={"plans": plans})
