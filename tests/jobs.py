"""Small jobs for the tests of `lcplan run`."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lcplan
from lcplan.backends.job import JobSpec, ModelSource
from lcplan.job_options import DataSource, TokenizerSource
from lcplan.presets import load_preset
from lcplan.train_plan import TrainPlan

ROOT = str(Path(lcplan.__file__).parent.parent)
"""For PYTHONPATH of the processes that need lcplan; a job's own must do without."""


def small_job(*, plan: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **fields: Any) -> JobSpec:
    """The smoke preset's job with other values."""
    smoke = load_preset("smoke")
    values: dict[str, Any] = {
        "plan": TrainPlan(**{**smoke.plan, **(plan or {})}),
        "model": ModelSource(id=smoke.model, init="random", config=smoke.config),
        "max_position_embeddings": 1024,
        "data": DataSource(kind="python-docs"),
        "tokenizer": TokenizerSource(kind="train-bpe", vocab_size=1024),
        "training": smoke.training.model_copy(update=training or {}),
        "device": "cpu",
    }
    return JobSpec(**{**values, **fields})


def fsdp2_job(**plan: Any) -> JobSpec:
    """A sharded job of the smoke model."""
    sizes = {"backend": "fsdp2", "num_gpus": 2, "gpus_per_node": 2, "dp_shard_size": 2, "gpu": "h100-80gb"}
    steps = {"max_steps": 3}
    return small_job(plan={**sizes, "per_device_train_batch_size": 4, **plan}, training=steps, device="gpu")


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder by its digest: to see that nothing changed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process without a network and without this process's warning filters."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
