"""The work of a generated job as a script that somebody wrote by hand: a model, rows, SFTTrainer, nothing else.

    python tools/plain_sft.py JOB_FOLDER OUTPUT.json

Trains on one GPU, or on the CPU where the job does, on the rows that the job made in its folder. Writes when the loss
of each step was logged, the losses, the peak, and the arguments that are not those of the job.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

NOT_COMPARED = ("output_dir", "logging_dir", "run_name")


class LogTimes(TrainerCallback):
    """When each step was logged, which waits for the GPU."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer after each step."""
        if "loss" in logs:
            self.times.append(time.time())
            self.losses.append(float(logs["loss"]))


def unlike(args: SFTConfig, job: dict[str, Any], folder: Path) -> dict[str, list[Any]]:
    """Arguments that the generated job has otherwise: this script's value, and the job's."""
    sys.path.insert(0, str(folder))
    from arguments import sft_arguments  # the job's own

    ours, theirs = args.to_dict(), SFTConfig(**sft_arguments(job)).to_dict()
    names = [name for name in ours if name not in NOT_COMPARED and ours[name] != theirs.get(name)]
    return {name: [ours[name], theirs.get(name)] for name in names}


def main(folder: Path, output: Path) -> None:
    """Train, then say how long it took."""
    job = json.loads((folder / "plan.json").read_text("utf-8"))
    plan, training, on_cpu = job["plan"], job["training"], job["device"] == "cpu"
    args = SFTConfig(
        output_dir=str(output.parent / "plain_sft"),
        max_length=plan["max_length"],
        per_device_train_batch_size=plan["per_device_train_batch_size"],
        max_steps=training["max_steps"],
        learning_rate=training["learning_rate"],
        seed=training["seed"],
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
        optim="adamw_torch_fused",
        bf16=not on_cpu,
        use_cpu=on_cpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_drop_last=True,
    )
    raw = dict(job["model"]["config"])
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    set_seed(training["seed"])
    with torch.device("cpu" if on_cpu else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, plan["dtype"]))
    rows = concatenate_datasets([Dataset.from_file(str(path)) for path in sorted((folder / "rows").glob("*.arrow"))])
    steps = LogTimes()
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(str(folder / "tokenizer")),
        callbacks=[steps],
    )
    trainer.train()
    found = {
        "log_times": steps.times,
        "losses": steps.losses,
        "peak_allocated_bytes": None if on_cpu else torch.cuda.max_memory_allocated(),
        "arguments_unlike_the_job": unlike(args, job, folder),
    }
    output.write_text(json.dumps(found, indent=2, default=str) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
