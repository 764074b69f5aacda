"""Which module runs, and which part of the step, told by hooks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch  # noqa: TID253  (imported by the trace method alone)
from torch.nn.modules import module as nn_module  # noqa: TID253

from lcplan.tracing.model import decoder_layers
from lcplan.tracing.storages import StorageTracker

LOSS_FORWARD, LOSS_BACKWARD = "loss[forward]", "loss[backward]"
"""Parts of the step between the last layer's forward and its backward."""


class RunningModule:
    """The module whose forward runs, or whose backward does.

    Backward nodes are known by the number that autograd gave them while the forward of their module ran.
    """

    def __init__(self, model: Any) -> None:
        self.names = {id(module): without_index(name) for name, module in model.named_modules()}
        self.running: list[str] = []
        self.of_node: dict[int, str] = {}

    def name(self) -> str:
        """Called at every operator; an empty string where no module runs."""
        if self.running:
            self.of_node[torch.autograd._get_sequence_nr() - 1] = self.running[-1]
            return self.running[-1]
        node = torch._C._current_autograd_node()
        return "" if node is None else self.of_node.get(node._sequence_nr(), "")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Follow the modules while they run; a checkpoint's recomputation may leave them by an exception."""

        def enter(module: Any, _args: Any) -> None:
            self.running.append(self.names.get(id(module), ""))

        def leave(_module: Any, _args: Any, _output: Any) -> None:
            self.running.pop()

        hooks = [
            nn_module.register_module_forward_pre_hook(enter),
            nn_module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def without_index(name: str) -> str:
    """The name of a module in any layer: ``model.layers.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def name_phases(tracker: StorageTracker, model: Any) -> None:
    """Let the decoder layers say where the step is; a model that does not show them has one forward, one backward."""
    layers = decoder_layers(model)
    if not layers:
        return

    def at(phase: str) -> Any:
        def set_phase(*_: Any) -> None:
            tracker.phase = phase

        return set_phase

    def when_backward_reaches(phase: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if first.requires_grad:
                first.register_hook(at(phase))

        return hook

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(at(f"forward[{index}]"), prepend=True)
        layer.register_forward_hook(when_backward_reaches(f"backward[{index}]"))
    layers[-1].register_forward_hook(at(LOSS_FORWARD))
    model.get_input_embeddings().register_forward_hook(when_backward_reaches("backward.embedding"))
