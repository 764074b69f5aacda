"""Reports for a terminal: the first line answers, tables follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from lcplan.errors import InputError
from lcplan.ledger import PHASE_HELP, Compared, MemoryItem, MemoryReport
from lcplan.units import ByteUnits, format_bytes, format_parameters

if TYPE_CHECKING:
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


def _table(*columns: tuple[str, bool]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


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
    model, plan = report.model.id, report.plan
    return (
        f"lcplan recommend {model} --max-length {plan['max_length']} --gpu {plan['gpu']} --num-gpus {plan['num_gpus']}"
    )


def print_answer(report: MemoryReport, *, units: ByteUnits, console: Console | None = None) -> None:
    """The answer alone, and an empty line."""
    out = console or Console()
    out.print(answer(report, units), style="bold", highlight=False, markup=False)
    out.print()


def print_report(report: MemoryReport, *, units: ByteUnits, console: Console | None = None) -> None:
    """The whole report as text."""
    out = console or Console()
    print_answer(report, units=units, console=out)
    plan = report.plan
    split = "sp_size" if plan["backend"] == "deepspeed" else "cp_size"
    out.print(
        f"{report.model.id} ({format_parameters(report.model.num_parameters)}), {plan['max_length']:,} tokens, "
        f"{plan['num_gpus']} x {plan['gpu']}, {plan['backend']}, {split} {plan[split]}, "
        f"{report.method} method, rank {report.peak_rank}",
        highlight=False,
        markup=False,
    )
    if report.rope:
        rope = report.rope
        out.print(
            f"rope: {rope.rope_type} factor {rope.factor:g}, original {rope.original_max_position_embeddings:,}, "
            f"theta {rope.rope_theta:,.0f}",
            highlight=False,
        )
    out.print(f"peak: {report.peak_phase} - {_phase_help(report.peak_phase)}", highlight=False, markup=False)
    out.print()
    out.print(_breakdown(report, units))
    out.print()
    out.print(_phases(report, units))
    out.print()
    if report.compared:
        out.print(comparison(report.compared, units))
        out.print()
    _print_host(report, units, out)
    for warning in report.warnings:
        out.print(f"warning [{warning.code}]: {warning.message} {warning.fix}", highlight=False, markup=False)
    if report.assumptions:
        out.print("assumed: " + "; ".join(report.assumptions), highlight=False, markup=False)
    out.print("not modelled: " + "; ".join(report.not_modelled), highlight=False, markup=False)


def comparison(compared: tuple[Compared, ...], units: ByteUnits) -> Table:
    """The formulas' numbers beside those of a probe."""
    table = _table(("", False), ("formula", True), ("measured", True), ("difference", True))
    for pair in compared:
        error = f"{pair.predicted_bytes / pair.measured_bytes - 1:+.4%}" if pair.measured_bytes else ""
        sizes = (format_bytes(size, units) for size in (pair.predicted_bytes, pair.measured_bytes))
        table.add_row(pair.what, *sizes, error)
    return table


def _breakdown(report: MemoryReport, units: ByteUnits) -> Table:
    """Every group with its items, at the peak and at its own largest, and what lies on top."""
    table = _table(("", False), ("at the peak", True), ("share", True), ("at most", True), ("formula", False))
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
        table.add_row(
            title, format_bytes(at_peak, units), f"{at_peak / total:.1%}", format_bytes(most, units), "", style="bold"
        )
        for item in _largest_by_key(own):
            now = sum(i.num_bytes for i in here if i.key == item.key)
            table.add_row(
                f"  {item.key.partition('.')[2]}",
                format_bytes(now, units) if now else "",
                f"{now / total:.1%}" if now else "",
                format_bytes(item.num_bytes, units),
                item.formula,
            )
    table.add_row("peak allocated", format_bytes(total, units), "", "", "", style="bold")
    for item in report.items_in("device"):
        table.add_row(f"  {item.key}", format_bytes(item.num_bytes, units), "", "", item.formula)
    table.add_row("device peak", format_bytes(report.device_peak_bytes, units), "", "", "", style="bold")
    return table


def _largest_by_key(items: list[MemoryItem]) -> list[MemoryItem]:
    """One item a key, at its largest; largest first."""
    largest: dict[str, MemoryItem] = {}
    for item in items:
        if item.key not in largest or item.num_bytes > largest[item.key].num_bytes:
            largest[item.key] = item
    return sorted(largest.values(), key=lambda item: -item.num_bytes)


def _phases(report: MemoryReport, units: ByteUnits) -> Table:
    """Every phase with a bar, in step order."""
    table = _table(("phase", False), ("allocated", True), ("", False))
    longest = max(phase.allocated_bytes for phase in report.phases)
    for phase in report.phases:
        bar = "#" * round(BAR_WIDTH * phase.allocated_bytes / longest)
        mark = " <- peak" if phase.phase == report.peak_phase else ""
        table.add_row(phase.phase.replace("[", r"\["), format_bytes(phase.allocated_bytes, units), bar + mark)
    return table


def _print_host(report: MemoryReport, units: ByteUnits, out: Console) -> None:
    host = report.host
    pinned = f"{format_bytes(host.pinned_bytes_per_rank, units)} a rank"
    node = format_bytes(host.pinned_bytes_per_node, units)
    out.print(
        f"host: pinned {pinned}, {node} a node; while loading {format_bytes(host.load_bytes_per_node, units)} a node",
        highlight=False,
    )
    disk = report.disk
    out.print(
        f"disk: saved model {format_bytes(disk.saved_model_bytes, units)}, "
        f"checkpoint {format_bytes(disk.checkpoint_bytes, units)}",
        highlight=False,
    )


def explain_item(report: MemoryReport, key: str, *, units: ByteUnits) -> None:
    """One item's formula, source and sizes by phase.

    Raises:
        InputError: for a key that the report does not have, listing those it has.
    """
    found = [item for item in report.items if item.key == key]
    if not found:
        keys = ", ".join(sorted({item.key for item in report.items}))
        raise InputError("unknown-item", f"--explain {key!r} is no item of this report. There are: {keys}.")
    out = Console()
    first = found[0]
    lines = [
        f"{first.key} ({first.category}, on the {first.device}, {first.confidence})",
        f"formula: {first.formula}",
        f"source: {first.source}",
    ]
    lines += [
        f"{format_bytes(item.num_bytes, units)} ({item.num_bytes:,} bytes) in {', '.join(item.phases)}"
        for item in found
    ]
    for line in lines:
        out.print(line, highlight=False, markup=False)


def print_recommendation(recommendation: Recommendation, *, units: ByteUnits, console: Console | None = None) -> None:
    """The plan, the reason for each lever, the table from naive to final."""
    out = console or Console()
    if recommendation.plans:
        ranked = recommendation.plans[0]
    elif recommendation.nearest is not None:
        ranked = recommendation.nearest
        out.print("NOTHING FITS. The nearest miss:", style="bold", highlight=False)
    else:
        return
    report = ranked.report
    out.print(answer(report, units).partition(" Try:")[0], style="bold", highlight=False, markup=False)
    out.print(
        f"binding: {recommendation.binding}; {recommendation.searched} plans searched",
        highlight=False,
        markup=False,
    )
    out.print()
    out.print(_steps_table(ranked, units))
    out.print()
    for reason in ranked.why:
        out.print(f"- {reason}", highlight=False, markup=False)
    out.print()
    out.print(estimate_command(ranked), highlight=False, markup=False, soft_wrap=True)


def _steps_table(ranked: RankedPlan, units: ByteUnits) -> Table:
    table = _table(("lever", False), ("change", False), ("device peak", True), ("", False))
    for step in ranked.steps:
        table.add_row(step.lever, step.change, format_bytes(step.device_peak_bytes, units), "fits" if step.fits else "")
    return table


def estimate_command(ranked: RankedPlan) -> str:
    """The estimate command of a plan, to be run as printed."""
    plan = ranked.plan
    parts = [
        f"lcplan estimate {ranked.report.model.id}",
        f"--max-length {plan.max_length} --gpu {plan.gpu} --num-gpus {plan.num_gpus}",
    ]
    if plan.cp_size > 1:
        parts.append(f"--cp-size {plan.cp_size}")
    if plan.activation_checkpointing != "full":
        parts.append(f"--activation-checkpointing {plan.activation_checkpointing}")
    if plan.offload_activations:
        parts.append("--offload-activations")
    return " ".join(parts)
