"""The command line as a user sees it: outputs, exit codes, messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lcplan.estimators.working import TIMES
from tests.conftest import tiny_config

JOB = ["Qwen/Qwen3-8B", "--max-length", "1Mi", "--gpu", "h100-80gb", "--num-gpus", "8", "--cp-size", "8"]


def test_the_first_line_answers(lcplan) -> None:
    result = lcplan("estimate", *JOB, "--offload-activations")
    first = result.out.splitlines()[0]
    assert result.code == 0
    assert first.startswith("FITS: 55.16 GiB of 79.10 GiB on h100-80gb, 23.94 GiB free")
    assert "mlp.saved" in " ".join(result.out.split("\n")[:2])
    for word in ("weights", "gradients", "optimizer", "loss head", "MLP", "attention", "host"):
        assert word in result.out


def test_a_plan_that_does_not_fit_exits_1_and_says_what_to_try(lcplan) -> None:
    result = lcplan("estimate", *JOB)
    assert result.code == 1
    text = " ".join(result.out.split())
    assert "DOES NOT FIT" in text
    assert "10.10 GiB short" in text
    assert "Try: lcplan recommend Qwen/Qwen3-8B --max-length 1048576 --gpu h100-80gb --num-gpus 8" in text


def test_json_is_the_contract(lcplan) -> None:
    result = lcplan("estimate", *JOB, "--offload-activations", "--json")
    report = json.loads(result.out)
    assert set(report) == {
        "schema_version", "lcplan_version", "method", "model", "plan", "gpu", "stack", "peak_allocated_bytes",
        "peak_phase", "peak_rank", "device_peak_bytes", "fits", "headroom_bytes", "host", "disk", "items", "phases",
        "timeline", "tensors_at_peak", "rope", "step_time_s", "tokens_per_second", "warnings", "assumptions",
        "not_modelled", "compared", "batch", "step_time", "step_time_unknown", "token_budget",
    }  # fmt: skip
    assert report["schema_version"] == 1
    assert set(report["stack"]) == {"trl", "transformers", "accelerate", "torch"}
    assert set(report["gpu"]) == {"id", "usable_bytes"}
    assert set(report["host"]) == {"pinned_bytes_per_rank", "pinned_bytes_per_node", "load_bytes_per_node", "fits"}
    assert set(report["disk"]) == {"saved_model_bytes", "checkpoint_bytes"}
    for item in report["items"]:
        assert set(item) == {
            "key", "category", "num_bytes", "phases", "device", "formula", "source", "confidence",
        }  # fmt: skip
    assert report["rope"]["factor"] == 32


def test_presets(lcplan) -> None:
    report = json.loads(lcplan("estimate", "--preset", "qwen3-8b-1m", "--json").out)
    assert report["peak_allocated_bytes"] == pytest.approx(55_088_169_472, rel=1e-4)
    assert report["fits"] is True
    assert report["host"]["pinned_bytes_per_node"] == 8 * 36 * 2**30
    assert lcplan("estimate", "--preset", "qwen3-8b-1m", "--no-offload-activations").code == 1
    for name in ("qwen3-4b-128k", "qwen3-4b-192k-offload", "qwen3-4b-1m-4gpu"):
        assert lcplan("estimate", "--preset", name).code == 0


def test_flags_win_over_the_preset(lcplan) -> None:
    report = json.loads(lcplan("estimate", "--preset", "qwen3-8b-1m", "--max-length", "524288", "--json").out)
    assert report["plan"]["max_length"] == 524288
    assert report["plan"]["cp_size"] == 8
    assert report["rope"]["factor"] == 16


def test_a_job_file_is_read_like_a_preset(lcplan, tmp_path: Path) -> None:
    job = tmp_path / "my job.yaml"
    job.write_text(
        "description: mine\nsource: me\nmodel: Qwen/Qwen3-8B\nplan: {max_length: 4096, gpu: h200}\n"
        "data: {kind: python-docs}\n"
    )
    report = json.loads(lcplan("estimate", "--config", str(job), "--json").out)
    assert report["plan"]["max_length"] == 4096


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "allenai/OLMo-2-1124-7B", "microsoft/phi-4", "Qwen/Qwen2.5-7B"]
)
@pytest.mark.parametrize(
    "levers",
    [
        [],
        ["--lora-r", "16"],
        ["--lora-r", "16", "--lora-dropout", "0.1"],
        ["--lora-r", "16", "--quantize", "nf4"],
        ["--activation-checkpointing", "none", "--scored-fraction", "0.1"],
        ["--optim", "adamw_torch_8bit"],
        ["--num-gpus", "2", "--no-reshard-after-forward"],
        ["--num-gpus", "2", "--backend", "ddp"],
    ],
)
@pytest.mark.parametrize("length", ["1Ki", "64Ki"])
def test_every_plan_that_is_covered_is_shown(lcplan, model: str, levers: list[str], length: str) -> None:
    """A lever may be refused for a family; whatever is answered is answered in words."""
    result = lcplan("estimate", model, "--max-length", length, "--gpu", "h200", *levers)
    if result.code == 2:
        assert "error [not-covered]" in result.err
    else:
        assert "FIT" in result.out.splitlines()[0]


def test_every_item_has_its_group_in_the_report() -> None:
    from lcplan.estimators import formula  # noqa: F401  (registers the items)
    from lcplan.estimators._item import ITEMS
    from lcplan.reports.terminal import GROUPS

    outside_the_gpu = {"host", "disk"}
    assert {key.partition(".")[0] for key in ITEMS} - outside_the_gpu <= set(GROUPS)


def test_units(lcplan) -> None:
    result = lcplan("estimate", *JOB, "--offload-activations", "--units", "GB")
    assert "59.23 GB of 84.93 GB" in result.out
    assert "GiB" not in result.out.replace("--units GiB", "")


def test_explain(lcplan) -> None:
    result = lcplan("estimate", *JOB, "--offload-activations", "--explain", "mlp.saved")
    assert "formula: 8*I*T" in result.out
    assert "source: transformers 5.24 Qwen3MLP" in result.out
    assert "confidence: exact" in result.out
    assert "12.00 GiB (12,884,901,888 bytes) in backward[35].mlp" in result.out
    assert "  = 8 x intermediate_size x tokens\n  = 8 x 12,288 x 131,072\n" in result.out.replace(TIMES, "x")
    assert "no item" in lcplan("estimate", *JOB, "--explain", "nothing").err


@pytest.mark.parametrize("width", ["60", "100", "160"])
def test_no_line_is_wider_than_the_terminal(lcplan, monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for line in lcplan("estimate", *JOB).out.splitlines():
        assert len(line) <= int(width)


def test_recommend(lcplan) -> None:
    goal = ["Qwen/Qwen3-8B", "--max-length", "1048576", "--gpu", "h100-80gb", "--num-gpus", "8"]
    result = lcplan("recommend", *goal)
    assert result.code == 0
    text = " ".join(result.out.replace("\\\n", " ").split())
    command = text[text.index("lcplan estimate") :]
    kept = "--activation-checkpointing selective --offload-activations --kernels liger --host-memory 2TiB"
    assert command == f"lcplan estimate {' '.join(goal)} --cp-size 8 {kept}"
    assert lcplan(*command.split()[1:]).code == 0, "the printed command runs and fits"
    answer = json.loads(lcplan("recommend", *goal, "--json").out)
    assert set(answer) >= {"schema_version", "goal", "plans", "searched", "binding"}
    assert answer["plans"][0]["levers"][-3:] == ["offload-activations", "context-parallel", "fused-kernels"]


def test_recommend_nothing_exits_1(lcplan) -> None:
    result = lcplan("recommend", "Qwen/Qwen3-32B", "--max-length", "4Mi", "--gpu", "l40s", "--num-gpus", "8")
    assert result.code == 1
    assert "NOTHING FITS" in result.out


def test_check(lcplan) -> None:
    result = lcplan("check", "--tolerance", "2%")
    assert result.code == 0
    assert "no row drifts" in result.out
    assert "context-parallel" in result.out
    report = json.loads(lcplan("check", "--tolerance", "2%", "--json").out)
    assert {"measured_bytes", "predicted_bytes", "error"} <= set(report["rows"][0])
    assert {"worst_error", "mean_error", "mean_signed_error"} <= set(report)
    assert {"kind", "name", "num_rows", "worst_error", "mean_error", "mean_signed_error"} <= set(report["groups"][0])
    assert lcplan("check", "--tolerance", "0.0001%").code == 1
    assert "percentage" in lcplan("check", "--tolerance", "2").err


@pytest.mark.parametrize("kind", ["models", "gpus", "presets", "levers"])
def test_list(lcplan, kind: str) -> None:
    result = lcplan("list", kind)
    assert result.code == 0
    expected = {"models": "Qwen/Qwen3-8B", "gpus": "h100-80gb", "presets": "qwen3-8b-1m", "levers": "context-parallel"}
    assert expected[kind] in result.out


MISTAKES = [
    (["estimate"], "No model is named"),
    (["estimate", "qwen3-8b"], "--max-length is not given"),
    (["estimate", "qwen3-8b", "--max-length", "4096"], "--gpu is not given"),
    (["estimate", "qwen3-8b", "--max-length", "4096", "--gpu", "h100"], "h100-80gb"),
    (["estimate", "qwen9-8b", "--max-length", "4096", "--gpu", "h200"], "qwen9-8b"),
    (["estimate", "qwen3-8b", "--max-length", "-5", "--gpu", "h200"], "-5"),
    (["estimate", "qwen3-8b", "--max-length", "4k5", "--gpu", "h200"], "1048576"),
    (["estimate", "qwen3-8b", "--max-length", "4096", "--gpu", "h200", "--host-memory", "2T"], "80GB"),
    (["estimate", "--preset", "nothing"], "qwen3-8b-1m"),
    (["estimate", "--preset", "smoke", "--config", "x.yaml"], "one of them"),
    (["estimate", "--config", "not-there.yaml"], "not-there.yaml"),
    (["estimate", *JOB, "--capacity", "80GB"], "--capacity with --method formula: use --method probe"),
    (["estimate", *JOB, "--rank", "7"], "--method trace or probe"),
    (["estimate", *JOB, "--method", "probe", "--rank", "8"], "ranks 0 to 7"),
    (["estimate", *JOB, "--method", "probe", "--layers", "99"], "has 36"),
    (["estimate", *JOB, "--units", "TB"], "GiB, GB"),
    (["estimate", *JOB, "--method", "guess"], "formula"),
    (["estimate", *JOB, "--num-gpus", "7"], "the product must equal"),
    (["estimate", *JOB, "--compare-rules", "--explain", "mlp.saved"], "Give one of them"),
    (["recommend", "qwen3-8b", "--gpu", "h200"], "--longest"),
    (["recommend", "qwen3-8b", "--gpu", "h200", "--longest", "--max-length", "1M"], "Use one of them"),
    (["recommend", "qwen3-8b", "--longest"], "--gpu"),
    (["recommend", "qwen3-8b", "--longest", "--gpu", "h200", "--num-gpus", "-1"], "positive"),
    (["list", "nothing"], "models, gpus, presets, levers"),
    (["check", "--rows", "not-there.jsonl"], "not-there.jsonl"),
    (["check", "--add", "not-there.json"], "not-there.json"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_a_mistake_is_one_message_and_exit_2(lcplan, args: list[str], message: str) -> None:
    result = lcplan(*args)
    assert result.code == 2
    assert result.out == ""
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.err.count("\n") == 1


def test_a_model_from_its_folder(lcplan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert lcplan("estimate", str(tmp_path), "--max-length", "512", "--gpu", "a10g").code == 0
    (tmp_path / "config.json").write_text("{ broken")
    result = lcplan("estimate", str(tmp_path), "--max-length", "512", "--gpu", "a10g")
    assert result.code == 2
    assert "config.json" in result.err


def test_an_unexpected_failure_is_exit_2_with_its_traceback(lcplan, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr("lcplan.estimation.estimate", broken)
    result = lcplan("estimate", *JOB)
    assert result.code == 2
    assert "surprise" in result.err
    assert "defect" in result.err


@pytest.mark.parametrize(
    "code",
    [
        "from lcplan.cli.main import main\ntry: main(['estimate', '--preset', 'qwen3-8b-1m'])\nexcept SystemExit: pass",
        "from lcplan.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from lcplan.cli.main import main\ntry: main(['plot', 'timeline', '--preset', 'qwen3-8b-1m'])\n"
        "except SystemExit: pass",
        "from lcplan import estimate, recommend, ModelSpec, TrainPlan, GpuSpec, MemoryReport",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    names = {"torch", "transformers", "trl", "accelerate", "datasets", "matplotlib", "numpy"}
    check = f"\nimport sys\nheavy = {names} & set(sys.modules)\n"
    script = code + check + "sys.exit(f'imported {heavy}' if heavy else 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["list models", "check", "plot timeline --preset qwen3-8b-1m"])
def test_a_closed_pipe_is_no_error(command: str) -> None:
    script = f"'{sys.executable}' -m lcplan.cli.main {command} | head -n 1; test ${{PIPESTATUS[0]}} -eq 0"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
