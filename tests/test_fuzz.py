"""10,000 job configs with something wrong in most: an answer, or one message and exit 2; no traceback, nothing written.

Seeded, so that a failure can be run again: the test's name has the seed, the message has the command line.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import tiny_config
from typer.main import get_command

from lcplan.backends.job import SCRIPTS
from lcplan.cli.main import build_app
from lcplan.errors import LcplanError
from lcplan.presets import _preset_files
from lcplan.train_plan import KNOWN_OPTIMIZERS

NUM_CONFIGS = 10_000
NUM_SEEDS = 8
FILES = {*SCRIPTS, "plan.json", "accelerate.yaml", "README.md"}
NASTY: list[Any] = [
    "", " ", "0", "-1", "1e9", "nan", "inf", "1.5", "9" * 40, "None", "null", "true", "[]", "{}", "..", "/", "\0", "\n",
    "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", "{{ 7*7 }}", "{% raw %}", "%s%n", "ü" * 9, "x" * 5000, "--",
    "-h", "../../etc/passwd", "~nobody-here/x", "\ud800",
]  # fmt: skip
SIZES = ["1", "2", "3", "4", "7", "8", "16", "64"]
FLAGS: dict[str, list[str]] = {
    "--max-length": ["64", "100", "4096", "65536", "1Mi", "1M", "1000003", "1e6"],
    "--per-device-train-batch-size": SIZES,
    "--per-device-eval-batch-size": SIZES,
    "--gradient-accumulation-steps": SIZES,
    "--gpu": ["h100-80gb", "h200", "a100-40gb", "H200", "cpu", "h300"],
    "--num-gpus": SIZES,
    "--gpus-per-node": SIZES,
    "--backend": ["single", "ddp", "fsdp2", "deepspeed", "fsdp"],
    "--dp-replicate-size": SIZES,
    "--dp-shard-size": SIZES,
    "--cp-size": SIZES,
    "--sp-size": SIZES,
    "--cp-comm-strategy": ["allgather", "alltoall", "ring"],
    "--dtype": ["bfloat16", "float32", "float16"],
    "--optim": [*KNOWN_OPTIMIZERS, "muon"],
    "--loss": ["chunked", "chunked-256", "full", "dft"],
    "--scored-fraction": ["0.1", "1", "1.1"],
    "--activation-checkpointing": ["full", "selective", "none", "some"],
    "--checkpoint-every-n-layers": SIZES,
    "--zero-stage": ["0", "1", "2", "3", "4"],
    "--mlp-tile-size": SIZES,
    "--lora-r": SIZES,
    "--lora-target-modules": ["all-linear", "q_proj,v_proj", "q_proj,,", "lm_head"],
    "--lora-dropout": ["0", "0.1", "1"],
    "--lora-alpha": SIZES,
    "--quantize": ["none", "nf4", "int8"],
    "--attn-implementation": ["sdpa", "flash_attention_2", "eager", "flex"],
    "--rope": ["auto", "none", "yarn:2", "yarn:0", "yarn:", "linear:2"],
    "--host-memory": ["64GB", "1TB", "80G", "0"],
    "--max-steps": SIZES,
    "--learning-rate": ["1e-5", "0.1"],
    "--seed": ["0", "42"],
    "--init": ["random", "pretrained", "zeros"],
    "--data": ["python-docs", "emozilla/pg19", "missing.txt", "a/b/c", "{files}/texts.txt", "{files}/chats.jsonl",
               "{files}/prompts.jsonl", "{files}/broken.jsonl", "{files}"],
    "--data-format": ["auto", "text", "messages", "csv"],
    "--text-column": ["text", "body"],
    "--split": ["train", "test[:10%]"],
    "--tokenizer": ["Qwen/Qwen3-8B", "{files}"],
    "--revision": ["main", "abc"],
    "--eval-rows": SIZES,
    "--eval-steps": SIZES,
    "--rank": SIZES,
    "--capacity": ["80GB", "1"],
    "--units": ["GiB", "GB", "KB"],
}  # fmt: skip
SWITCHES = (
    "--offload-activations", "--activation-offloading", "--offload-params", "--no-reshard-after-forward",
    "--offload-optimizer", "--freeze-embeddings", "--freeze-head", "--padding", "--packing", "--no-save", "--force",
    "--completion-only-loss", "--assistant-only-loss",
)  # fmt: skip
LCPLAN = get_command(build_app(["run"]))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "texts.txt").write_text("a few words\n" * 20_000)
    (folder / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "x", "completion": "y"}) + "\n")
    (folder / "broken.jsonl").write_text("{not json\n")
    return folder


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy of nested settings with one to three of them gone, doubled in kind, or replaced."""
    changed = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        node = changed
        while isinstance(node, dict) and node:
            key = rng.choice(sorted(node, key=str))
            if isinstance(node[key], dict) and rng.random() < 0.8:
                node = node[key]
                continue
            how = rng.random()
            if how < 0.2:
                del node[key]
            elif how < 0.3:
                node[rng.choice(["x", "gpus", "max_len"])] = node.pop(key)
            else:
                node[key] = rng.choice([None, True, -1, 0, 3, 10**18, 1.5, float("nan"), [], {}, [1], *NASTY[:-1]])
            break
    return changed


def config_file(rng: random.Random, folder: Path) -> list[str]:
    """A preset's YAML, or another tool's, with something wrong in it."""
    accelerate = {
        "distributed_type": rng.choice(["FSDP", "DEEPSPEED", "NO", "MULTI_GPU"]), "machine_rank": 0,
        "compute_environment": "LOCAL_MACHINE",
        "num_processes": 8, "num_machines": 1, "mixed_precision": "bf16", "use_cpu": False,
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False},
        "deepspeed_config": {"zero_stage": 3, "offload_param_device": "none"},
        "parallelism_config": {"parallelism_config_cp_size": 8, "parallelism_config_dp_shard_size": 1},
    }  # fmt: skip
    trl = {
        "model_name_or_path": "Qwen/Qwen3-8B", "max_length": 65536, "per_device_train_batch_size": 1, "bf16": True,
        "gradient_checkpointing_kwargs": {"offload": True}, "use_peft": True, "lora_r": 16, "packing": False,
    }  # fmt: skip
    presets = [yaml.safe_load(text) for text in _preset_files().values()]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(mutated(rng.choice([*presets, accelerate, trl]), rng)), "utf-8", "surrogatepass")
    more = [] if rng.random() < 0.6 else ["Qwen/Qwen3-8B"]
    return [*more, "--config", str(path)]


def model_file(rng: random.Random, folder: Path) -> list[str]:
    """A config.json with something wrong in it."""
    path = folder / "config.json"
    path.write_text(json.dumps(mutated(tiny_config(), rng)), "utf-8", "surrogatepass")
    return [str(path), "--max-length", "256", "--gpu", "h200", "--init", "random", "--data", "python-docs"]


def command_line(rng: random.Random, files: Path, folder: Path) -> list[str]:
    base = rng.random()
    if base < 0.3:
        arguments = ["--preset", rng.choice([*_preset_files(), "smokey"])]
    elif base < 0.55:
        arguments = config_file(rng, folder)
    elif base < 0.75:
        arguments = model_file(rng, folder)
    else:
        arguments = [rng.choice(["Qwen/Qwen3-8B", "qwen/qwen3-0.6b", str(files), *NASTY]), "--max-length", "4096"]
    for flag in rng.sample(sorted(FLAGS), rng.choice([0, 1, 1, 1, 2, 5])):
        value = rng.choice(NASTY if rng.random() < 0.2 else FLAGS[flag])
        arguments += [flag, value.replace("{files}", str(files))]
    return [*arguments, *rng.sample(SWITCHES, rng.choice([0, 0, 0, 1, 2]))]


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit code and what went to stderr; anything but a plain refusal is raised."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            LCPLAN.main(args=["run", *arguments], prog_name="lcplan")
        except LcplanError as error:
            return 2, f"error [{error.code}]: {error.message}"
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 0, err.getvalue()
    return 0, err.getvalue()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_configs_are_answered_or_refused_and_then_nothing_is_written(
    seed: int, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    work, settings = tmp_path / "work", tmp_path / "settings"
    for folder in (work, settings):
        folder.mkdir()
    monkeypatch.chdir(work)
    counts = {0: 0, 1: 0, 2: 0}
    for number in range(NUM_CONFIGS // NUM_SEEDS):
        line = [*command_line(rng, files, settings), "--output-dir", "job", "--dry-run"]
        try:
            code, text = run(line)
        except Exception as error:
            raise AssertionError(f"seed {seed}, number {number}: {line}") from error
        written = sorted(path.name for path in work.iterdir())
        assert code in counts, (number, line, text)
        counts[code] += 1
        if code == 0 and written:
            assert written == ["job"], (number, line)
            assert {path.name for path in (work / "job").iterdir()} == FILES, (number, line)
            json.loads((work / "job" / "plan.json").read_text())
            shutil.rmtree(work / "job")
        else:
            assert written == [], (number, line, text)
            assert len(text.strip()) > 20 or code == 0, (number, line)
            assert "Traceback" not in text, (number, line)
    assert min(counts.values()) >= 5, counts
