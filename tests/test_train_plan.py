from __future__ import annotations

from typing import Any

import pytest

from lcplan.errors import PlanError
from lcplan.model_loading import load_model
from lcplan.train_plan import resolve
from tests.conftest import plan_of, tiny_spec


def test_what_is_left_out_is_filled_and_said() -> None:
    plan, assumptions = resolve(
        tiny_spec(), {"max_length": 4096, "gpu": "h100-80gb", "num_gpus": 8, "cp_size": 4}, usual_gpus_per_node=8
    )
    assert (plan.backend, plan.dp_shard_size, plan.cp_size) == ("fsdp2", 2, 4)
    assert plan.tokens_per_rank == 1024
    assert plan.shard_size == 8
    assert plan.length_multiple == 8
    said = " ".join(assumptions)
    for name in ("backend", "dp_shard_size", "dtype", "optim", "loss", "cp_comm_strategy"):
        assert f"{name} = " in said
    assert "cp_size" not in said, "the user chose it"


def test_one_gpu_is_not_sharded() -> None:
    plan = plan_of(tiny_spec(), max_length=100)
    assert (plan.backend, plan.shard_size, plan.length_multiple) == ("single", 1, 1)


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("missing-value", {"max_length": None}, "--max-length is not given"),
    ("missing-value", {"gpu": None}, "--gpu is not given.*lcplan list gpus"),
    ("bad-value", {"num_gpus": 0}, "--num-gpus 0"),
    ("bad-value", {"num_gpus": -8}, "--num-gpus -8"),
    ("bad-value", {"cp_size": True}, "--cp-size True"),
    ("bad-value", {"per_device_train_batch_size": -1}, "--per-device-train-batch-size -1"),
    ("bad-value", {"backend": "megatron"}, "--backend 'megatron'"),
    ("bad-value", {"dtype": "float16"}, "--dtype 'float16'"),
    ("absurd-value", {"max_length": 2**40}, "a unit wrong"),
    ("absurd-value", {"max_length": 2**29, "per_device_train_batch_size": 64}, "a unit wrong"),
    ("absurd-value", {"num_gpus": 2**20}, "--num-gpus"),
    ("bad-gpus-per-node", {"num_gpus": 4, "gpus_per_node": 8}, "Use at most 4"),
    ("bad-gpus-per-node", {"num_gpus": 6, "gpus_per_node": 4}, "no multiple"),
    ("single-backend", {"backend": "single", "num_gpus": 4}, "--backend fsdp2"),
    ("single-backend", {"cp_size": 2}, "one GPU"),
    ("sizes-do-not-multiply", {"num_gpus": 8, "cp_size": 3}, "divide 8: 1, 2, 4, 8"),
    ("sizes-do-not-multiply", {"num_gpus": 8, "cp_size": 2, "dp_shard_size": 2}, "the product must equal"),
    ("cp-with-sp", {"num_gpus": 4, "cp_size": 2, "sp_size": 2}, "not by both"),
    ("sp-backend", {"num_gpus": 4, "sp_size": 2}, "--backend deepspeed"),
    ("cp-backend", {"num_gpus": 4, "cp_size": 2, "backend": "deepspeed"}, "--backend fsdp2"),
    ("ring-without-cp", {"cp_head_chunks": 3}, "--cp-size is 1. Leave it out"),
    ("ring-without-cp", {"cp_merge_dtype": "bfloat16"}, "--cp-merge-dtype bfloat16 is of ring attention"),
    ("prefetch-without-offload", {"offload_prefetch": True}, "it needs --offload-activations"),
    (
        "prefetch-without-offload",
        {"offload_prefetch": True, "offload_activations": True, "activation_checkpointing": "selective"},
        "travel on a side stream anyway",
    ),
    ("cp-head-chunks", {"num_gpus": 2, "cp_size": 2, "cp_head_chunks": 2}, "Use a divisor of 3"),
    ("sp-heads", {"num_gpus": 4, "sp_size": 4, "backend": "deepspeed"}, "Legal sizes: 3, 6"),
    ("length-multiple", {"num_gpus": 8, "cp_size": 8, "max_length": 1_000_001}, "Use --max-length 1000000 or 1000016"),
    ("length-multiple", {"num_gpus": 8, "cp_size": 8, "max_length": 5}, "Use --max-length 16"),
    ("cp-packing", {"num_gpus": 2, "cp_size": 2, "packing": True}, "--no-packing"),
    ("cp-attention", {"num_gpus": 2, "cp_size": 2, "attn_implementation": "flash_attention_2"}, "sdpa"),
    ("offload-without-checkpointing", {"offload_activations": True, "activation_checkpointing": "none"}, "full"),
    ("two-offloads", {"offload_activations": True, "activation_offloading": True}, "alone"),
    ("unknown-optim", {"optim": "lion"}, "adamw_torch_fused"),
    ("unknown-optim", {"optim": "muon"}, "adamw_torch_fused"),
    ("optim-sharded", {"optim": "adamw_bnb_8bit", "num_gpus": 2}, "adamw_torch_8bit"),
    ("optim-sharded", {"optim": "adafactor", "num_gpus": 2}, "fails on sharded"),
    ("without-lora", {"quantize": "nf4"}, "--quantize nf4 without --lora-r"),
    ("without-lora", {"lora_dropout": 0.1}, "--lora-dropout without --lora-r"),
    ("bad-value", {"lora_r": 8, "lora_dropout": 1.0}, "--lora-dropout 1.0"),
    ("quantize-dtype", {"quantize": "nf4", "lora_r": 8, "dtype": "float32"}, "--dtype bfloat16"),
    ("freeze-with-lora", {"lora_r": 8, "freeze_head": True}, "whole base model"),
    ("bad-value", {"scored_fraction": 0}, "--scored-fraction 0"),
    ("bad-value", {"scored_fraction": 1.5}, "--scored-fraction 1.5"),
    ("other-backend", {"zero_stage": 3}, "--zero-stage is a choice of --backend deepspeed"),
    ("other-backend", {"offload_optimizer": True, "num_gpus": 2}, "deepspeed, not of fsdp2"),
    ("other-backend", {"reshard_after_forward": False}, "fsdp2, not of single"),
    (
        "offload-params-stage",
        {"backend": "deepspeed", "num_gpus": 2, "zero_stage": 2, "offload_params": True},
        "--zero-stage 3",
    ),
    ("bad-value", {"backend": "deepspeed", "num_gpus": 2, "zero_stage": 4}, "--zero-stage 4"),
    ("deepspeed-sizes", {"backend": "deepspeed", "num_gpus": 4, "dp_replicate_size": 2}, "--dp-shard-size 4"),
    (
        "ddp-sizes",
        {"backend": "ddp", "num_gpus": 4, "dp_replicate_size": 2, "dp_shard_size": 2},
        "must be 4, not 2",
    ),
]


@pytest.mark.parametrize(("code", "changes", "message"), REFUSALS)
def test_refusals(code: str, changes: dict[str, Any], message: str) -> None:
    given = {"max_length": 4096, "gpu": "h200"} | changes
    with pytest.raises(PlanError, match=message) as caught:
        resolve(tiny_spec(), given, usual_gpus_per_node=8)
    assert caught.value.code == code


def test_a_tied_table_is_frozen_as_a_whole() -> None:
    with pytest.raises(PlanError, match="one table") as caught:
        plan_of(tiny_spec(tie_word_embeddings=True), max_length=64, freeze_head=True)
    assert caught.value.code == "freeze-tied"


def test_ddp_replicates_and_deepspeed_shards_over_all_of_its_gpus() -> None:
    ddp = plan_of(tiny_spec(), max_length=64, num_gpus=4, backend="ddp")
    assert (ddp.dp_replicate_size, ddp.dp_shard_size, ddp.shard_size) == (4, 1, 1)
    zero = plan_of(tiny_spec(), max_length=66, num_gpus=6, sp_size=3, backend="deepspeed")
    assert (zero.zero_stage, zero.dp_shard_size, zero.shard_size) == (3, 2, 6)


def test_a_windowed_model_never_gets_context_parallelism() -> None:
    for name in ("openai/gpt-oss-20b", "google/gemma-3-4b-pt"):
        with pytest.raises(PlanError, match="sliding_attention.*full attention"):
            plan_of(load_model(name), max_length=4096, num_gpus=2, cp_size=2)


def test_legal_ulysses_sizes_are_accepted() -> None:
    plan = plan_of(tiny_spec(), max_length=4096 * 3, num_gpus=3, sp_size=3, backend="deepspeed")
    assert plan.length_multiple == 3
