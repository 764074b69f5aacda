"""Fine-tune the model that plan.json describes with TRL's SFTTrainer, and measure it.

    accelerate launch --config_file accelerate.yaml train.py [--resume]

Every choice is in plan.json, beside this file; lcplan is not needed. events.jsonl says how it is going,
result.json how it went. --resume continues from the newest whole checkpoint, or starts where there is none. A file
named ``stop`` in this folder, or SIGTERM, ends the run after its step with a checkpoint, if the plan saves any.
Exit code: 0 done; 1 the run failed, for one out of memory; 2 the data, the plan or the versions installed do not go
together; 75 stopped on request, with a checkpoint (with several ranks only result.json says so); 130 and 143 ended at
once by Ctrl-C or SIGTERM.
"""
# ruff: noqa: E402  (the environment has to be set before torch is imported)

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
JOB = json.loads((HERE / "plan.json").read_text(encoding="utf-8"))

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that looks at one layer announces itself
if JOB["plan"]["backend"] == "single":
    # With several GPUs in sight and one process, the trainer would fall back to DataParallel.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

import attempt
import data
import measure
import torch
import transformers
import trl
from accelerate import PartialState
from checks import JobError, ShardCheck, check_layout, watch_first_sequence
from datasets import Dataset
from model import build_model, load_config
from transformers import AutoTokenizer, PreTrainedModel, PrinterCallback, set_seed
from trl import SFTConfig, SFTTrainer

PATIENCE_S = 4 * 3600
"""Ranks wait this long for one another: rank 0 tokenizes the data and loads the weights for all."""


def sft_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of SFTConfig, under the names that the installed versions know."""
    plan, training, on_cpu = job["plan"], job["training"], job["device"] == "cpu"
    fields = {field.name: field for field in dataclasses.fields(SFTConfig)}
    prefix = "activation" if "activation_checkpointing" in fields else "gradient"
    arguments = {
        "output_dir": str(HERE / "checkpoints"),
        "max_length": plan["max_length"],
        "per_device_train_batch_size": plan["per_device_train_batch_size"],
        "gradient_accumulation_steps": plan["gradient_accumulation_steps"],
        "optim": plan["optim"],
        "loss_type": loss_type(plan["loss"], fields["loss_type"].default),
        f"{prefix}_checkpointing": plan["activation_checkpointing"] != "none",
        f"{prefix}_checkpointing_kwargs": checkpointing_kwargs(plan),
        "activation_offloading": plan["activation_offloading"],
        "bf16": not on_cpu,
        "use_cpu": on_cpu,
        "learning_rate": training["learning_rate"],
        "lr_scheduler_type": training["lr_scheduler_type"],
        "warmup_steps": training["warmup_steps"],
        "weight_decay": training["weight_decay"],
        "max_steps": training["max_steps"] or -1,
        "num_train_epochs": training["num_train_epochs"],
        "seed": training["seed"],
        "save_strategy": training["save_strategy"],
        "save_steps": training["save_steps"],
        "save_total_limit": training["save_total_limit"],
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_timeout": PATIENCE_S,
        # Rows arrive tokenized and exactly max_length long; a last batch that is not full is left out.
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "dataloader_drop_last": True,
    }
    if unknown := sorted(set(arguments) - set(fields)):
        raise JobError(f"trl {trl.__version__} does not know {', '.join(unknown)}. Install a release that does.")
    return arguments


def loss_type(loss: str, default: str | None) -> str:
    """TRL 1.13 and 1.14 (no default) have two; later ones call the chunked one ``nll`` and have no other."""
    if default is None:
        if loss == "chunked":
            print(f"Note: trl {trl.__version__} scores 256 rows at a time (--loss chunked-256).", file=sys.stderr)
        return "nll" if loss == "full" else "chunked_nll"
    if loss != "chunked":
        raise JobError(
            f"trl {trl.__version__} always computes the loss in large chunks; 1.14 is the last with --loss {loss}. "
            "Plan with --loss chunked, or install trl<1.15."
        )
    return "nll"


def checkpointing_kwargs(plan: dict[str, Any]) -> dict[str, Any] | None:
    """Keys that transformers and TRL take out of the dict before it reaches torch's checkpoint."""
    asked: dict[str, Any] = {}
    if plan["offload_activations"]:
        asked["offload"] = True
    if plan["checkpoint_every_n_layers"] > 1:
        asked["every_n_layers"] = plan["checkpoint_every_n_layers"]
    newer_name = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
    enable = newer_name or PreTrainedModel.gradient_checkpointing_enable
    if unknown := sorted(set(asked) - set(inspect.signature(enable).parameters)):
        raise JobError(
            f"transformers {transformers.__version__} cannot checkpoint with {', '.join(unknown)}. "
            "Install a later release, or plan without it."
        )
    if plan["activation_checkpointing"] == "selective":
        if not hasattr(trl.models, "enable_selective_activation_checkpointing"):
            raise JobError(f"trl {trl.__version__} has no selective checkpointing. Install trl>=1.15.")
        asked["selective"] = True
    return asked or None


def rows_per_step(plan: dict[str, Any]) -> int:
    """Rows of one optimizer step over all ranks."""
    data_parallel_size = plan["dp_replicate_size"] * plan["dp_shard_size"]
    return plan["per_device_train_batch_size"] * data_parallel_size * plan["gradient_accumulation_steps"]


def load_data(job: dict[str, Any], vocab_size: int, state: PartialState) -> tuple[Any, Dataset, dict[str, int] | None]:
    """Tokenizer and rows of whole steps; rank 0 makes them, the others read them from the job folder."""
    plan, max_steps = job["plan"], job["training"]["max_steps"]
    step_rows = rows_per_step(plan)
    made = None
    if state.is_main_process:
        made = data.write_rows(
            job["data"],
            make_tokenizer(job, vocab_size),
            HERE / "rows.arrow",
            max_length=row_length(plan),
            min_rows=step_rows,
            max_rows=max_steps and max_steps * step_rows,
        )
        print(data.describe(made, max_length=row_length(plan), rows_per_step=step_rows), flush=True)
    state.wait_for_everyone()
    rows = Dataset.from_file(str(HERE / "rows.arrow"))
    return load_tokenizer(job), rows.select(range(len(rows) - len(rows) % step_rows)), made


def row_length(plan: dict[str, Any]) -> int:
    """max_length trimmed to a multiple of 2 x cp_size: ring attention balances its load for no other."""
    multiple = 2 * plan["cp_size"] if plan["cp_size"] > 1 else 1
    return plan["max_length"] - plan["max_length"] % multiple


def load_tokenizer(job: dict[str, Any]) -> Any:
    """The tokenizer that plan.json names, or the one trained for this job."""
    source = job["tokenizer"]
    if source["kind"] == "train-bpe":
        return AutoTokenizer.from_pretrained(str(HERE / "tokenizer"))
    return AutoTokenizer.from_pretrained(source["id"], revision=source["revision"] or "main")


def make_tokenizer(job: dict[str, Any], vocab_size: int) -> Any:
    """Train the tokenizer where the plan says so, and refuse one that the model cannot embed."""
    source = job["tokenizer"]
    if source["kind"] == "train-bpe":
        trained = data.train_tokenizer(job["data"], min(source["vocab_size"] or vocab_size, vocab_size))
        trained.save_pretrained(str(HERE / "tokenizer"))
    tokenizer = load_tokenizer(job)
    if len(tokenizer) > vocab_size:
        raise JobError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model's vocab_size is {vocab_size:,}: "
            "some ids have no embedding. Name the model's own tokenizer with --tokenizer."
        )
    if tokenizer.eos_token_id is None:
        raise JobError("the tokenizer has no end-of-text token, which parts the texts. Name another with --tokenizer.")
    return tokenizer


def save_model(trainer: SFTTrainer, folder: Path) -> str:
    """Weights and tokenizer as transformers loads them; FSDP2 gathers the shards on rank 0."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder))
    return str(folder)


def make_trainer(
    job: dict[str, Any], args: SFTConfig, model: PreTrainedModel, tokenizer: Any, rows: Dataset, callbacks: list[Any]
) -> SFTTrainer:
    """The trainer, and the checks that it is set up as planned."""
    plan = job["plan"]
    if plan["backend"] == "fsdp2":
        callbacks = [*callbacks, ShardCheck(plan["dp_shard_size"] * plan["cp_size"])]
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)  # the recorder prints every step
    check_layout(trainer.accelerator, plan)
    return trainer


def run(job: dict[str, Any], current: attempt.Attempt) -> dict[str, Any]:
    """Train, save, and return the content of result.json."""
    if job["device"] == "gpu" and not torch.cuda.is_available():
        raise JobError("this PyTorch sees no CUDA GPU, and the plan needs one.")
    args = SFTConfig(**sft_arguments(job))  # also joins the process group
    state = PartialState()
    current.enter("tokenizing")
    config = load_config(job)
    tokenizer, rows, made = load_data(job, config.get_text_config().vocab_size, state)
    current.enter("loading")
    set_seed(job["training"]["seed"])
    model = build_model(job, config, state.device, empty=not state.is_main_process)
    trainer = make_trainer(job, args, model, tokenizer, rows, current.callbacks(rows))
    plan = job["plan"]
    watch_first_sequence(trainer.model, plan["per_device_train_batch_size"], row_length(plan) // plan["cp_size"])
    current.enter("training")
    trainer.train(resume_from_checkpoint=current.checkpoint and str(current.checkpoint))
    current.enter("saving")
    peaks = measure.gather_ranks(current.recorder.summary())
    saves_model = job["training"]["save_model"] and current.stopped is None
    saved = save_model(trainer, HERE / "final_model") if saves_model else None
    return {
        **peaks,
        "saved_model_dir": saved,
        "world_size": trainer.accelerator.num_processes,
        "distributed_type": str(trainer.accelerator.distributed_type.value),
        "data": made,
    }


def main(job: dict[str, Any]) -> int:
    """Run the job, write result.json whatever happens, and return the exit code."""
    tokens = rows_per_step(job["plan"]) * row_length(job["plan"])
    return attempt.main(HERE, job, lambda current: run(job, current), tokens_per_step=tokens)


if __name__ == "__main__":
    sys.exit(main(JOB))
