"""The loss head: final norm, projection to the vocabulary, cross-entropy.

Letters: T tokens per rank, H hidden size, V vocabulary, b bytes of one element.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.weights import BF16_BYTES, FP32_BYTES

TOKENS_PER_TILE = 4096
"""trl 1.16 kernels/chunked_logprob.py TOKEN_CHUNK_SIZE."""
VOCAB_PER_TILE = 32768
"""trl 1.16 trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE."""
ROWS_PER_CHUNK = 256
"""trl 1.13 and 1.14 trainer/sft_trainer.py: chunk_size of the patched forward."""
FULL_LOGITS_BYTES = 12
"""Bytes a token and vocabulary entry at the peak of a full-logits loss: bf16 logits, their float32 copy, log-softmax or
its gradient, the bf16 gradient. Rows m015 and m016 agree within 0.01%."""


@item("loss_head.final_norm", "activation")
def final_norm(*, tokens: int, hidden_size: int, float32: bool, frozen: bool) -> int:
    """What the final RMSNorm saves.

    Formula: ``(6*H + 4)*T``; float32: ``(8*H + 4)*T``; frozen: ``(4*H + 4)*T``
    Live in: forward, loss
    Rounding: exact
    Ignores: nothing
    Source: allocator trace of Qwen3-4B without checkpointing; transformers 5.24 Qwen3RMSNorm
    Confidence: exact
    """
    width = 4 if frozen else 8 if float32 else 6
    return (width * hidden_size + 4) * tokens


@item("loss_head.fused_norm", "activation")
def fused_norm(*, tokens: int, hidden_size: int) -> int:
    """What Liger's final RMSNorm saves: input, reciprocal root.

    Formula: ``(2*H + 4)*T``
    Live in: forward, loss
    Rounding: exact
    Ignores: nothing
    Source: liger-kernel 0.8.5 ops/rms_norm.py LigerRMSNormFunction
    Confidence: modelled
    """
    return (2 * hidden_size + 4) * tokens


@item("loss_head.fused_norm_forward", "temporary")
def fused_norm_forward(*, tokens: int, hidden_size: int) -> int:
    """Forward of Liger's final RMSNorm: the last layer's output, reciprocal root, its own output.

    Formula: ``(4*H + 4)*T``
    Live in: forward (the last layer not checkpointed)
    Rounding: exact
    Ignores: nothing
    Source: liger-kernel 0.8.5 ops/rms_norm.py rms_norm_forward
    Confidence: modelled
    """
    return (4 * hidden_size + 4) * tokens


@item("loss_head.fused_norm_backward", "temporary")
def fused_norm_backward(*, tokens: int, hidden_size: int) -> int:
    """Backward of Liger's final RMSNorm: its input, and the gradient, which it changes in place.

    Formula: ``(4*H + 4)*T``
    Live in: final_norm
    Rounding: exact
    Ignores: nothing
    Source: liger-kernel 0.8.5 ops/rms_norm.py rms_norm_backward
    Confidence: modelled
    """
    return (4 * hidden_size + 4) * tokens


@item("loss_head.final_norm_forward", "temporary")
def final_norm_forward(*, tokens: int, hidden_size: int, wide: bool, float32: bool) -> int:
    """Forward of the final RMSNorm, its casts, and the last layer's output.

    Masks are still there. Without them the loss is larger.

    Formula: ``14*H*T``; wide norms: ``16*H*T``; float32: ``12*H*T``
    Live in: forward (the last layer not checkpointed)
    Rounding: exact
    Ignores: some bytes a token
    Source: transformers 5.24 Gemma3RMSNorm, MistralRMSNorm; traces of Gemma 3 and Mistral with a sliding window
    Confidence: exact
    """
    return (12 if float32 else 16 if wide else 14) * hidden_size * tokens


@item("loss_head.forward", "temporary")
def forward(*, tokens: int, scored: int, hidden_size: int, dtype_bytes: int) -> int:
    """Forward of a chunked loss: the final norm's output, those of its rows that are scored, per-token statistics.

    Formula: ``b*H*T + (b*H + 52)*T_scored``
    Live in: forward
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: trl 1.16 ChunkedLogProbFunction.forward; traces
    Confidence: exact
    """
    return dtype_bytes * hidden_size * (tokens + scored) + 52 * scored


@item("loss_head.full_logits_forward", "temporary")
def full_logits_forward(*, tokens: int, vocab_size: int, hidden_size: int, dtype_bytes: int) -> int:
    """Forward of a loss over all logits: in bf16, in float32 and their log-softmax; the final norm's output.

    Formula: ``(10*V + b*H)*T``
    Live in: forward (TRL before 1.15, loss_type "nll")
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: transformers 5.24 ForCausalLMLoss; traces
    Confidence: exact
    """
    return (10 * vocab_size + dtype_bytes * hidden_size) * tokens


@item("loss_head.final_norm_backward", "temporary")
def final_norm_backward(*, tokens: int, hidden_size: int) -> int:
    """Backward of the final RMSNorm: its saved float32 input and five float32 tensors more.

    Formula: ``24*H*T``
    Live in: final_norm
    Rounding: exact
    Ignores: some bytes a token
    Source: autograd of pow, mean, rsqrt, mul; allocator trace of Qwen3-4B; row m127
    Confidence: exact
    """
    return 6 * FP32_BYTES * hidden_size * tokens


@item("loss_head.hidden_states", "temporary")
def hidden_states(*, tokens: int, hidden_size: int) -> int:
    """Hidden states picked for scoring (2H), their float32 gradient (4H) and its cast (2H), per-token statistics (28).

    Formula: ``(8*H + 28)*T``
    Live in: loss
    Rounding: exact
    Ignores: some bytes a token for the mask of labels; T counts tokens that have a label
    Source: trl 1.16 ChunkedLogProbFunction; allocator trace of Qwen3-4B without checkpointing
    Confidence: exact
    """
    return (8 * hidden_size + 28) * tokens


@item("loss_head.weight_gradient", "gradient")
def weight_gradient(*, vocab_size: int, hidden_size: int, float32: bool) -> int:
    """Float32 accumulator of the head's weight gradient and its cast to the weight's dtype.

    Formula: ``(4 + 2)*V*H``; float32: ``4*V*H``
    Live in: loss
    Rounding: exact
    Ignores: a bias
    Source: trl 1.16 ChunkedLogProbFunction.backward; allocator traces
    Confidence: exact
    """
    return (FP32_BYTES if float32 else FP32_BYTES + BF16_BYTES) * vocab_size * hidden_size


@item("loss_head.logits_tile", "temporary")
def logits_tile(*, tokens: int) -> int:
    """The only logits that a chunked loss ever holds.

    Formula: ``2 * min(T, 4096) * 32768``
    Live in: forward, loss
    Rounding: exact
    Ignores: nothing
    Source: trl 1.16 kernels/chunked_logprob.py; allocator traces
    Confidence: exact
    """
    return BF16_BYTES * min(tokens, TOKENS_PER_TILE) * VOCAB_PER_TILE


@item("loss_head.casts", "temporary")
def casts(*, tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Bf16 casts of a float32 head and of one tile's hidden states: two tiles of the weight at once.

    Formula: ``2*min(V, 2*32768)*H + 2*min(T, 4096)*H``; V <= 32768 and T > 4096: ``4*V*H`` of the head
    Live in: loss (float32 weights on one GPU)
    Rounding: exact
    Ignores: nothing
    Source: trl 1.16 ChunkedLogProbFunction.backward; allocator trace of Qwen3-4B float32 without checkpointing
    Confidence: exact
    """
    alone_again = vocab_size <= VOCAB_PER_TILE and tokens > TOKENS_PER_TILE  # cast anew for every tile of tokens
    head = 2 * vocab_size if alone_again else min(vocab_size, 2 * VOCAB_PER_TILE)
    return BF16_BYTES * hidden_size * (head + min(tokens, TOKENS_PER_TILE))


@item("loss_head.casts_forward", "temporary")
def casts_forward(*, tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Bf16 casts of one tile of a float32 head, and of one tile's hidden states.

    Formula: ``2*min(V, 32768)*H + 2*min(T, 4096)*H``
    Live in: forward (float32 weights on one GPU)
    Rounding: exact
    Ignores: nothing
    Source: trl 1.16 ChunkedLogProbFunction.forward; traces in float32
    Confidence: exact
    """
    return BF16_BYTES * hidden_size * (min(vocab_size, VOCAB_PER_TILE) + min(tokens, TOKENS_PER_TILE))


@item("loss_head.chunks_of_rows", "temporary")
def chunks_of_rows(*, tokens: int, vocab_size: int, hidden_size: int) -> int:
    """TRL 1.13's loss, checkpointed in chunks of 256 rows: sorted hidden states, their gradient, order and labels.

    Beside them the head's gradient so far, and the larger of: this chunk's part with their sum, or the chunk's logits,
    log-probabilities, probabilities and their product in float32.

    Formula: ``(4*H + 16)*T + 2*V*H + max(4*V*H + 512*H, 16*256*V)``
    Live in: loss (TRL 1.13 and 1.14)
    Rounding: exact from three chunks on (T > 512)
    Ignores: nothing
    Source: trl 1.13 _chunked_cross_entropy_loss; allocator trace of Qwen3-4B at 32,768 tokens; row m133
    Confidence: exact
    """
    table = vocab_size * hidden_size
    summing = 2 * BF16_BYTES * table + BF16_BYTES * ROWS_PER_CHUNK * hidden_size
    logits = 4 * FP32_BYTES * ROWS_PER_CHUNK * vocab_size
    return (2 * BF16_BYTES * hidden_size + 16) * tokens + BF16_BYTES * table + max(summing, logits)


@item("loss_head.full_logits", "temporary")
def full_logits(*, tokens: int, vocab_size: int, hidden_size: int) -> int:
    """Logits of all tokens with their float32 copies and gradients, and the hidden states they came from.

    Formula: ``12*V*T + 2*H*T``
    Live in: loss (TRL before 1.15, loss_type "nll")
    Rounding: exact
    Ignores: nothing
    Source: rows m015 and m016 (trl 1.13)
    Confidence: fitted
    """
    return (FULL_LOGITS_BYTES * vocab_size + BF16_BYTES * hidden_size) * tokens
