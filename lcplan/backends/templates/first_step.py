"""After the first step: what was planned beside what is. Whatever differs still trains, and costs days to notice."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import journal
import torch
from transformers import TrainerCallback

FUSED = ("flash_attention", "cudnn_attention")
"""Kernels of scaled_dot_product_attention that keep no square of the sequence and are fast."""
KERNEL_NAMES = ("cudnn_attention", "efficient_attention", "flash_attention", "attention_math")
LOSS_OF_A_WRONG_ROPE = 8.0
"""Pretrained weights start far below it; with rotary positions they have never seen they start near 10."""
RANDOM_LOSS_MARGIN = 1.0
"""Random weights start at ln(vocab_size), give or take."""
ROPE_TOLERANCE = 0.01


class Finding(NamedTuple):
    """One thing that was planned, and what it is."""

    what: str
    planned: str
    found: str
    as_planned: bool
    fix: str = ""


class FirstStep(TrainerCallback):
    """Looks at the first decoder layer while it runs for the first time, and reports after the first loss."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.job = job
        self.folder = folder
        self.kernels: tuple[str, ...] = ()
        self.seen: tuple[int, ...] = ()
        self.findings: list[Finding] = []

    def on_train_begin(self, *_args: Any, model: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer once the model is wrapped."""
        if (layer := first_layer(model)) is not None:
            self._watch(layer)

    def _watch(self, layer: torch.nn.Module) -> None:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            self.seen = tuple(hidden_states.shape[:2])
            handles[0].remove()
            profiler.start()

        def after(*_args: Any, **_kwargs: Any) -> None:
            handles[1].remove()
            profiler.stop()
            self.kernels = attention_kernels(event.key for event in profiler.key_averages())

        handles = (
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after, always_call=True),
        )

    def on_log(
        self, _args: Any, state: Any, _control: Any, logs: Any = None, model: Any = None, **_kwargs: Any
    ) -> None:
        """Called by the trainer after each step."""
        if self.findings or "loss" not in (logs or {}):
            return
        self.findings = list(self._compare(model, float(logs["loss"]), first=state.global_step == 1))
        if state.is_world_process_zero:
            report(self.findings, self.folder)

    def _compare(self, model: Any, loss: float, *, first: bool) -> Iterator[Finding]:
        job, plan = self.job, self.job["plan"]
        if self.seen:
            yield boundary(self.seen, plan)
        yield from shards(model, plan)
        yield from masters(model, plan)
        if plan["attn_implementation"] == "sdpa" and self.kernels:
            yield kernel(self.kernels, on_gpu=job["device"] == "gpu")
        if job["rope"] is not None:
            yield from rotary(model, job["rope"])
        if first:
            yield first_loss(loss, pretrained=job["model"]["init"] == "pretrained", vocab_size=vocab_size(model))


def report(findings: list[Finding], folder: Path) -> None:
    """One event, one line for all that is as planned, one for each thing that is not."""
    rows = [finding._asdict() for finding in findings]
    journal.append_event(folder, "first_step", findings=rows)
    good = [f"{finding.what} {finding.found}" for finding in findings if finding.as_planned]
    if good:
        print(f"As planned: {'; '.join(good)}.", flush=True)
    for finding in findings:
        if not finding.as_planned:
            print(
                f"Warning: {finding.what}: planned {finding.planned}, found {finding.found}. {finding.fix}",
                file=sys.stderr,
                flush=True,
            )


def first_layer(model: Any) -> Any:
    """The first decoder layer, also once FSDP2 has given it another class; None where the model names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return next((m for m in model.modules() if any(base.__name__ in names for base in type(m).__mro__)), None)


def attention_kernels(operators: Any) -> tuple[str, ...]:
    """The attention kernels among the operators that ran."""
    found = {name for operator in operators for name in KERNEL_NAMES if name in operator}
    return tuple(sorted(found))


def boundary(seen: tuple[int, ...], plan: dict[str, Any]) -> Finding:
    """Tokens of the tensors between layers, which checkpointing keeps: a rank has its share of the sequence."""
    ranks = plan["cp_size"] * plan["sp_size"]
    planned = plan["max_length"] // ranks
    tokens = seen[1]
    # rows are trimmed to a multiple of the ranks, and never longer
    ok = planned - 2 * ranks <= tokens <= planned
    return Finding(
        "tokens between layers", f"{planned:,} of {plan['max_length']:,} a rank", f"{tokens:,} a rank", ok,
        "The sequence is not cut over the ranks: every rank holds too much. Start with the README's command.",
    )  # fmt: skip


def shards(model: Any, plan: dict[str, Any]) -> Iterator[Finding]:
    """The share of the largest trained weight that this rank holds under FSDP2 or ZeRO-3."""
    size = plan["dp_shard_size"] * plan["cp_size"] * plan["sp_size"]
    if plan["backend"] not in ("fsdp2", "deepspeed") or (plan["backend"] == "deepspeed" and plan["zero_stage"] != 3):
        return
    weight = max((p for p in model.parameters() if p.requires_grad), key=whole_size)
    held, whole = local_size(weight), whole_size(weight)
    yield Finding(
        "sharded weights", f"1/{size} a rank", f"1/{whole / held:.3g} a rank", held <= 1.05 * whole / size + 8,
        "The launcher did not shard the model. Start with the README's command.",
    )  # fmt: skip


def local_size(weight: Any) -> int:
    """Elements that this rank holds, padding included."""
    if hasattr(weight, "ds_tensor"):
        return int(weight.ds_tensor.numel())
    return int(weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel())


def whole_size(weight: Any) -> int:
    """Elements of the whole weight."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def masters(model: Any, plan: dict[str, Any]) -> Iterator[Finding]:
    """Type of the trained weights: FSDP2 keeps float32 masters, one process those it loaded."""
    if plan["lora_r"] is not None or plan["backend"] == "deepspeed":
        return  # adapters have their own type, and ZeRO its masters apart
    planned = "float32" if plan["backend"] == "fsdp2" else plan["dtype"]
    found = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad})
    yield Finding(
        "trained weights in", planned, " and ".join(found), found == [planned],
        "Memory and rounding are not those of the plan; see --dtype.",
    )  # fmt: skip


def kernel(kernels: tuple[str, ...], *, on_gpu: bool) -> Finding:
    """Which kernel scaled_dot_product_attention took for the first layer."""
    found = " and ".join(kernels)
    ok = not on_gpu or (bool(kernels) and all(name in FUSED for name in kernels))
    return Finding(
        "attention by", "flash_attention or cudnn_attention", found, ok,
        "Slower, and attention_math keeps a square of the sequence. A mask (padding), the head_dim or a hidden cuDNN "
        "is the usual reason: see lcplan doctor.",
    )  # fmt: skip


def rotary(model: Any, rope: dict[str, Any]) -> Iterator[Finding]:
    """The slowest frequency of the rotary embedding, which the scaling divides by its factor."""
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        if not isinstance(frequencies, torch.Tensor) or frequencies.dim() != 1:
            continue
        found = scaling_of(frequencies.detach().float().cpu().tolist(), rope["rope_theta"])
        ok = abs(found / rope["factor"] - 1) <= ROPE_TOLERANCE
        yield Finding(
            "rotary positions stretched", f"x{rope['factor']:g}", f"x{found:.4g}", ok,
            "The model was built without the plan's rope_parameters: the loss would start near 10.",
        )  # fmt: skip
        return


def scaling_of(frequencies: list[float], rope_theta: float) -> float:
    """By how much the slowest of these frequencies was slowed down."""
    dimensions = 2 * len(frequencies)
    unscaled = rope_theta ** (-(dimensions - 2) / dimensions)
    return unscaled / frequencies[-1]


def vocab_size(model: Any) -> int:
    """Tokens of the model's text part."""
    return int(model.config.get_text_config().vocab_size)


def first_loss(loss: float, *, pretrained: bool, vocab_size: int) -> Finding:
    """A first loss that is too high for pretrained weights has a reason, and it is not the data."""
    limit = LOSS_OF_A_WRONG_ROPE if pretrained else math.log(vocab_size) + RANDOM_LOSS_MARGIN
    fix = (
        "The rotary scaling or the tokenizer is likely wrong: hold plan.json's rope against the model's card."
        if pretrained
        else "Random weights start at ln(vocab_size): something is wrong with the model or its labels."
    )
    return Finding("first loss", f"below {limit:.2f}", f"{loss:.2f}", math.isfinite(loss) and loss <= limit, fix)
