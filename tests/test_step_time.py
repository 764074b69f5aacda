"""Step times by hand, what has none, and the table of memory traffic against the modeling code itself."""

from __future__ import annotations

from typing import Any

import pytest

from lcplan import load_gpu, load_model
from lcplan.estimation import estimate, with_token_budget
from lcplan.estimators import step_time
from lcplan.estimators.step_time import StepParts, StepTimer, Traffic
from lcplan.hardware import GpuSpec, KernelRates, scale_rates
from lcplan.model_spec import ModelSpec
from tests.conftest import plan_of, tiny_spec

RATES = KernelRates(
    measured_on="h200",
    linear_flops=100,
    attention_forward_flops={16: 10},
    attention_backward_flops={16: 20},
    memory_bytes=1000,
    host_copy_bytes=50,
)
L, H, INNER, QUERY, KEY, V, LAYERS = 32, 40, 112, 96, 48, 560, 5
ACTIVE = LAYERS * (H * 2 * (QUERY + KEY) + 3 * H * INNER)
ATTENTION = 2 * L * L * QUERY * LAYERS


HOST = 8 * 50
"""Bytes a second of one GPU alone: what all eight of a node get together."""


def gpu_of(**changes: Any) -> GpuSpec:
    return load_gpu("h200").model_copy(update={"kernel_rates": RATES, "link_bandwidth": 7, **changes})


def parts(spec: ModelSpec | None = None, gpu: GpuSpec | None = None, **given: Any) -> StepParts:
    spec = spec or tiny_spec()
    plan = plan_of(spec, **{"max_length": L} | given)
    timer = StepTimer(spec, gpu or gpu_of(), RATES)
    found = timer.parts(plan)
    assert timer.seconds(plan) == pytest.approx(found.total), "both say the same"
    return found


def test_attention_runs_forward_twice_and_backward_two_and_a_half_times() -> None:
    assert parts().attention == pytest.approx(2 * ATTENTION / 10 + 2.5 * ATTENTION / 20)
    assert parts(activation_checkpointing="none").attention == pytest.approx(ATTENTION / 10 + 2.5 * ATTENTION / 20)
    selective = parts(activation_checkpointing="selective")
    assert selective.attention == parts(activation_checkpointing="none").attention
    assert selective.linear == parts().linear
    every = parts(checkpoint_every_n_layers=2)
    assert every.attention == pytest.approx(1.6 * ATTENTION / 10 + 2.5 * ATTENTION / 20), "3 of 5 layers"


def test_matrix_products_of_the_linears() -> None:
    assert parts().linear == pytest.approx(2 * L * ACTIVE * 4 / 100)
    assert parts(activation_checkpointing="none").linear == pytest.approx(2 * L * ACTIVE * 3 / 100)


def test_tiles_run_an_mlp_forward_more_where_no_recomputation_stops_before_it() -> None:
    """Two tiles of 16 tokens; OLMo 2 ends its layers with a norm, so that a checkpoint recomputes the MLP as well."""
    mlps = LAYERS * 3 * H * INNER
    assert parts(mlp_tile_size=16).linear == parts().linear
    kept = parts(mlp_tile_size=16, activation_checkpointing="none")
    assert kept.linear == pytest.approx(2 * L * (ACTIVE * 3 + mlps) / 100)
    every = parts(mlp_tile_size=16, checkpoint_every_n_layers=2)
    assert every.linear == pytest.approx(2 * L * (ACTIVE * 3.6 + mlps * 0.4) / 100), "2 of 5 layers are not recomputed"
    more = parts(mlp_tile_size=16).elementwise - parts().elementwise
    assert more == pytest.approx((8 * H * L * LAYERS + 6 * mlps) / 1000)
    assert parts(mlp_tile_size=L) == parts()
    olmo = tiny_spec(model_type="olmo2")
    assert parts(olmo, mlp_tile_size=16).linear == pytest.approx(2 * L * (ACTIVE * 4 + mlps) / 100)


def test_frozen_weights_get_no_gradient_and_adapters_do() -> None:
    spec = tiny_spec()
    adapters = (
        2 * LAYERS * (3 * H + QUERY + 2 * KEY + QUERY + H + 2 * H + 2 * INNER + INNER + H)
    )  # rank 2, inputs and outputs of the seven linears
    found = parts(spec, lora_r=2)
    assert found.linear == pytest.approx(2 * L * (ACTIVE * 3 + adapters * 4) / 100)
    assert found.optimizer == pytest.approx(adapters * 4 * 10 / 1000)
    assert found.loss_head < parts(spec).loss_head
    assert found.elementwise > parts(spec).elementwise


def test_the_head_is_computed_once_more_in_chunks() -> None:
    product = 2 * L * H * V / 100
    assert parts().loss_head == pytest.approx(4 * product + (6 + 9 / 4096 * H) * L * V / 1000)
    assert parts(loss="full").loss_head == pytest.approx(3 * product + 28 * L * V / 1000)


def test_elementwise_traffic() -> None:
    forward = 84 * H + 10 * INNER + 60 * QUERY + 60 * KEY
    backward = 214 * H + 18 * INNER + 129 * QUERY + 133 * KEY
    assert parts().elementwise == pytest.approx((2 * forward + backward) * L * LAYERS / 1000)
    wide = parts(dtype="float32").elementwise
    forward, backward = (
        107 * H + 10 * INNER + 97 * QUERY + 85 * KEY, 287 * H + 18 * INNER + 187 * QUERY + 179 * KEY,
    )  # fmt: skip
    assert wide == pytest.approx(((2 * forward + backward) * L * LAYERS + 6 * ACTIVE * 2) / 1000)


def test_experts_count_those_that_are_active() -> None:
    spec = load_model("Qwen/Qwen3-30B-A3B")
    assert spec.moe is not None
    timer = StepTimer(spec, load_gpu("h200"), RATES)
    hidden, experts = spec.hidden_size, spec.moe.num_experts_per_tok * spec.moe.moe_intermediate_size
    attention = hidden * 2 * (32 + 4) * 128
    assert timer.active == 48 * (attention + 3 * hidden * experts + hidden * 128)
    plan = plan_of(spec, max_length=1024)
    routed = 8 * hidden
    forward = 84 * hidden + 10 * experts + 60 * (32 + 4) * 128 + 14 * routed
    backward = 214 * hidden + 18 * experts + (129 * 32 + 133 * 4) * 128 + 36 * routed
    rates = RATES.model_copy(update={"attention_forward_flops": {128: 1}, "attention_backward_flops": {128: 1}})
    found = StepTimer(spec, load_gpu("h200"), rates).parts(plan)
    assert found.elementwise == pytest.approx((2 * forward + backward) * 1024 * 48 / 1000)


def test_ring_attention_merges_and_exchanges() -> None:
    assert parts(num_gpus=4, cp_size=4).attention == pytest.approx(parts().attention / 4)
    found = parts(num_gpus=4, cp_size=4)
    merged = 2 * (12 + 38 * 3) * QUERY + 10 * 5 * QUERY + 44 * 4 * KEY
    assert found.ring == pytest.approx(merged * L // 4 * LAYERS / 1000)
    assert parts().ring == 0
    fast = gpu_of(link_bandwidth=10**15)
    assert parts(gpu=fast, num_gpus=4, cp_size=4).exchange == pytest.approx(0, abs=1e-6), "it all hides"
    slow = parts(gpu=gpu_of(link_bandwidth=1), num_gpus=4, cp_size=4)
    moved = 20 * KEY * (L // 4) * 3 * LAYERS
    gather = 2 * tiny_spec().num_parameters * 3 / 4
    compute = slow.attention + slow.linear + slow.loss_head + slow.elementwise + slow.ring
    assert slow.exchange == pytest.approx(3 * gather - compute + gather / LAYERS + moved - slow.attention)


def test_exchange_between_nodes_takes_the_network() -> None:
    """Kernels so fast that nothing hides: the sum over two replicas goes between nodes, the shards stay inside one."""
    spec = tiny_spec()
    fast = RATES.model_copy(
        update={
            "linear_flops": 1e30, "attention_forward_flops": {16: 1e30}, "attention_backward_flops": {16: 1e30},
            "memory_bytes": 1e30,
        }
    )  # fmt: skip
    gpu = load_gpu("h200").model_copy(update={"link_bandwidth": 1000, "network_bandwidth": 10})
    plan = plan_of(spec, max_length=L, num_gpus=16, dp_shard_size=8, dp_replicate_size=2, gpus_per_node=8)
    gather = 2 * spec.num_parameters * 7 / 8
    summed = 2 * 4 * spec.num_parameters / 8 / 2
    expected = 3 * gather / 1000 + summed / 10 + gather / LAYERS / 1000
    assert StepTimer(spec, gpu, fast).parts(plan).exchange == pytest.approx(expected)


def test_copies_to_the_host() -> None:
    assert parts(offload_activations=True).host_copies == 2 * LAYERS * L * H * 2 / HOST
    assert parts(offload_activations=True, dtype="float32").host_copies == 2 * LAYERS * L * H * 4 / HOST
    assert parts(activation_offloading=True).host_copies == 0, "on a stream of its own"


def test_of_kept_attention_the_inputs_come_back_on_the_compute_stream() -> None:
    kept = parts(activation_checkpointing="selective", offload_activations=True)
    inputs, outputs = LAYERS * L * H * 2, LAYERS * L * (2 * 96 + 4 * 6)
    compute = kept.attention + kept.linear + kept.loss_head + kept.elementwise
    longer = inputs + 2 * outputs - HOST * compute
    assert kept.host_copies == pytest.approx((inputs + max(longer, 0)) / HOST)
    assert kept.attention == parts(activation_checkpointing="none").attention
    slow = gpu_of()
    rates = RATES.model_copy(update={"host_copy_bytes": 1e-3})
    plan = plan_of(tiny_spec(), max_length=L, activation_checkpointing="selective", offload_activations=True)
    found = StepTimer(tiny_spec(), slow, rates).parts(plan)
    assert found.host_copies == pytest.approx((2 * inputs + 2 * outputs) / 8e-3 - compute), "the link is the bound"


def test_a_gpu_has_its_link_to_the_host_or_its_part_of_the_nodes() -> None:
    copied = 2 * LAYERS * 16 * H * 2
    wide = gpu_of(host_link_bandwidth=10**9)
    for num_gpus in (1, 2, 8):
        plan = {"num_gpus": num_gpus, "dp_shard_size": num_gpus, "max_length": 16, "offload_activations": True}
        assert parts(gpu=wide, **plan).host_copies == pytest.approx(copied * num_gpus / (8 * 50))
        assert parts(gpu=gpu_of(host_link_bandwidth=20), **plan).host_copies == pytest.approx(copied / 10)
    two_nodes = {"num_gpus": 16, "dp_shard_size": 16, "gpus_per_node": 8, "max_length": 16, "offload_activations": True}
    assert parts(gpu=wide, **two_nodes).host_copies == pytest.approx(copied / 50), "each node has a memory of its own"


def test_what_comes_a_layer_ahead_hides_but_for_the_last_layers() -> None:
    ahead = parts(offload_activations=True, offload_prefetch=True)
    one, compute = L * H * 2, ahead.total - ahead.host_copies - ahead.optimizer - ahead.exchange
    assert ahead.host_copies == pytest.approx((one + max((2 * LAYERS - 1) * one - HOST * compute, 0)) / HOST)
    assert ahead.host_copies < parts(offload_activations=True).host_copies


def test_copies_of_shards() -> None:
    spec = tiny_spec()
    found = parts(spec, num_gpus=2, dp_shard_size=2, offload_params=True)
    assert found.host_copies == pytest.approx(3 * 4 * spec.num_parameters / 2 / (8 * 50 / 2))
    assert found.optimizer == pytest.approx(spec.num_parameters / 2 * 1.4e-9)


def test_the_optimizer_reads_and_writes_the_states() -> None:
    count = tiny_spec().num_parameters
    assert parts().optimizer == pytest.approx(count * 2 * 10 / 1000)
    assert parts(dtype="float32").optimizer == pytest.approx(count * 4 * 10 / 1000)
    assert parts(num_gpus=2, dp_shard_size=2).optimizer == pytest.approx(count / 2 * 4 * 10 / 1000)


def test_accumulation_repeats_all_but_the_optimizer() -> None:
    one, three = parts(), parts(gradient_accumulation_steps=3)
    assert three.without_optimizer == pytest.approx(3 * one.without_optimizer)
    assert three.optimizer == one.optimizer


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attn_implementation": "eager"}, "causal sdpa"),
        ({"optim": "adamw_torch_8bit"}, "--optim adamw_torch_8bit has not been timed"),
        ({"num_gpus": 2, "offload_params": True, "optim": "sgd"}, "on the host"),
        ({"num_gpus": 2, "backend": "ddp"}, "ddp"),
        ({"num_gpus": 2, "backend": "deepspeed"}, "deepspeed"),
        ({"quantize": "nf4", "lora_r": 8}, "nf4"),
        ({"padding": True}, "padded"),
        ({"freeze_head": True}, "frozen"),
        ({"packing": True}, "packed"),
    ],
)
def test_what_has_no_time_says_why(given: dict[str, Any], reason: str) -> None:
    spec = tiny_spec()
    assert reason in str(step_time.refusal(spec, plan_of(spec, max_length=L, **given), gpu_of()))


def test_a_gpu_or_a_width_that_nobody_timed() -> None:
    spec, llama = tiny_spec(), load_model("meta-llama/Llama-3.2-1B")
    plan = plan_of(spec, max_length=L)
    assert step_time.refusal(spec, plan, gpu_of()) is None
    assert "no kernel has been timed on a100-80gb" in str(step_time.refusal(spec, plan, load_gpu("a100-80gb")))
    assert "head_dim 16" in str(step_time.refusal(spec, plan, load_gpu("h200")))
    assert step_time.refusal(llama, plan_of(llama, max_length=L), load_gpu("h200")) is None
    glm = load_model("microsoft/phi-4")
    assert "float32" in str(step_time.refusal(glm, plan_of(glm, max_length=L, dtype="float32"), load_gpu("h200")))
    nodes = plan_of(spec, max_length=L, num_gpus=16, gpus_per_node=8)
    assert "network" in str(step_time.refusal(spec, nodes, gpu_of(network_bandwidth=None)))


def test_rates_of_another_gpu_are_marked_and_scale_with_the_spec_sheet() -> None:
    h100, h200 = load_gpu("h100-80gb").kernel_rates, load_gpu("h200").kernel_rates
    assert h100 is not None
    assert h200 is not None
    assert h100.scaled
    assert not h200.scaled
    assert h100.linear_flops == h200.linear_flops
    assert h100.memory_bytes == pytest.approx(h200.memory_bytes * 3350 / 4800)
    with pytest.raises(ValueError, match="no measured rates"):
        scale_rates(load_gpu("h200"), load_gpu("a100-80gb"))


def test_pinning_is_paid_once() -> None:
    assert step_time.pinning_seconds(pinned_bytes=55 * 10**8, by_trl=False) == 1
    assert step_time.pinning_seconds(pinned_bytes=33 * 10**8, by_trl=True) == 1


def test_model_flops_by_the_stated_convention() -> None:
    spec = tiny_spec()
    timer = StepTimer(spec, gpu_of(), RATES)
    one = 3 * (2 * (ACTIVE + H * V) * L + ATTENTION)
    assert timer.model_flops(plan_of(spec, max_length=L)) == one
    assert timer.model_flops(plan_of(spec, max_length=L, num_gpus=4, cp_size=4)) == one, "one sequence"
    assert timer.model_flops(plan_of(spec, max_length=L, num_gpus=4, gradient_accumulation_steps=2)) == 8 * one
    frozen = 2 * (2 * (ACTIVE + H * V) * L) + 3 * ATTENTION
    assert timer.model_flops(plan_of(spec, max_length=L, lora_r=4)) == frozen


def test_the_report_says_time_speed_and_utilisation() -> None:
    spec, gpu = load_model("Qwen/Qwen3-8B"), load_gpu("h100-80gb")
    given: dict[str, Any] = {"gpu": gpu.id, "num_gpus": 8, "cp_size": 8, "offload_activations": True, "rope": "auto"}
    report = estimate(spec, plan_of(spec, max_length=2**20, **given), gpu)
    time = report.step_time
    assert time is not None
    assert report.step_time_s == time.seconds == pytest.approx(sum(time.parts.values()))
    assert report.tokens_per_second == pytest.approx(2**20 / time.seconds)
    assert time.tokens_per_second_per_gpu * 8 == pytest.approx(report.tokens_per_second)
    assert 0.3 < time.mfu < 0.4
    assert "spec sheets" in time.rates
    assert "without recomputation" in time.mfu_convention
    assert (report.batch.sequences_per_step, report.batch.tokens_per_step) == (1, 2**20)
    budget = with_token_budget(report, 10**9).token_budget
    assert budget is not None
    assert budget.steps == 954
    assert budget.seconds == pytest.approx(954 * time.seconds)
    assert budget.gpu_hours == pytest.approx(954 * time.seconds * 8 / 3600)


def test_a_plan_without_a_time_says_so_and_still_counts_steps() -> None:
    spec, gpu = load_model("Qwen/Qwen3-0.6B"), load_gpu("a100-80gb")
    report = estimate(spec, plan_of(spec, max_length=1024, gpu=gpu.id), gpu)
    assert report.step_time_s is report.tokens_per_second is report.step_time is None
    assert report.step_time_unknown == "no kernel has been timed on a100-80gb"
    budget = with_token_budget(report, 2000).token_budget
    assert budget is not None
    assert (budget.steps, budget.seconds, budget.gpu_hours) == (2, None, None)


@pytest.mark.train
@pytest.mark.parametrize(("model_type", "float32"), [("qwen3", False), ("llama", True), ("glm4", False)])
def test_the_table_is_what_the_modeling_code_moves(model_type: str, float32: bool) -> None:
    from tools.count_traffic import slopes

    table = step_time.WIDE_TRAFFIC if float32 else step_time.TRAFFIC
    found = slopes(model_type, float32=float32)
    for index, expected in enumerate(table[model_type]):
        assert Traffic(**{width: both[index] for width, both in found.items()}) == expected
