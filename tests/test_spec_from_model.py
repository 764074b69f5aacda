"""Specs of architectures that lcplan has no table for, from the model itself; against the table where both know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lcplan.errors import ModelError, PlanError
from lcplan.estimators import formula
from lcplan.model_spec import ModelSpec
from tests.conftest import Outcome, plan_of
from tests.families import COMMON, FAMILIES, MORE_FAMILIES

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 8192, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
UNKNOWN = ("gpt2", "gpt_neox", "starcoder2", "cohere2", "nemotron", "stablelm", "olmoe", "opt", "bloom", "mamba")


def spec_of(model_type: str, **changes: Any) -> ModelSpec:
    from lcplan.tracing.spec_from_model import spec_of_config

    return spec_of_config({**SIZES, "model_type": model_type, **changes}, model_type)


@pytest.mark.parametrize("model_type", [*FAMILIES, *MORE_FAMILIES])
def test_the_model_and_the_table_say_the_same(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lcplan.tracing import spec_from_model

    config = {**COMMON, **FAMILIES.get(model_type, {}), **MORE_FAMILIES.get(model_type, {})}
    config |= {"model_type": model_type, "tie_word_embeddings": False}
    table = ModelSpec.from_config(config, model_type)
    monkeypatch.setattr(spec_from_model, "KNOWN_FAMILIES", ())
    model = spec_from_model.spec_of_config(config, model_type)
    assert model.num_parameters == table.num_parameters
    assert [layer.total for layer in model.layers] == [layer.total for layer in table.layers]
    same = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "max_position_embeddings", "tie_word_embeddings", "layer_types", "sliding_window", "embedding_parameters",
        "lm_head_parameters", "has_sdpa",
    )  # fmt: skip
    assert {name: getattr(model, name) for name in same} == {name: getattr(table, name) for name in same}
    assert model.rope.rope_type == table.rope.rope_type
    assert model.rope.rope_theta == table.rope.rope_theta


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_an_architecture_without_a_table_is_traced_and_refused_by_the_formulas(model_type: str) -> None:
    from lcplan.tracing.trace import trace

    spec = spec_of(model_type)
    plan = plan_of(spec, max_length=64)
    short, long = (trace(spec, p) for p in (plan, plan_of(spec, max_length=128)))
    assert 8 * spec.num_parameters < short.peak <= long.peak
    assert sum(short.totals().values()) < sum(long.totals().values())
    with pytest.raises(PlanError, match=rf"model_type {model_type}; covered: .*--method trace may"):
        formula.instants(spec, plan)
    with pytest.raises(ModelError, match=rf"'{model_type}'.*--method trace"):
        ModelSpec.from_config(spec.config, model_type)


def test_a_model_without_rotary_embedding_cannot_be_stretched() -> None:
    from lcplan.rope import resolve_rope

    with pytest.raises(PlanError, match="no rotary embedding"):
        resolve_rope(spec_of("gpt2"), 16_384, "auto")
    assert spec_of("bloom").max_position_embeddings >= 8192


def test_a_variant_that_the_table_does_not_count_is_traced() -> None:
    given = {"use_sliding_window": True, "sliding_window": 64}
    spec = spec_of("smollm3", **given, num_hidden_layers=4)
    assert spec.layer_types == ("full_attention",) * 3 + ("sliding_attention",)
    with pytest.raises(ModelError, match="not valid|heads"):
        spec_of("llama", num_key_value_heads=3)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "deepseek_v9", "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "brings its own code"),
        ({"model_type": "deepseek_v9"}, "transformers has no model_type 'deepseek_v9'"),
        ({"model_type": "t5"}, "builds no causal language model of model_type 't5'"),
        ({"model_type": "bart", "encoder_layers": 3, "decoder_layers": 3}, "no list of 2 decoder layers|builds no"),
        ({"model_type": "gpt_neox", "hidden_size": "wide"}, "builds no causal language model"),
        ({"hidden_size": 8}, "model_type is missing"),
    ],
)  # fmt: skip
def test_what_transformers_cannot_build_is_refused_by_name(config: dict[str, Any], why: str) -> None:
    from lcplan.tracing.spec_from_model import spec_of_config

    sizes = {} if "hidden_size" in config and "model_type" not in config else SIZES
    with pytest.raises(ModelError, match=why):
        spec_of_config({**sizes, **config}, "x")


def test_the_command_line(lcplan: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "cohere2"}), encoding="utf-8")
    sizes = ("--max-length", "512", "--gpu", "a10g")
    refused = lcplan("estimate", str(tmp_path), *sizes)
    assert refused.code == 2
    assert "'cohere2'" in refused.err
    assert "--method trace" in refused.err
    answered = lcplan("estimate", str(tmp_path), *sizes, "--method", "trace", "--json")
    assert answered.code == 0, answered.err
    report = json.loads(answered.out)
    assert report["method"] == "trace"
    assert report["model"]["model_type"] == "cohere2"
