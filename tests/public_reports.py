"""Public reports of long-context memory (``data/public_reports.jsonl``), and how a test makes a plan of one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lcplan import Goal, MemoryReport, ModelSpec, estimate, load_gpu, load_model, recommend
from lcplan.errors import PlanError
from lcplan.units import GB
from tests.conftest import plan_of, tiny_spec

_FILE = Path(__file__).parent / "data" / "public_reports.jsonl"
REPORTS: dict[str, dict[str, Any]] = {
    report["id"]: report for report in map(json.loads, _FILE.read_text(encoding="utf-8").splitlines())
}
"""By id; ``measured`` holds the published figures, with the units as published."""
AS_PUBLISHED = 0.03
"""Relative distance within which a report of the same stack is met."""
OURS = 0.005
"""Relative distance within which a test pins what lcplan says where that is not the published figure."""
MILLION: dict[str, int] = {"max_length": 1 << 20, "num_gpus": 8, "cp_size": 8}
"""1M tokens on one node, as the reports of the same stack have it."""


def published(id: str) -> Any:
    """The published figures of a report."""
    return REPORTS[id]["measured"]


def model(name: str | ModelSpec) -> ModelSpec:
    return load_model(name) if isinstance(name, str) else name


def unlisted(model_type: str, **sizes: Any) -> ModelSpec:
    """A model that the catalog lacks, from the sizes in its config.json; head_dim follows from them."""
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    return tiny_spec(model_type=model_type, head_dim=head_dim, **sizes)


LLAMA3_8B = unlisted(
    "llama", hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128_256,
)  # fmt: skip
"""Llama 3, whose rotary embedding does not scale yet; the catalog's 3.1 has the same shapes."""


def estimated(name: str | ModelSpec, gpu: str = "h100-80gb", **given: Any) -> MemoryReport:
    spec = model(name)
    return estimate(spec, plan_of(spec, gpu=gpu, **given), load_gpu(gpu))


def peak_gb(report: MemoryReport) -> float:
    """Peak allocated in decimal GB."""
    return report.peak_allocated_bytes / GB


def item_bytes(report: MemoryReport, key: str) -> int:
    """The item where it is largest."""
    return max((item.num_bytes for item in report.items if item.key == key), default=0)


def phase_bytes(report: MemoryReport, phase: str) -> int:
    return next(total.allocated_bytes for total in report.phases if total.phase == phase)


def check_refused(what: str, name: str | ModelSpec, gpu: str = "h100-80gb", **given: Any) -> None:
    """The formulas do not cover it, and say so by name; once they do, this fails and the test owes a number."""
    with pytest.raises(PlanError, match=f"{re.escape(what)}.*would be a guess") as caught:
        estimated(name, gpu, **given)
    assert caught.value.code == "not-covered"


def longest(name: str | ModelSpec, gpu: str = "h100-80gb", num_gpus: int = 1, **fixed: Any) -> int:
    """The longest max_length that fits when the rest is fixed."""
    goal = Goal(gpu=gpu, num_gpus=num_gpus, fixed=fixed)
    return recommend(model(name), goal, load_gpu(gpu)).plans[0].plan.max_length
