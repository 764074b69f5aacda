"""Two GPUs with NCCL against one: the same job by ring attention over two ranks and on one GPU alone.

    python -m tools.two_gpus --output record.jsonl [--max-length 131072]

Three steps of each on the same rows: peak of every rank against the formulas and the trace, losses of both, and what
the driver counts beyond the allocator, which on two GPUs has NCCL in it. Needs two idle GPUs, and takes a few minutes.
"""

from __future__ import annotations

import sys
from typing import Any

from lcplan.units import format_bytes
from tools import runs

NAMES = {2: "cp2", 1: "cp1"}
"""Job by ranks of a sequence."""


def summary(by_size: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """What two ranks have beyond one."""
    two, one = by_size[2], by_size[1]
    losses = {NAMES[size]: [step["loss"] for step in result["steps"]] for size, result in by_size.items()}
    return {
        "losses": losses,
        "differences": [abs(a - b) for a, b in zip(losses["cp2"], losses["cp1"], strict=True)],
        "nccl_bytes": runs.beyond_allocator_bytes(two) - runs.beyond_allocator_bytes(one),
    }


def main(argv: list[str] | None = None) -> int:
    """Run both jobs."""
    parser = runs.arguments(__doc__, "two-gpus", model="Qwen/Qwen3-0.6B", max_length=262_144, max_steps=3)
    args = runs.parse(parser, argv)
    record = runs.Record(args.output)
    plans = {
        name: (*runs.plan_flags(args), "--num-gpus", str(size), "--cp-size", str(size)) for size, name in NAMES.items()
    }
    traced = {f"{name}, traced": (*plan, "--method", "trace") for name, plan in plans.items()}
    reports = runs.predict_all({**plans, **traced}, record)
    jobs = {size: runs.Job(name, plans[name], runs.run_flags(args, reports[name])) for size, name in NAMES.items()}
    done = {size: runs.run_job(job, args, record) for size, job in jobs.items()}
    if not args.dry_run:
        runs.compared_table(list(done.values()))
        results = {size: run["result"] for size, run in done.items() if run["exit_code"] == 0}
        if len(results) == len(NAMES):
            found = summary(results)
            record.write("summary", **found)
            print(f"NCCL: {format_bytes(found['nccl_bytes'])}; loss differences: {found['differences']}")
    return runs.failed(list(done.values()))


if __name__ == "__main__":
    sys.exit(main())
