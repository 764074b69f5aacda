"""The field's simple memory rules, quoted as people write them, each with its source.

Letters: B sequences, T tokens of one that lie on a GPU (max_length over the ranks that share it), H hidden size,
h query heads, V vocabulary, n layers, P parameters, W ranks that share the states, b bytes of one element.
"""

from __future__ import annotations

from math import isqrt
from typing import Literal

from lcplan._record import Record
from lcplan.units import ceil_div

Versus = Literal["layer", "layer_inputs", "states", "loss_head", "device_peak"]
Training = Literal["full", "lora", "qlora"]

LAYER_BYTES = 34
"""Korthikanti et al. 2022, equation 1: bytes that a 16-bit layer saves per token and hidden entry."""
SCORE_BYTES = 5
"""Same equation: bytes per head and pair of tokens, where attention keeps its scores."""


class Rule(Record):
    """One rule."""

    id: str
    statement: str
    """As people write it."""
    formula: str
    source: str
    versus: Versus
    """What of lcplan's it is held against."""


class StatesRule(Rule):
    """A rule of so many bytes a parameter, and the kind of training that people use it for."""

    bits_per_parameter: int
    trains: Training


_EQUATION = "Korthikanti et al. 2022, arXiv:2205.05198, equation 1"
LAYER = Rule(
    id="korthikanti", statement="34*B*T*H a layer", formula="34*B*T*H", versus="layer",
    source=f"{_EQUATION}, with flash attention, without sequence parallelism",
)  # fmt: skip
LAYER_WITH_SCORES = Rule(
    id="korthikanti-scores", statement="B*T*H*(34 + 5*a*s/h) a layer", formula="34*B*T*H + 5*h*B*T*max_length",
    versus="layer", source=f"{_EQUATION}, without flash attention, without sequence parallelism",
)  # fmt: skip
SQRT = Rule(
    id="sqrt-checkpointing", statement="sqrt(n) checkpoints", formula="b*ceil(sqrt(n))*B*T*H", versus="layer_inputs",
    source="Chen et al. 2016, arXiv:1604.06174, the O(sqrt n) algorithm",
)  # fmt: skip
LOGITS = {
    size: Rule(
        id=f"logits-{size}-bytes", statement=f"logits: B*T*V*{size}", formula=f"{size}*B*T*V", versus="loss_head",
        source=f"shape of the logits, {size} bytes each",
    )
    for size in (2, 4)
}  # fmt: skip
"""By bytes of one logit."""
ACCELERATE = Rule(
    id="accelerate-4x", statement="training using Adam: 4 x model size", formula="4*b*P/W", versus="device_peak",
    source="accelerate estimate-memory; accelerate 1.15 commands/estimate.py estimate_training_usage",
)  # fmt: skip


def _states_rule(id: str, statement: str, bits: int, versus: Versus, trains: Training, source: str) -> StatesRule:
    formula = f"{bits / 8:g}*P/W"
    return StatesRule(
        id=id, statement=statement, formula=formula, source=source, versus=versus, bits_per_parameter=bits,
        trains=trains,
    )  # fmt: skip


_TABLE = "LLaMA-Factory README, Hardware Requirement (estimated)"
STATES_RULES = (
    _states_rule(
        "adam-16-bytes", "mixed-precision Adam: 16 bytes per parameter", 128, "states", "full",
        "Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 3.1: 2 + 2 + 12",
    ),
    _states_rule(
        "adam-18-bytes", "mixed-precision AdamW: 18 bytes per parameter", 144, "states", "full",
        "Transformers documentation, model_memory_anatomy: 6 + 4 + 8",
    ),
    _states_rule(
        "full-12-gb", "full fine-tuning: 12 GB per billion parameters", 96, "states", "full",
        "popular; derived as 2 + 2 + 4 + 4 in Stanford CS336, spring 2026, lecture 2",
    ),
    _states_rule(
        "lora-2-gb", "LoRA: 2 GB per billion parameters", 16, "states", "lora",
        "popular; the frozen weights alone, in 16 bits",
    ),
    _states_rule("table-18x", "full, bf16 or fp16: 18 GB per billion", 144, "device_peak", "full", _TABLE),
    _states_rule("table-8x", "full, pure bf16: 8 GB per billion", 64, "device_peak", "full", _TABLE),
    _states_rule("table-lora-2x", "LoRA, 16 bits: 2 GB per billion", 16, "device_peak", "lora", _TABLE),
    _states_rule("table-qlora-half", "QLoRA, 4 bits: 0.5 GB per billion", 4, "device_peak", "qlora", _TABLE),
)  # fmt: skip


def layer_activations(*, tokens: int, hidden_size: int) -> int:
    """What one 16-bit transformer layer saves where attention keeps no scores.

    Formula: ``34*B*T*H``
    Source: Korthikanti et al. 2022, arXiv:2205.05198, equation 1 without its last term
    """
    return LAYER_BYTES * tokens * hidden_size


def attention_scores(*, tokens: int, sequence_tokens: int, heads: int) -> int:
    """What a layer saves besides where attention keeps its scores (no flash attention).

    Formula: ``5*h*B*T*max_length``
    Source: Korthikanti et al. 2022, arXiv:2205.05198, equation 1: ``s*b*h*(34 + 5*a*s/h)``, last term
    """
    return SCORE_BYTES * heads * tokens * sequence_tokens


def sqrt_checkpoints(*, num_layers: int, tokens: int, hidden_size: int, dtype_bytes: int) -> int:
    """Inputs of the segments where n layers are cut into sqrt(n) of them.

    Formula: ``b*ceil(sqrt(n))*B*T*H``
    Source: Chen et al. 2016, arXiv:1604.06174, the O(sqrt n) algorithm
    """
    return (isqrt(num_layers - 1) + 1) * tokens * hidden_size * dtype_bytes


def states(*, num_parameters: int, bits_per_parameter: int, ranks: int) -> int:
    """So many bits a parameter, spread over the ranks that share the states.

    Formula: ``bits/8*P/W``
    Source: of the rule that gives the bits, see STATES_RULES
    """
    return ceil_div(num_parameters * bits_per_parameter, 8 * ranks)


def logits(*, tokens: int, vocab_size: int, bytes_per_logit: int) -> int:
    """One score for every token and vocabulary entry.

    Formula: ``bytes*B*T*V``
    Source: shape of the logits
    """
    return bytes_per_logit * tokens * vocab_size


def adam_training(*, num_parameters: int, dtype_bytes: int, ranks: int) -> int:
    """Four times the model in the type it is loaded in, spread over the ranks that share the states.

    Formula: ``4*b*P/W``
    Source: accelerate 1.15 commands/estimate.py estimate_training_usage, its largest entry in float32 and in 16 bits
    """
    return ceil_div(4 * dtype_bytes * num_parameters, ranks)
