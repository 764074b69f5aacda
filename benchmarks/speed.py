"""Speed as ratios within one run: the command line against its bare libraries, one estimate against one JSON dump."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from lcplan import estimate, load_gpu, load_model, resolve
from lcplan.estimators import formula

RUNS = 7
BARE = [sys.executable, "-c", "import typer, rich.console, rich.table, pydantic"]
RECOMMEND = [
    sys.executable, "-m", "lcplan", "recommend", "Qwen/Qwen3-8B", "--max-length", "1048576", "--gpu", "h100-80gb",
    "--num-gpus", "8", "--json",
]  # fmt: skip
ESTIMATE = [sys.executable, "-m", "lcplan", "estimate", "--preset", "qwen3-8b-1m"]


def seconds(command: list[str]) -> float:
    """Wall time of one process."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Print each figure with its ratio."""
    pairs = [(seconds(ESTIMATE), seconds(BARE)) for _ in range(RUNS + 1)][1:]
    cold = statistics.median(a for a, _ in pairs)
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"cold start of estimate: {cold:.3f} s, {ratio:.2f} x importing typer, rich and pydantic")

    pairs = [(seconds(RECOMMEND), seconds(BARE)) for _ in range(RUNS)]
    whole, ratio = statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)
    print(f"recommend over the whole lattice: {whole:.3f} s, {ratio:.2f} x importing typer, rich and pydantic")

    spec, gpu = load_model("Qwen/Qwen3-8B"), load_gpu("h100-80gb")
    given = {"max_length": 1 << 20, "gpu": gpu.id, "num_gpus": 8, "cp_size": 8, "offload_activations": True}
    plan, _ = resolve(spec, given, usual_gpus_per_node=8)
    for name, call in (
        ("one estimate", lambda: estimate(spec, plan, gpu)),
        ("one set of instants", lambda: formula.instants(spec, plan)),
        ("one JSON dump", lambda report=estimate(spec, plan, gpu): report.model_dump_json()),
    ):
        call()
        start = time.perf_counter()
        for _ in range(200):
            call()
        print(f"{name}: {(time.perf_counter() - start) / 200 * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
