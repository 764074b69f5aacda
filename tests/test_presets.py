from __future__ import annotations

import pytest

from lcplan.errors import InputError
from lcplan.presets import list_presets, load_preset, parse_preset
from lcplan.train_plan import TrainPlan

VALID = """
description: a job
source: nowhere
model: Qwen/Qwen3-4B
plan: {max_length: 4096, gpu: h200}
data: {kind: python-docs}
"""


def test_all_presets_are_there_and_load():
    assert set(list_presets()) == {
        "qwen3-8b-1m", "qwen3-8b-1m-faster", "qwen3-8b-4m", "qwen3-4b-1m-4gpu", "qwen3-4b-128k",
        "qwen3-4b-192k-offload", "smoke",
    }  # fmt: skip
    for name in list_presets():
        preset = load_preset(name)
        assert preset.name == name
        TrainPlan(**preset.plan)
        assert preset.source
        assert preset.description


def test_the_guides_job():
    preset = load_preset("qwen3-8b-1m")
    assert preset.model == "Qwen/Qwen3-8B"
    assert preset.plan == {
        "max_length": 1048576, "per_device_train_batch_size": 1, "gpu": "h100-80gb", "num_gpus": 8,
        "gpus_per_node": 8, "backend": "fsdp2", "cp_size": 8, "loss": "chunked",
        "activation_checkpointing": "full", "offload_activations": True, "rope": "auto",
    }  # fmt: skip
    assert (preset.data.kind, preset.data.name, preset.data.text_column) == ("hub", "emozilla/pg19", "text")
    assert preset.device == "gpu"


def test_smoke_needs_neither_gpu_nor_network():
    preset = load_preset("smoke")
    assert (preset.device, preset.init, preset.data.kind) == ("cpu", "random", "python-docs")
    assert preset.config is not None
    assert preset.tokenizer is not None
    assert preset.tokenizer.kind == "train-bpe"
    assert preset.plan["dtype"] == "float32"


def test_only_what_a_preset_sets_is_in_its_plan():
    assert parse_preset(VALID, name="p").plan == {"max_length": 4096, "gpu": "h200"}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match="'qwen'.*qwen3-8b-1m.*smoke") as caught:
        load_preset("qwen")
    assert caught.value.code == "unknown-preset"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (VALID + "\nmodle: x\n", "modle: Extra inputs"),
        (VALID.replace("gpu: h200", "gpu: h200, cp_sise: 2"), "cp_sise"),
        (VALID.replace("4096", "-4096"), "max_length"),
        (VALID + "\nmodel: again\n", "'model' is there twice"),
        (VALID.replace("gpu: h200", "gpu: h200, gpu: h100-80gb"), "'gpu' is there twice"),
        (VALID.replace("kind: python-docs", "kind: nowhere"), r"data\.kind"),
        (VALID + "\ntraining: {learning_rate: 0}\n", r"training\.learning_rate"),
        ("- a list", "not a mapping"),
        ("model: [unclosed", "not valid YAML"),
        ("? [a, b]\n: c\n", "not valid YAML"),
        ("", "not a mapping"),
        (VALID.replace("source: nowhere", ""), "source: Field required"),
    ],
)
def test_a_wrong_preset_is_refused_by_name(text, complaint):
    with pytest.raises(InputError, match=complaint) as caught:
        parse_preset(text, name="mine")
    assert caught.value.code == "bad-preset"
    assert "'mine'" in caught.value.message
