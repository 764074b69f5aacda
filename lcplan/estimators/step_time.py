"""Seconds of one optimizer step: tensor cores, memory traffic, copies to the host, exchange between GPUs.

What the kernels of one stream do is summed; exchange between GPUs hides behind it and counts where it is longer.
Rates are measured ones of the GPU (``KernelRates``), never peaks. Without one there is no time: ``refusal`` says why.

Letters: L max_length, B sequences of a micro step, T tokens per rank, n layers, H hidden size, I MLP width,
h query heads, k key/value heads, d head_dim, V vocabulary, P parameters, W ranks that share the states, C cp_size.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

from lcplan.estimators import lora, weights
from lcplan.estimators.layer import TRAITS
from lcplan.hardware import GpuSpec, KernelRates
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div

ATTENTION_BACKWARD = 2.5
"""Matrix products of the attention backward over those of its forward: five to two (FlashAttention, 2205.14135)."""
LOGITS_TRAFFIC = 6
"""Bytes a token and vocabulary entry: a tile is read in the forward, read and written in the backward (trl 1.16)."""
HEAD_ACCUMULATOR_TRAFFIC = 9 / 4096
"""The same, per hidden entry: float32 sums of the head's gradients, once a tile of 4,096 tokens (trl 1.16
kernels/chunked_logprob.py)."""
FULL_LOGITS_TRAFFIC = 28
"""Bytes a token and entry of full logits: cast to float32, log_softmax, its backward, cast back (trl 1.13)."""
EXPERT_FORWARD, EXPERT_BACKWARD = 14, 36
"""Bytes a token, expert and hidden entry: gather, weigh, sum; counted by tools/count_traffic.py on qwen3_moe."""
LORA_INPUT_FORWARD, LORA_OUTPUT_FORWARD = 12, 10
"""Bytes a token and entry of an adapted linear's input (cast to float32, back) and output; peft 0.21 lora/layer.py."""
LORA_INPUT_BACKWARD, LORA_OUTPUT_BACKWARD = 14, 6
"""The same in the backward, counted on Qwen3 with adapters on every linear."""
RING_MERGE, RING_ENDS, RING_DQ, RING_DKV = 38, 12, 10, 44
"""Bytes a token and entry: a partial output in float32 merged, first and last cast; dq, and dk with dv, summed up
(torch 2.13 context_parallel/_attention.py)."""
RING_EXCHANGE = 20
"""Bytes a token and key entry that go round the ring: keys and values three times in bf16 (forward, recomputation,
backward), their gradients once in float32 (torch 2.13 context_parallel/_attention.py)."""
HEAD_CHUNK_COPIES = 4
"""Bytes a token and entry of what a part of the heads gives, read and written into the tensor for all of them
(lcplan/backends/templates/ring_attention.py)."""
HEAD_CHUNK_ROWS = 2_300
"""Queries of one head whose time each further kernel takes, since its last blocks leave the GPU half empty: rows m366
and m367, alike but for eight parts, are 0.195 s apart in 1,176 such kernels, 0.015 s of it copies."""
TILE_COPIES = 8
"""Bytes a token and hidden entry of a tiled MLP: each tile's output, and the gradient of its input, copied into one
tensor for all (lcplan/backends/templates/tiling.py)."""
TILE_SUMS = 6
"""Bytes a weight and tile after the first: the sum of gradients read and written, the tile's own read."""
OPTIMIZER_PASSES = {"adamw_torch_fused": 7, "adamw_torch": 20, "sgd": 3, "adafactor": 12, "adamw_bnb_8bit": 4}
"""Reads and writes of a parameter's size in an update (sources of torch.optim, transformers, bitsandbytes)."""
CLIPPING_PASSES = 3
"""The gradient's norm reads it once, its scaling reads and writes it (transformers' max_grad_norm 1.0)."""
HOST_OPTIMIZER_S = {"adamw_torch_fused": 1.4e-9, "adamw_torch": 10.5e-9}
"""Seconds a parameter of an optimizer step on the host. Fused: one published step of a 4.02 B model with its states
there, all of its 5.63 s (github.com/PrimeIntellect-ai/prime-rl/pull/3210), so a bound; torch 2.13 on one thread of an
EPYC takes 0.64 ns and clipping 0.47. Not fused: that thread, 10.0 ns and clipping."""
PINNING_BYTES_PER_S = 5.5e9
"""New pinned memory a second, which the first step at a length pays for: what m004, m006, m008, m019, m340, m351, m354,
m356 and m361 have beyond a steady step lies between 3 and 21 GB/s, in the largest (77 GB) at 4.0."""
TRL_PINNING_BYTES_PER_S = 3.3e9
"""The same for TRL's own offload, from row m025 alone; rows m099 and m100 are slower still."""
MFU_CONVENTION = (
    "forward and twice that for the backward, without recomputation; causal attention counted by half; active experts "
    "only; over the spec sheet's dense bf16 peak"
)
"""As PaLM's appendix B counts it (arXiv:2204.02311), but for the mask, which that leaves in."""


class Traffic(NamedTuple):
    """Bytes of elementwise operations a token, per entry of each of a layer's widths."""

    hidden: int
    mlp: int
    query: int
    key: int


_LLAMA = (Traffic(84, 10, 24, 24), Traffic(214, 18, 36, 40))
_LLAMA_WIDE = (Traffic(107, 10, 48, 36), Traffic(287, 18, 70, 62))
_QWEN3 = (Traffic(84, 10, 60, 60), Traffic(214, 18, 129, 133))
TRAFFIC: dict[str, tuple[Traffic, Traffic]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "phi3": (Traffic(84, 10, 32, 28), Traffic(196, 26, 64, 88)),
    "olmo2": (Traffic(92, 10, 80, 80), Traffic(238, 18, 166, 170)),
    "glm4": (Traffic(156, 10, 22, 18), Traffic(392, 26, 36, 42)),
}
"""Forward and backward by model_type, bf16 weights; counted by tools/count_traffic.py on transformers 5.24."""
WIDE_TRAFFIC: dict[str, tuple[Traffic, Traffic]] = {
    "llama": _LLAMA_WIDE,
    "mistral": _LLAMA_WIDE,
    "qwen2": _LLAMA_WIDE,
    "qwen3": (Traffic(107, 10, 97, 85), Traffic(287, 18, 187, 179)),
}
"""The same for float32 weights under bf16 autocast; counted by tools/count_traffic.py on transformers 5.24."""


_FUSED_LLAMA = (Traffic(20, 6, 4, 4), Traffic(42, 10, 6, 6))
_FUSED_QWEN3 = (Traffic(20, 6, 8, 8), Traffic(42, 10, 12, 12))
FUSED_TRAFFIC: dict[str, tuple[Traffic, Traffic]] = {
    "llama": _FUSED_LLAMA,
    "mistral": _FUSED_LLAMA,
    "qwen2": _FUSED_LLAMA,
    "qwen3": _FUSED_QWEN3,
}
"""The same with Liger's kernels: what each of them (liger-kernel 0.8.5 ops), residual sums and sums of gradients read
and write, by hand."""


@dataclass(frozen=True)
class StepParts:
    """Seconds by part; they add up to the step."""

    attention: float
    linear: float
    """Matrix products of the decoder's linears and experts."""
    loss_head: float
    elementwise: float
    """Norms, rotary embedding, activation functions, residual sums: bound by memory."""
    ring: float
    """Merging the partial results of ring attention."""
    host_copies: float
    """Layer inputs, and with parameter offload the shards, on the compute stream."""
    exchange: float
    """What of the exchange between GPUs is not hidden."""
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        total: float = sum(astuple(self))
        return total

    @property
    def without_optimizer(self) -> float:
        """Forward and backward alone."""
        return self.total - self.optimizer


def attention_flops(*, length: int, heads: int, head_dim: int) -> int:
    """Forward of causal attention over one sequence in one layer.

    Formula: ``2 * L^2 * h*d`` (two products of 2*L^2*h*d, half of which the mask leaves out)
    Source: torch/utils/flop_counter.py sdpa_flop_count, halved for the mask
    """
    return 2 * length * length * heads * head_dim


def elementwise_bytes(*, traffic: Traffic, hidden_size: int, mlp_size: int, query_size: int, key_size: int) -> int:
    """Memory traffic of one token in one layer's elementwise operations.

    Formula: ``a*H + b*I + c*h*d + e*k*d``
    Source: TRAFFIC
    """
    return traffic.hidden * hidden_size + traffic.mlp * mlp_size + traffic.query * query_size + traffic.key * key_size


def ring_bytes(*, query_size: int, key_size: int, cp_size: int, recomputed: float) -> float:
    """Memory traffic of one token and layer in merging partial results, on the rank that merges most.

    Formula: ``(1 + r) * (12 + 38*(C-1)) * h*d + (10 + 10*C) * h*d + 44*C * k*d``
    Source: torch 2.13 _SDPAMerger, _templated_ring_attention_backward
    """
    if cp_size == 1:
        return 0.0
    forward = (RING_ENDS + RING_MERGE * (cp_size - 1)) * query_size
    return (1 + recomputed) * forward + RING_DQ * (1 + cp_size) * query_size + RING_DKV * cp_size * key_size


def head_chunk_bytes(*, query_size: int, key_size: int, recomputed: float) -> float:
    """Memory traffic of one token and layer in putting the parts of the heads together.

    Formula: ``4*((1 + r)*h*d + h*d + 2*k*d)``
    Source: lcplan/backends/templates/ring_attention.py
    """
    return HEAD_CHUNK_COPIES * ((2 + recomputed) * query_size + 2 * key_size)


def head_chunk_flops(*, tokens: int, head_dim: int, cp_size: int, chunks: int, recomputed: float) -> float:
    """What ring attention in parts of the heads could have done in one layer while its further kernels end.

    Formula: ``(2 + r) * C * (G-1) * 2300 * 4*T*d``
    Source: HEAD_CHUNK_ROWS
    """
    return (2 + recomputed) * cp_size * (chunks - 1) * HEAD_CHUNK_ROWS * 4 * tokens * head_dim


def refusal(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec) -> str | None:
    """Why the plan has no step time; None where it has one."""
    rates = gpu.kernel_rates
    if rates is None:
        return f"no kernel has been timed on {gpu.id}"
    table = WIDE_TRAFFIC if _is_wide(plan) else TRAFFIC
    missing = {
        f"the memory traffic of {spec.model_type} with --dtype {plan.dtype} has not been counted": (
            spec.model_type not in table
        ),
        f"attention with head_dim {spec.head_dim} has not been timed on {rates.measured_on}": (
            spec.head_dim not in rates.attention_forward_flops
        ),
        "attention other than causal sdpa has not been timed": (
            plan.attn_implementation != "sdpa" or not spec.is_full_attention
        ),
        f"--optim {plan.optim} has not been timed": plan.optim not in OPTIMIZER_PASSES,
        f"the network between nodes of {gpu.id} is not known": (
            plan.num_gpus > plan.gpus_per_node and gpu.network_bandwidth is None
        ),
        f"--optim {plan.optim} on the host has not been timed": (
            plan.offload_params and plan.optim not in HOST_OPTIMIZER_S
        ),
        f"--backend {plan.backend} has not been timed": plan.backend not in ("single", "fsdp2"),
        "layers with and without experts have not been timed": spec.moe is not None and bool(spec.moe.dense_layers),
        "padded rows have not been timed": plan.padding,
        "frozen embeddings have not been timed": plan.freeze_embeddings or plan.freeze_head,
        f"--quantize {plan.quantize} has not been timed": plan.quantize != "none",
        "packed rows attend to less than max_length": plan.packing,
    }
    return next((reason for reason, is_missing in missing.items() if is_missing), None)


def _is_wide(plan: TrainPlan) -> bool:
    return plan.dtype == "float32" and plan.backend == "single"


class Work(NamedTuple):
    """Seconds of a micro step's kernels on one GPU."""

    attention: float
    linear: float
    loss_head: float
    elementwise: float
    ring: float

    @property
    def total(self) -> float:
        """Seconds of all of them."""
        return self.attention + self.linear + self.loss_head + self.elementwise + self.ring


class StepTimer:
    """Times plans of one model on one GPU; what depends on both alone is worked out once.

    Where ``refusal`` finds something, the nearest known figure stands in (another head_dim, Llama's traffic, the most
    passes): good for the order of plans, which all share it, and never printed.
    """

    def __init__(self, spec: ModelSpec, gpu: GpuSpec, rates: KernelRates) -> None:
        self.spec, self.gpu, self.rates = spec, gpu, rates
        self.query = spec.num_attention_heads * spec.head_dim
        self.key = spec.num_key_value_heads * spec.head_dim
        experts = spec.moe
        self.mlp = spec.intermediate_size
        router = 0
        if experts is not None:
            self.mlp = experts.moe_intermediate_size * experts.num_experts_per_tok
            router = spec.hidden_size * experts.num_experts
        self.mlps = spec.num_hidden_layers * 3 * spec.hidden_size * self.mlp
        attention = spec.hidden_size * (2 * self.query + 2 * self.key)
        self.active = spec.num_hidden_layers * (attention + 3 * spec.hidden_size * self.mlp + router)
        self.head = spec.hidden_size * spec.vocab_size
        nearest = min(rates.attention_forward_flops, key=lambda known: abs(known - spec.head_dim))
        self.forward_flops = rates.attention_forward_flops[nearest]
        self.backward_flops = rates.attention_backward_flops[nearest]
        self.num_parameters = spec.num_parameters
        self._known: dict[tuple[object, ...], Work] = {}
        self.network_bandwidth = gpu.network_bandwidth or gpu.link_bandwidth

    def parts(self, plan: TrainPlan) -> StepParts:
        """Seconds by part; ``refusal`` must have found nothing.

        Source: FLOPs and bytes over the GPU's measured rates
        """
        micro = plan.gradient_accumulation_steps
        work = self._work(plan)
        exposed = self._exposed_seconds(plan, attention=work.attention, compute=work.total)
        return StepParts(
            attention=micro * work.attention,
            linear=micro * work.linear,
            loss_head=micro * work.loss_head,
            elementwise=micro * work.elementwise,
            ring=micro * work.ring,
            host_copies=micro * self._copy_seconds(plan, work.total),
            exchange=exposed,
            optimizer=self._optimizer_seconds(plan),
        )

    def seconds(self, plan: TrainPlan) -> float:
        """The total of ``parts``, for many plans.

        Source: FLOPs and bytes over the GPU's measured rates
        """
        work = self._work(plan)
        step = work.total + self._copy_seconds(plan, work.total)
        exposed = self._exposed_seconds(plan, attention=work.attention, compute=work.total)
        return plan.gradient_accumulation_steps * step + exposed + self._optimizer_seconds(plan)

    def _work(self, plan: TrainPlan) -> Work:
        """Kernels of one micro step; worked out once for plans that agree in what they depend on."""
        key = (
            plan.max_length, plan.per_device_train_batch_size, plan.cp_size, plan.sp_size, plan.loss, plan.dtype,
            plan.activation_checkpointing, plan.checkpoint_every_n_layers, plan.lora_r, plan.lora_target_modules,
            plan.backend, plan.mlp_tile_size, plan.kernels, plan.cp_head_chunks,
        )  # fmt: skip
        if key not in self._known:
            recomputed, kept = self._recomputed(plan)
            ring = ring_bytes(query_size=self.query, key_size=self.key, cp_size=plan.cp_size, recomputed=kept)
            if plan.cp_head_chunks > 1:
                ring += head_chunk_bytes(query_size=self.query, key_size=self.key, recomputed=kept)
            self._known[key] = Work(
                attention=self._attention_seconds(plan, kept),
                linear=self._linear_seconds(plan, recomputed),
                loss_head=self._head_seconds(plan),
                elementwise=self._elementwise_seconds(plan, recomputed),
                ring=ring * plan.tokens_per_rank * self.spec.num_hidden_layers / self.rates.memory_bytes,
            )
        return self._known[key]

    def _recomputed(self, plan: TrainPlan) -> tuple[float, float]:
        """Share of the layers whose linears, and whose attention, run forward twice."""
        if plan.activation_checkpointing == "none":
            return 0.0, 0.0
        layers = self.spec.num_hidden_layers
        share = ceil_div(layers, plan.checkpoint_every_n_layers) / layers
        return share, 0.0 if plan.activation_checkpointing == "selective" else share

    def _tiled_forwards(self, plan: TrainPlan) -> float:
        """How many more times tiles run an MLP forward, over all layers.

        A tile's backward recomputes it. So does a checkpointed layer, but only up to the last tensor it saves: the
        MLP's input, unless a norm behind the MLP saves more.
        """
        if plan.running_tile is None:
            return 0.0
        recomputed, _ = self._recomputed(plan)
        traits = TRAITS.get(self.spec.model_type)
        return 1.0 if traits is not None and traits.closing_norms else 1.0 - recomputed

    def _attention_seconds(self, plan: TrainPlan, recomputed: float) -> float:
        spec = self.spec
        one = attention_flops(length=plan.max_length, heads=spec.num_attention_heads, head_dim=spec.head_dim)
        flops = one * spec.num_hidden_layers * plan.per_device_train_batch_size / (plan.cp_size * plan.sp_size)
        idle = spec.num_hidden_layers * head_chunk_flops(
            tokens=plan.tokens_per_rank, head_dim=spec.head_dim, cp_size=plan.cp_size, chunks=plan.cp_head_chunks,
            recomputed=recomputed,
        )  # fmt: skip
        forward = (1 + recomputed) * flops + idle
        return forward / self.forward_flops + ATTENTION_BACKWARD * flops / self.backward_flops

    def _linear_seconds(self, plan: TrainPlan, recomputed: float) -> float:
        backward = 1 if plan.lora_r else 2
        products = self.active * (1 + recomputed + backward) + self.mlps * self._tiled_forwards(plan)
        if plan.lora_r:
            products += self._trainable(plan) * (3 + recomputed)
        return 2 * plan.tokens_per_rank * products / self.rates.linear_flops

    def _targets(self, plan: TrainPlan) -> dict[str, tuple[int, int]]:
        return lora.target_shapes(self.spec, plan.lora_target_modules)

    def _head_seconds(self, plan: TrainPlan) -> float:
        """The logits: forward, once more in the backward where they come in chunks, and two gradients."""
        spec, tokens = self.spec, plan.tokens_per_rank
        chunked = plan.loss != "full"
        products = (2 if chunked else 1) + (1 if plan.lora_r else 2)
        per_entry = LOGITS_TRAFFIC + HEAD_ACCUMULATOR_TRAFFIC * spec.hidden_size if chunked else FULL_LOGITS_TRAFFIC
        traffic = per_entry * tokens * spec.vocab_size
        return 2 * tokens * self.head * products / self.rates.linear_flops + traffic / self.rates.memory_bytes

    def _elementwise_seconds(self, plan: TrainPlan, recomputed: float) -> float:
        spec, wide = self.spec, _is_wide(plan)
        sizes = {
            "hidden_size": spec.hidden_size, "mlp_size": self.mlp, "query_size": self.query, "key_size": self.key,
        }  # fmt: skip
        ahead, back = WIDE_TRAFFIC.get(spec.model_type, _LLAMA_WIDE) if wide else TRAFFIC.get(spec.model_type, _LLAMA)
        if plan.kernels == "liger" and spec.model_type in FUSED_TRAFFIC:
            fused = FUSED_TRAFFIC[spec.model_type]
            # in tiles the SwiGLU stays transformers' own
            tiled = [ahead.mlp, back.mlp] if plan.running_tile is not None else [each.mlp for each in fused]
            ahead, back = (each._replace(mlp=mlp) for each, mlp in zip(fused, tiled, strict=True))
        forward: float = elementwise_bytes(traffic=ahead, **sizes)
        backward = elementwise_bytes(traffic=back, **sizes)
        if spec.moe is not None:
            routed = spec.moe.num_experts_per_tok * spec.hidden_size
            forward += EXPERT_FORWARD * routed
            backward += EXPERT_BACKWARD * routed
        if plan.lora_r:
            shapes = self._targets(plan).values()
            inputs, outputs = sum(shape[0] for shape in shapes), sum(shape[1] for shape in shapes)
            forward += LORA_INPUT_FORWARD * inputs + LORA_OUTPUT_FORWARD * outputs
            backward += LORA_INPUT_BACKWARD * inputs + LORA_OUTPUT_BACKWARD * outputs
        num_bytes = (1 + recomputed) * forward + backward
        if plan.running_tile is not None:
            num_bytes += self._tiled_forwards(plan) * ahead.mlp * self.mlp + TILE_COPIES * spec.hidden_size
        num_bytes *= plan.tokens_per_rank * spec.num_hidden_layers
        if plan.running_tile is not None:
            num_bytes += TILE_SUMS * self.mlps * (ceil_div(plan.tokens_per_rank, plan.running_tile) - 1)
        if wide:  # autocast reads each float32 weight and writes its bf16 copy, once a pass
            num_bytes += (weights.FP32_BYTES + weights.BF16_BYTES) * self.active * (1 + recomputed)
        return num_bytes / self.rates.memory_bytes

    def _copy_seconds(self, plan: TrainPlan, compute: float) -> float:
        """Copies to and from the host on the compute stream, and of those beside it what is longer than ``compute``.

        TRL's own offload has a stream of its own. Where attention is kept on the host, the layer inputs come back on
        the compute stream; the rest goes beside it. With prefetch the last layer's input alone comes back on it.
        """
        num_bytes, rate = 0.0, self._host_rate(plan)
        if plan.offload_activations:
            layers = ceil_div(self.spec.num_hidden_layers, plan.checkpoint_every_n_layers)
            size = weights.FP32_BYTES if _is_wide(plan) else weights.BF16_BYTES
            inputs = layers * plan.tokens_per_rank * self.spec.hidden_size * size
            if plan.offload_prefetch:
                beside = inputs * (2 - 1 / layers)
                num_bytes += inputs / layers + max(beside - compute * rate, 0.0)
            elif plan.keeps_attention_on_host:
                outputs = weights.BF16_BYTES * self.query + weights.FP32_BYTES * self.spec.num_attention_heads
                beside = inputs + 2 * layers * plan.tokens_per_rank * outputs
                num_bytes += inputs + max(beside - compute * rate, 0.0)
            else:
                num_bytes += 2 * inputs
        if plan.offload_params:  # shards come in for forward and backward, gradients go out
            num_bytes += 3 * weights.FP32_BYTES * self.num_parameters / plan.shard_size
        return num_bytes / rate

    def _host_rate(self, plan: TrainPlan) -> float:
        """Bytes a second between one GPU and the host: its link's, or its part of what the node's GPUs get together.

        Alone a GPU has more than in a full node: steps of rows m359 and m360 are 0.16 s apart, for 12 GB copied on the
        compute stream or beside it.
        """
        copying = min(plan.num_gpus, plan.gpus_per_node)
        together = self.rates.host_copy_bytes * self.gpu.gpus_per_node
        return min(self.gpu.host_link_bandwidth / 2, together / copying)

    def _exposed_seconds(self, plan: TrainPlan, *, attention: float, compute: float) -> float:
        """Exchange that is longer than the kernels it hides behind, and the first layer's weights."""
        ranks = plan.shard_size
        if plan.backend != "fsdp2" or plan.num_gpus == 1:
            return 0.0
        layers, micro = self.spec.num_hidden_layers, plan.gradient_accumulation_steps
        gather = weights.BF16_BYTES * self.num_parameters * (ranks - 1) / ranks
        reduced = 0.0 if plan.lora_r else gather
        gathers = 2 if plan.reshard_after_forward else 1
        states = (gathers * micro * gather + reduced) / self._link(plan, ranks)
        if plan.dp_replicate_size > 1:
            replicas = plan.dp_replicate_size
            summed = 2 * weights.FP32_BYTES * self.num_parameters / ranks * (replicas - 1) / replicas
            states += summed / self._link(plan, plan.num_gpus)
        exposed = max(states - micro * compute, 0.0) + gather / layers / self._link(plan, ranks)
        if plan.cp_size > 1:
            moved = RING_EXCHANGE * self.key * plan.tokens_per_rank * (plan.cp_size - 1) * layers
            exposed += micro * max(moved / self._link(plan, plan.cp_size) - attention, 0.0)
        return exposed

    def _link(self, plan: TrainPlan, ranks: int) -> float:
        """Bytes a second between a GPU and its neighbour in a group of so many ranks."""
        inside = ranks <= plan.gpus_per_node
        return self.gpu.link_bandwidth if inside else self.network_bandwidth

    def _optimizer_seconds(self, plan: TrainPlan) -> float:
        wide = plan.lora_r or plan.backend == "fsdp2" or plan.dtype == "float32"
        own = self._trainable(plan) / plan.shard_size
        if plan.offload_params:
            return own * HOST_OPTIMIZER_S.get(plan.optim, max(HOST_OPTIMIZER_S.values()))
        passes = OPTIMIZER_PASSES.get(plan.optim, max(OPTIMIZER_PASSES.values())) + CLIPPING_PASSES
        return own * (weights.FP32_BYTES if wide else weights.BF16_BYTES) * passes / self.rates.memory_bytes

    def _trainable(self, plan: TrainPlan) -> int:
        if not plan.lora_r:
            return self.num_parameters
        return lora.adapter_parameters(self._targets(plan), plan.lora_r) * self.spec.num_hidden_layers

    def model_flops(self, plan: TrainPlan) -> float:
        """FLOPs of one step over all GPUs, by MFU_CONVENTION.

        Source: MFU_CONVENTION
        """
        spec = self.spec
        rows = plan.per_device_train_batch_size * plan.dp_replicate_size * plan.dp_shard_size
        rows *= plan.gradient_accumulation_steps
        linears = 2 * (self.active + self.head) * plan.max_length
        attention = attention_flops(length=plan.max_length, heads=spec.num_attention_heads, head_dim=spec.head_dim)
        gradients = 1 if plan.lora_r else 2
        return rows * ((1 + gradients) * linears + 3 * attention * spec.num_hidden_layers)


def pinning_seconds(*, pinned_bytes: int, by_trl: bool) -> float:
    """What the first step at a length takes longer, since it pins the host memory of the offload.

    Formula: ``pinned / rate``
    Source: PINNING_BYTES_PER_S, TRL_PINNING_BYTES_PER_S
    """
    return pinned_bytes / (TRL_PINNING_BYTES_PER_S if by_trl else PINNING_BYTES_PER_S)
