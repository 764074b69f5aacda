"""Sees to it that the ranks of a job end together.

A thread of its own in every rank tells the others every two seconds that it lives, and how far it is. It ends its
process where another is gone, silent or stuck, or where the launcher is gone. The main thread cannot: it waits inside a
collective, for hours if need be.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from causes import EXIT_FAILED, Interrupted, lost_peers, rank_of_this_process
from journal import STOP_FILE, process_state

BEAT_S = 2.0
SILENT_S = 15.0
"""A rank that does not answer for so long while it trains is taken for dead; its host is then another, or frozen."""
SILENT_LOADING_S = 900.0
"""The same while it loads: reading a large file may hold Python's lock."""
DIES_WITHIN_S = 1.0
"""A process that was killed closes its connections this much before it is gone."""
ENDS_WITHIN_S = 5.0
"""What the thread does takes no longer, unless the group is lost."""
COMES_OUT_S = 3.0
"""The main thread has so long to report a lost connection itself."""
FIRST_STEP_S = 3600.0
SHORTEST_HANG_S = 600.0
HANG_FACTOR = 10.0
"""No step takes ten times as long as the slowest before it."""

ORPHAN = "the launcher of this rank is gone, so that nobody would end the group."


class Guard:
    """One rank's watch over the others."""

    def __init__(
        self, folder: Path, *, saves: bool, hang_timeout_s: float | None, end: Callable[[int, str], None]
    ) -> None:
        self.folder = folder
        self.saves = saves
        self.hang_timeout_s = hang_timeout_s
        self.rank = rank_of_this_process()
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.stop_requested = False
        self.peers: list[dict[str, Any]] = []
        """What every rank last said of itself, this one included."""
        self.verdict: str | None = None
        """What is wrong with the group, once something is."""
        self._end = end
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._store: Any = None
        self._own = {"host": socket.gethostname(), "pid": os.getpid(), "stage": "starting", "step": 0, "peak": None}
        self._heard: dict[int, tuple[int, float]] = {}
        self._progress = time.monotonic()
        self._slowest: float | None = None
        self._beats = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    # --- what the main thread calls

    def start(self) -> None:
        """Take the signals and start watching."""
        with suppress(ValueError):  # not the main thread, as in a test
            signal.signal(signal.SIGTERM, self._on_signal)
        self._thread.start()

    def join_group(self) -> None:
        """Meet the other ranks, once they have a process group."""
        import torch.distributed as dist

        if self._store is not None or not dist.is_initialized() or dist.get_backend() == "fake":
            return
        default = getattr(dist.distributed_c10d, "_get_default_store", None)
        if default is None or dist.get_world_size() == 1:
            return
        # a connection of its own: the default one is held while another thread waits on it
        store = default().clone()
        self._say(store)
        store.wait(self._keys())
        self._listen(store)
        self._store = store

    def enter(self, stage: str) -> None:
        """A new phase of the job has begun."""
        self._own["stage"] = stage
        self._progress = time.monotonic()
        if self._store is not None:
            self._say(self._store)  # at once: the others judge a silence by it

    def step_done(self, step: int, seconds: float, peak: int | None) -> None:
        """A step has ended on this rank."""
        self._own.update(step=step, peak=peak)
        self._slowest = max(seconds, self._slowest or 0.0)
        self._progress = time.monotonic()

    def stop(self) -> None:
        """This rank is through; the others may end as they like."""
        self._own["stage"] = "done"
        if self._store is not None:
            with suppress(Exception):
                self._say(self._store)
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(ENDS_WITHIN_S)  # a thread inside the store aborts a Python that ends

    def settle(self) -> None:
        """The run is over, however: a signal changes nothing any more."""
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wants_to_stop(self) -> bool:
        """Whether this rank was asked to stop at the end of the step."""
        return self.stop_requested or (self.folder / STOP_FILE).exists()

    def gone(self, *, patience_s: float = 0.0) -> tuple[str, ...]:
        """Ranks on this host whose process has ended without a word; one that is ending takes a moment."""
        deadline = time.monotonic() + patience_s
        while True:
            found = tuple(self._describe(peer) for peer in self.peers if self._has_died(peer))
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    # --- the thread

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.saves and not self.stop_requested:
            self.stop_requested = True
            return
        raise Interrupted(number, signal.Signals(number).name)

    def _watch(self) -> None:
        while not self._over.wait(BEAT_S):
            self.verdict = self._problem()
            if self.verdict is not None and not self._over.wait(COMES_OUT_S):
                self._end_the_process(self.verdict)

    def _problem(self) -> str | None:
        """What is wrong with the group, in one line; None while all is well."""
        if self._is_orphan():
            return ORPHAN
        if self._store is None:
            return None
        try:
            self._say(self._store)
            self._listen(self._store)
        except Exception as error:  # the store's server has ended with the launcher, or with the host of rank 0
            time.sleep(DIES_WITHIN_S)
            if self._is_orphan():
                return ORPHAN
            return f"rank {self.rank} lost its connection to the host of rank 0 ({type(error).__name__})."
        if gone := self.gone():
            return lost_peers(gone)
        return self._silence() or self._hang()

    def _is_orphan(self) -> bool:
        return self._launcher is not None and os.getppid() != self._launcher

    def _keys(self) -> list[str]:
        return [f"guard/{rank}" for rank in range(self.world_size)]

    def _say(self, store: Any) -> None:
        self._beats += 1
        store.set(f"guard/{self.rank}", json.dumps({**self._own, "rank": self.rank, "beat": self._beats}))

    def _listen(self, store: Any) -> None:
        self.peers = [json.loads(content) for content in store.multi_get(self._keys())]
        now = time.monotonic()
        for peer in self.peers:
            if self._heard.get(peer["rank"], (0, 0.0))[0] != peer["beat"]:
                self._heard[peer["rank"]] = (peer["beat"], now)

    def _has_died(self, peer: dict[str, Any]) -> bool:
        if peer["stage"] == "done" or peer["rank"] == self.rank or peer["host"] != self._own["host"]:
            return False
        state = process_state(peer["pid"])
        return state is None or state == "Z"

    def _silence(self) -> str | None:
        now = time.monotonic()
        limits = {peer["rank"]: SILENT_S if peer["stage"] == "training" else SILENT_LOADING_S for peer in self.peers}
        silent = [
            peer
            for peer in self.peers
            if peer["stage"] != "done" and now - self._heard[peer["rank"]][1] > limits[peer["rank"]]
        ]
        if not silent:
            return None
        names = ", ".join(map(self._describe, silent))
        limit = max(limits[peer["rank"]] for peer in silent)
        self.verdict = f"{names} did not answer for {limit:.0f} s: frozen, or its node or network is lost."
        for peer in silent:
            if peer["host"] == self._own["host"]:
                with suppress(OSError):  # frozen, so that no other signal would end it
                    os.kill(peer["pid"], signal.SIGKILL)
        return self.verdict

    def _hang(self) -> str | None:
        if self._own["stage"] != "training":
            return None
        waited, step = time.monotonic() - self._progress, self._own["step"]
        if waited < self.hang_limit():
            return None
        behind = [peer for peer in self.peers if peer["step"] < step]
        where = f"; behind: {', '.join(map(self._describe, behind))}" if behind else ""
        return (
            f"step {step + 1} has not ended after {waited:.0f} s (the slowest before took {self._slowest or 0:.0f} s): "
            f"a collective hangs{where}. The stack above says where; hang_timeout_s in plan.json sets the limit."
        )

    def hang_limit(self) -> float:
        """Seconds after which a step is taken to hang."""
        if self.hang_timeout_s is not None:
            return self.hang_timeout_s
        return FIRST_STEP_S if self._slowest is None else max(SHORTEST_HANG_S, HANG_FACTOR * self._slowest)

    def _end_the_process(self, problem: str) -> None:
        if "hangs" in problem:
            faulthandler.dump_traceback(sys.stderr)
        self._end(EXIT_FAILED, problem)
        os._exit(EXIT_FAILED)

    @staticmethod
    def _describe(peer: dict[str, Any]) -> str:
        return f"rank {peer['rank']} (process {peer['pid']} on {peer['host']}, step {peer['step']})"


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank; a collective call, the same answer everywhere."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
    value = torch.tensor(int(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())
