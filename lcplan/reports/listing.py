"""Tables of the catalog, the presets and the levers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lcplan import catalog
from lcplan.hardware import load_gpu
from lcplan.levers import LEVERS, excluded
from lcplan.model_loading import load_model
from lcplan.presets import list_presets, load_preset
from lcplan.units import format_bytes, format_parameters


def _show(columns: dict[str, bool], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows; a column maps to whether it is right-aligned."""
    table = Table(box=None, pad_edge=False)
    for name, right in columns.items():
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


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
    _show({"model": False, "type": False, "parameters": True, "layers": True, "positions": True}, rows)


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
    _show({"gpu": False, "name": False, "usable": True, "bf16 dense": True, "per node": True}, rows)


def print_presets() -> None:
    """Name and description of every preset."""
    _show(
        {"preset": False, "what it is": False},
        [(name, load_preset(name).description) for name in list_presets()],
    )


def print_levers() -> None:
    """Every lever: what it does, which fields it sets, what it needs, costs and does not go with."""
    out = Console()
    for lever in LEVERS:
        out.print(f"{lever.id}: {lever.summary}", highlight=False, markup=False)
        facts = {
            "sets": lever.changes,
            "needs": "; ".join(filter(None, (lever.needs, " or ".join(lever.requires)))),
            "costs": lever.costs,
            "does not go with": ", ".join(excluded(lever)),
            "not searched": lever.not_searched,
        }
        for name, fact in facts.items():
            if fact:
                out.print(Padding(Text(f"{name}: {fact}"), (0, 0, 0, 4)))
