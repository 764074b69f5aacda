"""The arithmetic that is shown beside an item is the one that was done."""

from __future__ import annotations

from typing import Any

import pytest

from lcplan.cli.plan_options import read_job
from lcplan.estimation import estimate, workings
from lcplan.estimators import attention, weights
from lcplan.estimators._item import ITEMS
from lcplan.estimators.working import MINUS, TIMES, Working, named, showing_working
from lcplan.units import ceil_div


def number(name: str, value: int) -> Any:
    return Working.argument(name, value)


def value_of(text: str) -> float:
    return eval(text.replace(",", "").replace(TIMES, "*").replace(MINUS, "-"))


A, B, C = number("a", 7), number("b", 3), number("c", 1000)


@pytest.mark.parametrize(
    ("made", "names", "numbers", "value"),
    [
        (A + B, "a + b", "7 + 3", 10),
        (A + 2, "a + 2", "7 + 2", 9),
        (2 + A, "2 + a", "2 + 7", 9),
        (0 + A, "a", "7", 7),
        (A + 0, "a", "7", 7),
        (number("none", 0) + A, "a", "7", 7),
        (A - B, "a - b", "7 - 3", 4),
        (A - 0, "a", "7", 7),
        (A - (B - 1), "a - (b - 1)", "7 - (3 - 1)", 5),
        (2 * (A + B) * C, "2 x (a + b) x c", "2 x (7 + 3) x 1,000", 20000),
        ((A + B) * 4, "(a + b) x 4", "(7 + 3) x 4", 40),
        (1 * A, "a", "7", 7),
        (C // A, "c / a", "1,000 / 7", 142),
        (C // 1, "c", "1,000", 1000),
        (C // (A * B), "c / (a x b)", "1,000 / (7 x 3)", 47),
        (ceil_div(C, A), "c / a", "1,000 / 7", 143),
        (ceil_div(2 * C, A), "2 x c / a", "2 x 1,000 / 7", 286),
        (ceil_div(C, 1), "c", "1,000", 1000),
        (-A, "-a", "-7", -7),
        (-(A + B), "-(a + b)", "-(7 + 3)", -10),
        (min(A, B), "b", "3", 3),
    ],
)
def test_every_operation_keeps_its_text(made: Working, names: str, numbers: str, value: int) -> None:
    ascii_of = {ord(TIMES): "x", ord(MINUS): "-"}
    assert made == value
    assert made.names.translate(ascii_of) == names
    assert made.numbers.translate(ascii_of) == numbers


def test_items_show_their_working_only_when_asked() -> None:
    size = {"tokens": 10, "heads": 6, "kv_heads": 2, "head_dim": 4}
    plain = attention.saved(**size)
    with showing_working():
        shown = attention.saved(**size)
        assert named({"wide": True, "tokens": 4})["wide"] is True
    assert type(plain) is int
    assert isinstance(shown, Working)
    assert shown == plain == value_of(shown.numbers)
    assert "kv_heads" in shown.names
    assert type(attention.saved(**size)) is int
    assert type(named(size)["tokens"]) is int


def test_a_failure_ends_the_showing() -> None:
    with pytest.raises(ZeroDivisionError), showing_working():
        weights.parameters(num_parameters=1, dtype_bytes=2, ranks=0)
    assert type(weights.parameters(num_parameters=1, dtype_bytes=2, ranks=1)) is int


JOBS: list[dict[str, Any]] = [
    {"preset": "qwen3-8b-1m"},
    {"preset": "qwen3-4b-128k"},
    {"model": "Qwen/Qwen3-30B-A3B", "max_length": 8192, "gpu": "h200"},
    {"model": "Qwen/Qwen3-4B", "max_length": 8192, "gpu": "h200", "lora_r": 16, "quantize": "nf4"},
    {"model": "Qwen/Qwen3-4B", "max_length": 8192, "gpu": "h200", "activation_checkpointing": "none"},
    {
        "model": "Qwen/Qwen3-4B", "max_length": 32768, "gpu": "h200", "num_gpus": 4, "backend": "deepspeed",
        "offload_optimizer": True,
    },
    {"model": "google/gemma-3-4b-it", "max_length": 8192, "gpu": "h200"},
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=lambda job: str(job.get("preset") or job["model"]))
def test_the_numbers_of_a_report_give_its_bytes(job: dict[str, Any]) -> None:
    given = {name: value for name, value in job.items() if name not in ("model", "preset")}
    found = read_job(job.get("model"), job.get("preset"), None, given, trust_remote_code=False)
    report = estimate(found.spec, found.plan, found.gpu)
    worked = workings(found.spec, found.plan, report)
    sizes = {(item.key, item.num_bytes) for item in report.items}
    assert set(worked) <= sizes
    for (key, num_bytes), working in worked.items():
        # a division is rounded once, up or down
        assert abs(value_of(working.numbers) - num_bytes) < 2, key
    without = {key for key, _ in sizes} - {key for key, _ in worked}
    assert without <= {
        "runtime.cublas_workspace", "runtime.cuda_context", "runtime.nccl", "loss_head.logits_tile",
        "host.zero_pinned_gradients", "host.zero_pinned_copies",
    }  # fmt: skip
    assert estimate(found.spec, found.plan, found.gpu) == report, "nothing of it stays behind"


def test_every_item_is_in_the_stack_of_the_timeline() -> None:
    from lcplan.estimators import formula  # noqa: F401  (registers the items)
    from lcplan.pictures import STACK
    from lcplan.reports.text_pictures import LETTERS

    off_the_gpu = {"host", "disk"}
    assert {key.partition(".")[0] for key in ITEMS} - off_the_gpu <= set(STACK)
    assert set(LETTERS) == set(STACK)
