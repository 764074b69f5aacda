"""The field's simple rules beside the ledger: what each says of a plan, what lcplan says, how far apart they are.

A side that has no bytes is the text of why it has none, so that a rule never fails: it is not comparable, and says so.
"""

from __future__ import annotations

from lcplan import simple_rules
from lcplan._record import Record
from lcplan.ledger import SCHEMA_VERSION, MemoryReport
from lcplan.model_spec import ModelSpec
from lcplan.simple_rules import Rule, StatesRule, Training, Versus
from lcplan.train_plan import TrainPlan

STATE_CATEGORIES = ("parameter", "gradient", "optimizer_state")
PLAIN_ADAMW = ("adamw_torch_fused", "adamw_torch")
"""Values of ``optim`` whose moments are those that the rules count."""
LAYER_INPUTS = "activations.layer_inputs"
NOT_OF_THE_LAYER = (LAYER_INPUTS, "activations.rotary_tables")
RESIDUAL = "activations.residual"

Side = int | str
"""Bytes, or why there are none."""


class Comparison(Record):
    """A rule's bytes beside lcplan's; ``error`` is rule / lcplan - 1, None where they cannot be compared."""

    rule: Rule
    rule_bytes: int | None
    lcplan_bytes: int | None
    error: float | None
    not_comparable: str | None = None


class ComparisonReport(Record):
    """Every rule: of a layer, of stored layer inputs, of the states, of the loss head, of the whole GPU."""

    schema_version: int = SCHEMA_VERSION
    comparisons: tuple[Comparison, ...]


def compare_rules(report: MemoryReport, spec: ModelSpec, plan: TrainPlan) -> ComparisonReport:
    """Hold every rule against the report of ``plan``."""
    ours: dict[Versus, Side] = {
        "layer": saved_by_a_layer(report, spec, plan),
        "layer_inputs": stored_inputs(report, plan),
        "states": resident_states(report, plan),
        "loss_head": loss_head(report),
        "device_peak": report.device_peak_bytes,
    }
    sides = _of_activations(spec, plan) + _of_states(spec, plan)
    order = list(ours)
    sides.sort(key=lambda side: order.index(side[0].versus))
    return ComparisonReport(comparisons=tuple(_compare(rule, value, ours[rule.versus]) for rule, value in sides))


def _compare(rule: Rule, value: Side, ours: Side) -> Comparison:
    error = value / ours - 1 if isinstance(value, int) and isinstance(ours, int) else None
    return Comparison(
        rule=rule,
        rule_bytes=value if isinstance(value, int) else None,
        lcplan_bytes=ours if isinstance(ours, int) else None,
        error=error,
        not_comparable=next((side for side in (value, ours) if isinstance(side, str)), None),
    )


def _of_activations(spec: ModelSpec, plan: TrainPlan) -> list[tuple[Rule, Side]]:
    """Rules that know the tokens: of a layer, of stored inputs, of the logits."""
    tokens = plan.tokens_per_rank
    layer = simple_rules.layer_activations(tokens=tokens, hidden_size=spec.hidden_size)
    scores = simple_rules.attention_scores(
        tokens=tokens, sequence_tokens=plan.max_length, heads=spec.num_attention_heads
    )
    checkpoints = simple_rules.sqrt_checkpoints(
        num_layers=spec.num_hidden_layers, tokens=tokens, hidden_size=spec.hidden_size, dtype_bytes=_compute_bytes(plan)
    )
    found: list[tuple[Rule, Side]] = [
        (simple_rules.LAYER, layer),
        (simple_rules.LAYER_WITH_SCORES, layer + scores),
        (simple_rules.SQRT, checkpoints),
    ]
    for size, rule in simple_rules.LOGITS.items():
        value = simple_rules.logits(tokens=tokens, vocab_size=spec.vocab_size, bytes_per_logit=size)
        found.append((rule, value))
    return found


def _of_states(spec: ModelSpec, plan: TrainPlan) -> list[tuple[Rule, Side]]:
    """Rules of so many bytes a parameter, on the ranks that share the states."""
    found: list[tuple[Rule, Side]] = [(rule, _states(rule, spec, plan)) for rule in simple_rules.STATES_RULES]
    loaded_bytes = 4 if plan.dtype == "float32" else 2
    adam = simple_rules.adam_training(
        num_parameters=spec.num_parameters, dtype_bytes=loaded_bytes, ranks=plan.shard_size
    )
    found.append((simple_rules.ACCELERATE, _other_training("full", plan) or adam))
    return found


def _states(rule: StatesRule, spec: ModelSpec, plan: TrainPlan) -> Side:
    return _other_training(rule.trains, plan) or simple_rules.states(
        num_parameters=spec.num_parameters, bits_per_parameter=rule.bits_per_parameter, ranks=plan.shard_size
    )


def _other_training(trains: Training, plan: TrainPlan) -> str | None:
    """Why a rule for one kind of training says nothing of this plan."""
    kind: Training = "full" if plan.lora_r is None else "lora" if plan.quantize == "none" else "qlora"
    if kind != trains:
        words = {
            "full": "trains every parameter",
            "lora": f"trains adapters (--lora-r {plan.lora_r})",
            "qlora": f"trains adapters on a quantized model (--quantize {plan.quantize})",
        }
        return f"the plan {words[kind]}"
    if kind == "full" and plan.optim not in PLAIN_ADAMW:
        return f"the rule counts the moments of AdamW, and the plan has --optim {plan.optim}"
    return None


def _compute_bytes(plan: TrainPlan) -> int:
    """FSDP2 computes in bf16 whatever the weights were loaded in."""
    return 4 if plan.dtype == "float32" and plan.backend != "fsdp2" else 2


def saved_by_a_layer(report: MemoryReport, spec: ModelSpec, plan: TrainPlan) -> Side:
    """Everything one layer saves, read off the backward of the first, when nothing of another layer is left.

    The gradient that flows into a layer is under the residual's key and is no saved tensor. The layer's own input
    counts where the layer saves it as it is (in float32), and where LoRA with offload has copied it back.
    """
    gradient = _compute_bytes(plan) * spec.hidden_size * plan.tokens_per_rank
    # the ledger has that input among the stored ones, or, copied back from the host, under the residual's key
    own_input = gradient if plan.dtype == "float32" and not plan.offload_activations else 0
    sums = []
    for phase in report.phases:
        if not phase.phase.startswith("backward[0]."):
            continue
        kept = [item for item in report.items_in(phase.phase) if item.category == "activation"]
        total = sum(item.num_bytes for item in kept if item.key not in NOT_OF_THE_LAYER)
        sums.append(total + own_input - (gradient if any(item.key == RESIDUAL for item in kept) else 0))
    return max(sums, default=0) or "the report has no backward of a layer"


def stored_inputs(report: MemoryReport, plan: TrainPlan) -> Side:
    """Layer inputs on the GPU when all are there."""
    if plan.activation_checkpointing == "none":
        return "no layer is checkpointed (--activation-checkpointing none)"
    if plan.offload_activations:
        return "the layer inputs wait in host memory (--offload-activations)"
    stored = (item.num_bytes for item in report.items if item.key == LAYER_INPUTS and item.device == "gpu")
    return max(stored, default=0) or "the report has no stored layer inputs"


def resident_states(report: MemoryReport, plan: TrainPlan) -> Side:
    """Weights, gradients and optimizer states of one rank in the optimizer step, when all of them are there."""
    if plan.offload_params:
        return "the states lie in host memory (--offload-params)"
    items = report.items_in("optimizer_step")
    total = sum(item.num_bytes for item in items if item.category in STATE_CATEGORIES)
    return total or "the report has no states in the optimizer step"


def loss_head(report: MemoryReport) -> Side:
    """All items of the loss head together, in the phase where they are largest."""
    sums = (
        sum(item.num_bytes for item in report.items_in(phase.phase) if item.group == "loss_head")
        for phase in report.phases
    )
    return max(sums, default=0) or "the report has no loss head"
