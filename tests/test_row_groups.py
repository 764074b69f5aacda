"""The summary of `lcplan check` by family and lever."""

from __future__ import annotations

import pytest

from lcplan.checking import check_rows, load_rows
from lcplan.row_groups import LEVER_NAMES, GroupedRow, figures, group_rows, lever_names
from tests.conftest import plan_of, tiny_spec

PULLED = {
    "one-gpu": {},
    "context-parallel": {"num_gpus": 4, "cp_size": 4},
    "cp-head-chunks": {"num_gpus": 4, "cp_size": 4, "cp_head_chunks": 3},
    "cp-merge-bfloat16": {"num_gpus": 4, "cp_size": 4, "cp_merge_dtype": "bfloat16"},
    "alltoall": {"num_gpus": 4, "cp_size": 4, "cp_comm_strategy": "alltoall"},
    "data-parallel": {"num_gpus": 2},
    "replicated": {"num_gpus": 4, "dp_replicate_size": 2},
    "deepspeed": {"num_gpus": 2, "backend": "deepspeed"},
    "ulysses": {"num_gpus": 3, "backend": "deepspeed", "sp_size": 3, "max_length": 768},
    "offload-activations": {"offload_activations": True},
    "offload-prefetch": {"offload_activations": True, "offload_prefetch": True},
    "activation-offloading": {"activation_offloading": True},
    "offload-params": {"offload_params": True},
    "checkpointing-none": {"activation_checkpointing": "none"},
    "checkpointing-selective": {"activation_checkpointing": "selective"},
    "checkpoint-every-n-layers": {"checkpoint_every_n_layers": 2},
    "not-resharded": {"num_gpus": 2, "reshard_after_forward": False},
    "offload-optimizer": {"num_gpus": 2, "backend": "deepspeed", "offload_optimizer": True},
    "zero-1": {"num_gpus": 2, "backend": "deepspeed", "zero_stage": 1},
    "zero-2": {"num_gpus": 2, "backend": "deepspeed", "zero_stage": 2},
    "zero-3": {"num_gpus": 2, "backend": "deepspeed", "zero_stage": 3},
    "ddp": {"num_gpus": 2, "backend": "ddp"},
    "chunked-256-loss": {"loss": "chunked-256"},
    "masked-labels": {"scored_fraction": 0.5},
    "lora-dropout": {"lora_r": 8, "lora_dropout": 0.1},
    "frozen-tables": {"freeze_head": True},
    "padding": {"padding": True},
    "mlp-tiles": {"mlp_tile_size": 128},
    "fused-kernels": {"kernels": "liger"},
    "full-loss": {"loss": "full"},
    "float32": {"dtype": "float32"},
    "batch": {"per_device_train_batch_size": 2},
    "accumulated": {"gradient_accumulation_steps": 2},
    "lora": {"lora_r": 8},
    "nf4": {"quantize": "nf4", "lora_r": 8},
    "other-optimizer": {"optim": "sgd"},
    "other-attention": {"attn_implementation": "eager"},
    "packing": {"packing": True},
}


@pytest.mark.parametrize("name", [name for name, _ in LEVER_NAMES])
def test_every_lever_is_told_from_the_plan(name: str) -> None:
    spec = tiny_spec()
    plain = lever_names(plan_of(spec, max_length=512))
    assert plain == ("one-gpu",)
    pulled = lever_names(plan_of(spec, **{"max_length": 512, **PULLED[name]}))
    assert name in pulled


def test_figures_by_hand() -> None:
    worst, mean, signed = figures([0.01, -0.03, 0.005])
    assert worst == -0.03
    assert mean == pytest.approx(0.015)
    assert signed == pytest.approx(-0.005)
    assert figures([]) == (None, None, None)


def test_groups_by_hand() -> None:
    rows = [
        GroupedRow("qwen3", ("one-gpu", "batch"), 0.02),
        GroupedRow("qwen3", ("one-gpu",), -0.04),
        GroupedRow("llama", ("context-parallel",), 0.01),
        GroupedRow("llama", ("lora",), None),
        GroupedRow(None, (), None),
    ]
    groups = {(group.kind, group.name): group for group in group_rows(rows)}
    assert list(groups) == [
        ("family", "llama"), ("family", "qwen3"),
        ("lever", "one-gpu"), ("lever", "context-parallel"), ("lever", "batch"), ("lever", "lora"),
    ]  # fmt: skip
    one = groups["lever", "one-gpu"]
    assert (one.num_rows, one.num_refused, one.worst_error) == (2, 0, -0.04)
    assert one.mean_error == pytest.approx(0.03)
    assert one.mean_signed_error == pytest.approx(-0.01)
    llama = groups["family", "llama"]
    assert (llama.num_rows, llama.num_refused, llama.worst_error) == (1, 1, 0.01)
    lora = groups["lever", "lora"]
    assert (lora.num_rows, lora.num_refused) == (0, 1)
    assert lora.worst_error is lora.mean_error is lora.mean_signed_error is None


def test_the_shipped_rows_add_up() -> None:
    report = check_rows(load_rows(), tolerance=0.01)
    families = [group for group in report.groups if group.kind == "family"]
    assert sum(group.num_rows for group in families) == report.num_checked
    assert sum(group.num_refused for group in families) == report.num_refused
    worst = max((group.worst_error for group in families if group.worst_error is not None), key=abs)
    assert worst == report.worst_error
    assert {"one-gpu", "context-parallel", "offload-activations"} <= {group.name for group in report.groups}
