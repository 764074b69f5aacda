"""Each item by hand: T=7, H=40, I=112, h=6, k=3, d=16, V=560, and every item documented."""

from __future__ import annotations

import ast
from importlib import resources

import pytest

from lcplan.estimators import (
    activations,
    attention,
    deepspeed,
    gradients,
    host,
    lora,
    loss_head,
    moe,
    optimizer,
    runtime,
    weights,
)
from lcplan.estimators._item import ITEMS, Item, item

T, H, INNER, HEADS, KV, D, V = 7, 40, 112, 6, 3, 16, 560
SHAPE = {"tokens": T, "heads": HEADS, "kv_heads": KV, "head_dim": D}
EVEN = SHAPE | {"kv_heads": HEADS}
WHOLE = {"tokens": T, "kv_heads": KV, "head_dim": D, "head_chunks": 1}
SUMS, SUMS_EVEN = (shape | {"head_chunks": 1, "merge_bytes": 4} for shape in (SHAPE, EVEN))
CHOSEN = {"tokens": T, "hidden_size": H, "experts_per_token": 3}
EXPERTS = CHOSEN | {"expert_size": 24}
SCORES = {
    "tokens": T, "row_tokens": T, "heads": HEADS, "repeated_heads": HEADS, "head_dim": D, "soft_capped": False,
    "sinks": False,
}  # fmt: skip
QUERIES = SHAPE | {
    "rotary_dim": 8, "hidden_size": H, "qk_norm": False, "norms_rotated": False, "wide_rotary": False,
    "fused_qkv": False,
}  # fmt: skip
MERGE = SHAPE | {"hidden_size": H}
SCORED = SCORES | {"kv_heads": KV, "hidden_size": H}
TILED = {"tokens": T, "hidden_size": H, "intermediate_size": INNER, "hidden_states": 2}
MLP = {"tokens": T, "hidden_size": H, "intermediate_size": INNER}
NORMS = {"tokens": T, "hidden_size": H, "num_norms": 2, "num_linears": 5, "frozen": False}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (weights.parameters(num_parameters=1001, dtype_bytes=4, ranks=8), 501),
        (optimizer.adamw_states(num_parameters=1001, dtype_bytes=4, ranks=8), 1001),
        (optimizer.foreach_temporary(num_parameters=1001, dtype_bytes=4, ranks=8), 501),
        (optimizer.adafactor_states(sum_of_sides=11), 44),
        (optimizer.adafactor_update(largest_parameter=V * H), 16 * 22_400),
        # 10,240 codes and 40 scales of each moment over 4 ranks
        (optimizer.adamw_8bit_states(num_parameters=10_240, ranks=4), (20_480 + 320) // 4),
        (optimizer.wide_embedding_states(embedding_parameters=V * H), 8 * 22_400),
        (optimizer.paged_scales(num_parameters=10_240), 320),
        (optimizer.torchao_update(largest_parameter=10_240, ranks=4), (81_920 + 320) // 4),
        # 16,385 weights: 8,193 bytes of codes, 257 scales, two scales of scales
        (weights.nf4(num_parameters=16_385, ranks=1), 8193 + 257 + 8),
        (weights.nf4(num_parameters=16_384, ranks=4), 2048 + 256 + 4),
        (weights.dequantised(largest_matrix=H * INNER), 2 * 40 * 112),
        (weights.gathered_nf4_layers(linear_parameters=1000, num_layers=2), 1000),
        (weights.gathered_layers(layer_parameters=500, num_layers=2), 2000),
        (weights.gathered_embedding(embedding_parameters=V * H), 44_800),
        (weights.gathered_head(head_parameters=V * H + H), 44_880),
        (weights.autocast_copies(layer_weight_parameters=3), 6),
        (weights.saved_model(num_parameters=10, dtype_bytes=4), 40),
        (weights.checkpoint(num_parameters=10, dtype_bytes=4), 120),
        (gradients.finished(num_parameters=1001, dtype_bytes=4, ranks=8), 501),
        (gradients.current_layer(num_parameters=11, dtype_bytes=2), 22),
        (gradients.accumulated(num_parameters=11, dtype_bytes=4), 44),
        (gradients.tied_head(head_parameters=11, dtype_bytes=4), 44),
        (gradients.embedding(embedding_parameters=11, dtype_bytes=2), 22),
        (gradients.embedding_partial_sums(tokens=3072, vocab_size=V, hidden_size=H), 0),
        (gradients.embedding_partial_sums(tokens=3073, vocab_size=V, hidden_size=H), 4 * 40 * (560 + 308)),
        (gradients.embedding_partial_sums(tokens=3073, vocab_size=5000, hidden_size=H), 4 * 40 * 3073),
        (gradients.ddp_buckets(num_parameters=11, dtype_bytes=2), 22),
        (gradients.reduce_scatter_input(unit_parameters=11), 22),
        (activations.batch(tokens=T, micro_batches=2), 336),
        (activations.positions(tokens=T), 56),
        (activations.context_parallel_buffers(sequence_tokens=28, rows=2, tokens_per_rank=T), 8 * (56 + 28 + 42)),
        (activations.rotary_tables(tokens=T, head_dim=D, dtype_bytes=2), 448),
        (activations.layer_inputs(num_layers=5, tokens=T, hidden_size=H, dtype_bytes=2), 2800),
        (activations.norms(**NORMS, float32=False, wide=False), 2 * 324 * 7),
        (activations.norms(**NORMS, float32=False, wide=True), 2 * 404 * 7),
        (activations.norms(**NORMS, float32=True, wide=False), (2 * 164 + 400) * 7),
        (activations.norms(**NORMS | {"frozen": True}, float32=False, wide=False), 2 * 164 * 7),
        (activations.closing_norms(tokens=T, hidden_size=H, num_norms=2, wide=False), 2 * 244 * 7),
        (activations.closing_norms(tokens=T, hidden_size=H, num_norms=2, wide=True), 2 * 324 * 7),
        (activations.closing_norm_backward(tokens=T, hidden_size=H, wide=False), 18 * 40 * 7),
        (activations.closing_norm_backward(tokens=T, hidden_size=H, wide=True), 16 * 40 * 7),
        (activations.feeding_norm_backward(tokens=T, hidden_size=H), 24 * 40 * 7),
        (loss_head.final_norm_forward(tokens=T, hidden_size=H, wide=False, float32=False), 14 * 40 * 7),
        (loss_head.final_norm_forward(tokens=T, hidden_size=H, wide=True, float32=False), 16 * 40 * 7),
        (loss_head.final_norm_forward(tokens=T, hidden_size=H, wide=False, float32=True), 12 * 40 * 7),
        (loss_head.forward(tokens=T, scored=3, hidden_size=H, dtype_bytes=2), 80 * (7 + 3) + 52 * 3),
        (loss_head.full_logits_forward(tokens=T, vocab_size=V, hidden_size=H, dtype_bytes=4), (5600 + 160) * 7),
        (loss_head.casts_forward(tokens=T, hidden_size=H, vocab_size=V), 80 * (560 + 7)),
        (loss_head.casts_forward(tokens=5000, hidden_size=H, vocab_size=40_000), 80 * (32_768 + 4096)),
        (activations.residual(tokens=T, hidden_size=H, dtype_bytes=4, copies=2), 2240),
        (activations.mlp_saved(tokens=T, intermediate_size=INNER, frozen=False), 6272),
        (activations.mlp_saved(tokens=T, intermediate_size=INNER, frozen=True), 4704),
        (activations.mlp_backward(tokens=T, intermediate_size=INNER, frozen=False), 3136),
        (activations.mlp_backward(tokens=T, intermediate_size=INNER, frozen=True), 4704),
        (activations.down_backward(tokens=T, intermediate_size=INNER), 448 * 7),
        (activations.fused_norms(tokens=T, hidden_size=H, num_norms=2), 2 * 84 * 7),
        (activations.fused_mlp_saved(tokens=T, intermediate_size=INNER), 4704),
        (activations.fused_mlp_backward(tokens=T, hidden_size=H, intermediate_size=INNER), 2 * 112 * 47),
        (attention.fused_qk_norm(**SHAPE), (2 * 9 * 16 + 36) * 7),
        (loss_head.fused_norm(tokens=T, hidden_size=H), 84 * 7),
        (loss_head.fused_norm_forward(tokens=T, hidden_size=H), 164 * 7),
        (loss_head.fused_norm_backward(tokens=T, hidden_size=H), 164 * 7),
        (activations.mlp_tile(tile=3, hidden_size=H, intermediate_size=INNER), (80 + 1120) * 3 + 2 * 112 * 40),
        (activations.mlp_tile(tile=50, hidden_size=H, intermediate_size=INNER), (80 + 1120 + 224) * 50),
        (activations.mlp_first_tile(tile=3, hidden_size=H, intermediate_size=INNER), (80 + 1344) * 3),
        (activations.mlp_tile_gradients(parameters=11), 22),
        # tiles of 3, 3 and 1: two hidden states and the output, a tile's intermediates, the last one's output
        (activations.tiled_forward(tile=3, **TILED, fused_projection=False), 3 * 80 * 7 + 672 * 3 + 80 * 3),
        (activations.tiled_forward(tile=3, **TILED, fused_projection=True), 3 * 80 * 7 + 896 * 3 + 80 * 3),
        # tiles of 6 and 1: the first is the largest, and the output is not there yet
        (activations.tiled_forward(tile=6, **TILED, fused_projection=False), 2 * 80 * 7 + 672 * 6),
        (activations.mlp_forward(**MLP, hidden_states=2, dtype_bytes=2, fused_projection=False), (672 + 160) * 7),
        (activations.mlp_forward(**MLP, hidden_states=1, dtype_bytes=4, fused_projection=True), (896 + 160) * 7),
        (activations.norm_forward(tokens=T, hidden_size=H, hidden_states=2, float32=False), (160 + 320 + 4) * 7),
        (activations.norm_forward(tokens=T, hidden_size=H, hidden_states=1, float32=True), (160 + 320 + 4) * 7),
        (attention.forward(**QUERIES), (192 + 6 * 6 * 8 + 192 + 80) * 7),
        (attention.forward(**QUERIES | {"wide_rotary": True}), (192 + 12 * 6 * 8 + 192 + 80) * 7),
        (attention.forward(**QUERIES | {"qk_norm": True}), (960 + 48 + 80) * 7),
        (attention.forward(**QUERIES | {"qk_norm": True, "norms_rotated": True}), (960 + 48 + 192 + 80) * 7),
        (attention.forward(**QUERIES | {"fused_qkv": True}), (768 + 288 + 80) * 7),
        (attention.masked_forward(**SHAPE, row_tokens=T, repeated_heads=6, hidden_size=H),
         (768 + 24 + 14 + 192 + 80) * 7),
        (attention.masked_forward(**SHAPE, row_tokens=T, repeated_heads=3, hidden_size=0), (576 + 24 + 14) * 7),
        (attention.eager_forward(**SCORED),
         (60 * 7 + 192 + 384 + 192 + 80) * 7),
        (attention.eager_forward(**SCORED | {"soft_capped": True}),
         (72 * 7 + 192 + 384 + 192 + 80) * 7),
        (attention.eager_forward(**SCORED | {"repeated_heads": KV, "sinks": True}),
         (36 * 7 + 36 + 192 + 192 + 80) * 7),
        (attention.eager_weights(tokens=T, row_tokens=T, heads=HEADS, sinks=False), 84 * 7),
        (attention.eager_weights(tokens=T, row_tokens=T, heads=HEADS, sinks=True), 96 * 7),
        # one head's share hd = 96, kd = 48; whole: queries, keys, values, normed input
        (attention.ring_forward(**MERGE, cp_size=4, cp_rank=0, allgather=True, head_chunks=1, merge_bytes=4),
         (192 + 192 + 80 + 13 * 96 + 48 + 4 * 192) * 7),
        (attention.ring_forward(**MERGE, cp_size=4, cp_rank=3, allgather=True, head_chunks=1, merge_bytes=4),
         (192 + 192 + 80 + 18 * 96 + 72 + 4 * 192) * 7),
        (attention.ring_forward(**MERGE, cp_size=2, cp_rank=0, allgather=False, head_chunks=1, merge_bytes=2),
         (192 + 192 + 80 + 9 * 96 + 48 + 192) * 7),
        (attention.ring_forward(**MERGE, cp_size=4, cp_rank=0, allgather=False, head_chunks=1, merge_bytes=2),
         (192 + 192 + 80 + 11 * 96 + 48 + 2 * 192) * 7),
        (attention.ring_forward(**MERGE, cp_size=4, cp_rank=1, allgather=False, head_chunks=1, merge_bytes=2),
         (192 + 192 + 80 + 12 * 96 + 72 + 2 * 192) * 7),
        (attention.ring_forward(**MERGE, cp_size=4, cp_rank=2, allgather=True, head_chunks=3, merge_bytes=2),
         (384 + 24 + 192 + 80) * 7 + (14 * 96 + 72 + 4 * 192) * 7 // 3),
        (attention.ulysses_forward(**MERGE, sp_size=2), (960 + 192 + 192 + 80 + 32) * 7),
        (attention.ulysses_forward(**MERGE, sp_size=6), (960 + 192 + 384 + 80 + 96) * 7),
        (lora.mlp_forward(**MLP, rank=5, gate=False, up=False, down=False, wide=True, dropout=True), (672 + 160) * 7),
        (lora.mlp_forward(**MLP, rank=5, gate=True, up=False, down=False, wide=True, dropout=True), (672 + 320) * 7),
        (lora.mlp_forward(**MLP, rank=5, gate=True, up=True, down=True, wide=True, dropout=False), (896 + 320) * 7),
        (lora.mlp_forward(**MLP, rank=5, gate=True, up=True, down=True, wide=False, dropout=True), (896 + 160) * 7),
        (lora.mlp_forward(**MLP, rank=5, gate=False, up=False, down=True, wide=True, dropout=False),
         (896 + 240 + 10) * 7),
        (lora.mlp_forward(**MLP, rank=5, gate=True, up=True, down=True, wide=True, dropout=True),
         (1344 + 240 + 10) * 7),
        (moe.forward(**EXPERTS, weight_bytes=2, biased=False), (3 * (8 * 40 + 34) + 160) * 7),
        (moe.forward(**EXPERTS, weight_bytes=4, biased=True), (3 * (80 + 18 * 24 + 34) + 160) * 7),
        (moe.output_forward(**CHOSEN, weight_bytes=4), (24 + 4) * 40 * 7),
        (attention.qk_norm(**SHAPE, wide=False, full=False, frozen=False), (6 * 9 * 16 + 36) * 7),
        (attention.qk_norm(**SHAPE, wide=True, full=True, frozen=False), (8 * 9 * 16 + 8) * 7),
        (attention.qk_norm(**SHAPE, wide=False, full=False, frozen=True), (4 * 9 * 16 + 36) * 7),
        (attention.kept_outputs(num_layers=5, tokens=T, heads=HEADS, head_dim=D), 5 * (192 + 24) * 7),
        (attention.fused_qkv(**SHAPE), 2 * 9 * 16 * 7),
        (attention.saved(**SHAPE), (384 + 192 + 24) * 7),
        (attention.output_copy(tokens=T, heads=HEADS, head_dim=D), 1344),
        (attention.backward(**SHAPE), (768 + 192 + 24 + 384) * 7),
        (attention.backward(**EVEN), (768 + 384 + 24) * 7),
        (attention.ring_gathered_kv(cp_size=8, allgather=True, **WHOLE), 9 * 192 * 7),
        (attention.ring_gathered_kv(cp_size=8, allgather=False, **WHOLE), 3 * 192 * 7),
        (attention.ring_gathered_kv(cp_size=2, allgather=False, **WHOLE), 2 * 192 * 7),
        (attention.ring_backward(first_rank=True, **SUMS), (8 * 96 + 28 * 48 + 3 * 96 + 4 * 48 + 24 + 4 * 96) * 7),
        (attention.ring_backward(first_rank=False, **SUMS), (8 * 96 + 28 * 48 + 6 * 96 + 2 * 48 + 24 + 2 * 96) * 7),
        (attention.ring_backward(first_rank=True, **SUMS_EVEN), (12 * 96 + 32 * 96) * 7),
        (attention.ring_backward(first_rank=False, **SUMS_EVEN), (36 * 96 + 8 * 96 + 24) * 7),
        (attention.ring_gathered_kv(tokens=T, kv_heads=KV, head_dim=D, cp_size=8, allgather=True, head_chunks=3),
         9 * 64 * 7),
        (attention.ring_backward(first_rank=True, head_chunks=1, merge_bytes=2, **SHAPE),
         (6 * 96 + 16 * 48 + 3 * 96 + 4 * 48 + 24 + 4 * 96) * 7),
        (attention.ring_backward(first_rank=True, head_chunks=1, merge_bytes=2, **EVEN), (6 * 96 + 24 * 96) * 7),
        (attention.ring_backward(first_rank=False, head_chunks=3, merge_bytes=4, **SHAPE),
         (4 * 96 + 4 * 48) * 7 + (6 * 96 + 28 * 48 + 6 * 96 + 2 * 48 + 24 + 2 * 96) * 7 // 3),
        (loss_head.final_norm(tokens=T, hidden_size=H, float32=False, frozen=False), 244 * 7),
        (loss_head.final_norm(tokens=T, hidden_size=H, float32=True, frozen=False), 324 * 7),
        (loss_head.final_norm(tokens=T, hidden_size=H, float32=False, frozen=True), 164 * 7),
        (loss_head.final_norm_backward(tokens=T, hidden_size=H), 24 * 40 * 7),
        (loss_head.chunks_of_rows(tokens=T, vocab_size=V, hidden_size=H), 176 * 7 + 44_800 + 16 * 256 * V),
        (
            loss_head.chunks_of_rows(tokens=T, vocab_size=V, hidden_size=4096),
            (16_384 + 16) * 7 + 6 * V * 4096 + 512 * 4096,
        ),
        (loss_head.hidden_states(tokens=T, hidden_size=H), 348 * 7),
        (loss_head.weight_gradient(vocab_size=V, hidden_size=H, float32=False), 6 * 22_400),
        (loss_head.weight_gradient(vocab_size=V, hidden_size=H, float32=True), 4 * 22_400),
        (loss_head.logits_tile(tokens=T), 2 * 7 * 32768),
        (loss_head.logits_tile(tokens=10_000), 256 * 2**20),
        (loss_head.casts(tokens=T, hidden_size=H, vocab_size=151_936), 2 * 40 * (65_536 + 7)),
        (loss_head.casts(tokens=T, hidden_size=H, vocab_size=V), 2 * 40 * (560 + 7)),
        (loss_head.casts(tokens=4097, hidden_size=H, vocab_size=V), 2 * 40 * (2 * 560 + 4096)),
        (loss_head.full_logits(tokens=T, vocab_size=V, hidden_size=H), (6720 + 80) * 7),
        # 7*40*2 = 560 bytes a layer become 1024
        (host.pinned_layer_inputs(num_layers=5, tokens=T, hidden_size=H, dtype_bytes=2), 5120),
        (lora.adapters(num_parameters=1001, dtype_bytes=4, ranks=8), 501),
        (lora.dropped_inputs(tokens=T, sum_of_inputs=100, num_targets=3, rank=5), (300 + 30) * 7),
        (lora.weight_casts(layer_parameters=11), 22),
        (lora.saved(tokens=T, sum_of_inputs=100, num_targets=3, rank=5), (200 + 30) * 7),
        (lora.shared_inputs(tokens=T, sum_of_inputs=100, num_targets=3, rank=5), (200 + 30) * 7),
        (lora.down_forward(**MLP, wide=True, dropout=False), (672 + 320) * 7),
        (lora.down_forward(**MLP, wide=True, dropout=True), (1120 + 320) * 7),
        (lora.down_forward(**MLP, wide=False, dropout=True), (224 + 320) * 7),
        (moe.router(tokens=T, num_experts=12, experts_per_token=3), (48 + 102) * 7),
        (moe.experts(tokens=T, hidden_size=H, experts_per_token=3, expert_size=24), 3 * (160 + 192) * 7),
        (moe.backward(**CHOSEN, weight_bytes=2, recomputed=True), 3 * (240 + 32) * 7),
        (moe.backward(**CHOSEN, weight_bytes=4, recomputed=True), 3 * (480 + 32) * 7),
        (moe.backward(**CHOSEN, weight_bytes=4, recomputed=False), 3 * (560 + 32) * 7),
        (moe.biased_experts(tokens=T, hidden_size=H, experts_per_token=3, expert_size=24), 3 * (160 + 336) * 7),
        (moe.biased_gate_forward(tokens=T, experts_per_token=3, expert_size=24), 3 * 144 * 7),
        (moe.biased_output_forward(tokens=T, hidden_size=H, experts_per_token=3), 3 * 240 * 7),
        (moe.gate_backward(**EXPERTS, biased=False), 3 * (80 + 288) * 7),
        (moe.gate_backward(**EXPERTS, biased=True), 3 * (80 + 432) * 7),
        (attention.flash_backward(row_tokens=T, **SHAPE), (4 * 96 + 4 * 48 + 4 * 96) * 7 + 4 * 6 * 33 * 128),
        (attention.flash_backward(row_tokens=T, **EVEN), (4 * 96 + 4 * 96) * 7 + 4 * 6 * 33 * 128),
        (attention.masks(tokens=14, row_tokens=7, num_masks=2, element_bytes=2), 2 * 2 * 2 * 49),
        (attention.masked_saved(tokens=T, row_tokens=T, heads=6, repeated_heads=6, head_dim=16), (768 + 24 + 14) * 7),
        (attention.masked_saved(tokens=T, row_tokens=T, heads=6, repeated_heads=1, head_dim=16), (448 + 24 + 14) * 7),
        (attention.masked_backward(tokens=T, heads=6, head_dim=16), (1152 + 24) * 7),
        (attention.eager_saved(**SCORES), (6 * 42 + 768) * 7),
        (attention.eager_saved(**SCORES | {"soft_capped": True}), (6 * 56 + 768) * 7),
        (attention.eager_saved(**SCORES | {"sinks": True}), (6 * (16 + 8) + 768) * 7),
        (attention.eager_backward(**SCORES), (6 * 112 + 576) * 7),
        (attention.eager_backward(**SCORES | {"soft_capped": True}), (6 * 126 + 576) * 7),
        (attention.eager_backward(**SCORES | {"sinks": True}), (6 * (64 + 8) + 576) * 7),
        (moe.gate_up_backward(tokens=T, hidden_size=H, experts_per_token=3, expert_size=24), 3 * (160 + 96) * 7),
        (moe.router_gradients(tokens=T, num_experts=12, num_layers=5), 2 * 12 * 7 * 5),
        (gradients.all_reduce_input(num_parameters=1001, ranks=8), 251),
        # 4 * 100 / 8 = 50 bytes become 64, 4 * 1000 / 8 = 500 become 512
        (host.pinned_shards(parameters=(100, 1000), ranks=8), 2 * (64 + 512)),
        (host.optimizer_states(num_parameters=1001, ranks=8), 1001),
        (host.load_copies(num_parameters=10, dtype_bytes=4, copies=3), 120),
        (deepspeed.master_weights(num_parameters=1001, ranks=8), 501),
        (deepspeed.gradient_shards(num_parameters=1001, ranks=8), 251),
        (deepspeed.bucket(dtype_bytes=2), 10**9),
        (deepspeed.bucket(dtype_bytes=4), 2 * 10**9),
        (deepspeed.offload_buffer(largest_parameter=V * H), 44_800),
        (deepspeed.gathered(elements=11), 22),
        (deepspeed.persistent(elements=11), 22),
        (deepspeed.own_gradients(elements=11), 22),
        (deepspeed.partition_gradients(elements=11), 22),
        (deepspeed.reduction(copies=1, elements=1001, dtype_bytes=2, ranks=8), 2002),
        (deepspeed.reduction(copies=0, elements=1001, dtype_bytes=2, ranks=8), 0),
        # two float32 copies, and an eighth in bf16
        (deepspeed.reduction(copies=2, elements=1001, dtype_bytes=4, ranks=8), 8008 + 251),
        (deepspeed.offloaded_slice(elements=1001, returns=False), 8008),
        (deepspeed.offloaded_slice(elements=1001, returns=True), 2002 + 8008),
        (deepspeed.offloaded_slice(elements=10**9, returns=True), 2 * 10**9 + 2 * 10**9),
        (deepspeed.norm(largest_slice=1001), 8008),
        (deepspeed.float32_gradient(elements=1001, slices=1), 4004),
        (deepspeed.float32_gradient(elements=1001, slices=2), 6006),
        (deepspeed.ulysses_batch(sequence_tokens=28, tokens_per_rank=T), 8 * (4 * 28 + 7)),
        (weights.zero_checkpoint(num_parameters=10), 140),
        # 4 * 100 bytes become 512, 4 * 1000 become 4096; stage 2 has masters beside the gradients
        (host.zero_pinned_gradients(updated=(100, 1000), masters_too=False), 512 + 4096),
        (host.zero_pinned_gradients(updated=(100, 1000), masters_too=True), 2 * (512 + 4096)),
        (host.zero_pinned_copies(buffers=(100, 1000)), 256 + 2048),
        (host.zero_masters(num_parameters=1001, ranks=8), 501),
        (runtime.cublas_workspace(), 67_108_864),
        (runtime.cuda_context(), 957_153_280),
        (runtime.nccl(), 2_156_789_760 - 957_153_280),
        (runtime.nccl(ulysses=True), 24_038_473_728 - 21_153_972_224 - 957_153_280),
        (runtime.allocator_slack(peak_allocated_bytes=1001), 36),
    ],
)  # fmt: skip
def test_item_by_hand(value: int, expected: int) -> None:
    assert value == expected


def test_published_figure_of_offload() -> None:
    """Qwen3-8B at 131,072 tokens a rank: 36 GiB of layer inputs (transformers #48444 names the same)."""
    assert activations.layer_inputs(num_layers=36, tokens=131_072, hidden_size=4096, dtype_bytes=2) == 36 * 2**30
    assert activations.layer_inputs(num_layers=8, tokens=8192, hidden_size=1024, dtype_bytes=2) == 128 * 2**20


def test_pinned_blocks_are_rounded_up() -> None:
    """Qwen3-32B at 1M on 8 ranks: 1.25 GiB a layer takes 2 GiB."""
    assert host.pinned_layer_inputs(num_layers=64, tokens=131_072, hidden_size=5120, dtype_bytes=2) == 128 * 2**30


def test_pinned_blocks_of_kept_layers_fill_their_powers_of_two() -> None:
    """Qwen3-32B at 1M on 8 ranks: inputs of 1.25 GiB, outputs of 2 GiB, logsumexp of 32 MiB, nothing wasted."""
    size = {"tokens": 131_072, "hidden_size": 5120, "heads": 64, "head_dim": 128, "dtype_bytes": 2}
    assert host.pinned_kept_layers(num_layers=64, **size) == 64 * (1280 + 2048 + 32) * 2**20
    # 2*40*90,000 bytes are 3 blocks of 2 MiB and 908,544 bytes; 2*96*90,000 are 8 and 502,784; 4*6*90,000 are 2,160,000
    small = {"tokens": 90_000, "hidden_size": 40, "heads": 6, "head_dim": 16, "dtype_bytes": 2}
    block = host.LAST_BLOCK
    by_hand = (3 * block + (1 << 20)) + (8 * block + (1 << 19)) + (block + (1 << 16))
    assert host.pinned_kept_layers(num_layers=5, **small) == 5 * by_hand


@pytest.mark.parametrize("key", sorted(ITEMS))
def test_every_item_says_where_it_comes_from(key: str) -> None:
    found = ITEMS[key]
    assert found.formula
    assert len(found.source) > 10
    assert found.confidence in ("exact", "modelled", "fitted")
    if found.confidence == "fitted":
        assert "row" in found.source, "a fitted constant cites its measurements"


def test_an_item_without_its_facts_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match=r"lacks.*Source"):

        @item("test.undocumented", "activation")
        def undocumented() -> int:
            """Nothing said.

            Formula: 1
            """
            return 1

    assert "test.undocumented" not in ITEMS


def test_a_key_is_taken_once() -> None:
    taken: Item[...] = ITEMS["mlp.saved"]
    with pytest.raises(TypeError, match="twice"):
        item("mlp.saved", "activation")(taken.function)


def _constants() -> list[tuple[str, str, str]]:
    """Module, name and documentation of every constant of the estimators."""
    found = []
    for file in resources.files("lcplan.estimators").iterdir():
        if file.name.endswith(".py"):
            body = ast.parse(file.read_text("utf-8")).body
            for statement, following in zip(body, [*body[1:], None], strict=True):
                if isinstance(statement, ast.Assign) and isinstance(name := statement.targets[0], ast.Name):
                    documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                    text = str(following.value.value) if documented else ""  # type: ignore[union-attr]
                    if name.id.isupper() and len(name.id) > 1 and not name.id.startswith("_"):
                        found.append((file.name, name.id, text))
    return found


def test_every_constant_carries_its_source() -> None:
    constants = _constants()
    assert len(constants) >= 10
    assert [(module, name) for module, name, text in constants if len(text) < 20] == []
