"""Reports for a terminal: the first line answers, tables follow."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lcplan.errors import InputError
from lcplan.ledger import PHASE_HELP, Compared, MemoryItem, MemoryReport
from lcplan.reports.layout import Column, Terminal, print_table, say, say_command
from lcplan.reproduction import ALWAYS, command_line, plan_flag
from lcplan.units import ByteUnits, format_bytes, format_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lcplan.estimators.working import Working
    from lcplan.recommendation import RankedPlan, Recommendation

GROUPS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "loss_head": "logits / loss head",
    "activations": "per-layer activations",
    "mlp": "MLP intermediates",
    "moe": "experts",
    "attention": "attention",
    "lora": "LoRA adapters",
    "communication": "communication buffers",
    "inputs": "batch",
    "evaluation": "evaluation",
    "save": "saving",
    "trace": "traced storages",
    "probe": "measured",
    "runtime": "CUDA workspaces",
}
"""Item groups in the order and words a user asks for them."""
BAR_WIDTH = 24
PEAK_MARK = " <- peak"
FORMULA_ROOM = 30
"""Columns that formulas need beside the sizes; where there are fewer they are left to --explain."""
TENSORS_SHOWN = 16
LAYERS_SHOWN = 5


def _phase_help(phase: str) -> str:
    general = phase
    if phase.startswith("backward["):
        index, _, part = phase.removeprefix("backward[").partition("].")
        return PHASE_HELP[f"backward[i].{part}"].replace("layer i", f"layer {index}")
    return PHASE_HELP.get(general, general)


def answer(report: MemoryReport, units: ByteUnits) -> str:
    """The one line a user came for."""
    verdict = "FITS" if report.fits else "DOES NOT FIT"
    over = report.headroom_bytes < 0
    margin = f"{format_bytes(abs(report.headroom_bytes), units)} {'short' if over else 'free'}"
    peak = format_bytes(report.device_peak_bytes, units)
    usable = format_bytes(report.gpu.usable_bytes, units)
    top = report.dominant
    text = (
        f"{verdict}: {peak} of {usable} on {report.gpu.id}, {margin}; the largest item is {top.key} "
        f"({format_bytes(top.num_bytes, units)})."
    )
    if report.host.fits is False:
        text += f" Host memory is too small: {format_bytes(report.host.pinned_bytes_per_node, units)} pinned a node."
    if not report.fits:
        text += f" Try: {suggestion(report)}"
    return text


def suggestion(report: MemoryReport) -> str:
    """The command that finds a plan that fits; it counts by formulas, so a traced plan may be none it knows."""
    if report.method == "trace":
        return "a shorter --max-length, or a larger --gpu (lcplan list gpus)."
    plan = report.plan
    goal = [word for name in ALWAYS for word in plan_flag(name, plan[name])]
    return command_line("recommend", [report.model.id, *goal])


def print_answer(report: MemoryReport, *, units: ByteUnits, console: Console | None = None) -> None:
    """The answer alone, what to try if it is no, and an empty line."""
    out = console or Terminal()
    said, _, hint = answer(report, units).partition(" Try: ")
    say(out, said, bold=True)
    if hint.startswith("lcplan "):
        say_command(out, hint, lead="Try: ")
    elif hint:
        say(out, f"Try: {hint}")
    say(out)


def print_report(report: MemoryReport, *, units: ByteUnits, console: Console | None = None) -> None:
    """The whole report as text."""
    out = console or Terminal()
    print_answer(report, units=units, console=out)
    plan = report.plan
    split = "sp_size" if plan["backend"] == "deepspeed" else "cp_size"
    say(
        out,
        f"{report.model.id} ({format_parameters(report.model.num_parameters)}), {plan['max_length']:,} tokens, "
        f"{plan['num_gpus']} x {plan['gpu']}, {plan['backend']}, {split} {plan[split]}, "
        f"{report.method} method, rank {report.peak_rank}",
    )
    if report.rope:
        rope = report.rope
        say(
            out,
            f"rope: {rope.rope_type} factor {rope.factor:g}, original {rope.original_max_position_embeddings:,}, "
            f"theta {rope.rope_theta:,.0f}",
        )
    say(out, time_line(report))
    if line := budget_line(report):
        say(out, line)
    say(out, f"peak: {report.peak_phase} - {_phase_help(report.peak_phase)}")
    say(out)
    _print_breakdown(report, units, out)
    say(out)
    _print_phases(report, units, out)
    say(out)
    if report.compared:
        print_comparison(report.compared, units, out)
        say(out)
    if report.method == "trace":
        _print_trace(report, units, out)
    _print_host(report, units, out)
    for warning in report.warnings:
        say(out, f"warning [{warning.code}]: {warning.message} {warning.fix}", hanging=2)
    if report.assumptions:
        say(out, "assumed: " + "; ".join(report.assumptions), hanging=2)
    say(out, "not modelled: " + "; ".join(report.not_modelled), hanging=2)


def print_comparison(compared: tuple[Compared, ...], units: ByteUnits, out: Console) -> None:
    """The formulas' numbers beside those of a probe."""
    rows = []
    for pair in compared:
        error = f"{pair.predicted_bytes / pair.measured_bytes - 1:+.4%}" if pair.measured_bytes else ""
        predicted, measured = (format_bytes(size, units) for size in (pair.predicted_bytes, pair.measured_bytes))
        rows.append((pair.what, predicted, measured, error))
    names = ("formula", "measured", "difference")
    print_table(out, (Column("", text=True), *(Column(name, right=True) for name in names)), rows)


def _print_breakdown(report: MemoryReport, units: ByteUnits, out: Console) -> None:
    """Every group with its items, at the peak and at its own largest, and what lies on top."""
    rows, bold = _breakdown(report, units)
    columns = [Column("")] + [Column(name, right=True) for name in ("at the peak", "share", "at most")]
    taken = [2 + max(map(len, cells)) for cells in zip([c.name for c in columns], *rows, strict=False)]
    if out.width - sum(taken) >= FORMULA_ROOM:
        print_table(out, [*columns, Column("formula", text=True)], rows, bold=bold)
        return
    # as narrow as this, shares go before sizes do
    shown = [0, 1, 2, 3] if sum(taken) - 2 <= out.width else [0, 1, 3]
    print_table(out, [columns[i] for i in shown], [tuple(cells[i] for i in shown) for cells in rows], bold=bold)
    say(out, "formulas: --explain ITEM, or a wider terminal")


def _breakdown(report: MemoryReport, units: ByteUnits) -> tuple[list[tuple[str, ...]], set[int]]:
    """The rows of the breakdown, and which of them are sums."""
    rows: list[tuple[str, ...]] = []
    bold: set[int] = set()

    def add_sum(*cells: str) -> None:
        bold.add(len(rows))
        rows.append(cells)

    alive = report.items_in(report.peak_phase)
    total = report.peak_allocated_bytes
    for group, title in GROUPS.items():
        own = [
            item
            for item in report.items
            if item.group == group and item.device == "gpu" and "device" not in item.phases
        ]
        if not own:
            continue
        here = [item for item in alive if item.group == group]
        most = max(sum(i.num_bytes for i in own if phase.phase in i.phases) for phase in report.phases)
        at_peak = sum(item.num_bytes for item in here)
        add_sum(title, format_bytes(at_peak, units), f"{at_peak / total:.1%}", format_bytes(most, units), "")
        for item in _largest_by_key(own):
            now = sum(i.num_bytes for i in here if i.key == item.key)
            rows.append(
                (
                    f"  {item.key.partition('.')[2]}",
                    format_bytes(now, units) if now else "",
                    f"{now / total:.1%}" if now else "",
                    format_bytes(item.num_bytes, units),
                    item.formula,
                )
            )
    add_sum("peak allocated", format_bytes(total, units), "", "", "")
    rows += [(f"  {i.key}", format_bytes(i.num_bytes, units), "", "", i.formula) for i in report.items_in("device")]
    add_sum("device peak", format_bytes(report.device_peak_bytes, units), "", "", "")
    return rows, bold


def _largest_by_key(items: list[MemoryItem]) -> list[MemoryItem]:
    """One item a key, at its largest; largest first."""
    largest: dict[str, MemoryItem] = {}
    for item in items:
        if item.key not in largest or item.num_bytes > largest[item.key].num_bytes:
            largest[item.key] = item
    return sorted(largest.values(), key=lambda item: -item.num_bytes)


def _print_phases(report: MemoryReport, units: ByteUnits, out: Console) -> None:
    """Every phase with a bar, in step order."""
    sizes = [(phase.phase, format_bytes(phase.allocated_bytes, units)) for phase in report.phases]
    heads = ("phase", "allocated")
    taken = sum(2 + max(map(len, cells)) for cells in zip(heads, *sizes, strict=True)) + len(PEAK_MARK)
    width = min(BAR_WIDTH, out.width - taken)
    longest = max(phase.allocated_bytes for phase in report.phases)
    rows = [
        (*cells, "#" * round(width * phase.allocated_bytes / longest) + PEAK_MARK * (phase.phase == report.peak_phase))
        for cells, phase in zip(sizes, report.phases, strict=True)
    ]
    print_table(out, (Column(heads[0]), Column(heads[1], right=True), Column("")), rows)


def _print_trace(report: MemoryReport, units: ByteUnits, out: Console) -> None:
    """The step part by part, and the largest tensors at the peak with the module that made them."""
    parts = [(title, format_bytes(total, units)) for title, total in _timeline_rows(report)]
    print_table(out, (Column("timeline", text=True), Column("largest", right=True)), parts)
    say(out)
    rows: list[tuple[str, ...]] = []
    for group in report.tensors_at_peak[:TENSORS_SHOWN]:
        made_by = group.operator.removeprefix("aten.").partition(".")[0]
        if group.shape:
            made_by += f" {group.dtype} {'x'.join(map(str, group.shape))}"
        rows.append((group.module, format_bytes(group.num_bytes, units), group.category, made_by.strip()))
    rest = sum(group.num_bytes for group in report.tensors_at_peak[TENSORS_SHOWN:])
    if rest > 0:
        rows.append(("smaller ones", format_bytes(rest, units), "", ""))
    columns = (
        Column("alive at the peak", text=True), Column("bytes", right=True), Column("category"),
        Column("made by", text=True),
    )  # fmt: skip
    print_table(out, columns, rows)
    say(out)


def _timeline_rows(report: MemoryReport) -> list[tuple[str, int]]:
    """Parts of the step in order; the layers between a pass's first two and last two are one row."""
    rows: list[tuple[str, int]] = []
    for _, same in itertools.groupby(report.timeline, key=lambda part: part.phase.partition("[")[0]):
        parts = [(part.phase, part.allocated_bytes) for part in same]
        if len(parts) > LAYERS_SHOWN:
            hidden = parts[2:-2]
            largest = max(total for _, total in hidden)
            parts = [*parts[:2], (f"{hidden[0][0]} to {hidden[-1][0]}", largest), *parts[-2:]]
        rows += parts
    return rows


def _print_host(report: MemoryReport, units: ByteUnits, out: Console) -> None:
    host = report.host
    pinned = f"{format_bytes(host.pinned_bytes_per_rank, units)} a rank"
    node = format_bytes(host.pinned_bytes_per_node, units)
    loading = f"while loading {format_bytes(host.load_bytes_per_node, units)} a node"
    say(out, f"host: pinned {pinned}, {node} a node; {loading}")
    disk = report.disk
    saved = format_bytes(disk.saved_model_bytes, units)
    say(out, f"disk: saved model {saved}, checkpoint {format_bytes(disk.checkpoint_bytes, units)}")


def explain_item(
    report: MemoryReport, key: str, *, workings: Mapping[tuple[str, int], Working] | None = None, units: ByteUnits
) -> None:
    """One item's formula, source, and sizes by phase with the numbers put in, where formulas worked them out.

    Raises:
        InputError: for a key that the report does not have, listing those it has.
    """
    found = [item for item in report.items if item.key == key]
    if not found:
        keys = ", ".join(sorted({item.key for item in report.items}))
        raise InputError("unknown-item", f"--explain {key!r} is no item of this report. There are: {keys}.")
    out = Terminal()
    first = found[0]
    say(out, f"{first.key} ({first.category}, on the {first.device})", bold=True)
    say(out, f"formula: {first.formula}", hanging=2)
    say(out, f"source: {first.source}", hanging=2)
    say(out, f"confidence: {first.confidence}", hanging=2)
    for item in found:
        say(out)
        where = ", ".join(item.phases)
        say(out, f"{format_bytes(item.num_bytes, units)} ({item.num_bytes:,} bytes) in {where}", hanging=2)
        working = (workings or {}).get((key, item.num_bytes))
        if working is not None:
            say(out, f"  = {working.names}", hanging=4)
            say(out, f"  = {working.numbers}", hanging=4)


def print_recommendation(recommendation: Recommendation, *, units: ByteUnits, console: Console | None = None) -> None:
    """The plan, the reason for each lever, the waterfall from naive to final, memory against time."""
    out = console or Terminal()
    ranked = recommendation.plans[0] if recommendation.plans else recommendation.nearest
    if ranked is None:
        return
    report = ranked.report
    if not recommendation.plans:
        spare = f" with {format_bytes(recommendation.headroom_bytes, units)} to spare" if report.fits else ""
        say(out, f"NOTHING FITS{spare}. The nearest miss:", bold=True)
    say(out, answer(report, units).partition(" Try:")[0], bold=True)
    say(out, time_line(report))
    if line := budget_line(report):
        say(out, line)
    asked = f"{format_bytes(recommendation.headroom_bytes, units)} asked to stay free"
    say(out, f"binding: {recommendation.binding}; {recommendation.searched:,} plans searched, {asked}")
    if recommendation.fewer_gpus:
        say(out, recommendation.fewer_gpus)
    if report.step_time is None:
        say(out, f"times are compared by {recommendation.order}")
    if recommendation.changes:
        miss, *changes = recommendation.changes
        say(out, f"{miss} " + (f"What would make it fit: {'; or '.join(changes)}." if changes else ""))
    say(out)
    _print_steps(ranked, units, out)
    say(out)
    for reason in ranked.why:
        say(out, f"- {reason}", hanging=2)
    say(out)
    for rest in ranked.left_out:
        say(out, f"left out: {rest.lever}: {rest.why}", hanging=2)
    if len(recommendation.pareto) > 1:
        say(out)
        _print_pareto(recommendation, units, out)
    if len(recommendation.plans) > 1:
        say(out)
        _print_gpus(recommendation, units, out)
    say(out)
    for warning in report.warnings:
        say(out, f"warning [{warning.code}]: {warning.message} {warning.fix}", hanging=2)
    say_command(out, ranked.command)


def _print_steps(ranked: RankedPlan, units: ByteUnits, out: Console) -> None:
    rows = [
        (
            step.lever,
            step.change,
            format_bytes(step.device_peak_bytes, units),
            _seconds(step.step_time_s),
            "fits" if step.fits else "",
        )
        for step in ranked.steps
    ]
    columns = (
        Column("lever", text=True), Column("change", text=True), Column("device peak", right=True),
        Column("step", right=True), Column(""),
    )  # fmt: skip
    print_table(out, columns, rows)


def _print_pareto(recommendation: Recommendation, units: ByteUnits, out: Console) -> None:
    """Plans that none beats in both; the time is over the fastest of all, whether it fits or not."""
    rows = [
        (
            plan_words(point.plan),
            format_bytes(point.device_peak_bytes, units),
            _seconds(point.step_time_s),
            f"{point.relative_time:.2f}x",
            "<- chosen" if point.chosen else "fits" if point.fits else "",
        )
        for point in recommendation.pareto
    ]
    numbers = (Column(name, right=True) for name in ("device peak", "step", "time"))
    print_table(out, (Column("memory against time", text=True), *numbers, Column("")), rows)


def _print_gpus(recommendation: Recommendation, units: ByteUnits, out: Console) -> None:
    rows = []
    for ranked in recommendation.plans:
        report, cost = ranked.report, ranked.cost
        speed = "-" if report.tokens_per_second is None else f"{report.tokens_per_second:,.0f}"
        price = "-" if cost is None or cost.per_billion_tokens is None else f"{cost.per_billion_tokens:,.0f}"
        peak = format_bytes(report.device_peak_bytes, units)
        rows.append((f"{ranked.plan.num_gpus} x {ranked.plan.gpu}", peak, _seconds(report.step_time_s), speed, price))
    numbers = (Column(name, right=True) for name in ("device peak", "step", "tokens/s", "1B tokens"))
    print_table(out, (Column("gpu"), *numbers), rows)


def plan_words(plan: dict[str, Any]) -> str:
    """The searched fields of a plan that differ from its simplest form, in short."""
    words = [
        f"{plan['num_gpus']} GPU{'s' if plan['num_gpus'] > 1 else ''}: cp {plan['cp_size']}",
        f"shard {plan['dp_shard_size']}",
    ]
    if plan["dp_replicate_size"] > 1:
        words.append(f"replicate {plan['dp_replicate_size']}")
    every = plan["checkpoint_every_n_layers"]
    kind = "no" if plan["activation_checkpointing"] == "none" else plan["activation_checkpointing"]
    words.append(kind + (f" every {every}" if every > 1 else "") + " checkpointing")
    words += [name.replace("_", " ") for name in ("offload_activations", "offload_params") if plan[name]]
    if plan["offload_prefetch"]:
        words.append("prefetch")
    if plan["activation_offloading"]:
        words.append("TRL's offload")
    if plan["cp_comm_strategy"] == "alltoall":
        words.append("alltoall")
    if plan["cp_head_chunks"] > 1:
        words.append(f"heads in {plan['cp_head_chunks']} parts")
    if plan["mlp_tile_size"] is not None:
        words.append("MLP in tiles")
    if plan["kernels"] == "liger":
        words.append("Liger's kernels")
    if plan["loss"] == "full":
        words.append("full logits")
    return ", ".join(words)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:,.2f} s"


def time_line(report: MemoryReport) -> str:
    """Step time, speed and batch of one plan, or why there is no time."""
    batch = report.batch
    sequences = f"{batch.sequences_per_step} sequence{'s' if batch.sequences_per_step > 1 else ''}"
    text = f"{sequences} and {batch.tokens_per_step:,} tokens a step"
    time = report.step_time
    if time is None:
        return f"{text}; no step time: {report.step_time_unknown}"
    speed = f"{time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {time.mfu:.0%}"
    text = f"{_seconds(time.seconds)} a step: {text}, {speed}"
    return text if time.rates == "measured" else f"{text} (kernel rates: {time.rates})"


def budget_line(report: MemoryReport) -> str | None:
    """How long the asked number of tokens takes."""
    budget = report.token_budget
    if budget is None:
        return None
    text = f"{budget.tokens:,} tokens: {budget.steps:,} steps"
    if budget.seconds is None or budget.gpu_hours is None:
        return text
    return f"{text}, {budget.seconds / 3600:,.1f} hours, {budget.gpu_hours:,.0f} GPU hours"
