"""Fine-tune the model that plan.json describes with TRL's SFTTrainer, and measure it.

    accelerate launch --config_file accelerate.yaml train.py [--resume]

Every choice is in plan.json, beside this file; lcplan is not needed. events.jsonl says how it is going,
result.json how it went. --resume continues from the newest whole checkpoint, or starts where there is none. Where
the plan saves checkpoints, a file named ``stop`` in this folder, or SIGTERM, ends the run after its step with one.
Exit code: 0 done; 1 the run failed, for one out of memory; 2 the data, the plan or the versions installed do not go
together; 75 stopped on request, with a checkpoint (with several ranks only result.json says so); 130 and 143 ended at
once by Ctrl-C or SIGTERM.
"""
# ruff: noqa: E402  (the environment has to be set before torch is imported)

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
JOB = json.loads((HERE / "plan.json").read_text(encoding="utf-8"))

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that looks at one layer announces itself
if JOB["plan"]["backend"] == "single":
    # With several GPUs in sight and one process, the trainer would fall back to DataParallel.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

import attempt
import measure
import ring_attention
import torch
from accelerate import PartialState
from arguments import (
    keeps_attention_on_host,
    length_multiple,
    offloads_by_itself,
    ranks_per_sequence,
    row_length,
    rows_held_out,
    rows_per_load,
    rows_per_step,
    sft_arguments,
)
from checks import JobError, ShardCheck, check_layout, watch_first_sequence
from data import describe
from datasets import Dataset
from host_offload import HostOffload
from model import build_model, load_config, lora_config
from rows import RowShape, load_rows, make_rows
from tokenization import load_tokenizer, make_tokenizer
from transformers import PreTrainedModel, PrinterCallback, set_seed
from trl import SFTConfig, SFTTrainer


class Data(NamedTuple):
    """What the job trains on."""

    tokenizer: Any
    train: Dataset
    """Rows of whole steps."""
    evaluation: Dataset | None
    made: dict[str, Any] | None
    """What there is of it; rank 0 knows."""


def load_data(job: dict[str, Any], vocab_size: int, state: PartialState) -> Data:
    """Rank 0 makes the rows, the others read them from the job folder; the first are held out for evaluation."""
    plan, training = job["plan"], job["training"]
    step_rows, held_out = rows_per_step(plan), rows_held_out(job)
    whole = math.lcm(step_rows, rows_per_load(plan))
    wanted = training["max_steps"] and math.ceil(training["max_steps"] * step_rows / whole) * whole
    made = None
    if state.is_main_process:
        shape = RowShape(
            max_length=row_length(plan),
            multiple=length_multiple(plan),
            padded=plan["padding"],
            batch_size=plan["per_device_train_batch_size"],
            vocab_size=vocab_size,
        )
        made = make_rows(
            job["data"],
            make_tokenizer(job, vocab_size),
            HERE / "rows",
            shape,
            min_rows=held_out + whole,
            max_rows=wanted and held_out + wanted,
            training=training,
        )
        print(describe(made, max_length=row_length(plan), rows_per_step=step_rows), flush=True)
    state.wait_for_everyone()
    rows = load_rows(HERE / "rows")
    last = len(rows) - (len(rows) - held_out) % whole
    return Data(
        tokenizer=load_tokenizer(job),
        train=rows.select(range(held_out, last)),
        evaluation=rows.select(range(held_out)) if held_out else None,
        made=made,
    )


def save_model(trainer: SFTTrainer, folder: Path) -> str:
    """Weights and tokenizer as transformers loads them; FSDP2 gathers the shards on rank 0."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder))
    return str(folder)


def make_trainer(
    job: dict[str, Any], args: SFTConfig, model: PreTrainedModel, data: Data, callbacks: list[Any]
) -> SFTTrainer:
    """The trainer, and the checks that it is set up as planned."""
    plan = job["plan"]
    if plan["cp_size"] > 1:
        ring_attention.install(head_chunks=plan["cp_head_chunks"], merge_dtype=plan["cp_merge_dtype"])
    if offloads_by_itself(plan):
        callbacks = [*callbacks, HostOffload(keep_attention=keeps_attention_on_host(plan))]
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=data.tokenizer,
        callbacks=callbacks,
        peft_config=lora_config(job),
    )
    trainer.remove_callback(PrinterCallback)  # the recorder prints every step
    check_layout(trainer.accelerator, plan, on_cpu=job["device"] == "cpu")
    return trainer


def run(job: dict[str, Any], current: attempt.Attempt) -> dict[str, Any]:
    """Train, save, and return the content of result.json."""
    if job["device"] == "gpu" and not torch.cuda.is_available():
        raise JobError("this PyTorch sees no CUDA GPU, and the plan needs one.")
    args = SFTConfig(**sft_arguments(job))  # also joins the process group
    state = PartialState()
    current.enter("tokenizing")
    config = load_config(job)
    data = load_data(job, config.get_text_config().vocab_size, state)
    current.enter("loading")
    set_seed(job["training"]["seed"])
    model = build_model(job, config, state.device, empty=not state.is_main_process)
    plan = job["plan"]
    shards = ShardCheck(plan)
    trainer = make_trainer(job, args, model, data, [*current.callbacks(data.train), shards])
    sequence = watch_first_sequence(
        trainer.model,
        plan["per_device_train_batch_size"],
        row_length(plan) // ranks_per_sequence(plan),
        exact="labels" not in data.train.column_names,
    )
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
        "elements_held": shards.found and shards.found.held,
        "elements_sharded": shards.found and shards.found.whole,
        "first_layer_sees": sequence,
        "data": data.made,
        "evaluations": [entry for entry in trainer.state.log_history if "eval_loss" in entry],
    }


def main(job: dict[str, Any]) -> int:
    """Run the job, write result.json whatever happens, and return the exit code."""
    tokens = rows_per_step(job["plan"]) * row_length(job["plan"])
    return attempt.main(HERE, job, lambda current: run(job, current), tokens_per_step=tokens)


if __name__ == "__main__":
    sys.exit(main(JOB))
