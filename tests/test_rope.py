from __future__ import annotations

from typing import Any

import pytest

from lcplan.errors import PlanError
from lcplan.model_loading import load_model
from lcplan.rope import check_theta, explain_rope, longest_reach, position_limit, resolve_rope
from tests.conftest import tiny_spec


def test_qwen3_is_stretched_from_its_pretrained_length() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    rope = resolve_rope(spec, 2**20, "auto")
    assert rope is not None
    assert rope.model_dump() == {
        "rope_type": "yarn", "factor": 32.0, "rope_theta": 1_000_000, "original_max_position_embeddings": 32768,
    }  # fmt: skip
    assert position_limit(spec, 2**20, rope) == 2**20


def test_a_length_within_the_models_own_range_is_left_alone() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    assert resolve_rope(spec, 32768, "auto") is None
    assert resolve_rope(spec, 40960, "auto") is None, "the config's own range"
    assert resolve_rope(spec, 2**20, "none") is None
    assert position_limit(spec, 100, None) == 40960


def test_an_explicit_factor_is_taken() -> None:
    rope = resolve_rope(load_model("Qwen/Qwen3-8B"), 65536, "yarn:4")
    assert rope is not None
    assert rope.factor == 4.0


@pytest.mark.parametrize("text", ["yarn", "yarn:x", "yarn:-4", "linear:2", "", "YARN:4", "yarn:1", "yarn:0.5"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="rope"):
        resolve_rope(load_model("Qwen/Qwen3-8B"), 2**20, text)


def test_scaling_is_never_stacked() -> None:
    llama = load_model("meta-llama/Llama-3.1-8B")
    assert resolve_rope(llama, 131072, "auto") is None
    for length, rope in ((2**20, "auto"), (131072, "yarn:8")):
        with pytest.raises(PlanError, match=r"already scales.*llama3.*131,072"):
            resolve_rope(llama, length, rope)


def test_a_factor_has_to_cover_the_length() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    with pytest.raises(PlanError, match=r"reach 131,072.*yarn:32") as caught:
        resolve_rope(spec, 2**20, "yarn:4")
    assert caught.value.code == "rope-factor-too-small"


def test_another_original_length_can_be_asked_for_and_the_choice_is_explained() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    rope = resolve_rope(spec, 2**20, "yarn:25.6:40960")
    assert rope is not None
    assert (rope.factor, rope.original_max_position_embeddings) == (25.6, 40960)
    usual = explain_rope(spec, resolve_rope(spec, 2**20, "auto"), 2**20)
    assert "pretrained at 32,768" in usual
    assert "40,960" in usual
    assert "--rope yarn:25.6:40960" in usual
    assert "40,960 original" in explain_rope(spec, rope, 2**20)
    assert "needs no scaling" in explain_rope(spec, None, 1000)
    llama = load_model("meta-llama/Llama-3.1-8B")
    assert "scales already" in explain_rope(llama, None, 1000)
    with pytest.raises(PlanError, match="must be positive"):
        resolve_rope(spec, 2**20, "yarn:4:0")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, "yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}}, "llama3"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual chunk attention"),
    ],
)
def test_every_kind_of_scaling_is_left_alone(config: dict[str, Any], what: str) -> None:
    spec = tiny_spec(**config)
    assert resolve_rope(spec, 4096, "auto") is None
    with pytest.raises(PlanError, match=rf"already scales.*{what}.*--rope none"):
        resolve_rope(spec, 8192, "auto")
    with pytest.raises(PlanError, match="never stacked"):
        resolve_rope(spec, 2048, "yarn:2")


def test_how_far_the_rotary_embedding_reaches() -> None:
    qwen, llama = load_model("Qwen/Qwen3-8B"), load_model("meta-llama/Llama-3.1-8B")
    assert longest_reach(qwen, "auto", 2**30) == 2**30
    assert longest_reach(qwen, "none", 2**30) == 2**30
    assert longest_reach(qwen, "yarn:4", 2**30) == 131_072
    assert longest_reach(qwen, "yarn:4:40960", 2**30) == 163_840
    assert longest_reach(llama, "auto", 2**30) == 131_072
    with pytest.raises(PlanError, match="never stacked"):
        longest_reach(llama, "yarn:4", 2**30)


def test_theta_is_the_models_own() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    check_theta(spec, 1_000_000)
    with pytest.raises(PlanError, match="not that of Qwen/Qwen3-8B, 1e\\+06"):
        check_theta(spec, 5_000_000)
