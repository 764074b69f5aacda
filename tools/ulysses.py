"""DeepSpeed ZeRO-3 with Ulysses over all GPUs: peak of every rank against the plan.

    python -m tools.ulysses --output record.jsonl --num-gpus 4
    python -m tools.ulysses --output record.jsonl --num-gpus 2 --max-length 131072

Three steps of Qwen3-0.6B. Ring attention over as many GPUs is predicted to take 35 s a step at 262,144 tokens on two
H200 and 18 s on four; lcplan has no step time for Ulysses.
"""

from __future__ import annotations

import sys

from tools import runs


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    parser = runs.arguments(__doc__, "ulysses", model="Qwen/Qwen3-0.6B", max_length=262_144, max_steps=3)
    parser.add_argument("--num-gpus", type=int, default=4, help="they share every sequence")
    args = runs.parse(parser, argv)
    gpus = str(args.num_gpus)
    args.more += ("--backend", "deepspeed", "--num-gpus", gpus, "--gpus-per-node", gpus, "--sp-size", gpus)
    return runs.run_on_several_gpus("job", args)


if __name__ == "__main__":
    sys.exit(main())
