"""Tables of the catalog, the presets and the levers."""

from __future__ import annotations

from lcplan import catalog
from lcplan.hardware import load_gpu
from lcplan.levers import LEVERS, excluded
from lcplan.model_loading import load_model
from lcplan.presets import list_presets, load_preset
from lcplan.reports.layout import Column, Terminal, print_table, say
from lcplan.units import format_bytes, format_parameters


def print_models() -> None:
    """Id, type, parameters, layers and positions of every catalog model."""
    rows = []
    for id in catalog.model_ids():
        spec = load_model(id)
        rows.append(
            (
                spec.id,
                spec.model_type,
                format_parameters(spec.num_parameters),
                str(spec.num_hidden_layers),
                f"{spec.max_position_embeddings:,}",
            )
        )
    numbers = (Column(name, right=True) for name in ("parameters", "layers", "positions"))
    print_table(Terminal(), (Column("model", text=True), Column("type"), *numbers), rows)


def print_gpus() -> None:
    """Id, usable memory, peak FLOP/s and usual node of every catalog GPU."""
    rows = []
    for id in catalog.gpu_ids():
        gpu = load_gpu(id)
        rows.append(
            (
                gpu.id,
                gpu.name,
                format_bytes(gpu.usable_bytes),
                f"{gpu.bf16_dense_flops / 1e12:,.0f} TFLOP/s",
                f"{gpu.gpus_per_node}",
            )
        )
    numbers = (Column(name, right=True) for name in ("usable", "bf16 dense", "per node"))
    print_table(Terminal(), (Column("gpu", text=True), Column("name", text=True), *numbers), rows)


def print_presets() -> None:
    """Name and description of every preset."""
    rows = [(name, load_preset(name).description) for name in list_presets()]
    print_table(Terminal(), (Column("preset"), Column("what it is", text=True)), rows)


def print_levers() -> None:
    """Every lever: what it does, which fields it sets, what it needs, costs and does not go with."""
    out = Terminal()
    for lever in LEVERS:
        say(out, f"{lever.id}: {lever.summary}", bold=True, hanging=2)
        facts = {
            "sets": lever.changes,
            "needs": "; ".join(filter(None, (lever.needs, " or ".join(lever.requires)))),
            "costs": lever.costs,
            "does not go with": ", ".join(excluded(lever)),
            "not searched": lever.not_searched,
        }
        for name, fact in facts.items():
            if fact:
                say(out, f"    {name}: {fact}", hanging=6)
