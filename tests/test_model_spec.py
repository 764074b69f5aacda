"""Config.json to ModelSpec: counts by hand, spellings, refusals, and the models that transformers builds."""

import json
import subprocess
import sys

import pytest

from lcplan import catalog
from lcplan.errors import EnvironmentProblem, ModelError
from lcplan.model_families import KNOWN_FAMILIES
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec

# Pairwise distinct sizes, so that a swapped axis cancels: hd = 60, kd = 20, 2H(hd + kd) = 3840, 3HI = 3744.
TINY = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 7,
    "image_size": 28,
    "vision_use_head": False,
}
NEED_HEAD_DIM = ("hunyuan_v1_dense", "ministral")
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}


def tiny(model_type, **changes):
    """A small config.json; ``...`` as a value takes the key away."""
    config = {"model_type": model_type, **TINY, **changes}
    if model_type in ("gpt_oss", "mixtral", "qwen3_moe"):
        config = {**EXPERTS, **config}
    if model_type == "qwen3_moe":
        config = {"moe_intermediate_size": 14, **config}
    config = {key: value for key, value in config.items() if value is not ...}
    if model_type == "gemma3":
        text = {key: value for key, value in config.items() if key != "model_type"}
        text.pop("tie_word_embeddings", None)
        config = {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", **text},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 96,
            **{key: changes[key] for key in ("tie_word_embeddings",) if key in changes},
        }
    return config


def spec_of(model_type, **changes):
    return ModelSpec.from_config(tiny(model_type, **changes), "tiny")


# --- counts by hand ---


@pytest.mark.parametrize(
    ("model_type", "attention", "mlp", "norms"),
    [
        ("llama", 3840, 3744, 48),
        ("mistral", 3840, 3744, 48),
        ("phi3", 3840, 3744, 48),
        ("qwen2", 3840 + 60 + 2 * 20, 3744, 48),  # biases on q, k, v
        ("qwen3", 3840 + 2 * 10, 3744, 48),  # one norm of head_dim for queries, one for keys
        ("olmo2", 3840 + 60 + 20, 3744, 48),  # norms as wide as the projections
        ("gemma2", 3840, 3744, 4 * 24),
        ("gemma3_text", 3840 + 2 * 10, 3744, 4 * 24),
        ("gemma3", 3840 + 2 * 10, 3744, 4 * 24),
        ("glm4", 3840 + 60 + 2 * 20, 3744, 4 * 24),
        ("qwen3_moe", 3840 + 2 * 10, 5 * (3 * 24 * 14 + 24), 48),  # five experts with a router row each
        ("mixtral", 3840, 5 * (3744 + 24), 48),
        ("smollm3", 3840, 3744, 48),
        ("granite", 3840, 3744, 48),
        ("ernie4_5", 3840, 3744, 48),
        ("hunyuan_v1_dense", 3840 + 2 * 10, 3744, 48),
        ("ministral", 3840, 3744, 48),
        ("gemma", 3840, 3744, 48),
        ("glm", 3840 + 60 + 2 * 20, 3744, 48),
        ("olmo3", 3840 + 60 + 20, 3744, 48),
        ("exaone4", 3840 + 2 * 10, 3744, 48),
        # biases on q, k, v, o and a sink per head; biases in experts and router
        ("gpt_oss", 3840 + 60 + 2 * 20 + 24 + 6, 5 * (3744 + 2 * 52 + 24 + 24 + 1), 48),
    ],
)
def test_parameters_of_a_layer(model_type, attention, mlp, norms):
    spec = spec_of(model_type)
    assert {(layer.attention, layer.mlp, layer.norms) for layer in spec.layers} == {(attention, mlp, norms)}
    assert len(spec.layers) == len(spec.layer_types) == 3
    assert spec.embedding_parameters == 97 * 24
    assert spec.final_norm_parameters == 24
    tied = model_type.startswith("gemma") or model_type in ("smollm3", "ernie4_5")
    assert spec.tie_word_embeddings is tied
    assert spec.lm_head_parameters == (0 if tied else 97 * 24)
    assert spec.other_parameters == (7240 if model_type == "gemma3" else 0)
    outside = 97 * 24 * (1 if tied else 2) + 24 + spec.other_parameters
    assert spec.num_parameters == outside + 3 * (attention + mlp + norms)


def test_every_known_family_is_counted():
    assert {spec_of(model_type).model_type for model_type in KNOWN_FAMILIES} == set(KNOWN_FAMILIES)


def test_vision_tower_by_hand():
    patches, positions, post_norm, projector = 3 * 7 * 7 * 16 + 16, 4 * 4 * 16, 2 * 16, 16 * 24 + 16
    attention, mlp, norm = 4 * (16 * 16 + 16), 2 * 16 * 28 + 28 + 16, 2 * 16
    tower = patches + positions + 2 * (attention + mlp + 2 * norm) + post_norm
    assert spec_of("gemma3").other_parameters == tower + projector == 7240
    with_head = tiny("gemma3")
    with_head["vision_config"] = {key: value for key, value in VISION.items() if key != "vision_use_head"}
    pooling = 16 + attention + mlp + norm
    assert ModelSpec.from_config(with_head, "tiny").other_parameters == 7240 + pooling


@pytest.mark.parametrize("model_type", NEED_HEAD_DIM)
def test_head_dim_where_transformers_has_no_default(model_type):
    with pytest.raises(ModelError, match="head_dim is missing"):
        spec_of(model_type, head_dim=...)


@pytest.mark.parametrize(("model_type", "key"), [("smollm3", "use_sliding_window"), ("ernie4_5", "use_bias")])
def test_variants_of_a_family_that_are_not_counted(model_type, key):
    assert spec_of(model_type, **{key: False}).model_type == model_type
    with pytest.raises(ModelError, match=f"{key} is set"):
        spec_of(model_type, **{key: True})


def test_llama_biases():
    layer = spec_of("llama", attention_bias=True, mlp_bias=True).layers[0]
    assert layer.attention == 3840 + 60 + 2 * 20 + 24
    assert layer.mlp == 3744 + 2 * 52 + 24


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "mixtral", "qwen2"])
def test_keys_that_the_architecture_ignores(model_type):
    assert spec_of(model_type, attention_bias=True, mlp_bias=True).layers == spec_of(model_type).layers


def test_dense_layers_of_qwen3_moe():
    spec = spec_of("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert spec.moe.dense_layers == (0, 2, 3, 4)
    assert [layer.mlp for layer in spec.layers] == [3744, 5160, 3744, 3744, 3744, 5160]
    assert spec.moe.num_experts == 5
    assert spec.moe.num_experts_per_tok == 2
    assert spec.moe.moe_intermediate_size == 14


def test_moe_width_is_the_intermediate_size_where_the_family_has_no_other():
    assert spec_of("mixtral").moe.moe_intermediate_size == 52
    assert spec_of("qwen3_moe", num_local_experts=None, num_experts=7).moe.num_experts == 7


@pytest.mark.parametrize(
    ("model_type", "head_dim"),
    [
        ("llama", 4),
        ("qwen2", 4),
        ("qwen3_moe", 4),
        ("qwen3", 128),
        ("gemma2", 256),
        ("glm4", 128),
        ("gpt_oss", 64),
    ],
)
def test_head_dim_where_the_config_has_none(model_type, head_dim):
    assert spec_of(model_type, head_dim=None).head_dim == spec_of(model_type, head_dim=...).head_dim == head_dim


def test_kv_heads_where_the_config_has_none():
    assert spec_of("llama", num_key_value_heads=...).num_key_value_heads == 6
    assert spec_of("qwen3", num_key_value_heads=None).num_key_value_heads == 6
    with pytest.raises(ModelError, match=r"^tiny: num_key_value_heads is missing"):
        spec_of("qwen3", num_key_value_heads=...)


def test_tying_is_read_from_the_config():
    assert spec_of("llama", tie_word_embeddings=True).lm_head_parameters == 0
    assert spec_of("gemma2", tie_word_embeddings=False).lm_head_parameters == 97 * 24
    assert spec_of("gemma3", tie_word_embeddings=False).lm_head_parameters == 97 * 24


def test_the_config_is_kept_as_read():
    config = tiny("qwen3", torch_dtype="bfloat16")
    assert ModelSpec.from_config(config, "tiny").config == config


# --- layer types ---

FULL, SLIDES = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("model_type", "changes", "types", "window"),
    [
        ("llama", {"sliding_window": 9}, [FULL] * 3, None),
        ("mistral", {}, [SLIDES] * 3, 4096),
        ("mistral", {"sliding_window": None}, [FULL] * 3, None),
        ("mixtral", {}, [FULL] * 3, None),
        ("phi3", {"sliding_window": 2047}, [SLIDES] * 3, 2047),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 2}, [FULL] * 3, None),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
            [FULL, FULL, SLIDES],
            9,
        ),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, [SLIDES] * 3, 4096),
        ("qwen3", {"use_sliding_window": True}, [FULL] * 3, None),
        ("qwen3", {"layer_types": [FULL] * 3}, [FULL] * 3, None),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}, [SLIDES] * 3, 9),
        ("gemma2", {}, [SLIDES, FULL, SLIDES], 4096),
        ("gemma3_text", {"sliding_window_pattern": 3}, [SLIDES, SLIDES, FULL], 4096),
        ("gemma3", {"sliding_window": 1024}, [SLIDES] * 3, 1024),
        ("gpt_oss", {}, [SLIDES, FULL, SLIDES], 128),
        ("gpt_oss", {"layer_types": [FULL, FULL, SLIDES], "sliding_window": 7}, [FULL, FULL, SLIDES], 7),
    ],
)
def test_layer_types(model_type, changes, types, window):
    spec = spec_of(model_type, **changes)
    assert list(spec.layer_types) == types
    assert spec.sliding_window == window
    assert spec.is_full_attention is (SLIDES not in types)


# --- rotary embedding ---

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("model_type", "changes", "rope"),
    [
        ("llama", {}, ("default", 1e4, None, None)),
        ("mixtral", {}, ("default", 1e6, None, None)),
        ("gpt_oss", {}, ("yarn", 150_000, 32, 4096)),
        ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, ("llama3", 5e5, 8, 1024)),
        ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, ("llama3", 5e5, 8, 1024)),
        ("qwen3", {"rope_theta": 1000000, "rope_scaling": None}, ("default", 1e6, None, None)),
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
            ("default", 1e6, None, None),
        ),
        (
            "qwen3",
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
            ("linear", 1e6, 2, None),
        ),
        ("qwen3", {"rope_theta": 1e6, "rope_scaling": YARN}, ("yarn", 1e6, 4, 2048)),
        ("qwen3", {"rope_scaling": {**YARN, "rope_type": "dynamic"}}, ("dynamic", 1e4, 4, 2048)),
        # without the key transformers takes max_position_embeddings
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, ("yarn", 1e4, 4, 4096)),
        (
            "phi3",
            {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 512},
            ("longrope", 1e4, None, 512),
        ),
        ("phi3", {"original_max_position_embeddings": 512}, ("default", 1e4, None, None)),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8}}, ("linear", 1e6, 8, None)),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    SLIDES: {"rope_theta": 7.0},
                    FULL: {"rope_theta": 3.0, "rope_type": "linear", "factor": 8},
                }
            },
            ("linear", 3.0, 8, None),
        ),
        ("gemma3", {"rope_theta": 5.0, "rope_local_base_freq": 9.0}, ("default", 5.0, None, None)),
    ],
)
def test_rope_in_both_spellings(model_type, changes, rope):
    found = spec_of(model_type, **changes).rope
    assert (found.rope_type, found.rope_theta, found.factor, found.original_max_position_embeddings) == rope


def test_partial_rotation():
    assert spec_of("llama").rope.partial_rotary_factor == 1.0
    assert spec_of("glm4").rope.partial_rotary_factor == 0.5
    assert spec_of("phi3", partial_rotary_factor=0.75).rope.partial_rotary_factor == 0.75
    assert spec_of("glm4", rope_parameters={"partial_rotary_factor": 0.25}).rope.partial_rotary_factor == 0.25


@pytest.mark.parametrize(
    ("model_type", "changes", "tokens"),
    [
        ("qwen3", {"max_position_embeddings": 40960, "rope_theta": 1000000}, 32768),
        ("qwen3_moe", {"max_position_embeddings": 40960, "rope_parameters": {"rope_theta": 1e6}}, 32768),
        ("qwen3", {"max_position_embeddings": 262144, "rope_theta": 5000000}, 262144),  # the 2507 models
        ("qwen3", {"max_position_embeddings": 40960, "rope_theta": 500}, 40960),  # not one of Qwen's
        ("qwen2", {"max_position_embeddings": 131072, "rope_theta": 1e6}, 32768),
        ("qwen2", {"max_position_embeddings": 1010000, "rope_theta": 1e7}, 1010000),
        ("llama", {"rope_scaling": LLAMA3}, 1024),
        ("qwen3", {"max_position_embeddings": 40960, "rope_theta": 1e6, "rope_scaling": YARN}, 2048),
    ],
)
def test_pretrained_length(model_type, changes, tokens):
    assert spec_of(model_type, **changes).pretrained_length == tokens


# --- refusals ---


@pytest.mark.parametrize(
    ("model_type", "changes", "code", "message"),
    [
        ("qwen3", {"hidden_size": ...}, "missing-key", "^tiny: hidden_size is missing"),
        ("qwen3", {"intermediate_size": None}, "missing-key", r"is missing\. It is never guessed: add it"),
        ("qwen3", {"vocab_size": None}, "missing-key", "vocab_size is missing"),
        ("qwen3", {"max_position_embeddings": None}, "missing-key", "max_position_embeddings is missing"),
        ("gemma3", {"hidden_size": None}, "missing-key", r"text_config\.hidden_size is missing"),
        ("mixtral", {"num_local_experts": None}, "missing-key", "num_local_experts is missing"),
        ("gemma2", {"sliding_window": None}, "missing-key", "sliding_window is not set, but some"),
        ("qwen3", {"layer_types": [SLIDES] * 3}, "missing-key", "sliding_window is not set"),
        ("llama", {"hidden_size": 0}, "bad-size", r"is 0\. It must be a whole number from 1 to 1,000"),
        ("llama", {"hidden_size": -24}, "bad-size", "is -24"),
        ("llama", {"hidden_size": 24.0}, "bad-size", r"is 24\.0"),
        ("llama", {"hidden_size": True}, "bad-size", "is True"),
        ("llama", {"hidden_size": "24"}, "bad-size", "is '24'"),
        ("llama", {"hidden_size": [24]}, "bad-size", r"is \[24\]"),
        ("llama", {"hidden_size": 10**9 + 1}, "bad-size", "is 1000000001"),
        ("llama", {"vocab_size": 10**40}, "bad-size", "vocab_size is 1000"),
        ("llama", {"num_hidden_layers": 10**6}, "bad-size", "from 1 to 10,000"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "bad-size", "must be a list of layer indices"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "bad-size", "from 0 to"),
        ("llama", {"tie_word_embeddings": "yes"}, "bad-flag", r"is 'yes'\. It must be true or false"),
        ("llama", {"rope_theta": -1.0}, "bad-number", r"rope_theta is -1\.0\. It must be a positive number"),
        ("llama", {"rope_theta": float("nan")}, "bad-number", "rope_theta is nan"),
        ("llama", {"rope_theta": float("inf")}, "bad-number", "rope_theta is inf"),
        ("llama", {"rope_scaling": {"factor": "8"}}, "bad-number", r"rope_scaling\.factor is '8'"),
        ("llama", {"rope_scaling": [8]}, "bad-config", r"rope_scaling is \[8\]\. It must be a JSON object"),
        ("llama", {"rope_scaling": {"rope_type": 3}}, "bad-rope", r"rope_scaling\.rope_type is 3"),
        ("llama", {"num_key_value_heads": 4}, "uneven-heads", "is 4 and num_attention_heads 6.*must divide"),
        ("llama", {"num_attention_heads": 10, "head_dim": None}, "uneven-heads", "hidden_size is 24"),
        ("qwen3", {"layer_types": [FULL]}, "layer-types-length", "names 1 layers and num_hidden_layers is 3"),
        ("qwen3", {"layer_types": FULL}, "layer-types-length", "is 'full_attention' and num_hidden"),
        ("qwen3", {"layer_types": [FULL, FULL, "linear_attention"]}, "unknown-layer-type", "holds 'linear"),
        ("gpt_oss", {"layer_types": [FULL, FULL, 1]}, "unknown-layer-type", "holds 1"),
        ("mixtral", {"num_experts_per_tok": 6}, "too-many-experts", "is 6 and num_local_experts 5"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "unsupported-architecture", "causal models"),
    ],
)  # fmt: skip
def test_refused_values(model_type, changes, code, message):
    with pytest.raises(ModelError, match=message) as caught:
        spec_of(model_type, **changes)
    assert caught.value.code == code


@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v3", ["llama"], "Llama", "gemma3_vision"])
def test_unsupported_architectures_are_refused_by_name(model_type):
    with pytest.raises(
        ModelError, match=r"do not know model_type .*XForCausalLM.* llama, mistral, .*gemma3\."
    ) as caught:
        ModelSpec.from_config({"model_type": model_type, "architectures": ["XForCausalLM"]}, "tiny")
    assert caught.value.code == "unsupported-architecture"


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_both_parts_of_a_gemma3_config_are_needed(part):
    config = tiny("gemma3")
    del config[part]
    with pytest.raises(ModelError, match=f"^tiny: {part} is missing"):
        ModelSpec.from_config(config, "tiny")


def test_no_model_type():
    with pytest.raises(ModelError, match="model_type is missing"):
        ModelSpec.from_config({"architectures": ["XForCausalLM"]}, "tiny")


def test_not_an_object():
    with pytest.raises(ModelError, match="holds a list, not a JSON object"):
        ModelSpec.from_config([1], "tiny")


# --- loading ---


def test_a_file_and_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny("llama")), encoding="utf-8")
    from_folder, from_file = load_model(str(tmp_path)), load_model(str(tmp_path / "config.json"))
    assert from_folder.id == str(tmp_path)
    assert from_file.num_parameters == from_folder.num_parameters == spec_of("llama").num_parameters


def test_a_path_wins_over_the_catalog_but_an_output_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    assert load_model("qwen3-8b").id == "Qwen/Qwen3-8B"
    (tmp_path / "qwen3-8b" / "config.json").write_text(json.dumps(tiny("llama")), encoding="utf-8")
    assert load_model("qwen3-8b").model_type == "llama"


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"{", "bad-config", "is not JSON: .*line 1.*whole and in UTF-8"),
        (b"", "bad-config", "is not JSON"),
        (b"\xff\xfe{\x00}\x00", "bad-config", "is not JSON: .*codec can't decode"),
        (b"[" * 100_000, "bad-config", "is not JSON"),
        (b'{"hidden_size": ' + b"1" * 5_000 + b"}", "bad-config", "is not JSON: .*digits"),
        (b"[1, 2]", "bad-config", "holds a JSON list"),
        (b"null", "bad-config", "holds a JSON NoneType"),
        (b"{}", "missing-key", "model_type is missing"),
        (b" " * (10**7 + 1), "bad-config", "larger than 10 MB, so it is no config.json"),
    ],
)
def test_unusable_files(tmp_path, content, code, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(tmp_path))
    assert caught.value.code == code


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(
        ModelError, match=r"config\.json cannot be read: Permission denied\. Make it readable"
    ) as caught:
        load_model(str(tmp_path))
    assert caught.value.code == "unreadable-config"


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json.*saved model") as caught:
        load_model(str(tmp_path))
    assert caught.value.code == "no-config"


@pytest.mark.parametrize(
    "name", ["", " ", "no-such", "./no/such", "../such", "a/b/c", "out/config.json", "a\0b", "x" * 5000]
)
def test_an_unknown_name_never_touches_the_network(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(ModelError, match="neither a file or folder here nor in the catalog") as caught:
        load_model(name)
    assert caught.value.code == "unknown-model"


def test_near_matches_are_named():
    with pytest.raises(ModelError, match=r"Near it in the catalog: Qwen/Qwen3-8B, "):
        load_model("qwen-3-8b")


def hub_error(name):
    import huggingface_hub.errors as errors

    cls = getattr(errors, name)
    return cls.__new__(cls, "what the Hub said")


@pytest.mark.parametrize(
    ("error", "kind", "code", "message"),
    [
        (
            "GatedRepoError",
            ModelError,
            "gated-model",
            "is gated.*Accept it at https://huggingface.co/Qwen/Qwen3-8B-X",
        ),
        (
            "RepositoryNotFoundError",
            ModelError,
            "unknown-model",
            "neither in the catalog nor on the Hugging Face Hub",
        ),
        ("HFValidationError", ModelError, "unknown-model", "Correct the id"),
        ("RemoteEntryNotFoundError", ModelError, "no-config", "has no config.json on the Hugging Face Hub"),
        ("LocalEntryNotFoundError", EnvironmentProblem, "hub-unreachable", "needs no network"),
        ("OfflineModeIsEnabled", EnvironmentProblem, "hub-unreachable", "needs no network"),
        (
            "HfHubHTTPError",
            EnvironmentProblem,
            "hub-unreachable",
            r"did not give its config\.json: HfHubHTTPError\. Near",
        ),
    ],
)
def test_hub_errors(error, kind, code, message, monkeypatch):
    def fail(*_, **__):
        raise hub_error(error)

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    with pytest.raises(kind, match=message) as caught:
        load_model("Qwen/Qwen3-8B-X")
    assert caught.value.code == code
    assert "Near it in the catalog: Qwen/Qwen3-8B" in caught.value.message


@pytest.mark.parametrize("online", [True, False])
def test_a_hub_model_comes_from_the_hub_or_else_from_its_cache(online, tmp_path, monkeypatch):
    def head(url, timeout):
        assert url.endswith("/someone/tiny-llama/resolve/main/config.json")
        if not online:
            raise hub_error("OfflineModeIsEnabled")

    def find(id, file):
        assert (id, file) == ("someone/tiny-llama", "config.json")
        return str(tmp_path / file)

    (tmp_path / "config.json").write_text(json.dumps(tiny("llama")), encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", head)
    monkeypatch.setattr(f"huggingface_hub.{'hf_hub_download' if online else 'try_to_load_from_cache'}", find)
    assert load_model("someone/tiny-llama").id == "someone/tiny-llama"


def test_a_corrupt_hub_config_is_the_models_fault_not_the_networks(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda id, file: str(tmp_path / file))
    with pytest.raises(ModelError, match="holds a JSON list"):
        load_model("someone/tiny-llama")


def test_own_code_is_never_counted_as_transformers_class(tmp_path):
    config = tiny("phi3", auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"})
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_model(str(tmp_path)).model_type == "phi3"
    with pytest.raises(ModelError, match="Leave it off: transformers has its own phi3") as caught:
        load_model(str(tmp_path), trust_remote_code=True)
    assert caught.value.code == "remote-code"


def test_loading_imports_no_heavy_library():
    code = "import sys, lcplan.model_loading as m; m.load_model('qwen3-8b'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "huggingface_hub", "numpy"} & set(loaded)


# --- the models themselves ---


def assert_equals_transformers(spec):
    """Every count and every resolved default against the model that transformers builds from the config."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    config = json.loads(json.dumps(spec.config))
    config.pop("quantization_config", None)
    built = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    decoder, text = model.get_decoder(), built.get_text_config()

    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    assert count(model) == spec.num_parameters
    assert len(decoder.layers) == spec.num_hidden_layers
    for layer, counted in zip(decoder.layers, spec.layers, strict=True):
        assert count(layer.self_attn) == counted.attention
        assert count(layer.mlp) == counted.mlp
        assert count(layer) == counted.total
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embedding.numel() == spec.embedding_parameters
    assert (head is embedding) is spec.tie_word_embeddings
    assert (0 if head is embedding else head.numel()) == spec.lm_head_parameters
    assert count(decoder.norm) == spec.final_norm_parameters

    assert text.num_key_value_heads == spec.num_key_value_heads
    assert text.max_position_embeddings == spec.max_position_embeddings
    assert decoder.layers[0].self_attn.head_dim == spec.head_dim
    types = getattr(text, "layer_types", None)
    if types is None:
        types = [SLIDES if getattr(text, "sliding_window", None) else FULL] * spec.num_hidden_layers
    assert list(spec.layer_types) == list(types)
    if spec.sliding_window is not None:
        assert text.sliding_window == spec.sliding_window
    rope = text.rope_parameters.get(FULL) or text.rope_parameters
    assert rope["rope_type"] == spec.rope.rope_type
    assert rope["rope_theta"] == spec.rope.rope_theta
    assert rope.get("factor") == spec.rope.factor
    assert rope.get("original_max_position_embeddings") == spec.rope.original_max_position_embeddings
    assert rope.get("partial_rotary_factor", 1.0) == spec.rope.partial_rotary_factor


@pytest.mark.train
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("id", catalog.model_ids())
def test_catalog_models_equal_transformers(id):
    assert_equals_transformers(load_model(id))


@pytest.mark.train
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((model_type, {}) for model_type in KNOWN_FAMILIES),
        *((model_type, {"head_dim": ...}) for model_type in KNOWN_FAMILIES if model_type not in NEED_HEAD_DIM),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"attention_bias": True, "sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "attention_bias": False}),
        (
            "qwen3",
            {"attention_bias": True, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 9},
        ),
        (
            "qwen3_moe",
            {
                "decoder_sparse_step": 2,
                "mlp_only_layers": [1],
                "num_hidden_layers": 5,
                "attention_bias": True,
            },
        ),
        ("qwen3_moe", {"use_sliding_window": True}),
        ("phi3", {"sliding_window": 2047, "partial_rotary_factor": 0.5}),
        ("gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
        ("gemma3_text", {"attention_bias": True, "sliding_window_pattern": 2, "num_hidden_layers": 7}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "num_hidden_layers": 7}),
        ("gemma3", {"tie_word_embeddings": False}),
        (
            "gpt_oss",
            {"attention_bias": False, "rope_parameters": {**YARN, "rope_theta": 5.0, "truncate": False}},
        ),
        ("olmo2", {"attention_bias": True}),
        ("glm4", {"attention_bias": False}),
        ("mixtral", {"sliding_window": 9}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("hunyuan_v1_dense", {"attention_bias": True}),
        ("ministral", {"sliding_window": None}),
        ("ministral", {"layer_types": [FULL, SLIDES, FULL], "sliding_window": 9}),
        ("gemma", {"attention_bias": True, "tie_word_embeddings": False}),
        ("glm", {"attention_bias": False, "partial_rotary_factor": 1.0}),
        ("olmo3", {"attention_bias": True, "num_hidden_layers": 5}),
        ("exaone4", {"sliding_window_pattern": 2, "num_hidden_layers": 5}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        ),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ],
)
def test_tiny_models_equal_transformers(model_type, changes):
    assert_equals_transformers(spec_of(model_type, **changes))
