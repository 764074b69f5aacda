from __future__ import annotations

import pytest

from lcplan.errors import PlanError
from lcplan.model_loading import load_model
from lcplan.rope import position_limit, resolve_rope


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
