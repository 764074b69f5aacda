"""Measure one step of this job as one rank of its N on a single GPU, with no communication.

    python probe.py [--rank R] [--capacity BYTES] [--whole-steps N]

Real kernels and real allocations: the model, the trainer and the arguments are train.py's, and PyTorch's fake process
group stands in for the other ranks. Their weights are copies of this rank's share, so that values stay finite; losses
mean nothing. Two steps of random tokens: a short one, which creates the optimizer states, and the measured one. With
more whole steps the last is measured; the first of them also pays for new pinned memory.
probe.json says what was measured, or why nothing was. Exit code: 0 done; 1 it ran out of memory or failed; 2 the plan
or the versions installed do not allow a probe.
"""
# ruff: noqa: E402  (the environment has to be set before torch is imported)

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
JOB = json.loads((HERE / "plan.json").read_text(encoding="utf-8"))
RESULT_FILE = "probe.json"
SHORT_TOKENS = 1024
"""Of the first step, or the shortest length that the plan can cut, whichever is longer."""


def read_arguments() -> argparse.Namespace:
    """Rank and capacity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=0, help="rank that this GPU stands for")
    parser.add_argument("--capacity", type=int, help="bytes that PyTorch's allocator may take from the driver")
    parser.add_argument("--whole-steps", type=int, default=1, help="steps of the plan's length")
    return parser.parse_args()


def launcher_environment(rank: int) -> dict[str, str]:
    """What ``accelerate launch`` would set for this rank, from accelerate's own launcher code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    plan = JOB["plan"]
    command = ["--config_file", str(HERE / "accelerate.yaml"), "probe.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    if plan["backend"] == "single":
        return dict(prepare_simple_launcher_cmd_env(arguments)[1])
    ranks = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(plan["num_gpus"]),
        "LOCAL_WORLD_SIZE": str(min(plan["num_gpus"], plan["gpus_per_node"])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    # every rank that is probed holds whole weights before it is sharded: there is no other to send them
    return {**prepare_multi_gpu_env(arguments), **ranks, "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}


ARGUMENTS = read_arguments() if __name__ == "__main__" else argparse.Namespace(rank=0, capacity=None, whole_steps=1)
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
os.environ.update(launcher_environment(ARGUMENTS.rank))

import journal
import measure
import torch
from arguments import length_multiple, ranks_per_sequence, row_length, rows_per_step, sft_arguments
from checks import JobError, ShardCheck, watch_first_sequence
from datasets import Dataset
from model import build_model, load_config
from tokenizers import Tokenizer, models
from train import Data, make_trainer
from transformers import PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig


def join_fake_group(rank: int, world_size: int) -> None:
    """PyTorch's process group without processes; what it gathers are copies of what this rank sends."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    sent, received = torch.ones(2), torch.full((2 * world_size,), float("nan"))
    gather = dist.all_gather_into_tensor
    gather(received, sent)
    if bool((received == 1).all()):
        return

    def gather_copies(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = gather(output, given, *args, **kwargs)
        output.view(-1, given.numel()).copy_(given.view(1, -1))
        return work

    dist.all_gather_into_tensor = gather_copies


class PhaseRecorder(TrainerCallback):
    """Peak bytes of each phase of the last step, and what there was before it; None without a GPU."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available() and JOB["device"] == "gpu"
        self.parts = measure.PhasePeaks(on_gpu=self.cuda)
        self.step_s: float | None = None
        self.whole_steps_s: list[float] = []
        self.loss: float | None = None
        self._started = 0.0

    def watch(self, model: torch.nn.Module) -> None:
        """Tell the end of the forward pass from the model itself."""
        model.register_forward_hook(lambda *_: self.parts.mark("forward"))

    def on_step_begin(
        self, _args: Any, state: Any, _control: Any, model: Any = None, optimizer: Any = None, **_kwargs: Any
    ) -> None:
        """Called by the trainer before a step's first micro batch."""
        plan = JOB["plan"]
        tokens = row_lengths(plan)[state.global_step] // ranks_per_sequence(plan)
        watch_first_sequence(model, plan["per_device_train_batch_size"], tokens)
        self.parts.begin(model, optimizer)
        self._started = time.perf_counter()

    def on_substep_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Called by the trainer after the backward of a micro batch that is not the step's last."""
        self.parts.mark("backward")

    def on_pre_optimizer_step(self, *_args: Any, model: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer when all gradients are there."""
        self.parts.mark("backward")
        self.parts.gradients(model)

    def on_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
        """Called by the trainer after the optimizer."""
        self.parts.mark("optimizer_step")
        self.step_s = time.perf_counter() - self._started

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        """Called by the trainer after the optimizer."""
        if state.global_step > 1:
            self.whole_steps_s.append(round(self.step_s or 0.0, 4))

    def on_log(self, *_args: Any, logs: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer after each step."""
        if "loss" in (logs or {}):
            self.loss = float(logs["loss"])


def row_lengths(plan: dict[str, Any]) -> list[int]:
    """Tokens of a row in the first step and in each whole one."""
    multiple = length_multiple(plan)
    whole = row_length(plan)
    return [min(whole, max(multiple, SHORT_TOKENS - SHORT_TOKENS % multiple)), *[whole] * ARGUMENTS.whole_steps]


def random_rows(plan: dict[str, Any], vocab_size: int, seed: int) -> Dataset:
    """A step of short rows, then those of whole ones; every rank's, since the loader deals them out."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(1, vocab_size, (tokens,), generator=generator, dtype=torch.int32).numpy()
        for tokens in row_lengths(plan)
        for _ in range(rows_per_step(plan))
    ]
    return Dataset.from_dict({"input_ids": rows})


def bare_tokenizer() -> PreTrainedTokenizerFast:
    """What the trainer asks a tokenizer for: a token to pad with, which no row needs."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0}, "<eos>")), eos_token="<eos>"
    )


def probe(job: dict[str, Any], recorder: PhaseRecorder) -> dict[str, Any]:
    """A short step and the whole ones, and what the last took."""
    plan = job["plan"]
    if job["device"] == "gpu" and not torch.cuda.is_available():
        raise JobError("a probe needs one CUDA GPU, and this PyTorch sees none.")
    if not 0 <= ARGUMENTS.rank < plan["num_gpus"]:
        raise JobError(f"--rank {ARGUMENTS.rank}: the plan has ranks 0 to {plan['num_gpus'] - 1}.")
    if ARGUMENTS.capacity is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        if ARGUMENTS.capacity > total:
            raise JobError(f"--capacity {ARGUMENTS.capacity:,} is more than the {total:,} bytes of this GPU.")
        torch.cuda.set_per_process_memory_fraction(ARGUMENTS.capacity / total)
    if plan["backend"] != "single":
        join_fake_group(ARGUMENTS.rank, plan["num_gpus"])
    steps = len(row_lengths(plan))
    arguments = {
        **sft_arguments(job),
        "max_steps": steps,
        "save_strategy": "no",
        "eval_strategy": "no",
        "train_sampling_strategy": "sequential",
    }
    args = SFTConfig(**arguments)
    config = load_config(job)
    set_seed(job["training"]["seed"])
    model = build_model(job, config, args.device, empty=False)
    rows = random_rows(plan, config.get_text_config().vocab_size, job["training"]["seed"])
    data = Data(tokenizer=bare_tokenizer(), train=rows, evaluation=None, made=None)
    trainer = make_trainer(job, args, model, data, [recorder, ShardCheck(plan)])
    recorder.watch(trainer.model)
    trainer.train()
    if trainer.state.global_step != steps:
        raise JobError(
            f"{trainer.state.global_step} steps ran, planned {steps}: the rows were not dealt out as planned."
        )
    return {"distributed_type": str(trainer.accelerator.distributed_type.value)}


def main(job: dict[str, Any]) -> int:
    """Probe, write probe.json whatever happens, and return the exit code."""
    (HERE / RESULT_FILE).unlink(missing_ok=True)
    recorder = PhaseRecorder()
    exit_code, error, summary, found = 0, None, None, {}
    try:
        found = probe(job, recorder)
    except JobError as problem:
        exit_code, error = 2, str(problem)
    except torch.OutOfMemoryError as problem:
        exit_code, error, summary = (
            1,
            f"out of GPU memory: {problem}",
            torch.cuda.memory_summary() if recorder.cuda else None,
        )
    except Exception as problem:
        traceback.print_exc()
        exit_code, error = 1, f"{type(problem).__name__}: {problem}"
    if error is not None:
        print(f"Error: {error}", file=sys.stderr, flush=True)
    measured = {
        "peak_allocated_bytes": max(recorder.parts.phases.values(), default=None),
        "phases": recorder.parts.phases,
        "resident": recorder.parts.resident,
        "peak_reserved_bytes": max(recorder.parts.reserved, torch.cuda.max_memory_reserved())
        if recorder.cuda
        else None,
        "pinned_peak_bytes": measure.pinned_peak_bytes() if recorder.cuda else None,
        "device_used_bytes": measure.device_used_bytes() if recorder.cuda else None,
        "step_s": recorder.step_s,
        "whole_steps_s": recorder.whole_steps_s,
        "loss": recorder.loss,
    }
    content = {
        "exit_code": exit_code,
        "error": error,
        "allocator_summary": summary,
        "rank": ARGUMENTS.rank,
        "capacity_bytes": ARGUMENTS.capacity,
        **found,
        **measured,
        **measure.environment(),
    }
    journal.write_result(HERE / RESULT_FILE, content)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(JOB))
