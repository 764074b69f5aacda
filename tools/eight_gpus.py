"""The long-context preset on the GPUs that are here: peak of every rank, step time and pinned bytes against the plan.

    python -m tools.eight_gpus --output record.jsonl --max-length 786432
    python -m tools.eight_gpus --output record.jsonl --num-gpus 2 --max-length 262144
    python -m tools.eight_gpus --output record.jsonl --preset NAME

Two steps, the second of which has optimizer states from its start; with --num-gpus by ring attention over all of them,
else as the preset says. On eight H200 a step at 1,048,576 tokens takes six minutes, so that two do not end within ten:
the first line is as long as two allow. ``--max-steps 1`` gives the step time at the whole length, without the peak of a
steady step.
"""

from __future__ import annotations

import sys

from tools import runs


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    parser = runs.arguments(__doc__, "eight-gpus", preset="qwen3-8b-1m", gpu="h200", max_steps=2)
    parser.add_argument("--num-gpus", type=int, help="those of the preset if not given")
    parser.add_argument("--cp-size", type=int, help="of --num-gpus all if not given")
    args = runs.parse(parser, argv)
    if args.num_gpus is not None:
        gpus, cp_size = str(args.num_gpus), str(args.cp_size or args.num_gpus)
        args.more += ("--num-gpus", gpus, "--gpus-per-node", gpus, "--cp-size", cp_size)
    return runs.run_on_several_gpus("job", args)


if __name__ == "__main__":
    sys.exit(main())
