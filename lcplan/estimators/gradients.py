"""Gradients: what earlier layers have left, what the current layer has made so far.

Letters: P parameters, W ranks, b bytes of one element, V vocabulary, H hidden size, I intermediate size.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.weights import BF16_BYTES, FP32_BYTES
from lcplan.units import ceil_div

ONE_PASS_TOKENS = 3072
"""Tokens up to which torch's embedding backward needs no partial sums (aten/native/cuda/Embedding.cu)."""
ROWS_PER_PARTIAL_SUM = 10
"""Rows of one token id that one partial sum takes (aten/native/cuda/EmbeddingBackwardKernel.cu NROWS_PER_THREAD)."""


@item("gradients.finished", "gradient")
def finished(*, num_parameters: int, dtype_bytes: int, ranks: int) -> int:
    """Gradients of everything whose backward is over; under FSDP2 float32 shards.

    Formula: ``b*P_done/W``
    Live in: backward, growing from the head down; optimizer_step with P_done = P
    Rounding: up to whole bytes
    Ignores: nothing; with gradient accumulation gradients.accumulated stands in its place
    Source: torch autograd; torch.distributed.fsdp foreach_reduce; rows m001-m034
    Confidence: exact
    """
    return ceil_div(dtype_bytes * num_parameters, ranks)


@item("gradients.current_layer", "gradient")
def current_layer(*, num_parameters: int, dtype_bytes: int) -> int:
    """Weight gradients that the running layer has already made.

    In its MLP that is down_proj; in its attention all of the MLP, the second norm and o_proj.

    Formula: ``b*H*I`` (MLP); ``b*(P_mlp + H + H*h*d)`` (attention)
    Live in: backward of a layer
    Rounding: exact
    Ignores: nothing
    Source: allocator traces of Qwen3-0.6B and Llama-3.2-1B; order of autograd
    Confidence: exact
    """
    return dtype_bytes * num_parameters


@item("gradients.accumulated", "gradient")
def accumulated(*, num_parameters: int, dtype_bytes: int) -> int:
    """Gradients kept from the previous micro step (gradient_accumulation_steps > 1); new ones are added in place.

    FSDP2 does not reduce before the last micro step: the gradients of all units still to come are whole on every rank.

    Formula: ``b*P``; FSDP2: ``2*(P - P_done)``
    Live in: every phase of a micro step
    Rounding: exact
    Ignores: nothing
    Source: torch AccumulateGrad; allocator trace of Qwen3-4B with two micro steps
    Confidence: exact
    """
    return dtype_bytes * num_parameters


@item("gradients.tied_head", "gradient")
def tied_head(*, head_parameters: int, dtype_bytes: int) -> int:
    """Gradient of the tied head, held back until the embedding's backward adds its part.

    It is whole on every rank under FSDP2, and apart from .grad where gradients accumulate.

    Formula: ``b*(V*H + H)``
    Live in: backward (tied embeddings, under FSDP2 or with gradient accumulation)
    Rounding: exact
    Ignores: nothing
    Source: accelerate 1.15 fsdp2_prepare_model ([norm, embed, lm_head] is one unit); rows m031, m033, m034
    Confidence: exact
    """
    return dtype_bytes * head_parameters


@item("gradients.embedding", "gradient")
def embedding(*, embedding_parameters: int, dtype_bytes: int) -> int:
    """Dense gradient that the embedding's backward makes; with tied weights it is added to the head's in place.

    Formula: ``b*V*H``
    Live in: backward.embedding
    Rounding: exact
    Ignores: sort indices of some bytes per token
    Source: torch embedding_dense_backward, autograd's InputBuffer; allocator trace of Qwen3-8B at 1,024 tokens
    Confidence: exact
    """
    return dtype_bytes * embedding_parameters


@item("gradients.embedding_partial_sums", "temporary")
def embedding_partial_sums(*, tokens: int, vocab_size: int, hidden_size: int) -> int:
    """Float32 sums of at most ten rows of the same token, before they are added to the table's gradient.

    Formula: ``4*H*min(T, V + T/10)`` if T > 3072
    Live in: backward.embedding
    Rounding: an upper bound: every token id of the vocabulary occurs, or every token is another
    Ignores: sort indices of some bytes per token
    Source: aten/native/cuda/EmbeddingBackwardKernel.cu; allocator trace of Qwen3-0.6B float32; row m112
    Confidence: exact
    """
    if tokens <= ONE_PASS_TOKENS:
        return 0
    return FP32_BYTES * hidden_size * min(tokens, vocab_size + ceil_div(tokens, ROWS_PER_PARTIAL_SUM))


@item("communication.ddp_buckets", "gradient")
def ddp_buckets(*, num_parameters: int, dtype_bytes: int) -> int:
    """DDP's buckets: a second copy of every gradient, kept from step to step.

    Formula: ``b*P``
    Live in: every phase (DDP)
    Rounding: exact
    Ignores: nothing
    Source: torch.nn.parallel DistributedDataParallel, gradient_as_bucket_view=False; rows m162-m167
    Confidence: exact
    """
    return dtype_bytes * num_parameters


@item("communication.reduce_scatter_input", "reduce_scatter")
def reduce_scatter_input(*, unit_parameters: int) -> int:
    """Bf16 gradients of the previous unit, kept until its reduce-scatter is waited for.

    That unit is the head while the last layer runs, then one decoder layer.

    Formula: ``2*P_unit``
    Live in: backward (FSDP2)
    Rounding: exact
    Ignores: the reduce-scatter output, 1/W of it
    Source: torch.distributed.fsdp FSDPParamGroup (one retained ReduceScatterState); rows m012-m014
    Confidence: exact
    """
    return BF16_BYTES * unit_parameters


@item("communication.all_reduce_input", "reduce_scatter")
def all_reduce_input(*, num_parameters: int, ranks: int) -> int:
    """Bf16 shards of every finished unit, kept for the all-reduce over replicas until the backward ends.

    Formula: ``2*P_done/W``
    Live in: backward (FSDP2 with dp_replicate_size > 1)
    Rounding: up to whole bytes
    Ignores: nothing
    Source: torch.distributed.fsdp FSDPParamGroup AllReduceState; allocator trace of Qwen3-8B, 2 replicas of 4 shards
    Confidence: exact
    """
    return ceil_div(BF16_BYTES * num_parameters, ranks)
