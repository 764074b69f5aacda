"""Full fine-tuning, two ways of offload, LoRA and QLoRA through ``lcplan run``: predicted beside measured bytes.

    python -m tools.single_gpu_runs --output record.jsonl [--model Qwen/Qwen3-4B] [--max-length 32768]

Needs one idle GPU, and takes about five minutes on one H200 (3 steps each, random weights).
"""

from __future__ import annotations

import sys

from tools import runs

KINDS = {
    "full": (),
    "offload": ("--offload-activations",),
    "ahead": ("--offload-activations", "--offload-prefetch"),
    "lora": ("--lora-r", "16"),
    "qlora": ("--lora-r", "16", "--quantize", "nf4"),
}
"""Plan flags of each way to train."""


def main(argv: list[str] | None = None) -> int:
    """Run the jobs one after another."""
    parser = runs.arguments(__doc__, "single-gpu", model="Qwen/Qwen3-4B", max_length=32_768, max_steps=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = runs.parse(parser, argv)
    record = runs.Record(args.output)
    plans = {kind: (*runs.plan_flags(args), *KINDS[kind]) for kind in args.kinds}
    reports = runs.predict_all(plans, record)
    jobs = [runs.Job(kind, plans[kind], runs.run_flags(args, reports[kind])) for kind in args.kinds]
    done = [runs.run_job(job, args, record) for job in jobs]
    if not args.dry_run:
        runs.compared_table(done)
    return runs.failed(done)


if __name__ == "__main__":
    sys.exit(main())
