"""Measure tiled MLPs and Liger's kernels on one GPU: the probe of every case, the prediction written down beforehand.

    python tools/measure_tiles.py --output tiles.jsonl [--only NAME ...] [--list]

A line a case: name, predicted bytes by phase, and the measured row as ``lcplan check --add`` takes it (``row``), or why
there is none. Cases with the same ``pair`` differ in the levers alone: their losses are to be equal, their step times
tell what the levers cost. First gradients are compared on the GPU, in bf16 and against float32 (``gradients``).
Needs one GPU of 139 GiB, the train extra, and for the cases named fused the liger extra (without it they end with an
error in their line). With ``--list`` it predicts and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lcplan import load_model, resolve
from lcplan.checking import ring_rank
from lcplan.errors import LcplanError
from lcplan.estimators import formula
from lcplan.probing import measured_row, probe_job, run_probe, with_layers
from lcplan.rope import resolve_rope

TEMPLATES = Path(__file__).parent.parent / "lcplan" / "backends" / "templates"
RING = {"num_gpus": 8, "cp_size": 8, "offload_activations": True}
FUSED = {"kernels": "liger"}
MILLION = {"max_length": 1 << 20, **RING}


class Case(NamedTuple):
    """One probe; ``pair`` names those that differ in nothing but these levers."""

    name: str
    model: str
    layers: int
    plan: dict[str, Any]
    rank: int = 0
    pair: str = ""


CASES = (
    Case("small", "Qwen/Qwen3-4B", 4, {"max_length": 16_384, "mlp_tile_size": 3000}),
    Case("small-wide-tile", "Qwen/Qwen3-4B", 4, {"max_length": 32_768, "mlp_tile_size": 24_000}),
    Case("long", "Qwen/Qwen3-8B", 4, {"max_length": 262_144, "mlp_tile_size": 16_384}, pair="long"),
    Case("long-untiled", "Qwen/Qwen3-8B", 4, {"max_length": 262_144}, pair="long"),
    Case("long-wide-tile", "meta-llama/Llama-3.1-8B", 3, {"max_length": 150_000, "mlp_tile_size": 100_000}),
    Case("no-checkpointing", "Qwen/Qwen3-8B", 6,
         {"max_length": 98_304, "activation_checkpointing": "none", "mlp_tile_size": 8192}),
    Case("closing-norms", "allenai/OLMo-2-1124-7B", 4, {"max_length": 65_536, "mlp_tile_size": 8192}),
    Case("sharded", "Qwen/Qwen3-8B", 4,
         {"max_length": 131_072, "num_gpus": 4, "dp_shard_size": 4, "mlp_tile_size": 16_384}),
    Case("ring", "Qwen/Qwen3-8B", 2, {**MILLION, "mlp_tile_size": 16_384}, rank=1, pair="ring"),
    Case("ring-untiled", "Qwen/Qwen3-8B", 2, MILLION, rank=1, pair="ring"),
    Case("ring-first-rank", "Qwen/Qwen3-8B", 4, {**MILLION, "mlp_tile_size": 32_768}),
    Case("ring-wide-tile", "meta-llama/Llama-3.1-8B", 4, {**MILLION, "mlp_tile_size": 120_000}, rank=1),
    Case("ring-offload-params", "Qwen/Qwen3-32B", 3,
         {**MILLION, "offload_params": True, "mlp_tile_size": 16_384}, rank=1),
    Case("ring-narrow", "Qwen/Qwen3-0.6B", 6, {**MILLION, "mlp_tile_size": 16_384}, rank=1),
    Case("fused-small", "Qwen/Qwen3-4B", 4, {"max_length": 16_384, **FUSED}),
    Case("fused-long", "Qwen/Qwen3-8B", 4, {"max_length": 262_144, **FUSED}, pair="long"),
    Case("fused-llama", "meta-llama/Llama-3.1-8B", 3, {"max_length": 131_072, **FUSED}),
    Case("fused-ring", "Qwen/Qwen3-8B", 2, {**MILLION, **FUSED}, rank=1, pair="ring"),
    Case("fused-tiles-long", "Qwen/Qwen3-8B", 4,
         {"max_length": 262_144, **FUSED, "mlp_tile_size": 16_384}, pair="long"),
    Case("fused-tiles-ring", "Qwen/Qwen3-8B", 2, {**MILLION, **FUSED, "mlp_tile_size": 16_384}, rank=1, pair="ring"),
)  # fmt: skip


def predict(case: Case) -> tuple[Any, Any, dict[str, int]]:
    """The cut model, the resolved plan, and bytes by phase."""
    spec = with_layers(load_model(case.model), case.layers)
    plan, _ = resolve(spec, {"gpu": "h200", **case.plan}, usual_gpus_per_node=8)
    return spec, plan, formula.instants(spec, plan, rank=ring_rank(case.rank, plan)).totals()


def measure(case: Case) -> dict[str, Any]:
    """One line of the output."""
    spec, plan, totals = predict(case)
    line: dict[str, Any] = {"case": case.name, "pair": case.pair, "predicted_bytes": max(totals.values())}
    line["predicted_phase"] = max(totals, key=totals.__getitem__)
    line["predicted_phases"] = totals
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        job = probe_job(spec, plan, resolve_rope(spec, plan.max_length, plan.rope))
        try:
            found = run_probe(job, Path(folder) / "job", rank=case.rank, capacity_bytes=None)
        except LcplanError as error:
            return line | {"error": error.message}
    line["wall_s"] = round(time.perf_counter() - started, 1)
    if found.error is not None:
        return line | {"error": found.error}
    line["error_of_prediction"] = line["predicted_bytes"] / (found.peak_allocated_bytes or 1) - 1
    line |= {"measured_phases": found.phases, "loss": found.loss, "step_s": found.step_s}
    return line | {"row": measured_row(spec, plan, case.rank, found)}


def compare_gradients() -> dict[str, Any]:
    """How far gradients are apart by rounding: bf16 with tiles, Liger's kernels, neither, each from float32 weights.

    Where attention is kept, also how far from those with attention recomputed, and these from themselves: its backward
    may sum up in any order.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sys.path.insert(0, str(TEMPLATES))
    tile_mlps, fuse = importlib.import_module("tiling").tile_mlps, importlib.import_module("model").fuse_kernels
    keep = partial(importlib.import_module("host_offload").install, keep_attention=True)
    raw = dict(with_layers(load_model("Qwen/Qwen3-0.6B"), 4).config)
    config = CONFIG_MAPPING[raw.pop("model_type")].from_dict(raw)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 1000, (1, 16_384), generator=generator).cuda()

    def gradients(
        dtype: torch.dtype, tile: int | None, kernels: str = "none", *, kept: bool = False
    ) -> tuple[float, dict[str, Any]]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model = model.cuda().to(dtype)
        fuse(model, {"kernels": kernels, "mlp_tile_size": tile})
        if tile is not None:
            tile_mlps(model, tile)
        model.activation_checkpointing_enable({"use_reentrant": False})
        if kept:
            keep(model)
        model.train()
        decoder = model.get_decoder()
        # a small loss of the last hidden states: logits of so many tokens would take most of the GPU
        loss = decoder(input_ids=ids, use_cache=False).last_hidden_state.float().pow(2).mul(0.5).sin().mean()
        loss.backward()
        return loss.item(), {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}

    def apart(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
        """The largest relative distance of a gradient: of the MLPs' weights, and of the others."""
        each = {n: float((one[n] - other[n]).norm() / other[n].norm()) for n in one if float(other[n].norm()) > 0}
        return {
            "mlp": max(size for name, size in each.items() if ".mlp." in name),
            "others": max(size for name, size in each.items() if ".mlp." not in name),
        }

    exact_loss, exact = gradients(torch.float32, None)
    tiled_loss, tiled = gradients(torch.float32, 3000)
    found: dict[str, Any] = {"float32_losses": [exact_loss, tiled_loss], "float32_tiled": apart(tiled, exact)}
    ways: list[tuple[int | None, str]] = [(None, "none"), (1024, "none"), (4096, "none")]
    if importlib.util.find_spec("liger_kernel") is not None:  # last: it replaces the rotary embedding for good
        ways += [(None, "liger"), (4096, "liger")]
    for tile, kernels in ways:
        loss, made = gradients(torch.bfloat16, tile, kernels)
        found[f"bfloat16, tile {tile}, kernels {kernels}"] = {"loss": loss, "from_float32": apart(made, exact)}
        if tile == 1024:
            continue
        again = gradients(torch.bfloat16, tile, kernels)[1]
        loss, kept = gradients(torch.bfloat16, tile, kernels, kept=True)
        found[f"bfloat16, tile {tile}, kernels {kernels}, attention kept"] = {
            "loss": loss, "from_float32": apart(kept, exact), "from_recomputed": apart(kept, made),
            "recomputed_again": apart(again, made),
        }  # fmt: skip
    torch.cuda.empty_cache()
    return found


def main() -> None:
    """Measure the cases one by one; a line is written as soon as there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("tiles.jsonl"))
    parser.add_argument("--only", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--list", action="store_true", help="predictions alone; no GPU")
    args = parser.parse_args()
    chosen = [case for case in CASES if case.name in args.only]
    if args.list:
        for case in chosen:
            totals = predict(case)[2]
            phase = max(totals, key=totals.__getitem__)
            print(f"{case.name:20} {totals[phase] / 2**30:8.2f} GiB  {phase}")
        return
    with args.output.open("a", encoding="utf-8") as output:
        lines: list[Any] = [] if args.no_gradients else [lambda: {"gradients": compare_gradients()}]
        lines += [lambda case=case: measure(case) for case in chosen]
        for make in lines:
            text = json.dumps(make())
            print(text[:300], flush=True)
            output.write(text + "\n")
            output.flush()


if __name__ == "__main__":
    main()
