"""The catalog's data: well formed, sourced, unambiguous; ``test_model_spec`` builds each of its models."""

import pytest

from lcplan import catalog
from lcplan.model_loading import load_model

# Parameters of each repository's safetensors files, tied heads counted once.
PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "google/gemma-3-4b-pt": 4_300_079_472,
    "google/gemma-3-27b-pt": 27_432_406_640,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "microsoft/phi-4": 14_659_507_200,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
}


def test_every_model_of_the_catalog_has_a_published_count():
    assert set(catalog.model_ids()) == set(PUBLISHED)


@pytest.mark.parametrize("id", PUBLISHED)
def test_parameters_equal_the_published_count(id):
    assert load_model(id).num_parameters == PUBLISHED[id]


@pytest.mark.parametrize("id", PUBLISHED)
def test_each_model_names_its_source(id):
    assert catalog.model_source(id) == f"https://huggingface.co/{id}/blob/main/config.json"


def test_no_two_models_share_a_spelling():
    spellings = [
        spelling
        for id in catalog.model_ids()
        for name in (id, *catalog._model(id).get("aliases", []))
        for spelling in (name.casefold(), name.rpartition("/")[2].casefold())
    ]
    assert len(spellings) == len(set(spellings)) == len(catalog.model_names())


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "QWEN3-8B", "qwen3-8b"])
def test_ids_match_without_case_and_without_the_organisation(name):
    assert load_model(name).id == "Qwen/Qwen3-8B"


def test_an_alias_keeps_its_own_id():
    tuned, base = load_model("google/gemma-3-4b-it"), load_model("gemma-3-4b-pt")
    assert tuned.id == "google/gemma-3-4b-it"
    assert tuned.model_copy(update={"id": base.id}) == base


def test_a_caller_cannot_change_the_catalog():
    catalog.model_config("Qwen/Qwen3-8B")["hidden_size"] = 1
    catalog.gpu_entry("h200")["name"] = ""
    assert load_model("qwen3-8b").hidden_size == 4096
    assert catalog.gpu_entry("h200")["name"]


@pytest.mark.parametrize(
    ("id", "tokens"),
    [
        ("Qwen/Qwen3-8B", 32_768),
        ("Qwen/Qwen3-30B-A3B", 32_768),
        ("Qwen/Qwen2.5-7B", 32_768),
        ("meta-llama/Llama-3.1-8B", 8_192),
        ("openai/gpt-oss-20b", 4_096),
        ("microsoft/phi-4", 16_384),
        ("mistralai/Mistral-7B-v0.3", 32_768),
        ("google/gemma-3-4b-pt", 131_072),
    ],
)
def test_pretrained_length(id, tokens):
    assert load_model(id).pretrained_length == tokens


def test_only_gemma_and_gpt_oss_slide():
    sliding = {id for id in catalog.model_ids() if not load_model(id).is_full_attention}
    assert sliding == {
        "google/gemma-3-4b-pt", "google/gemma-3-27b-pt", "openai/gpt-oss-20b", "openai/gpt-oss-120b"
    }  # fmt: skip
