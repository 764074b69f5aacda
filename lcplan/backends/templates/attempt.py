"""One attempt at running the job, from the start or resumed, to whatever end it takes.

``train.py`` says what to run; this says how it ends: signals, checkpoints, causes, exit code.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import checkpoints
import journal
import measure
import torch
from causes import (
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_STOPPED,
    Facts,
    Interrupted,
    explain,
    free_disk_bytes,
    rank_of_this_process,
)
from checks import JobError
from data import DataError
from first_step import FirstStep
from guard import DIES_WITHIN_S, Guard, any_rank
from transformers import TrainerCallback


class Attempt:
    """What ``train.run`` gets: the phases to report, the trainer's callbacks, the checkpoint to continue from."""

    def __init__(self, folder: Path, job: dict[str, Any], *, tokens_per_step: int, resume: bool) -> None:
        self.folder = folder
        self.job = job
        self.rank = rank_of_this_process()
        self.checkpoint = self._find_checkpoint() if resume else None
        training = job["training"]
        self.guard = Guard(
            folder,
            saves=training["save_strategy"] != "no",
            hang_timeout_s=training.get("hang_timeout_s"),
            end=lambda code, error: self.finish(code, error, {}),
        )
        self.recorder = measure.StepRecorder(
            folder, tokens_per_step=tokens_per_step, on_gpu=job["device"] == "gpu", guard=self.guard
        )
        self.stopped: str | None = None
        """Why the training stopped before its last step; None where it did not."""

    def _find_checkpoint(self) -> Path | None:
        if self.job["plan"]["sp_size"] > 1:
            raise JobError(
                "a job that splits sequences by Ulysses (sp_size) cannot be resumed: transformers cannot skip the rows "
                "that were trained on. Start it again from its last final_model."
            )
        return checkpoints.newest_complete(self.folder)

    def begin(self) -> None:
        """Before anything else: keep what a resumed run has, forget the rest, take the signals."""
        done = checkpoints.step_of(self.checkpoint) if self.checkpoint else 0
        if self.rank == 0:
            self.recorder.earlier = journal.start(self.folder, keep_steps=done)
            removed = checkpoints.remove_incomplete(self.folder)
            place = {"host": socket.gethostname(), "pid": os.getpid(), "world_size": self.guard.world_size}
            self._tell("start", resumed_from=self.checkpoint and self.checkpoint.name, removed=removed, **place)
            if self.checkpoint:
                print(f"Resuming from {self.checkpoint.name}, which is whole.", flush=True)
        self.guard.start()

    def enter(self, phase: str) -> None:
        """A new phase begins: tokenizing, loading, training, saving."""
        self.guard.join_group()
        self.guard.enter(phase)
        if self.rank == 0:
            self._tell("phase", phase=phase)

    def callbacks(self, rows: Any) -> list[TrainerCallback]:
        """What the trainer calls at every step."""
        digest = checkpoints.rows_digest(rows)
        if self.checkpoint is not None:
            marker = checkpoints.read_marker(self.checkpoint) or {}
            if marker.get("rows") not in (None, digest):
                raise JobError(
                    f"{self.checkpoint.name} was written while training on other rows than those that the data gives "
                    "now: the rest of the run would see some twice and others never. Restore the data."
                )
        return [self.recorder, FirstStep(self.job, self.folder), Keeper(self, digest)]

    def _tell(self, event: str, **fields: Any) -> None:
        journal.append_event(self.folder, event, **fields)

    def finish(self, exit_code: int, error: str | None, result: dict[str, Any]) -> None:
        """Write what there is to say at the end; a rank without an error leaves it to rank 0."""
        if error is not None:
            print(f"Error: {error}" if exit_code != EXIT_STOPPED else error, file=sys.stderr, flush=True)
        if self.rank != 0 and error is None:
            return
        path = self.folder / journal.RESULT_FILE
        first = not path.exists()
        summary = {"exit_code": exit_code, "error": error, **result, "steps": self.recorder.all_steps()}
        try:
            journal.write_result(path, {**summary, **measure.environment()})
        except OSError as problem:
            print(f"Error: {path} cannot be written: {problem}", file=sys.stderr, flush=True)
        if first or error is None:
            self._tell("end", exit_code=exit_code, error=error)

    def facts(self) -> Facts:
        """The machine as a failure left it."""
        free, total = None, None
        if self.recorder.cuda:
            with suppress(RuntimeError):  # CUDA itself may be broken
                free, total = torch.cuda.mem_get_info()
        return Facts(
            rank=self.rank,
            free_disk_bytes=free_disk_bytes(self.folder),
            free_gpu_bytes=free,
            total_gpu_bytes=total,
            gone=self.guard.gone(patience_s=DIES_WITHIN_S),
            verdict=self.guard.verdict,
        )


class Keeper(TrainerCallback):
    """Marks checkpoints that are whole, and stops at the end of a step when asked to."""

    def __init__(self, attempt: Attempt, digest: str) -> None:
        self.attempt = attempt
        self.digest = digest

    def on_step_end(self, _args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Called by the trainer after the optimizer."""
        guard = self.attempt.guard
        if guard.saves and any_rank(guard.wants_to_stop()) and state.global_step < state.max_steps:
            self._stop(state, control)
        if control.should_save:
            guard.enter("saving")

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_kwargs: Any) -> None:
        """Called by the trainer after the last step of an epoch."""
        if control.should_save:
            self.attempt.guard.enter("saving")

    def _stop(self, state: Any, control: Any) -> None:
        control.should_save = control.should_training_stop = True
        self.attempt.stopped = (
            f"stopped on request after step {state.global_step} of {state.max_steps}, with checkpoint-"
            f"{state.global_step} written. Continue with --resume."
        )

    def on_save(self, args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        """Called by the trainer once a checkpoint's files are written, on every rank."""
        any_rank(flag=False)  # every rank is through
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            made = checkpoints.mark_complete(folder, step=state.global_step, rows=self.digest)
            size = sum(made["files"].values())
            journal.append_event(self.attempt.folder, "checkpoint", step=state.global_step, num_bytes=size)
        self.attempt.guard.enter("training")


def main(folder: Path, job: dict[str, Any], run: Callable[[Attempt], dict[str, Any]], *, tokens_per_step: int) -> int:
    """Run the job, write result.json whatever happens, and return the exit code; one of several ranks ends with it."""
    resume = "--resume" in sys.argv[1:]
    try:
        attempt = Attempt(folder, job, tokens_per_step=tokens_per_step, resume=resume)
    except JobError as problem:
        return refuse(folder, str(problem))
    attempt.begin()
    result, problem = outcome(attempt, run)
    exit_code, error = verdict(attempt, problem)
    attempt.finish(exit_code, error, result)
    attempt.guard.stop()
    if attempt.rank == 0:
        journal.finish(folder)
        (folder / journal.STOP_FILE).unlink(missing_ok=True)
    if attempt.guard.world_size == 1:
        return exit_code
    if exit_code in (0, EXIT_STOPPED):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # after a failure it would wait for ranks that wait for this one
        # torchrun would call it a failure of whoever ends first, and end the others
        exit_code = 0 if "TORCHELASTIC_RUN_ID" in os.environ else exit_code
    sys.stderr.flush()
    sys.stdout.flush()
    # Threads of gloo outlive their group. One that asks for Python's lock while Python ends aborts the process, and a
    # rank that did its work would count as failed (pytorch#179291).
    os._exit(exit_code)


def outcome(attempt: Attempt, run: Callable[[Attempt], dict[str, Any]]) -> tuple[dict[str, Any], BaseException | None]:
    """The run's result, or what ended it. The launcher's SIGTERM to all ranks after one has failed changes nothing."""
    try:
        try:
            return run(attempt), None
        finally:
            attempt.guard.settle()
    except (KeyboardInterrupt, Interrupted) as problem:
        return {}, failed_first(problem) or problem
    except Exception as problem:
        return {}, problem


def failed_first(interruption: BaseException) -> Exception | None:
    """The error that was already ending the run when a signal came.

    One that a library was handling ends nothing: torch's checkpoint stops every recomputation by one.
    """
    error = interruption.__context__
    if not isinstance(error, Exception) or error.__traceback__ is None:
        return None
    handled_in = Path(error.__traceback__.tb_frame.f_code.co_filename)
    return error if handled_in.resolve().parent == Path(__file__).resolve().parent else None


def verdict(attempt: Attempt, problem: BaseException | None) -> tuple[int, str | None]:
    """Exit code and one line."""
    if problem is None:
        return (0, None) if attempt.stopped is None else (EXIT_STOPPED, attempt.stopped)
    if isinstance(problem, (JobError, DataError)):
        return EXIT_REFUSED, str(problem)
    if isinstance(problem, (KeyboardInterrupt, Interrupted)):
        number = problem.number if isinstance(problem, Interrupted) else int(signal.SIGINT)
        return 128 + number, explain(problem, attempt.job["plan"], attempt.facts())
    traceback.print_exception(problem)
    return EXIT_FAILED, explain(problem, attempt.job["plan"], attempt.facts())


def refuse(folder: Path, error: str) -> int:
    """What cannot even start says so the same way."""
    print(f"Error: {error}", file=sys.stderr, flush=True)
    content = {"exit_code": EXIT_REFUSED, "error": error, "steps": [], **measure.environment()}
    (folder / journal.RESULT_FILE).unlink(missing_ok=True)
    journal.write_result(folder / journal.RESULT_FILE, content)
    return EXIT_REFUSED
