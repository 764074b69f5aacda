"""Shared pieces of the tests."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

from lcplan.cli.main import main
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan, resolve


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3 whose every size differs from every other, so that a swapped axis cannot cancel."""
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 40, "intermediate_size": 112,
        "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "vocab_size": 560,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
    }  # fmt: skip
    return config | changes


def tiny_spec(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config(tiny_config(**changes), "tiny")


def plan_of(spec: ModelSpec, **given: Any) -> TrainPlan:
    given = {"gpu": "h200", "rope": "none"} | given
    return resolve(spec, given, usual_gpus_per_node=8)[0]


class Outcome(NamedTuple):
    """What a user sees of one command."""

    code: int
    out: str
    err: str


@pytest.fixture
def lcplan(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The command line, called in this process."""

    def call(*args: str) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(list(args))
        captured = capsys.readouterr()
        code = stop.value.code
        return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)

    return call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that train are skipped where the train extra is not installed, and say so."""
    missing = [name for name in ("torch", "transformers", "trl", "datasets") if find_spec(name) is None]
    if missing:
        skip = pytest.mark.skip(reason=f"needs the train extra: {', '.join(missing)} not installed")
        for item in items:
            if item.get_closest_marker("train"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but a Hub name may need the network, and no test has one."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(autouse=True)
def _no_rows_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the rows that the user has recorded."""
    monkeypatch.setenv("LCPLAN_ROWS", str(tmp_path_factory.mktemp("own") / "rows.jsonl"))
