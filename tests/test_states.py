"""Weights, gradients and optimizer states that are not the plain ones: 8-bit, 4-bit, frozen, not resharded."""

from __future__ import annotations

from typing import Any

import pytest

from lcplan.estimators import formula
from lcplan.estimators.host_need import host_items, host_need
from lcplan.estimators.layer import Alive
from tests.conftest import plan_of, tiny_spec

LINEARS = 40 * 96 * 2 + 2 * 40 * 48 + 3 * 40 * 112
LAYER = LINEARS + 2 * 16 + 80
TABLE = 560 * 40
P = 5 * LAYER + 40 + 2 * TABLE
SIDES = (40 + 96) + 2 * (40 + 48) + (96 + 40) + 2 * (40 + 112) + (112 + 40)
"""Inputs and outputs of all linears of a layer."""


def phases(*, tied: bool = False, **given: Any) -> dict[str, Alive]:
    spec = tiny_spec(tie_word_embeddings=tied)
    return formula.instants(spec, plan_of(spec, **given)).phases


def test_torchao_keeps_every_moment_in_8_bits() -> None:
    step = phases(max_length=64, optim="adamw_torch_8bit")["optimizer_step"]
    assert step["optimizer.adamw_8bit_states"] == 2 * P + 8 * P // 256
    assert step["optimizer.torchao_update"] == 8 * TABLE + 8 * TABLE // 256, "the tables are the largest matrices"
    sharded = phases(max_length=64, optim="adamw_torch_8bit", num_gpus=4)["optimizer_step"]
    assert sharded["optimizer.adamw_8bit_states"] == -(-(2 * P + 8 * P // 256) // 4)


def test_torchao_updates_the_largest_matrix_that_is_trained() -> None:
    frozen: dict[str, Any] = {"freeze_embeddings": True, "freeze_head": True}
    for tied in (True, False):
        step = phases(max_length=64, tied=tied, optim="adamw_torch_8bit", **frozen)["optimizer_step"]
        assert step["optimizer.torchao_update"] == 8 * 40 * 112 + 8 * 40 * 112 // 256


def test_bitsandbytes_leaves_the_embedding_wide() -> None:
    step = phases(max_length=64, optim="adamw_bnb_8bit")["optimizer_step"]
    assert step["optimizer.wide_embedding_states"] == 8 * TABLE
    rest = P - TABLE
    assert step["optimizer.adamw_8bit_states"] == 2 * rest + 8 * rest // 256
    frozen = phases(max_length=64, optim="adamw_bnb_8bit", freeze_embeddings=True)["optimizer_step"]
    assert "optimizer.wide_embedding_states" not in frozen


def test_paged_states_are_not_in_the_allocator_but_on_the_host_if_need_be() -> None:
    spec = tiny_spec()
    for optim, scales, states in (
        ("paged_adamw_8bit", 8 * (P - TABLE) // 256, 2 * (P - TABLE) + 8 * TABLE),
        ("paged_adamw_32bit", 0, 8 * P),
    ):
        plan = plan_of(spec, max_length=64, optim=optim)
        step = formula.instants(spec, plan).phases["optimizer_step"]
        assert step.get("optimizer.paged_scales", 0) == scales
        assert "optimizer.adamw_states" not in step
        assert host_items(spec, plan)["host.paged_states"] == states
        assert host_need(spec, plan).other_bytes_per_rank == states


def test_small_adapters_are_not_paged() -> None:
    """Below 100,000 elements: all of them here."""
    adapters = 5 * 8 * SIDES
    step = phases(max_length=64, optim="paged_adamw_8bit", lora_r=8)["optimizer_step"]
    assert step["optimizer.adamw_8bit_states"] == 2 * adapters + 8 * adapters // 256
    step = phases(max_length=64, optim="paged_adamw_32bit", lora_r=8)["optimizer_step"]
    assert step["optimizer.adamw_states"] == 8 * adapters


def test_qlora_packs_the_linears_and_trains_narrow_adapters() -> None:
    t = 4096
    alive = phases(max_length=t, lora_r=8, quantize="nf4")
    step = alive["optimizer_step"]
    adapters = 5 * 8 * SIDES
    assert step["weights.parameters"] == 2 * (P - 5 * LINEARS), "norms and tables stay bf16"
    scales = -(-5 * LINEARS // 64)
    assert step["weights.nf4"] == -(-5 * LINEARS // 2) + scales + 4 * -(-scales // 256)
    assert step["lora.adapters"] == step["gradients.finished"] == 2 * adapters
    assert step["optimizer.adamw_states"] == 4 * adapters
    mlp = alive["backward[4].mlp"]
    assert mlp["lora.shared_inputs"] == (2 * 2 * 40 + 2 * 8 * 6) * t, "down_proj's own is over"
    assert mlp["gradients.current_layer"] == 2 * 8 * (112 + 40)
    down = alive["backward[4].down_proj_backward"]
    assert down["weights.dequantised"] == 2 * 40 * 112
    assert sum(mlp.values()) - sum(down.values()) == 2 * 112 * t - 2 * 40 * 112


def test_qlora_under_fsdp2_shards_what_is_packed() -> None:
    alive = phases(max_length=1024, lora_r=8, quantize="nf4", num_gpus=4)["backward[1].mlp"]
    scales = -(-5 * LINEARS // 64)
    assert alive["weights.nf4"] == -(-5 * LINEARS // 8) + scales + 4 * -(-scales // 256)
    assert alive["weights.gathered_nf4_layers"] == LINEARS
    assert alive["weights.gathered_layers"] == 2 * 2 * (LAYER - LINEARS + 8 * SIDES)
    assert alive["gradients.finished"] == -(-2 * 3 * 8 * SIDES // 4), "adapters on a 4-bit base stay bf16"


def test_dropout_gives_every_adapter_its_own_input() -> None:
    t = 4096
    wide = phases(max_length=t, lora_r=8, lora_dropout=0.1)["backward[4].down_proj"]
    inputs = 3 * 40 + 96 + 2 * 40 + 112
    assert wide["lora.dropped_inputs"] == (3 * inputs + 2 * 8 * 7) * t
    assert wide["lora.down_forward"] == (10 * 112 + 8 * 40) * t
    assert wide["lora.weight_casts"] == 2 * 8 * SIDES
    narrow = phases(max_length=t, lora_r=8, lora_dropout=0.1, quantize="nf4")
    assert narrow["backward[4].down_proj"]["lora.down_forward"] == (2 * 112 + 8 * 40) * t
    assert narrow["backward[4].mlp"]["lora.dropped_inputs"] == (3 * (inputs - 112) + 2 * 8 * 6) * t
    assert "lora.weight_casts" not in narrow["backward[4].mlp"]


def test_a_frozen_output_projection_needs_no_copy_of_the_attention_output() -> None:
    sizes: dict[str, Any] = {"max_length": 4096, "num_gpus": 4, "cp_size": 4, "lora_r": 8}
    assert "attention.output_copy" in phases(**sizes)["backward[0].mlp"]
    assert "attention.output_copy" not in phases(**sizes, lora_dropout=0.1)["backward[0].mlp"]
    assert "attention.output_copy" not in phases(**sizes, lora_target_modules="q_proj,v_proj")["backward[0].mlp"]


def test_frozen_tables_have_no_gradient_and_no_states() -> None:
    alive = phases(max_length=64, freeze_embeddings=True)
    assert alive["optimizer_step"]["gradients.finished"] == 2 * (P - TABLE)
    assert alive["optimizer_step"]["optimizer.adamw_states"] == 4 * (P - TABLE)
    assert alive["optimizer_step"]["weights.parameters"] == 2 * P
    assert "gradients.embedding" not in alive["backward.embedding"]
    assert "loss_head.weight_gradient" in alive["loss"]
    alive = phases(max_length=64, freeze_head=True)
    assert alive["optimizer_step"]["gradients.finished"] == 2 * (P - TABLE)
    assert "loss_head.weight_gradient" not in alive["loss"]
    assert "gradients.current_layer" not in alive["final_norm"]
    sharded = phases(max_length=64, freeze_embeddings=True, num_gpus=4)["optimizer_step"]
    assert sharded["weights.parameters"] == P - TABLE + TABLE // 2, "frozen weights are not upcast"


def test_the_final_norms_backward_wins_without_checkpointing_where_few_tokens_are_scored() -> None:
    alive = phases(max_length=2048, scored_fraction=0.1, activation_checkpointing="none")
    assert alive["final_norm"]["loss_head.final_norm_backward"] == 24 * 40 * 2048
    assert alive["final_norm"]["gradients.current_layer"] == 2 * TABLE
    assert alive["loss"]["loss_head.hidden_states"] == (8 * 40 + 28) * 205
    assert alive["loss"]["loss_head.logits_tile"] == 2 * 205 * 32_768


def test_trl_113_scores_256_rows_at_a_time() -> None:
    loss = phases(max_length=4096, loss="chunked-256")["loss"]
    assert loss["loss_head.chunks_of_rows"] == (4 * 40 + 16) * 4096 + 2 * TABLE + 16 * 256 * 560
    assert "loss_head.weight_gradient" not in loss


@pytest.mark.parametrize("tied", [True, False])
def test_without_resharding_layers_stay_gathered_until_their_backward(tied: bool) -> None:
    sizes: dict[str, Any] = {"max_length": 1024, "num_gpus": 4, "reshard_after_forward": False, "tied": tied}
    alive = phases(**sizes)
    assert alive["loss"]["weights.gathered_layers"] == 5 * 2 * LAYER
    # the last layer's weights are still in the buffer that they were gathered into, until the head is gathered
    assert alive["forward"]["weights.gathered_layers"] == (6 if tied else 5) * 2 * LAYER
    assert alive["backward[1].mlp"]["weights.gathered_layers"] == 2 * 2 * LAYER
    assert alive["backward[0].mlp"]["weights.gathered_layers"] == 2 * LAYER
    assert alive["backward[0].mlp"].get("weights.gathered_embedding", 0) == (0 if tied else 2 * TABLE)
    assert "weights.gathered_layers" not in alive["optimizer_step"]


def test_ddp_keeps_everything_and_its_buckets() -> None:
    one, two = phases(max_length=4096), phases(max_length=4096, num_gpus=2, backend="ddp")
    for phase, alive in two.items():
        assert alive == one[phase] | {"communication.ddp_buckets": 2 * P}
    adapters = phases(max_length=64, num_gpus=2, backend="ddp", lora_r=8)["loss"]
    assert adapters["communication.ddp_buckets"] == 4 * 5 * 8 * SIDES
    spec = tiny_spec()
    need = host_need(spec, plan_of(spec, max_length=64, num_gpus=2, gpus_per_node=2, backend="ddp"))
    assert need.load_bytes_per_node == 2 * 2 * P


def test_positions_are_over_when_the_embedding_runs_backward() -> None:
    alive = phases(max_length=4096)
    assert "activations.rotary_tables" in alive["backward[0].mlp"]
    assert "activations.rotary_tables" not in alive["backward.embedding"]
