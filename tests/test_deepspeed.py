"""ZeRO by hand on a tiny model, and DeepSpeed's own order of events as it was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lcplan.errors import PlanError
from lcplan.estimation import estimate
from lcplan.estimators import attention, formula
from lcplan.estimators import deepspeed_order as order
from lcplan.estimators.deepspeed_order import Arrival, Parameter
from lcplan.estimators.deepspeed_step import ZeroStep, gradient_hook
from lcplan.estimators.host_need import host_need
from lcplan.hardware import load_gpu
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from lcplan.reports.terminal import GROUPS
from tests.conftest import Outcome, plan_of, tiny_spec
from tests.families import family_spec
from tests.test_formula import HEAD, LAYER, P, lengths, many, shapes

T = 4096
WORKSPACE, BUCKET = 64 * 2**20, 10**9
BATCH = 24 * T
ALONG = 8 * T + 4 * 16 * T
SAVED = (16 * 40 + 8 + 6 * 9 * 16 + 4 * 9 + 4 * 96 + 4 * 48 + 24 + 8 * 112) * T
MLP = (4 * 112 + 2 * 40) * T
INPUT = 2 * 40 * T
NORMS = 5 * (80 + 32) + 40
"""Parameters without weight decay: two norms of H and two of d a layer, and the last."""


def zero(spec: ModelSpec, *, rank: int = 0, **given: Any) -> formula.Instants:
    return formula.instants(spec, _plan(spec, **given), rank=rank)


def _plan(spec: ModelSpec, **given: Any) -> Any:
    return plan_of(spec, **{"max_length": T, "num_gpus": 4, "backend": "deepspeed"} | given)


def shortened(name: str, layers: int) -> ModelSpec:
    spec = load_model(name)
    return spec.model_copy(
        update={"num_hidden_layers": layers, "layers": spec.layers[:layers], "layer_types": spec.layer_types[:layers]}
    )


# Instants by hand


def test_stage_1_keeps_all_gradients_beside_the_bucket() -> None:
    found = zero(tiny_spec(), zero_stage=1)
    states = 2 * P + -(-4 * P // 4) - (-8 * P // 4) + WORKSPACE + BATCH
    gradients = 2 * (HEAD + 40 + 4 * LAYER + 40 * 112)
    assert found.totals()["backward[0].mlp"] == states + ALONG + INPUT + SAVED + MLP + BUCKET + gradients


def test_stage_2_moves_gradients_into_the_bucket() -> None:
    found = zero(tiny_spec(), zero_stage=2)
    states = 2 * P + -(-4 * P // 4) - (-8 * P // 4) + WORKSPACE + BATCH
    for index in (0, 4):
        kept = (index + 1) * INPUT
        assert found.totals()[f"backward[{index}].mlp"] == states + ALONG + kept + SAVED + MLP + BUCKET
    # one bucket takes all: it is reduced after the backward, flattened because its slices are of several ranks
    own = found.phases["gradient_norm"]["gradients.zero_partition"]
    assert found.totals()["backward.reduction"] == states + BUCKET + max(2 * P, own)


def test_stage_3_shards_everything_and_keeps_small_parameters() -> None:
    """No tensor of the tiny model is above 100,000 elements: all of it stays gathered."""
    found = zero(tiny_spec(), zero_stage=3)
    states = -(-2 * P // 4) - (-4 * P // 4) - (-8 * P // 4) - (-2 * P // 4) + 2 * P + BUCKET + WORKSPACE + BATCH
    assert found.totals()["backward[4].mlp"] == states + ALONG + 5 * INPUT + SAVED + MLP
    assert found.totals()["backward.reduction"] == states + 2 * P
    assert "weights.zero_gathered" not in found.phases["loss"]


def test_stage_3_takes_norm_and_update_of_its_shards() -> None:
    found = zero(tiny_spec(), zero_stage=3)
    assert found.phases["gradient_norm"]["gradients.zero_norm"] == 8 * HEAD // 4
    assert found.phases["optimizer_step"]["gradients.zero_float32"] == 6 * (P - NORMS) // 4


def test_offload_leaves_the_bucket() -> None:
    found = zero(tiny_spec(), zero_stage=3, offload_optimizer=True, offload_params=True)
    assert found.totals()["optimizer_step"] == WORKSPACE + BATCH + BUCKET + 2 * P
    reduction = found.phases["backward.reduction"]
    assert reduction["gradients.zero_offloaded_slice"] == (2 + 8) * HEAD // 4
    assert found.totals()["gradient_norm"] == found.totals()["optimizer_step"]


def test_stage_2_offload_takes_the_norm_as_gradients_leave() -> None:
    found = zero(tiny_spec(), zero_stage=2, offload_optimizer=True)
    states = 2 * P + 2 * HEAD + WORKSPACE + BATCH
    assert found.totals()["optimizer_step"] == states
    # the flat copy of the bucket is larger than the norm of any slice, and gone by then
    assert found.totals()["backward.reduction"] == states + BUCKET + 2 * P
    assert "gradients.zero_partition" not in found.phases["gradient_norm"]


def test_ulysses_splits_activations_and_reduces_in_float32() -> None:
    spec = tiny_spec()
    whole, split = zero(spec), zero(spec, sp_size=3, num_gpus=3, max_length=3 * T)
    mine, theirs = split.phases["backward[4].mlp"], whole.phases["backward[4].mlp"]
    assert mine["mlp.saved"] == theirs["mlp.saved"]
    assert mine["attention.output_copy"] == 2 * 96 * T
    assert mine["communication.zero_bucket"] == 2 * BUCKET
    assert mine["inputs.ulysses_batch"] == 8 * (4 * 3 * T + T)
    assert split.phases["backward.reduction"]["communication.zero_reduction"] == 4 * P - (-2 * P // 3)


def test_ulysses_with_offload_frees_the_float32_copy_before_the_slices_leave() -> None:
    spec = shortened("qwen3-8b", 4)
    sizes: dict[str, Any] = {"num_gpus": 4, "sp_size": 4}
    moved = ZeroStep(spec, _plan(spec, **sizes, offload_optimizer=True), 0).reductions()
    kept = ZeroStep(spec, _plan(spec, **sizes), 0).reductions()
    key = "communication.zero_reduction"
    assert moved["1.gate_proj"][key] == kept["1.gate_proj"][key]
    assert "gradients.zero_offloaded_slice" not in moved["1.gate_proj"], "the float32 copy is larger"
    # two ranks: of a single large gradient half comes back, and its norm is taken of 2.5e8 elements at a time
    halves = ZeroStep(spec, _plan(spec, num_gpus=2, sp_size=2, offload_optimizer=True), 0).reductions()
    table = 622_329_856
    assert halves[order.END][key] == table
    assert halves[order.END]["gradients.zero_offloaded_slice"] == table + 8 * 250_000_000


def test_ulysses_repeats_keys_until_every_rank_has_a_head() -> None:
    spec = tiny_spec(num_key_value_heads=3)
    found = zero(spec, sp_size=6, num_gpus=6, max_length=6 * T).phases["backward[4].mlp"]
    assert found["attention.saved"] == (4 * 96 + 4 * 6 * 16 + 4 * 6) * T
    assert found["attention.qk_norm"] == (6 * 9 * 16 + 4 * 9) * T


def test_the_last_rank_holds_its_gradients_from_the_first_reduction_on() -> None:
    """Four layers of Qwen3-8B on four ranks: the head alone is above the bucket's size, the norm pushes it out."""
    spec, (table, layer) = shortened("qwen3-8b", 4), (622_329_856, 192_946_432)
    sizes: dict[str, Any] = {"zero_stage": 2, "max_length": 8192}
    first, last = (zero(spec, rank=rank, **sizes) for rank in (0, 3))
    assert "gradients.zero_partition" not in first.phases["backward[3].mlp"]
    # a quarter of the matrices is less than the head; of the norms the last three
    assert last.phases["backward[3].mlp"]["gradients.zero_partition"] == 2 * (table + 3 * 4096)
    assert spec.num_parameters == 2 * table + 4 * layer + 4096
    report = estimate(spec, _plan(spec, **sizes), load_gpu("h200"))
    assert report.peak_allocated_bytes == max(
        max(zero(spec, rank=rank, **sizes).totals().values()) for rank in range(4)
    )


@pytest.mark.parametrize(
    ("name", "world", "levers"),
    [
        ("qwen3-8b", 24, {"zero_stage": 1}),
        ("qwen3-8b", 32, {"zero_stage": 2}),
        ("qwen3-32b", 32, {"zero_stage": 2, "offload_optimizer": True}),
    ],
)
def test_no_rank_holds_more_than_the_reported_one(name: str, world: int, levers: dict[str, Any]) -> None:
    spec = load_model(name)
    plan = _plan(spec, num_gpus=world, gpus_per_node=1, max_length=8192, **levers)
    by_rank = [max(formula.instants(spec, plan, rank=rank).totals().values()) for rank in range(world)]
    assert max(by_rank) == max(by_rank[rank] for rank in formula.candidate_ranks(spec, plan))


# DeepSpeed's bookkeeping


def test_a_bucket_is_reduced_when_the_next_gradient_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "REDUCE_BUCKET", 100)
    sizes = {name: Parameter(numel, decays=True) for name, numel in {"a": 60, "b": 50, "c": 120, "d": 10}.items()}
    assert order.fill_buckets("abcd", sizes) == (
        Arrival("a", 0, ()), Arrival("b", 0, ("a",)), Arrival("c", 0, ("b",)), Arrival("d", 120, ("c",)),
        Arrival(order.END, 0, ("d",)),
    )  # fmt: skip
    assert order.fill_buckets("abc", sizes)[-1] == Arrival(order.END, 120, ("c",))


def test_partitions_cut_parameters_group_by_group() -> None:
    sizes = {"a": Parameter(5, decays=True), "n": Parameter(3, decays=False), "b": Parameter(4, decays=True)}
    assert order.partition_size(sizes, 2, decays=True) == 6, "9 elements, padded to a multiple of 2 x 2 ranks"
    assert order.pieces(sizes, 2) == {"a": ((0, 5),), "b": ((0, 1), (1, 3)), "n": ((0, 2), (1, 1))}


def test_slices_of_one_rank_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"a": ((0, 5),), "b": ((0, 1), (1, 3)), "c": ((1, 4),)}
    assert order.reduction_copy(["a"], owners) == 0
    assert order.reduction_copy(["a", "b", "c"], owners) == 6 + 7
    monkeypatch.setattr(order, "REDUCE_BUCKET", 5)
    assert order.reduction_copy(["a", "b", "c"], owners) == 0, "the first slice alone exceeds the bucket's size"


def test_groups_of_shards_that_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {name: Parameter(10, decays=name != "n") for name in "abcn"}
    assert order.sub_groups(sizes, 2) == ((15, 3), (5, 1))
    monkeypatch.setattr(order, "SUB_GROUP", 6)
    assert order.sub_groups(sizes, 2) == ((10, 2), (5, 1), (5, 1))


def test_qwen2_has_biases() -> None:
    spec = load_model("Qwen/Qwen2.5-7B")
    sizes = order.parameters(spec)
    assert sum(parameter.numel for parameter in sizes.values()) == spec.num_parameters
    assert sizes["0.k_bias"] == Parameter(512, decays=False)
    assert "0.q_norm" not in sizes


def test_what_stage_3_has_gathered_is_what_the_allocator_saw() -> None:
    """Allocator histories of Qwen3-8B with four layers on four ranks, and of Llama 3.2 1B with six on two.

    Bytes at the loss and at the instants of layer 3 and 1; the embedding is gathered again in layer 1's backward.
    """
    sizes = order.parameters(shortened("qwen3-8b", 4))
    found = {moment: 2 * elements for moment, elements in order.gathered(sizes, 4, 4).items()}
    assert found["loss"] == 2_016_411_648
    assert found["mlp.3"] == found["loss"] - 100_663_296, "down_proj is free"
    assert found["3.gate_proj"] == found["loss"] + 184_549_376 - 100_663_296
    # peaks of both layers' attention, less the layer input that is gone
    assert found["attention.1"] - found["attention.2"] == 13_391_813_916 - 12_600_139_036 + 67_108_864
    llama = order.parameters(shortened("llama-3.2-1b", 6))
    assert 2 * order.gathered(llama, 6, 2)["loss"] == 2 * 627_572_736, "below 1e9 parameters all matrices stay"


@pytest.mark.parametrize(
    ("name", "layers", "ranks", "expected"),
    [
        # elements of each all-gather, in order, as the histories have them
        ("llama-3.2-1b", 6, 2, [262_668_288] + [60_817_408] * 6),
        (
            "qwen3-8b", 4, 4,
            [
                622_329_856, 622_329_856, 92_274_688, 50_331_648, 50_331_648, 92_274_688, 50_331_648, 50_331_648,
                16_777_216, 4_194_304, 20_971_520, 50_331_648, 50_331_648, 50_331_648, 16_777_216, 4_194_304,
                20_971_520, 50_331_648, 50_331_648, 50_331_648, 16_777_216, 4_194_304, 20_971_520, 50_331_648,
                50_331_648, 50_331_648, 92_274_688, 50_331_648, 50_331_648, 92_274_688, 50_331_648, 622_329_856,
            ],
        ),
    ],
)  # fmt: skip
def test_all_gathers_in_order(
    name: str, layers: int, ranks: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    gather = order._Coordinator._gather

    def recorded(self: order._Coordinator, names: list[str]) -> None:
        seen.append(sum(self.sizes[one].numel for one in names))
        gather(self, names)

    monkeypatch.setattr(order._Coordinator, "_gather", recorded)
    order.gathered(order.parameters(shortened(name, layers)), layers, ranks)
    assert seen == expected


def test_reductions_are_where_the_allocator_saw_them() -> None:
    """Bytes at the flat copies of Qwen3-8B with four layers, stage 3, rank 0 of 4, less what is not a tensor's size."""
    spec = shortened("qwen3-8b", 4)
    step = ZeroStep(spec, _plan(spec, max_length=8192, zero_stage=3), 0)
    totals = {name: sum(alive.values()) for name, alive in step.reductions().items()}
    assert totals["1.gate_proj"] == pytest.approx(14_498_136_092, abs=10_000)
    assert totals[order.EMBEDDING] == pytest.approx(13_437_624_332, abs=10_000)


def test_a_tied_head_waits_while_layers_are_reduced() -> None:
    """Qwen3-4B with six layers: the last gradient but one of the fifth layer finds no room in the bucket of 5e8."""
    spec = shortened("qwen3-4b", 6)
    table, layer, matrix, norm = 388_956_160, 100_930_816, 10_485_760, 2560
    found = ZeroStep(spec, _plan(spec, zero_stage=3), 0).reductions()
    assert list(found) == ["1.q_proj", order.EMBEDDING, order.END]
    assert found["1.q_proj"]["gradients.zero_own"] == 2 * (table + matrix)
    assert found["1.q_proj"]["communication.zero_reduction"] == 2 * (norm + 5 * layer - matrix - norm)


@pytest.mark.parametrize("module", ["down_proj", "up_proj", "gate_proj", "o_proj"])
def test_a_hook_holds_less_than_the_instants_around_it(module: str) -> None:
    step = ZeroStep(tiny_spec(), _plan(tiny_spec()), 0)
    instants = {instant.name: sum(instant.alive.values()) for instant in step.own_instants(0)}
    held = sum(gradient_hook(step.shapes[step.kinds[0]], module, hooked=True).values())
    assert held < instants["attention" if module == "o_proj" else "mlp"]


# Host


def test_pinned_bytes_of_the_rows_with_offload() -> None:
    """Pinned blocks of Qwen3-8B with four layers on four ranks, less 0.4 MB of batches."""
    spec = shortened("qwen3-8b", 4)
    for levers, measured in (
        ({"zero_stage": 2, "offload_optimizer": True}, 7_516_774_413),
        ({"zero_stage": 3, "offload_optimizer": True}, 3_221_708_815),
        ({"zero_stage": 3, "offload_optimizer": True, "offload_params": True}, 5_855_783_439),
    ):
        need = host_need(spec, _plan(spec, max_length=16_384, **levers))
        assert need.pinned_bytes_per_rank == pytest.approx(measured, abs=500_000)
        assert need.other_bytes_per_rank >= -(-8 * spec.num_parameters // 4)
    assert need.load_bytes_per_node == 4 * 2 * spec.num_parameters, "every process reads the model"
    assert host_need(spec, _plan(spec)).pinned_bytes_per_rank == 0


def test_a_checkpoint_holds_masters_and_moments() -> None:
    report = estimate(tiny_spec(), _plan(tiny_spec()), load_gpu("h200"))
    assert report.disk.checkpoint_bytes == 14 * P
    assert report.disk.saved_model_bytes == 2 * P
    assert "saving under DeepSpeed" in report.not_modelled
    assert "--sp-size" in next(w.fix for w in report.warnings if w.code == "gpus-without-length")


def test_a_user_sees_every_item(lcplan: Callable[..., Outcome]) -> None:
    """The table's groups add up to the peak; nothing is left out of them."""
    for stage in (1, 2, 3):
        report = estimate(tiny_spec(), _plan(tiny_spec(), zero_stage=stage), load_gpu("h200"))
        shown = [item for item in report.items_in(report.peak_phase) if item.group in GROUPS]
        assert sum(item.num_bytes for item in shown) == report.peak_allocated_bytes
    sizes = ["--gpu", "h200", "--num-gpus", "8", "--max-length", "65536"]
    out = lcplan("estimate", "qwen3-8b", *sizes, "--backend", "deepspeed", "--sp-size", "8").out
    assert "deepspeed, sp_size 8" in out
    assert "zero_bucket" in out


# What is refused

REFUSED: dict[str, dict[str, Any]] = {
    "one GPU": {"num_gpus": 1},
    "--dtype float32": {"dtype": "float32"},
    "--optim adamw_torch": {"optim": "adamw_torch"},
    "--per-device-train-batch-size 2": {"per_device_train_batch_size": 2},
    "--gradient-accumulation-steps 2": {"gradient_accumulation_steps": 2},
    "--activation-checkpointing none": {"activation_checkpointing": "none"},
    "--checkpoint-every-n-layers 2": {"checkpoint_every_n_layers": 2},
    "--loss full": {"loss": "full"},
    "--lora-r 8": {"lora_r": 8},
    "--freeze-embeddings": {"freeze_embeddings": True},
    "--freeze-head": {"freeze_head": True},
    "--activation-offloading": {"activation_offloading": True},
    "--attn-implementation eager": {"attn_implementation": "eager"},
    "--padding": {"padding": True},
    "--per-device-eval-batch-size 1": {"per_device_eval_batch_size": 1},
    "--zero-stage 1 and --offload-optimizer": {"zero_stage": 1, "offload_optimizer": True},
    "--zero-stage 2 and --sp-size 3": {"zero_stage": 2, "sp_size": 3, "num_gpus": 3, "max_length": 3 * T},
    "--offload-params without --offload-optimizer": {"offload_params": True},
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_was_not_established_is_refused_by_name(what: str) -> None:
    with pytest.raises(PlanError, match=f"--backend deepspeed with {what}.*would be a guess"):
        zero(tiny_spec(), **REFUSED[what])


def test_families_that_were_not_run_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="--backend deepspeed with model_type phi3"):
        zero(load_model("microsoft/phi-4"))
    with pytest.raises(PlanError, match="biases outside q, k and v"):
        zero(tiny_spec(model_type="llama", attention_bias=True))


# Properties

stages = st.sampled_from(
    [
        {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True}, {"offload_optimizer": True, "offload_params": True},
        {"zero_stage": 3, "offload_activations": True},
    ]
)  # fmt: skip
ranks = st.sampled_from([2, 3, 4, 16])


def peak(spec: ModelSpec, **given: Any) -> int:
    plan = _plan(spec, gpus_per_node=1, **given)
    return max(
        max(formula.instants(spec, plan, rank=rank).totals().values()) for rank in formula.candidate_ranks(spec, plan)
    )


@many
@given(shapes, stages, ranks, lengths, lengths)
def test_more_tokens_never_lower_the_peak(shape: Any, stage: Any, world: int, one: int, more: int) -> None:
    spec = tiny_spec(**shape)
    assert peak(spec, max_length=one, num_gpus=world, **stage) <= peak(
        spec, max_length=one + more, num_gpus=world, **stage
    )


@many
@given(shapes, stages, ranks, lengths)
def test_more_layers_never_lower_the_peak(shape: Any, stage: Any, world: int, length: int) -> None:
    deeper = tiny_spec(**shape | {"num_hidden_layers": shape["num_hidden_layers"] + 1})
    sizes = {"max_length": length, "num_gpus": world, **stage}
    assert peak(tiny_spec(**shape), **sizes) <= peak(deeper, **sizes)


@many
@given(shapes, st.integers(1, 40))
def test_partitions_cover_the_whole(shape: Any, world: int) -> None:
    sizes = order.parameters(tiny_spec(**shape))
    cut = order.pieces(sizes, world)
    assert {name: sum(n for _, n in pieces) for name, pieces in cut.items()} == {
        name: parameter.numel for name, parameter in sizes.items()
    }
    for decays in (True, False):
        for rank in range(world):
            held = sum(n for name in cut if sizes[name].decays == decays for r, n in cut[name] if r == rank)
            assert held <= order.partition_size(sizes, world, decays=decays)


@many
@given(shapes, ranks, lengths)
def test_shards_cover_the_whole(shape: Any, world: int, length: int) -> None:
    spec = tiny_spec(**shape)
    alive = zero(spec, max_length=length, num_gpus=world).phases["optimizer_step"]
    for key, width in (("weights.parameters", 2), ("weights.zero_masters", 4), ("optimizer.adamw_states", 8)):
        assert 0 <= alive[key] * world - width * spec.num_parameters < world


@many
@given(shapes, lengths)
def test_ulysses_splits_activations_evenly(shape: Any, length: int) -> None:
    assume(shape["num_key_value_heads"] != 2)  # three ranks cannot share two heads
    spec = tiny_spec(**shape)
    sizes: dict[str, Any] = {"max_length": 3 * length, "num_gpus": 6}
    split, whole = zero(spec, **sizes, sp_size=3), zero(spec, **sizes)
    for key in ("activations.layer_inputs", "mlp.saved", "activations.norms", "attention.qk_norm"):
        for phase in ("loss", "backward[0].mlp"):
            assert 3 * split.phases[phase].get(key, 0) == whole.phases[phase].get(key, 0)


@many
@given(shapes, stages, ranks, lengths)
def test_the_candidates_hold_the_most(shape: Any, stage: Any, world: int, length: int) -> None:
    spec = tiny_spec(**shape)
    plan = _plan(spec, max_length=length, num_gpus=world, gpus_per_node=1, **stage)
    worst = max(max(formula.instants(spec, plan, rank=rank).totals().values()) for rank in range(world))
    assert peak(spec, max_length=length, num_gpus=world, **stage) == worst


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_of_many_queries_beside_one_key_head(stage: int) -> None:
    """It comes after k_proj's gradient: what of activations is there is what one GPU has."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 128}
    spec = family_spec("qwen3", num_hidden_layers=2, intermediate_size=704, vocab_size=1024, **heads)
    plan = plan_of(spec, max_length=16_384, num_gpus=2, backend="deepspeed", zero_stage=stage)
    alive = formula.instants(spec, plan).phases
    on_one = formula.instants(spec, plan_of(spec, max_length=16_384)).phases["backward[0].query_norm"]
    own = attention.query_norm_backward.key
    assert alive["backward[0].query_norm"][own] == on_one[own] == 24 * 16 * 128 * plan.tokens_per_rank
    sums = {phase: sum(items.values()) for phase, items in alive.items()}
    assert sums["backward[0].query_norm"] > sums["backward[0].attention"]
