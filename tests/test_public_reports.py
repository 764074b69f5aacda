"""What lcplan says of public reports R01-R16, which are of its own stack (TRL, transformers, accelerate).

Each test says what was reported, what lcplan says, and why the two may differ. Reports of other stacks are in
``test_public_reports_elsewhere``, of single pieces in ``test_public_reports_of_pieces``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from lcplan import Goal, load_gpu, load_model, recommend
from lcplan.backends.accelerate_yaml import accelerate_config
from lcplan.errors import PlanError
from lcplan.estimators import activations, loss_head, runtime, weights
from lcplan.units import GB, GIB, MIB
from tests.conftest import plan_of
from tests.public_reports import (
    AS_PUBLISHED,
    MILLION,
    OURS,
    REPORTS,
    check_refused,
    estimated,
    item_bytes,
    longest,
    peak_gb,
    phase_bytes,
    published,
    unlisted,
)

PLAIN: dict[str, Any] = {
    "activation_checkpointing": "full", "checkpoint_every_n_layers": 1, "offload_activations": False,
    "activation_offloading": False, "offload_params": False, "loss": "full", "mlp_tile_size": 1 << 30,
    "kernels": "none",
}  # fmt: skip
"""The stack before the guide's levers: layers recomputed, full logits, nothing offloaded, MLPs whole."""
WITH_SLACK = 1 + runtime.ALLOCATOR_SLACK_PERMILLE / 1000
"""Device bytes for one byte of tensors."""


def test_r01_qwen3_8b_at_1m_on_one_node() -> None:
    """Reported: 56.2 GB a GPU, it ran. lcplan: 55.1 GB (2.0% less), it fits, and 288 GiB of host memory are pinned.

    May differ: the real run has NCCL and other versions; row m014 measured 55.09 GB without either.
    """
    report = estimated("Qwen/Qwen3-8B", **MILLION, offload_activations=True, rope="auto")
    assert peak_gb(report) == pytest.approx(published("R01")["peak_gb_per_gpu"], rel=AS_PUBLISHED)
    assert report.fits
    assert report.host.pinned_bytes_per_node == 288 * GIB
    assert report.rope is not None
    config = REPORTS["R01"]["config"]
    assert report.rope.model_dump() == config["rope"]
    assert plan_of(load_model("Qwen/Qwen3-8B"), **MILLION).length_multiple == config["pad_to_multiple_of"]


def test_r02_qwen3_06b_at_1m_without_offload() -> None:
    """Reported: 27.9 GB. lcplan: 27.85 GB, of it 7.5 GB of layer inputs; ring attention's backward sets the peak."""
    report = estimated("Qwen/Qwen3-0.6B", **MILLION)
    assert peak_gb(report) == pytest.approx(published("R02")["peak_gb_per_gpu"], rel=AS_PUBLISHED)
    assert item_bytes(report, "activations.layer_inputs") == 28 * 131_072 * 1024 * 2
    assert report.peak_phase.endswith(".attention")


def test_r03_what_offload_saves_at_1m() -> None:
    """Reported: 20.8 GB, 7.1 less than without, of 7.5 moved. lcplan: 20.6 GB, 7.3 less, of 7.5 moved.

    The step takes 0.6% longer, on which lcplan has no figure.
    """
    figures = published("R03")
    plain, offloaded = (estimated("Qwen/Qwen3-0.6B", **MILLION, offload_activations=on) for on in (False, True))
    assert peak_gb(offloaded) == pytest.approx(figures["peak_gb_per_gpu"], rel=AS_PUBLISHED)
    saved, moved = peak_gb(plain) - peak_gb(offloaded), item_bytes(plain, "activations.layer_inputs") / GB
    assert saved == pytest.approx(figures["saved_gb"], rel=AS_PUBLISHED)
    assert moved == pytest.approx(figures["predicted_boundary_gb"], rel=AS_PUBLISHED)
    assert saved < moved


def test_r04_offload_does_not_lower_a_peak_that_the_recomputation_sets() -> None:
    """Reported: 79.43 GB, 24.73 checkpointed, 24.73 offloaded too, although the forward then keeps 1.54 GB less.

    Model and length are missing; 24 layers with 1.61 GB of inputs are 4096 wide at 8,192 tokens, and of such a model
    lcplan says 53.9, 16.6 and 16.5 GB, and after the forward 1.61 GB less, of which accelerate's offload leaves one
    layer's input, 0.07 GB, on the GPU. The peak falls by no more than that, and `recommend` does not offload.
    """
    spec = unlisted(
        "llama", hidden_size=4096, intermediate_size=14_336, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128_256,
    )  # fmt: skip
    figures = published("R04")
    bare, stored, moved = (
        estimated(spec, max_length=8192, num_gpus=8, activation_checkpointing=kept, offload_activations=offload)
        for kept, offload in (("none", False), ("full", False), ("full", True))
    )
    inputs = item_bytes(stored, "activations.layer_inputs")
    assert inputs / GB == pytest.approx(REPORTS["R04"]["config"]["boundary_inputs_gb"], rel=AS_PUBLISHED)
    kept_less = phase_bytes(stored, "forward") - phase_bytes(moved, "forward")
    assert kept_less == phase_bytes(stored, "loss") - phase_bytes(moved, "loss") == inputs
    after = figures["after_forward_gb"]
    assert (kept_less - inputs // 24) / GB == pytest.approx(after["ac"] - after["ac_offload"], rel=AS_PUBLISHED)
    assert stored.peak_allocated_bytes < bare.peak_allocated_bytes / 3
    assert stored.peak_phase == moved.peak_phase == "backward[0].mlp"
    assert stored.peak_allocated_bytes - moved.peak_allocated_bytes == inputs // 24
    gpu = load_gpu("h100-80gb").model_copy(update={"usable_bytes": 20 * GIB})
    levers = recommend(spec, Goal(max_length=8192, gpu=gpu.id, num_gpus=8), gpu).plans[0].levers
    assert {"activation-checkpointing", "selective-checkpointing"} & set(levers)
    assert "offload-activations" not in levers


def test_r05_qwen3_30b_a3b_at_1m() -> None:
    """Reported: 46.0 GB. lcplan refuses experts under context parallelism and under FSDP2 altogether.

    Nearest: the same 131,072 tokens on one GPU keep 39.1 GB alive besides the states, experts' activations only for the
    eight that a token is routed to. Weights and moments of all 30B parameters over 8 GPUs would be 45.8 GB: so they lay
    on the host, as the guide's draft asks from 30B on. The other 7 GB would be ring attention's and gathered layers.
    """
    check_refused("qwen3_moe with --cp-size 8", "Qwen/Qwen3-30B-A3B", **MILLION, offload_activations=True)
    check_refused("qwen3_moe with --backend fsdp2", "Qwen/Qwen3-30B-A3B", num_gpus=8, max_length=131_072)
    report = estimated("Qwen/Qwen3-30B-A3B", max_length=131_072, offload_activations=True)
    states = ("parameter", "optimizer_state", "gradient")
    alive = [item for item in report.items_in(report.peak_phase) if item.category not in states]
    rest = sum(item.num_bytes for item in alive) / GB
    assert rest == pytest.approx(39.10, rel=OURS)
    assert item_bytes(report, "moe.experts") == 8 * (4 * 2048 + 8 * 768) * 131_072
    shard = 12 * report.model.num_parameters / 8 / GB
    assert shard == pytest.approx(45.80, rel=OURS)
    assert rest < published("R05")["peak_gb_per_gpu"] < rest + shard


def test_r06_qwen3_32b_at_1m() -> None:
    """Reported: 60.8 GB with the MLP tiled and states on the host, on a patched stack; untiled, it does not fit.

    Tiled by lcplan's job it is 49.5 GB, of which the MLP is no part: attention's backward sets the peak. 60.8 GB is
    what the step needs when slices of the sequence go through the MLP one after another and none is recomputed: they
    keep what they save, and only the gradients are a slice's (the next test traces that). Untiled, and as the 8B is
    run, 135 GB do not fit; with the states on the host it says 70.6 GB, 70 of 79 GiB on the device, so that it fits,
    against the report, which has no untiled figure. The host needs 1.5 TiB: a node with 1 TiB does not do.
    """
    levers: dict[str, Any] = {**MILLION, "offload_activations": True}
    tiled = estimated("Qwen/Qwen3-32B", **levers, offload_params=True, mlp_tile_size=16_384)
    assert peak_gb(tiled) == pytest.approx(49.49, rel=OURS)
    assert tiled.dominant.key == "attention.ring_backward"
    as_8b = estimated("Qwen/Qwen3-32B", **levers)
    assert not as_8b.fits
    assert peak_gb(as_8b) == pytest.approx(135.5, rel=OURS)
    untiled = estimated("Qwen/Qwen3-32B", **levers, offload_params=True)
    assert untiled.fits
    assert peak_gb(untiled) / published("R06")["peak_gb_per_gpu"] == pytest.approx(1.161, rel=OURS)
    assert untiled.dominant.key == "mlp.saved"
    assert not estimated("Qwen/Qwen3-32B", **levers, offload_params=True, host_memory_bytes=1024 * GIB).fits


@pytest.mark.train
@pytest.mark.filterwarnings("ignore")
def test_r06_tiled_without_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    from lcplan.tracing.trace import trace

    forward, tile = Qwen3MLP.forward, REPORTS["R06"]["config"]["mlp_tile"]

    def in_slices(self: Any, hidden_states: Any) -> Any:
        return torch.cat([forward(self, part) for part in hidden_states.split(tile, dim=1)], dim=1)

    monkeypatch.setattr(Qwen3MLP, "forward", in_slices)
    spec = load_model("Qwen/Qwen3-32B")
    plan = plan_of(spec, **MILLION, offload_activations=True, offload_params=True)
    peak = trace(spec, plan, rank=1, torch_version="2.11.0").peak
    assert peak / GB == pytest.approx(published("R06")["peak_gb_per_gpu"], abs=0.05)


def test_r08_tokens_and_gpus_doubled_together() -> None:
    """Reported: 364, 696 and 1346 s for 1M, 2M and 4M tokens on 8, 16 and 32 GPUs; no memory. lcplan has no step time.

    A GPU keeps its tokens and its part of a layer, and the states are spread thinner: 55.1, 47.1, 43.2 GB. Only with
    the default `allgather` does the last take 49.1 GB, because keys and values of all ranks meet on each. 2M tokens
    fit 8 GPUs with weights and states on the host alone, and 16 without.
    """
    config = REPORTS["R08"]["config"]
    reports = [
        estimated("Qwen/Qwen3-8B", max_length=length, num_gpus=gpus, cp_size=gpus, offload_activations=True,
                  cp_comm_strategy="alltoall")
        for length, gpus in zip(config["seq_len"], config["gpus"], strict=True)
    ]  # fmt: skip
    assert {item_bytes(report, "mlp.saved") for report in reports} == {8 * 12_288 * 131_072}
    assert {report.host.pinned_bytes_per_node for report in reports} == {288 * GIB}
    states = [item_bytes(report, "optimizer.adamw_states") for report in reports]
    assert states == [2 * states[1], states[1], states[1] // 2]
    assert [peak_gb(report) for report in reports] == pytest.approx([55.09, 47.14, 43.23], rel=OURS)
    assert [report.step_time_s for report in reports] == pytest.approx([362.4, 702.0, 1381.0], rel=OURS)
    ratios = [b.step_time_s / a.step_time_s for a, b in pairwise(reports)]  # type: ignore[operator]
    times = published("R08")["step_s"]
    assert ratios == pytest.approx([b / a for a, b in pairwise(times)], rel=0.02)
    gathering = estimated(
        "Qwen/Qwen3-8B", max_length=4 << 20, num_gpus=32, cp_size=32, offload_activations=True,
        cp_comm_strategy="allgather",
    )  # fmt: skip
    assert peak_gb(gathering) == pytest.approx(49.12, rel=OURS)
    assert gathering.dominant.key == "attention.ring_gathered_kv"
    spec, gpu = load_model("Qwen/Qwen3-8B"), load_gpu("h100-80gb")
    goal = {"max_length": 2 << 20, "gpu": gpu.id, "fixed": {"mlp_tile_size": 2 << 20, "kernels": "none"}}
    on_8, on_16 = (recommend(spec, Goal(num_gpus=n, **goal), gpu) for n in (8, 16))
    assert on_8.plans[0].plan.offload_params, "it fits since the states may lie on the host"
    assert on_8.headroom_bytes == 0
    assert on_16.plans[0].plan.tokens_per_rank == 131_072


def test_r09_what_fits_one_node_without_offload() -> None:
    """Reported at 1M: without offload Qwen3-8B fails and 4B is the largest that fits; with it 8B takes 56.2 GB.

    lcplan: 90.4 GB and no; 61.6 GB and yes; 55.1 GB and yes.
    """
    assert not estimated("Qwen/Qwen3-8B", **MILLION).fits
    assert estimated("Qwen/Qwen3-4B", **MILLION).fits
    offloaded = estimated("Qwen/Qwen3-8B", **MILLION, offload_activations=True)
    assert offloaded.fits
    assert peak_gb(offloaded) == pytest.approx(published("R09")["with_offload_gb"], rel=AS_PUBLISHED)


def test_r10_one_saved_tensor_a_layer() -> None:
    """Reported: 40.8 GB at 131k tokens, 29.0 of it because accelerate kept four tensors a layer instead of one.

    lcplan is of the corrected version: 20.5 GB with one (7.5 GB). Four are 30.1 GB, 4% over the report, and three more
    would make 43.1, 6% over; the number of GPUs is missing (8 taken here). The generated job leaves accelerate's own
    checkpointing off.
    """
    report = estimated("Qwen/Qwen3-0.6B", num_gpus=8, max_length=131_072)
    one = item_bytes(report, "activations.layer_inputs") / GB
    assert 4 * one / published("R10")["of_which_interchild_saves_gb"] == pytest.approx(1.037, rel=OURS)
    assert peak_gb(report) == pytest.approx(20.54, rel=OURS)
    assert (peak_gb(report) + 3 * one) / published("R10")["peak_gb"] == pytest.approx(1.056, rel=OURS)
    plan = plan_of(load_model("Qwen/Qwen3-0.6B"), num_gpus=8, max_length=131_072)
    assert accelerate_config(plan, device="gpu")["fsdp_config"]["fsdp_activation_checkpointing"] is False


def test_r11_layer_inputs_by_the_formula() -> None:
    """Reported: 128.0 MB freed with 8 layers, 1024 wide, 8,192 tokens; 36 GB for Qwen3-8B. lcplan: 128 MiB, 36 GiB.

    The report's MB and GB are binary.
    """
    small = activations.layer_inputs(num_layers=8, tokens=8192, hidden_size=1024, dtype_bytes=2)
    resident = published("R11")["resident_after_forward_mb"]
    assert small / MIB == published("R11")["freed_mb"] == pytest.approx(resident["plain"] - resident["offload"])
    large = activations.layer_inputs(num_layers=36, tokens=131_072, hidden_size=4096, dtype_bytes=2)
    assert large / GIB == published("R11")["qwen3_8b_128k_gb"]


def test_r12_longest_sequence_by_loss() -> None:
    """Reported: Qwen3-4B on 80 GB reaches 32k with the plain and 128k with the chunked loss; 0.6B 48k (fails), 400k.

    lcplan: 28,027 and 140,358, so 128k fits and 160k does not; 0.6B 40,974 and 535,124. Of the plain 32k row m016
    measured what lcplan says, 90.7 GB; it would fit 80 GB if the loss kept 10 bytes a logit where that row has 12.
    The revision of the 0.6B figures is older than the stack that lcplan is of.
    """
    plain = estimated("Qwen/Qwen3-4B", max_length=32_768, loss="full")
    assert not plain.fits
    assert peak_gb(plain) == pytest.approx(90.67, rel=OURS)
    assert plain.dominant.key == "loss_head.full_logits"
    assert plain.device_peak_bytes - 2 * WITH_SLACK * 32_768 * 151_936 < plain.gpu.usable_bytes
    assert longest("Qwen/Qwen3-4B", **PLAIN) == pytest.approx(28_027, rel=OURS)
    assert longest("Qwen/Qwen3-4B", **PLAIN | {"loss": "chunked"}) == pytest.approx(140_358, rel=OURS)
    assert longest("Qwen/Qwen3-0.6B", **PLAIN) == pytest.approx(40_974, rel=OURS)
    assert longest("Qwen/Qwen3-0.6B", **PLAIN | {"loss": "chunked"}) == pytest.approx(535_124, rel=OURS)


@pytest.mark.parametrize(
    ("plan", "published_gib", "ours_gib", "token_kb"),
    [
        ({"max_length": 163_840}, None, 84.22, 57),
        ({"max_length": 262_144, "offload_activations": True}, None, 82.35, 28),
        ({"max_length": 1 << 20, "num_gpus": 4, "cp_size": 4, "offload_activations": True}, 63.6, 71.05, 30.5),
    ],
)
def test_r12_the_rest_of_the_guides_ladder(
    plan: dict[str, Any], published_gib: float | None, ours_gib: float, token_kb: float
) -> None:
    """Reported by the guide: Qwen3-4B on 80 GB cards at 160k tokens, at 256k with offload, on four at 1M in 63.6 GB.

    lcplan: 84.2 and 82.4 GiB, which do not fit, and 71.05 GiB, 12% over if 63.6 is binary like R13's figures. Rows m005
    and m006 (160k, untied) and m034 (1M on four, six layers) agree with lcplan, and so does the guide's own profile
    (R13). The last two would follow if a token took some 28 kB less, about what a fused RMSNorm saves, the first only
    with 57 kB less; nothing that the guide names does that.
    """
    report = estimated("Qwen/Qwen3-4B", **plan)
    assert report.peak_allocated_bytes / GIB == pytest.approx(ours_gib, rel=OURS)
    assert report.fits is (published_gib is not None)
    if published_gib:
        too_much = report.peak_allocated_bytes - published_gib * GIB
    else:
        too_much = -report.headroom_bytes / WITH_SLACK
    assert too_much / report.plan["max_length"] * report.plan["cp_size"] / 1000 == pytest.approx(token_kb, rel=0.01)


def test_r13_profile_at_96k() -> None:
    """Reported: 22 GB of states, 0.47 a layer, peaks of 59.9 and with offload 48.8; Qwen3-8B at 1M 288, at last 56.

    lcplan: 22.5, 0.469, 59.9, 49.6 and 288 GiB, so these are binary (as decimal GB ours are 7 to 10% over); the end is
    R01's figure rounded and decimal like it: 55.1 GB.
    """
    figures = published("R13")
    profile = estimated("Qwen/Qwen3-4B", max_length=98_304)
    states = item_bytes(profile, "weights.parameters") + item_bytes(profile, "optimizer.adamw_states")
    assert states / GIB == pytest.approx(figures["fixed_states_gb"], rel=AS_PUBLISHED)
    layer = item_bytes(profile, "activations.layer_inputs") / 36
    assert layer / GIB == pytest.approx(figures["per_layer_boundary_gb"], rel=AS_PUBLISHED)
    offloaded = estimated("Qwen/Qwen3-4B", max_length=98_304, offload_activations=True)
    assert profile.peak_allocated_bytes / GIB == pytest.approx(59.9, rel=AS_PUBLISHED)
    assert offloaded.peak_allocated_bytes / GIB == pytest.approx(48.8, rel=AS_PUBLISHED)
    naive = activations.layer_inputs(num_layers=36, tokens=1 << 20, hidden_size=4096, dtype_bytes=2)
    assert naive / GIB == figures["naive_8b_1m_gb"]
    final = estimated("Qwen/Qwen3-8B", **MILLION, offload_activations=True)
    assert peak_gb(final) == pytest.approx(figures["final_8b_1m_gb"], rel=AS_PUBLISHED)


def saved_by_chunking(**plan: Any) -> float:
    """Per cent of Qwen3-1.7B's peak, negative as the report has it."""
    plain, chunked = (estimated("Qwen/Qwen3-1.7B", loss=loss, **plan) for loss in ("full", "chunked"))
    return 100 * (peak_gb(chunked) / peak_gb(plain) - 1)


def test_r14_what_the_chunked_loss_saves() -> None:
    """Reported for Qwen3-1.7B: -33.0%, with 8 micro batches -33.4%, under FSDP2 on 4 GPUs up to -50%; no lengths.

    lcplan: -21% at 4,096 tokens and -43% at 8,192, with 8 micro batches -24 and -43%, on 4 GPUs -37 and -57%. So each
    figure is met at a length between, and more GPUs save more, because logits are not shared.
    """
    figures = published("R14")["delta_mem_pct"]
    kinds = {"baseline": {}, "grad_accum_8": {"gradient_accumulation_steps": 8}, "fsdp2x4_up_to": {"num_gpus": 4}}
    for kind, plan in kinds.items():
        short, long = (saved_by_chunking(max_length=length, **plan) for length in (4096, 8192))
        assert long < figures[kind] < short
    assert saved_by_chunking(max_length=8192, num_gpus=4) < saved_by_chunking(max_length=8192)


def test_r15_one_chunk_of_the_chunked_loss() -> None:
    """Reported: 5.99 GB, 3.03 without the head's float32 copy of 2.03; hidden 2048, vocabulary 248,320, 256 tokens.

    lcplan is of TRL 1.15 and later, whose kernel adds up the head's gradient in float32 and casts it at the end: with
    the weight 4.09 GB, between the two. Its tile holds 32,768 entries whatever the vocabulary.
    """
    figures, sizes = published("R15"), {"vocab_size": 248_320, "hidden_size": 2048}
    head = sizes["vocab_size"] * sizes["hidden_size"]
    assert weights.FP32_BYTES * head / GB == pytest.approx(figures["fp32_lm_head_copy_gb"], rel=AS_PUBLISHED)
    gradient = loss_head.weight_gradient(**sizes, float32=False)
    ours = (weights.gathered_head(head_parameters=head) + gradient + loss_head.logits_tile(tokens=256)) / GB
    assert ours == pytest.approx(4.085, rel=OURS)
    assert figures["after"]["peak_gb"] < ours < figures["before"]["peak_gb"]


def test_r16_experts_at_2k_tokens() -> None:
    """Reported: 34 GB a GPU for Qwen3-30B-A3B on 8 with expert parallelism; larger models in other set-ups.

    A plan has no expert parallelism, and FSDP2 is refused for experts. Nearest: one GPU with everything in bf16 takes
    244.3 GB, nearly all of it states; an eighth is 30.5 GB, 10% under the report. At FSDP2's 16 bytes a parameter the
    states alone would be 61 GB, so the report's were in bf16.
    """
    with pytest.raises(PlanError, match="--ep-size is no field") as caught:
        estimated("Qwen/Qwen3-30B-A3B", num_gpus=8, max_length=2048, ep_size=8)
    assert caught.value.code == "unknown-field"
    check_refused("qwen3_moe with --backend fsdp2", "Qwen/Qwen3-30B-A3B", num_gpus=8, max_length=2048)
    report = estimated("Qwen/Qwen3-30B-A3B", max_length=2048)
    assert 8 * report.model.num_parameters / report.peak_allocated_bytes > 0.99
    assert peak_gb(report) / 8 / published("R16")["peak_gb_per_gpu"] == pytest.approx(0.898, rel=OURS)
    assert 16 * report.model.num_parameters / 8 / GB > published("R16")["peak_gb_per_gpu"]
