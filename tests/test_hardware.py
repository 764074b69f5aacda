"""The catalog's GPUs: complete, sourced, and what a process gets is less than what nvidia-smi says."""

import pytest
from pydantic import ValidationError

from lcplan import catalog
from lcplan.errors import InputError
from lcplan.hardware import GpuSpec, load_gpu
from lcplan.units import GIB, MIB

IDS = [
    "h100-80gb",
    "h200",
    "a100-80gb",
    "a100-40gb",
    "b200",
    "l40s",
    "rtx-4090",
    "rtx-5090",
    "a10g",
    "mi300x",
]


def test_the_ids():
    assert catalog.gpu_ids() == IDS


@pytest.mark.parametrize("id", IDS)
def test_every_figure_has_a_source_and_a_date(id):
    gpu = load_gpu(id)
    figures = {
        name
        for name, value in gpu
        if name not in ("id", "name", "as_of", "sources") and value is not None
    }  # fmt: skip
    assert set(gpu.sources) == figures
    assert all(gpu.sources.values())
    assert gpu.as_of


@pytest.mark.parametrize("id", IDS)
def test_a_process_gets_less_than_is_reported(id):
    gpu = load_gpu(id)
    assert 0.97 * gpu.reported_bytes < gpu.usable_bytes < gpu.reported_bytes


@pytest.mark.parametrize(
    ("id", "usable_gib", "reported_mib"),
    [
        ("h100-80gb", 79.10, 81_559),
        ("h200", 139.72, 143_771),
        ("a100-80gb", 79.11, 81_920),
        ("a100-40gb", 39.38, 40_960),
        ("b200", 178.35, 183_359),
        ("l40s", 44.39, 46_068),
        ("rtx-4090", 23.49, 24_564),
        ("rtx-5090", 31.34, 32_607),
        ("a10g", 21.98, 23_028),
        ("mi300x", 191.69, 196_592),
    ],
)
def test_memory(id, usable_gib, reported_mib):
    gpu = load_gpu(id)
    # out-of-memory messages print two decimals; the catalog rounds down to a whole MiB
    assert gpu.usable_bytes == int(usable_gib * 1024) * MIB
    assert gpu.reported_bytes == reported_mib * MIB


def test_speed_and_node_of_an_h100():
    gpu = load_gpu("h100-80gb")
    assert gpu.bf16_dense_flops == 989_400_000_000_000
    assert gpu.memory_bandwidth == 3_350_000_000_000
    assert gpu.link_bandwidth == 450_000_000_000
    assert gpu.host_link_bandwidth == 64_000_000_000
    assert gpu.gpus_per_node == 8
    assert gpu.node_host_memory_bytes == 2048 * GIB


@pytest.mark.parametrize("id", ["l40s", "rtx-4090", "rtx-5090", "a10g"])
def test_without_nvlink_gpus_speak_over_pcie(id):
    assert load_gpu(id).link_bandwidth == load_gpu(id).host_link_bandwidth


def test_ids_match_without_case():
    assert load_gpu("H100-80GB") == load_gpu("h100-80gb")


@pytest.mark.parametrize(
    ("id", "hint"),
    [
        ("h100", " Did you mean h100-80gb?"),
        ("A100", " Did you mean a100-80gb or a100-40gb?"),
        ("4090", " Did you mean rtx-4090?"),
        ("l40", " Did you mean l40s?"),
        ("rtx4090", " Did you mean rtx-4090?"),
        ("tpu", ""),
        ("", ""),
    ],
)
def test_an_unknown_id_names_the_near_and_the_known_ones(id, hint):
    with pytest.raises(InputError) as caught:
        load_gpu(id)
    assert caught.value.code == "unknown-gpu"
    assert caught.value.message == f"GPU {id!r} is not in the catalog.{hint} Give one of {', '.join(IDS)}."


def test_a_gpu_of_ones_own():
    gpu = GpuSpec(
        id="mine", name="Mine", usable_bytes=8 * GIB, reported_bytes=9 * GIB, bf16_dense_flops=1,
        memory_bandwidth=1, link_bandwidth=1, host_link_bandwidth=1,
    )  # fmt: skip
    assert gpu.gpus_per_node == 1
    assert gpu.node_host_memory_bytes is None
    with pytest.raises(ValidationError, match="usable_bytes"):
        GpuSpec(**{**gpu.model_dump(), "usable_bytes": 0})
