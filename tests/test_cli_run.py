from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from lcplan.cli import run
from lcplan.errors import InputError, LcplanError

app = typer.Typer()
app.command()(run.command)
QWEN = ["Qwen/Qwen3-8B", "--max-length", "1Mi", "--gpu", "h100-80gb", "--num-gpus", "8", "--cp-size", "8"]


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, LcplanError):
        raise result.exception
    return result


def plan_of(folder):
    return json.loads((folder / "plan.json").read_text())


def test_dry_run_of_the_guides_job(tmp_path):
    result = invoke("--preset", "qwen3-8b-1m", "--output-dir", tmp_path / "job", "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"cd {tmp_path / 'job'} && accelerate launch --config_file accelerate.yaml train.py\n"
    written = plan_of(tmp_path / "job")
    assert written["plan"]["max_length"] == 1048576
    assert written["rope"]["factor"] == 32
    assert written["rope"]["original_max_position_embeddings"] == 32768
    assert written["max_position_embeddings"] == 1048576
    assert written["model"]["init"] == "pretrained"
    assert written["tokenizer"] == {
        "kind": "pretrained", "id": "Qwen/Qwen3-8B", "revision": None, "vocab_size": None,
    }  # fmt: skip
    assert written["training"]["max_steps"] == 100
    assert written["prediction"]["pinned_bytes_per_rank"] == 36 * 2**30
    assert set(written["stack"]) == {"torch", "transformers", "accelerate", "trl"}


def test_flags_override_the_preset(tmp_path):
    flags = [
        "--max-steps",
        3,
        "--learning-rate",
        "2e-4",
        "--seed",
        7,
        "--no-save",
        "--init",
        "random",
        "--data",
        "python-docs",
    ]
    result = invoke("--preset", "qwen3-8b-1m", *flags, "--output-dir", tmp_path / "job", "--dry-run")
    assert result.exit_code == 0, result.output
    written = plan_of(tmp_path / "job")
    chosen = {key: written["training"][key] for key in ("max_steps", "learning_rate", "seed", "save_model")}
    assert chosen == {"max_steps": 3, "learning_rate": 2e-4, "seed": 7, "save_model": False}
    assert written["model"]["init"] == "random"
    assert written["model"]["config"]["hidden_size"] == 4096
    assert written["data"]["kind"] == "python-docs"
    assert written["tokenizer"]["kind"] == "train-bpe"


def test_smoke_is_a_plan_for_the_cpu(tmp_path):
    result = invoke("--preset", "smoke", "--output-dir", tmp_path / "job", "--dry-run")
    assert result.exit_code == 0, result.output
    written = plan_of(tmp_path / "job")
    assert (written["device"], written["prediction"], written["rope"]) == ("cpu", None, None)
    assert written["tokenizer"]["vocab_size"] == 1024


def test_a_plan_that_does_not_fit_writes_nothing(tmp_path):
    result = invoke(*QWEN, "--data", "python-docs", "--output-dir", tmp_path / "job", "--dry-run")
    assert result.exit_code == 1
    assert "does not fit: the plan needs" in result.stderr
    assert "lcplan recommend" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([*QWEN, "--data", "python-docs"], "no-output-dir"),
        ([*QWEN, "--output-dir", "{}/job"], "no-data"),
        ([*QWEN, "--output-dir", "{}/job", "--data", "missing.txt"], "data-not-found"),
        (["--preset", "smoke", "--output-dir", "{}/job", "--init", "zero"], "bad-choice"),
        (["--preset", "smoke", "--output-dir", "{}/job", "--max-steps", "0"], "bad-value"),
        (["--preset", "smoke", "--output-dir", "{}/job", "--learning-rate", "-1"], "bad-value"),
        (["--preset", "smokey", "--output-dir", "{}/job"], "unknown-preset"),
        (["--output-dir", "{}/job"], "no-model"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(tmp_path, arguments, code):
    with pytest.raises(InputError) as caught:
        invoke(*(argument.format(tmp_path) for argument in arguments), "--dry-run")
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []
