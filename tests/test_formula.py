from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lcplan.checking import load_rows, row_spec
from lcplan.errors import PlanError
from lcplan.estimation import estimate
from lcplan.estimators import formula
from lcplan.estimators.host_need import host_need
from lcplan.hardware import load_gpu
from lcplan.ledger import PHASE_HELP, MemoryReport
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from tests.conftest import plan_of, tiny_spec
from tests.families import family_spec

LAYER = 40 * 96 * 2 + 2 * 40 * 48 + 2 * 16 + 3 * 40 * 112 + 80
HEAD = 560 * 40
P = 5 * LAYER + 40 + 2 * HEAD


def peak(spec: ModelSpec, **given: Any) -> int:
    return max(formula.instants(spec, plan_of(spec, **given)).totals().values())


def test_the_tiny_model_counts_by_hand() -> None:
    assert tiny_spec().num_parameters == P


def test_the_last_layers_mlp_on_one_gpu_by_hand() -> None:
    """Every tensor alive at the peak of a long sequence, written out."""
    t = 4096
    alive = formula.instants(tiny_spec(), plan_of(tiny_spec(), max_length=t)).totals()["backward[4].mlp"]
    states = 2 * P + 4 * P + 64 * 2**20
    batch = 3 * 8 * t + 8 * t + 4 * 16 * t
    layer_inputs = 5 * 2 * 40 * t
    saved = (16 * 40 + 8 + 6 * 9 * 16 + 4 * 9 + 4 * 96 + 4 * 48 + 24 + 8 * 112) * t
    gradients = 2 * (HEAD + 40) + 2 * 40 * 112
    assert alive == states + batch + layer_inputs + saved + (4 * 112 + 2 * 40) * t + gradients


def test_the_first_layers_mlp_under_fsdp2_by_hand() -> None:
    t, w = 1024, 4
    plan = plan_of(tiny_spec(), max_length=4096, num_gpus=w, cp_size=w, offload_activations=True)
    alive = formula.instants(tiny_spec(), plan).totals()["backward[0].mlp"]
    states = -(-4 * P // w) - (-8 * P // w) + 64 * 2**20
    batch = 3 * 8 * 4096 + 8 * 2 * 4096 + 6 * 8 * t + 4 * 16 * t
    saved = (16 * 40 + 8 + 6 * 9 * 16 + 4 * 9 + 4 * 96 + 4 * 48 + 24 + 8 * 112) * t
    copy_of_output = 2 * 96 * t
    gathered = 2 * LAYER + 2 * HEAD
    gradients = -(-4 * (4 * LAYER + HEAD + 40) // w) + 2 * LAYER + 2 * 40 * 112
    assert alive == states + batch + saved + (4 * 112 + 2 * 40) * t + copy_of_output + gathered + gradients


def test_frozen_tables_stay_in_the_type_they_were_loaded_in_under_fsdp2() -> None:
    """What is trained is float32 either way, and what is gathered bf16."""
    frozen = {"freeze_embeddings": True, "freeze_head": True}
    sizes: dict[str, Any] = {"max_length": 4096, "num_gpus": 4, "cp_size": 4, **frozen}
    narrow, wide = (
        formula.instants(tiny_spec(), plan_of(tiny_spec(), dtype=dtype, **sizes)).totals()
        for dtype in ("bfloat16", "float32")
    )
    assert {phase: wide[phase] - narrow[phase] for phase in narrow} == dict.fromkeys(narrow, 2 * 2 * HEAD // 4)
    on_host = formula.instants(tiny_spec(), plan_of(tiny_spec(), dtype="float32", offload_params=True, **sizes))
    assert all("weights.parameters" not in alive for alive in on_host.phases.values())


def test_qwen3_8b_at_a_million_tokens() -> None:
    """Row m014 measured 55,088,169,472 bytes; the published run 56.2 GB."""
    spec = load_model("Qwen/Qwen3-8B")
    plan = plan_of(spec, max_length=2**20, num_gpus=8, cp_size=8, offload_activations=True, rope="auto")
    report = estimate(spec, plan, load_gpu("h100-80gb"))
    assert report.peak_allocated_bytes == pytest.approx(55_088_169_472, rel=1e-4)
    assert report.host.pinned_bytes_per_node == 8 * 36 * 2**30
    assert report.fits
    assert report.rope is not None
    assert report.rope.factor == 32


def test_offload_saves_less_than_it_moves() -> None:
    """The peak moves from the last layer to the first: that is why phases exist."""
    spec = load_model("qwen3-8b")
    sizes: dict[str, Any] = {"max_length": 2**20, "num_gpus": 8, "cp_size": 8}
    saved = peak(spec, **sizes) - peak(spec, **sizes, offload_activations=True)
    assert 0 < saved < 36 * 2**30


def test_worst_rank_is_reported() -> None:
    """A narrow model peaks in ring attention, whose first rank holds most."""
    spec = load_model("qwen3-0.6b")
    plan = plan_of(spec, max_length=2**20, num_gpus=8, cp_size=8)
    totals = {rank: max(formula.instants(spec, plan, rank=rank).totals().values()) for rank in range(8)}
    report = estimate(spec, plan, load_gpu("h100-80gb"))
    assert report.peak_allocated_bytes == max(totals.values())
    assert report.peak_rank == min(rank for rank, total in totals.items() if total == max(totals.values()))


REFUSED: dict[str, dict[str, Any]] = {
    "selective with --dtype float32": {"activation_checkpointing": "selective", "dtype": "float32"},
    "checkpoint-every-n-layers 2 with --dtype float32": {"checkpoint_every_n_layers": 2, "dtype": "float32"},
    "offload-params": {"offload_params": True},
    "mlp-tile-size 128 with --lora-r 8": {"mlp_tile_size": 128, "lora_r": 8},
    "mlp-tile-size 128 with --dtype float32": {"mlp_tile_size": 128, "dtype": "float32"},
    "mlp-tile-size 128 with --backend ddp": {"mlp_tile_size": 128, "num_gpus": 2, "backend": "ddp"},
    "lora-r 8 with --offload-params": {"lora_r": 8, "num_gpus": 2, "offload_params": True},
    "lora-r 8 with --dp-replicate-size 2": {"lora_r": 8, "num_gpus": 4, "dp_replicate_size": 2},
    "activation-offloading with --backend fsdp2": {"activation_offloading": True, "num_gpus": 2},
    "activation-offloading without": {"activation_offloading": True, "activation_checkpointing": "none"},
    "lora-r 8 with --activation-checkpointing none": {"lora_r": 8, "activation_checkpointing": "none"},
    "lora-r 8 with --dtype float32": {"lora_r": 8, "dtype": "float32"},
    "lora-r 8 with --optim sgd": {"lora_r": 8, "optim": "sgd"},
    "eager, padding, or a sliding window. with --dtype float32": {"attn_implementation": "eager", "dtype": "float32"},
    "materialised attention mask.* with --lora-r 8": {"attn_implementation": "eager", "lora_r": 8},
    "materialised attention mask.* with --offload-activations": {
        "attn_implementation": "eager",
        "offload_activations": True,
    },
    "optim sgd with --offload-params": {"optim": "sgd", "num_gpus": 2, "offload_params": True},
    "loss chunked-256 with --backend fsdp2": {"loss": "chunked-256", "num_gpus": 2},
    "loss chunked-256 with --dtype float32": {"loss": "chunked-256", "dtype": "float32"},
    "lora-r 8 with --no-reshard-after-forward": {"lora_r": 8, "num_gpus": 2, "reshard_after_forward": False},
    "padding with --attn-implementation flash_attention_2": {
        "padding": True,
        "attn_implementation": "flash_attention_2",
    },
    "padding with --backend fsdp2 and --cp-size 1": {"padding": True, "num_gpus": 2},
    "a sliding window. with --activation-offloading": {"padding": True, "activation_offloading": True},
    "packing": {"packing": True},
    "loss full": {"loss": "full", "dtype": "float32"},
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_a_lever_without_measurements_is_refused_by_name(what: str) -> None:
    with pytest.raises(PlanError, match=f"{what}.*would be a guess"):
        peak(tiny_spec(), max_length=256, **REFUSED[what])


def test_a_frozen_table_shared_under_fsdp2_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="one table"):
        peak(tiny_spec(tie_word_embeddings=True), max_length=64, num_gpus=2, freeze_embeddings=True, freeze_head=True)


def test_families_and_layers_without_measurements_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="gemma3 with more than one GPU"):
        peak(load_model("google/gemma-3-4b-pt"), max_length=256, num_gpus=2)
    sliding = tiny_spec(use_sliding_window=True, sliding_window=64, max_window_layers=2)
    with pytest.raises(PlanError, match="sliding window. with --activation-checkpointing selective"):
        peak(sliding, max_length=256, activation_checkpointing="selective")
    assert peak(sliding, max_length=63, activation_checkpointing="selective") > 0, "shorter than the window: no mask"
    with pytest.raises(PlanError, match="phi3 with --attn-implementation flash_attention_2"):
        peak(load_model("microsoft/phi-4"), max_length=256, attn_implementation="flash_attention_2")
    with pytest.raises(PlanError, match="qwen3_moe with --dtype float32"):
        peak(load_model("Qwen/Qwen3-30B-A3B"), max_length=256, dtype="float32")
    with pytest.raises(PlanError, match="qwen3_moe with --cp-size 2"):
        peak(load_model("Qwen/Qwen3-30B-A3B"), max_length=256, num_gpus=2, cp_size=2)
    with pytest.raises(PlanError, match="qwen3_moe with --backend fsdp2"):
        peak(load_model("Qwen/Qwen3-30B-A3B"), max_length=256, num_gpus=2)


def test_selective_checkpointing_keeps_attention_outputs_of_every_layer() -> None:
    t = 4096
    selective = formula.instants(tiny_spec(), plan_of(tiny_spec(), max_length=t, activation_checkpointing="selective"))
    full = formula.instants(tiny_spec(), plan_of(tiny_spec(), max_length=t))
    kept = {phase: total - full.totals()[phase] for phase, total in selective.totals().items()}
    one = (2 * 96 + 24) * t
    assert kept["loss"] == 5 * one
    assert kept["backward[4].mlp"] == 4 * one, "the running layer's own output is counted with what it saved"
    assert kept["backward[0].mlp"] == 0


def test_attention_outputs_on_the_host_take_no_more_of_the_gpu_than_full_checkpointing() -> None:
    t, given = 4096, {"offload_activations": True}
    full = formula.instants(tiny_spec(), plan_of(tiny_spec(), max_length=t, **given)).totals()
    plan = plan_of(tiny_spec(), max_length=t, activation_checkpointing="selective", **given)
    kept = formula.instants(tiny_spec(), plan).totals()
    assert kept == full
    at_mlp = [
        sum(formula.Step(tiny_spec(), each, 0).forward_instants()["mlp"].values())
        for each in (plan, plan_of(tiny_spec(), max_length=t, **given))
    ]
    assert at_mlp[0] - at_mlp[1] == (2 * 96 + 24) * t, "one layer's on their way"


def test_selective_keeps_outputs_of_checkpointed_layers_alone() -> None:
    t = 4096
    plan = plan_of(tiny_spec(), max_length=t, activation_checkpointing="selective", checkpoint_every_n_layers=2)
    phases = formula.instants(tiny_spec(), plan).phases
    assert phases["loss"]["attention.kept_outputs"] == 3 * (2 * 96 + 24) * t, "layers 0, 2 and 4"
    assert phases["backward[3].mlp"]["attention.kept_outputs"] == 2 * (2 * 96 + 24) * t


def test_every_second_layer_keeps_everything() -> None:
    t = 4096
    plan = plan_of(tiny_spec(), max_length=t, checkpoint_every_n_layers=2)
    alive = formula.instants(tiny_spec(), plan).phases
    whole = formula.instants(tiny_spec(), plan_of(tiny_spec(), max_length=t)).phases["backward[0].mlp"]["mlp.saved"]
    assert alive["loss"]["mlp.saved"] == 2 * whole, "layers 1 and 3"
    assert alive["loss"]["activations.layer_inputs"] == 3 * 2 * 40 * t, "layers 0, 2 and 4"
    assert alive["backward[3].mlp"]["mlp.saved"] == 2 * whole, "layer 1 and the running layer 3"
    assert alive["backward[4].mlp"]["mlp.saved"] == 3 * whole


def test_parameter_offload_leaves_no_states_on_the_gpu() -> None:
    sizes: dict[str, Any] = {"max_length": 1024, "num_gpus": 4, "cp_size": 4}
    plan = plan_of(tiny_spec(), **sizes, offload_params=True)
    for alive in formula.instants(tiny_spec(), plan).phases.values():
        assert not {"weights.parameters", "optimizer.adamw_states", "gradients.finished"} & set(alive)
    need = host_need(tiny_spec(), plan)
    assert need.other_bytes_per_rank == -(-8 * P // 4)
    assert need.bytes_per_node == 4 * (need.pinned_bytes_per_rank + need.other_bytes_per_rank)


def test_replicas_keep_what_they_still_have_to_reduce() -> None:
    sizes: dict[str, Any] = {"max_length": 1024, "num_gpus": 4}
    replicated = formula.instants(tiny_spec(), plan_of(tiny_spec(), **sizes, dp_replicate_size=2))
    alive = replicated.phases["backward[0].mlp"]
    assert alive["communication.all_reduce_input"] == -(-2 * (4 * LAYER + HEAD + 40) // 2)


def test_lora_trains_adapters_only() -> None:
    t = 4096
    plan = plan_of(tiny_spec(), max_length=t, lora_r=8)
    phases = formula.instants(tiny_spec(), plan).phases
    adapters = 5 * 8 * ((40 + 96) + 2 * (40 + 48) + (96 + 40) + 2 * (40 + 112) + (112 + 40))
    step = phases["optimizer_step"]
    assert step["weights.parameters"] == 2 * P
    assert step["lora.adapters"] == step["gradients.finished"] == 4 * adapters
    assert step["optimizer.adamw_states"] == 8 * adapters
    assert "loss_head.weight_gradient" not in phases["loss"]
    top = phases["backward[4].down_proj"]
    assert top["lora.saved"] == (2 * (3 * 40 + 96 + 2 * 40 + 112) + 2 * 8 * 7) * t
    narrow = formula.instants(
        tiny_spec(), plan_of(tiny_spec(), max_length=t, lora_r=8, lora_target_modules="q_proj,v_proj")
    )
    assert narrow.phases["backward[4].mlp"]["lora.saved"] == (2 * 2 * 40 + 2 * 8 * 2) * t


def test_lora_under_fsdp2_shares_inputs() -> None:
    t = 1024
    plan = plan_of(tiny_spec(), max_length=4 * t, num_gpus=4, cp_size=4, lora_r=8)
    alive = formula.instants(tiny_spec(), plan).phases["backward[0].mlp"]
    assert alive["lora.shared_inputs"] == (2 * 2 * 40 + 2 * 8 * 6) * t, "down_proj's own is over"
    assert alive["weights.parameters"] == -(-2 * P // 4), "the frozen base stays in bf16"
    adapters = 8 * ((40 + 96) + 2 * (40 + 48) + (96 + 40) + 2 * (40 + 112) + (112 + 40))
    assert alive["weights.gathered_layers"] == 2 * (LAYER + adapters)
    assert alive["communication.reduce_scatter_input"] == 2 * adapters


def test_accumulated_gradients_are_whole_under_fsdp2_until_reduced() -> None:
    sizes: dict[str, Any] = {"max_length": 1024, "num_gpus": 4, "gradient_accumulation_steps": 2}
    phases = formula.instants(tiny_spec(), plan_of(tiny_spec(), **sizes)).phases
    assert phases["loss"]["gradients.accumulated"] == 2 * P
    assert phases["backward[4].mlp"]["gradients.accumulated"] == 2 * (P - HEAD - 40)
    assert "gradients.accumulated" not in phases["optimizer_step"]


def test_trl_offloading_keeps_one_input_in_the_backward() -> None:
    t = 4096
    plan = plan_of(tiny_spec(), max_length=t, activation_offloading=True)
    phases = formula.instants(tiny_spec(), plan).phases
    assert phases["backward[4].mlp"]["activations.layer_inputs"] == 2 * 40 * t
    assert host_need(tiny_spec(), plan).pinned_bytes_per_rank > 0


@pytest.mark.parametrize("targets", ["lm_head", "q_proj,", "all_linear", ""])
def test_lora_targets_that_do_not_exist(targets: str) -> None:
    with pytest.raises(PlanError, match="all-linear"):
        peak(tiny_spec(), max_length=64, lora_r=8, lora_target_modules=targets)


def test_optimizers() -> None:
    t = 64
    totals = {
        optim: formula.instants(tiny_spec(), plan_of(tiny_spec(), max_length=t, optim=optim)).totals()["optimizer_step"]
        for optim in ("adamw_torch_fused", "adamw_torch", "sgd", "adafactor")
    }
    assert totals["adamw_torch"] - totals["adamw_torch_fused"] == 2 * P
    assert totals["adamw_torch_fused"] - totals["sgd"] == 4 * P
    sides = 5 * (2 * (96 + 40) + 2 * (48 + 40) + 3 * (112 + 40)) + 2 * (560 + 40)
    assert totals["adafactor"] - totals["sgd"] == 4 * sides + 16 * 560 * 40


@pytest.mark.parametrize(
    "name", ["microsoft/phi-4", "allenai/OLMo-2-1124-7B", "Qwen/Qwen3-30B-A3B", "mistralai/Mistral-7B-v0.3"]
)
def test_every_covered_family_estimates(name: str) -> None:
    spec = load_model(name)
    assert peak(spec, max_length=2048) > 8 * spec.num_parameters


def short(name: str, num_layers: int) -> ModelSpec:
    spec = load_model(name)
    return ModelSpec.from_config({**spec.config, "num_hidden_layers": num_layers}, spec.id)


@pytest.mark.parametrize(
    ("name", "num_layers", "given", "on_h200"),
    [
        ("Qwen/Qwen3-0.6B", 4, {"max_length": 4096, "attn_implementation": "eager"}, 6_314_128_908),
        ("meta-llama/Llama-3.2-1B", 6, {"max_length": 8192, "attn_implementation": "eager"}, 39_873_688_064),
        ("Qwen/Qwen3-4B", 4, {"max_length": 32_768, "attn_implementation": "flash_attention_2"}, 13_464_716_860),
        (
            "meta-llama/Llama-3.2-1B",
            6,
            {"max_length": 32_768, "attn_implementation": "flash_attention_2"},
            9_975_561_292,
        ),
        (
            "Qwen/Qwen3-0.6B",
            4,
            {"max_length": 16_384, "attn_implementation": "flash_attention_2", "activation_checkpointing": "none"},
            7_532_815_872,
        ),
    ],
)
def test_eager_and_flash_attention_against_an_h200(
    name: str, num_layers: int, given: dict[str, Any], on_h200: int
) -> None:
    """Peaks on an H200; flash_attention_2 ran over torch's own FlashAttention-2 kernels."""
    assert peak(short(name, num_layers), **given) == pytest.approx(on_h200, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "num_layers", "on_h200"),
    [("Qwen/Qwen3-4B", 4, 10_735_639_612), ("meta-llama/Llama-3.2-1B", 6, 7_169_444_940)],
)
def test_flash_attentions_own_backward_against_an_h200(name: str, num_layers: int, on_h200: int) -> None:
    """Replayed from the allocator's history: the largest instant inside the last layer's attention backward."""
    spec = short(name, num_layers)
    totals = formula.instants(spec, plan_of(spec, max_length=32_768, attn_implementation="flash_attention_2")).totals()
    assert totals[f"backward[{num_layers - 1}].attention"] == pytest.approx(on_h200, rel=1e-5)


def test_each_kind_of_layer_can_be_the_peak() -> None:
    """One full layer in the middle of sliding ones, whose masks make them larger: both kinds have a phase."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    spec = tiny_spec(use_sliding_window=True, sliding_window=64, layer_types=kinds)
    phases = formula.instants(spec, plan_of(spec, max_length=4096)).phases
    full, sliding = phases["backward[1].attention"], phases["backward[4].attention"]
    assert full["attention.masks"] == sliding["attention.masks"] == 4096 * 4096
    assert full["attention.backward"] == (8 * 96 + 4 * 48 + 24 + 4 * 96) * 4096
    assert sliding["attention.masked_backward"] == (12 * 96 + 24) * 4096
    assert sliding["attention.masked_saved"] == (8 * 96 + 24 + 2 * 4096) * 4096
    last = formula.instants(spec, plan_of(spec, max_length=4096)).phases["backward.embedding"]
    assert "attention.masks" not in last


def test_repeated_rotary_tables_replace_those_of_the_model() -> None:
    """GLM repeats cos and sin in every layer: only a checkpointed layer still refers to what the model made."""
    t, spec = 256, tiny_spec(model_type="glm", partial_rotary_factor=0.5)
    own = 2 * 2 * 8 * t
    full = formula.instants(spec, plan_of(spec, max_length=t)).phases["loss"]
    none = formula.instants(spec, plan_of(spec, max_length=t, activation_checkpointing="none")).phases["loss"]
    assert full["activations.rotary_tables"] == own
    assert none["activations.rotary_tables"] == 5 * own


def test_every_instant_has_words() -> None:
    names = {
        phase.split("]")[-1]
        for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b", "allenai/OLMo-2-1124-7B")
        for lora_r in (None, 8)
        if not (lora_r and name != "Qwen/Qwen3-8B")
        for phase in formula.instants(
            load_model(name), plan_of(load_model(name), max_length=1024, lora_r=lora_r)
        ).phases
        if "[" in phase
    }
    assert len(names) >= 8
    assert all(f"backward[i]{name}" in PHASE_HELP for name in names)


levers = st.fixed_dictionaries(
    {
        "activation_checkpointing": st.sampled_from(["full", "none"]),
        "dtype": st.sampled_from(["bfloat16", "float32"]),
        "cp_size": st.sampled_from([1, 2, 4]),
        "num_gpus": st.sampled_from([1, 4]),
        "per_device_train_batch_size": st.integers(1, 3),
        "cp_comm_strategy": st.sampled_from(["allgather", "alltoall"]),
    }
).filter(lambda v: v["num_gpus"] % v["cp_size"] == 0 and v["num_gpus"] >= v["cp_size"])
shapes = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(8, 200),
        "intermediate_size": st.integers(8, 500),
        "num_hidden_layers": st.integers(1, 6),
        "num_key_value_heads": st.sampled_from([1, 2, 6]),
        "vocab_size": st.integers(16, 5000),
        "tie_word_embeddings": st.booleans(),
    }
)
lengths = st.integers(1, 5000).map(lambda n: 8 * n)
many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@many
@given(shapes, levers, lengths, lengths)
def test_more_tokens_never_lower_the_peak(shape: Any, lever: Any, one: int, more: int) -> None:
    spec = tiny_spec(**shape)
    assert peak(spec, max_length=one, **lever) <= peak(spec, max_length=one + more, **lever)


@many
@given(shapes, levers, lengths)
def test_more_layers_or_sequences_never_lower_the_peak(shape: Any, lever: Any, length: int) -> None:
    spec = tiny_spec(**shape)
    base = peak(spec, max_length=length, **lever)
    deeper = tiny_spec(**shape | {"num_hidden_layers": shape["num_hidden_layers"] + 1})
    assert base <= peak(deeper, max_length=length, **lever)
    wider = lever | {"per_device_train_batch_size": lever["per_device_train_batch_size"] + 1}
    assert base <= peak(spec, max_length=length, **wider)


families = st.sampled_from(
    [
        {"model_type": "gemma2", "sliding_window": 512},
        {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 3},
        {"model_type": "gpt_oss", "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "mistral", "sliding_window": 512},
        {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
         "decoder_sparse_step": 2},
    ]
)  # fmt: skip
kinds_of_levers = st.fixed_dictionaries(
    {
        "activation_checkpointing": st.sampled_from(["full", "none"]),
        "per_device_train_batch_size": st.integers(1, 3),
        "attn_implementation": st.sampled_from([None, "eager"]),
    }
)


@many
@given(shapes, families, kinds_of_levers, lengths, lengths)
def test_layers_of_several_kinds_grow_with_tokens_and_sequences(
    shape: Any, family: Any, lever: Any, one: int, more: int
) -> None:
    spec = tiny_spec(**shape | family)
    base = peak(spec, max_length=one, **lever)
    assert base <= peak(spec, max_length=one + more, **lever)
    wider = lever | {"per_device_train_batch_size": lever["per_device_train_batch_size"] + 1}
    assert base <= peak(spec, max_length=one, **wider)


@many
@given(shapes, families, kinds_of_levers, lengths)
def test_no_other_layer_holds_more_than_those_looked_at(shape: Any, family: Any, lever: Any, length: int) -> None:
    """Every layer of a deep model with layers of several kinds, against the few that can be its peak."""
    spec = tiny_spec(**shape | family | {"num_hidden_layers": 9})
    plan = plan_of(spec, max_length=length, **lever)
    step = formula.Step(spec, plan, 0)
    everywhere = {
        index: max(sum(step.backward(index, instant).values()) for instant in step.own_instants(index))
        for index in range(9)
    }
    assert max(everywhere.values()) == max(everywhere[index] for index in step.layers_that_can_peak())


@many
@given(shapes, levers, lengths)
def test_offload_never_raises_the_peak(shape: Any, lever: Any, length: int) -> None:
    spec, lever = tiny_spec(**shape), lever | {"activation_checkpointing": "full"}
    assert peak(spec, max_length=length, **lever, offload_activations=True) <= peak(spec, max_length=length, **lever)


@many
@given(shapes, levers, lengths)
def test_a_report_is_consistent_and_comes_back_from_json(shape: Any, lever: Any, length: int) -> None:
    spec = tiny_spec(**shape)
    report = estimate(spec, plan_of(spec, max_length=length, **lever), load_gpu("h200"))
    for phase in report.phases:
        assert phase.allocated_bytes == sum(item.num_bytes for item in report.items_in(phase.phase))
    assert report.peak_allocated_bytes == max(phase.allocated_bytes for phase in report.phases)
    on_top = sum(item.num_bytes for item in report.items_in("device"))
    assert report.device_peak_bytes == report.peak_allocated_bytes + on_top
    assert report.headroom_bytes == report.gpu.usable_bytes - report.device_peak_bytes
    assert MemoryReport.model_validate_json(report.model_dump_json()) == report
    seen = [(item.key, phase) for item in report.items for phase in item.phases]
    assert len(seen) == len(set(seen)), "an item counts once in a phase"


@many
@given(shapes, st.sampled_from([2, 4, 8]), lengths)
def test_shards_cover_the_whole(shape: Any, ranks: int, length: int) -> None:
    spec = tiny_spec(**shape)
    instants = formula.instants(spec, plan_of(spec, max_length=length, num_gpus=ranks, cp_size=1))
    resident = instants.phases["optimizer_step"]["weights.parameters"]
    assert 4 * spec.num_parameters <= resident * ranks < 4 * spec.num_parameters + ranks


def test_lora_under_fsdp2_peaks_in_the_embedding_where_sequences_are_short() -> None:
    """The flat buffer and what is copied out of it; the trace says 3.603 GB for Qwen3-8B at 1,024 tokens."""
    row = next(row for row in load_rows() if row.id == "m093")
    spec = row_spec(row)
    plan = plan_of(spec, max_length=1024, num_gpus=4, dp_shard_size=4, lora_r=16)
    totals = formula.instants(spec, plan).totals()
    assert max(totals, key=lambda phase: totals[phase]) == "backward.embedding"
    assert totals["backward.embedding"] == pytest.approx(3_603_320_832, rel=0.005)


def test_loss_of_lora_under_fsdp2_has_the_last_layer_gathered() -> None:
    spec = family_spec("llama")
    given = {"max_length": 4096, "num_gpus": 4, "dp_shard_size": 4}
    assert "weights.gathered_layers" not in formula.instants(spec, plan_of(spec, **given)).phases["loss"]
    with_adapters = formula.instants(spec, plan_of(spec, **given, lora_r=8)).phases["loss"]
    assert with_adapters["weights.gathered_layers"] > 2 * spec.layers[0].total


def test_float32_rotary_tables_are_cast_for_each_layer_under_fsdp2() -> None:
    spec = family_spec("olmo2", num_hidden_layers=5)
    phases = formula.instants(spec, plan_of(spec, max_length=4096, num_gpus=4, dp_shard_size=4)).phases
    one = 2 * 2 * 64 * 4096
    for phase, layers_left in (("loss", 5), ("backward[4].mlp", 5), ("backward[0].mlp", 1)):
        assert phases[phase]["activations.rotary_tables"] == layers_left * one
    assert "activations.rotary_tables" not in phases["backward.embedding"]


def test_trl_has_sent_the_layer_inputs_away_when_the_loss_runs() -> None:
    spec = family_spec("llama", num_hidden_layers=8)
    plan = plan_of(spec, max_length=4096, activation_offloading=True)
    at_mlp = formula.Step(spec, plan, 0).forward_instants()["mlp"]
    assert at_mlp["activations.layer_inputs"] == (5 + 1) * 2 * 512 * 4096, (
        "five on their way, and the embedding's output"
    )
    assert "activations.layer_inputs" not in formula.instants(spec, plan).phases["loss"]


def test_trl_offloading_with_experts_is_refused() -> None:
    spec = family_spec("qwen3_moe")
    with pytest.raises(PlanError, match=r"qwen3_moe with --activation-offloading.*--method trace may"):
        formula.instants(spec, plan_of(spec, max_length=512, activation_offloading=True))
