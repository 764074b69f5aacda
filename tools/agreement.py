"""Formula, trace and one GPU beside each other, as the table of docs/methods.md.

    python tools/agreement.py [--all]

Needs the train extra and some minutes; no GPU. One row for each combination of levers, and each that the probe command
made itself; or all of them. Every row is a step measured on GPUs, as the probe measures it.
"""

from __future__ import annotations

import argparse
import logging

from lcplan.checking import MeasuredRow, RowResult, check_row, load_rows, row_plan, row_spec
from lcplan.row_groups import lever_names


def one_of_each() -> list[MeasuredRow]:
    """The first row of every combination of levers in the order they were measured, and those of the probe command."""
    chosen: dict[tuple[str, ...], MeasuredRow] = {}
    for row in load_rows():
        levers = lever_names(row_plan(row, row_spec(row)))
        chosen.setdefault((row.id,) if measured_by(row) == "probe" else levers, row)
    return list(chosen.values())


def measured_by(row: MeasuredRow) -> str:
    """What ran the step: one GPU alone or as a rank of several, several GPUs over NCCL, or the probe command."""
    kind = str((row.model_extra or {}).get("kind", ""))
    return "probe" if kind.endswith("probe") else "NCCL" if "NCCL" in kind else "rank" if "rank" in kind else "one GPU"


def line(row: MeasuredRow, by_formula: RowResult, by_trace: RowResult) -> str:
    """One row of the table."""

    def error(result: RowResult) -> str:
        return "refused" if result.error is None else f"{result.error:+.4%}"

    what = f"{by_formula.model}, {by_formula.num_hidden_layers} layers"
    levers = ", ".join(by_formula.levers)
    measured = f"{by_formula.measured_bytes / 2**30:.2f}"
    cells = (by_formula.id, what, f"{by_formula.max_length:,}", levers, measured_by(row), measured)
    return f"| {' | '.join((*cells, error(by_formula), error(by_trace)))} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every measured row")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| row | model | tokens | levers | ran | measured GiB | formula | trace |")
    print("|---|---|---:|---|---|---:|---:|---:|")
    for row in load_rows() if args.all else one_of_each():
        print(line(row, check_row(row, "formula"), check_row(row, "trace")), flush=True)


if __name__ == "__main__":
    main()
