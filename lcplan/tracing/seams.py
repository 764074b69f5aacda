"""Where tracing touches private names of other libraries; each is looked for, and its absence named.

Tested with torch 2.13, transformers 5.24 and trl 1.16.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from lcplan.errors import EnvironmentProblem


class _NoKernel:
    """Stands in for a Triton kernel, which allocates nothing: ``kernel[grid](...)`` does nothing."""

    def __getitem__(self, _grid: object) -> Any:
        return lambda *_args, **_kwargs: None


class _Triton:
    """The one function of the triton package that the loss head calls on the host."""

    @staticmethod
    def cdiv(numerator: int, denominator: int) -> int:
        """Ceiling division."""
        return -(-numerator // denominator)


REPLACED: tuple[tuple[str, str, Any], ...] = (
    # a batch of whole rows has no padding, which a fake mask cannot say
    ("transformers.masking_utils", "is_tracing", lambda _tensor=None: False),
    ("transformers.masking_utils", "fast_all", lambda _tensor: True),
    # the loss head as it runs on a GPU: tiles in place, products accumulated in float32 without copies
    ("trl.kernels.chunked_logprob", "_use_triton", lambda _device: True),
    ("trl.kernels.chunked_logprob", "_forward_kernel", _NoKernel()),
    ("trl.kernels.chunked_logprob", "_backward_kernel", _NoKernel()),
    ("trl.kernels.chunked_logprob", "_addmm_fp32", lambda *_args: None),
)
"""Module, name, and what it becomes while tracing."""
NEEDED = (
    ("torch._C", "_current_graph_task_id"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("transformers.initialization", "no_init_weights"),
    ("trl.trainer.utils", "add_fused_lm_head"),
)
"""Used as they are."""
MAY_BE_MISSING = (("trl.kernels.chunked_logprob", "triton"),)
"""Imported by the module only where Triton is installed."""


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def gpu_behaviour() -> Iterator[None]:
    """Let the traced code take the paths it takes on a GPU with unpadded rows.

    Raises:
        EnvironmentProblem: when an installed library no longer has one of the names.
    """
    # NEEDED first: trl.trainer.utils takes some of the replaced names over at import, and must have the true ones, or
    # it would pick tokens by their labels, a size that fake tensors cannot know
    wanted = (*NEEDED, *((module, name) for module, name, _ in REPLACED))
    missing = [f"{module}.{name}" for module, name in wanted if not _has(module, name)]
    if missing:
        raise EnvironmentProblem(
            "trace-unknown-stack",
            f"tracing needs {', '.join(missing)}, which the installed versions do not have. Use --method formula, or "
            "the versions that tracing was tested with: torch 2.13, transformers 5.24, trl 1.16.",
        )
    replaced = [(importlib.import_module(module), name, value) for module, name, value in REPLACED]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    absent = [(importlib.import_module(module), name) for module, name in MAY_BE_MISSING]
    absent = [(module, name) for module, name in absent if not hasattr(module, name)]
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        for module, name in absent:
            setattr(module, name, _Triton)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        for module, name in absent:
            delattr(module, name)
