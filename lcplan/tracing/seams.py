"""Where tracing touches private names of other libraries; each is looked for, and its absence named.

Tested with torch 2.13, transformers 5.24, accelerate 1.15, trl 1.16 and peft 0.21.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from lcplan.errors import EnvironmentProblem
from lcplan.train_plan import TrainPlan

TESTED = "torch 2.13, transformers 5.24, accelerate 1.15, trl 1.16, peft 0.21"


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


class _Stream:
    """A stream of the stand-in device: everything happens in program order."""

    def wait_stream(self, _stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, _event: object) -> None:
        """Nothing to wait for."""

    def record_event(self) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


STREAMS = SimpleNamespace(
    Stream=_Stream, current_stream=_Stream, stream=lambda _stream: contextlib.nullcontext(), empty_cache=lambda: None
)
"""What TRL's offloading asks of a device module."""


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout as CUDA's: the CPU's keeps a mask of the input's type."""
    import torch

    del inplace
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def few_rounds(start: int, stop: int, step: int = 1) -> list[int]:
    """``range`` for loops whose rounds all allocate the same: the first two and the last, which may be smaller.

    In the second what the first made is still alive, as in every later one.
    """
    rounds = range(start, stop, step)
    return [*rounds[:2], *rounds[2:][-1:]]


LOSS_HEAD = "trl.kernels.chunked_logprob"
HOST_OFFLOAD = "lcplan.backends.templates.host_offload"
GPU_BEHAVIOUR: tuple[tuple[str, str, Any], ...] = (
    ("transformers.masking_utils", "is_tracing", lambda _tensor=None: False),
    # one kernel with a mask of bytes
    ("torch.nn.functional", "dropout", _dropout),
    # the loss head as it runs on a GPU: tiles in place, products accumulated in float32 without copies
    (LOSS_HEAD, "_use_triton", lambda _device: True),
    ("trl.trainer.utils", "_use_triton", lambda _device: True),
    (LOSS_HEAD, "_forward_kernel", _NoKernel()),
    (LOSS_HEAD, "_backward_kernel", _NoKernel()),
    (LOSS_HEAD, "_addmm_fp32", lambda *_args: None),
    # the CPU stands for the GPU, whose copies run in program order
    (HOST_OFFLOAD, "is_on_gpu", lambda _tensor: True),
    (HOST_OFFLOAD, "STREAMS", STREAMS),
)
"""Module, name, and what it becomes while tracing."""
FAST_ALL = ("transformers.masking_utils", "fast_all")
"""Asks whether all tokens of a mask are there."""
NEEDED = (
    ("torch._C", "_current_graph_task_id"),
    ("torch._C", "_current_autograd_node"),
    ("torch.autograd", "_get_sequence_nr"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("transformers.initialization", "no_init_weights"),
    ("trl.trainer.utils", "add_fused_lm_head"),
)
"""Used as they are."""
FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
RING = "torch.distributed.tensor.experimental._context_parallel._attention"
PROPAGATION = ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_non_cached")
"""Runs an operator on fake tensors of the whole shape, to learn that of its result."""
NEEDED_BY_SHARDING = (
    PROPAGATION,
    ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
    (FSDP_PARAM, "alloc_storage"),
    (FSDP_PARAM, "free_storage"),
    (FSDP_PARAM, "_to_dtype_if_needed"),
    (FSDP_PARAM, "FSDPParam.reset_sharded_param"),
    (FSDP_STATE, "FSDPState._force_complete_incomplete_states"),
    ("accelerate.utils.fsdp_utils", "fsdp2_prepare_model"),
    ("accelerate.big_modeling", "_attach_context_parallel_hooks"),
    ("transformers.trainer", "Trainer._prepare_context_parallel_inputs"),
    (RING, "custom_ops"),
    (RING, "_cp_options"),
    (RING, "_templated_ring_attention"),
    (RING, "_templated_ring_attention_backward"),
)
MAY_BE_MISSING = ((LOSS_HEAD, "triton", _Triton), (LOSS_HEAD, "range", few_rounds))
"""Triton is imported by the module only where it is installed; range is the module's only once it is set."""


def _find(module: str, name: str) -> Any:
    """The value of a dotted name.

    Raises:
        AttributeError: when the module or the name is not there.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise AttributeError(module) from error
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _has(module: str, name: str) -> bool:
    try:
        _find(module, name)
    except AttributeError:
        return False
    return True


def check_stack(*, sharded: bool) -> None:
    """Look for every name that a trace uses.

    Raises:
        EnvironmentProblem: naming those that the installed libraries do not have.
    """
    wanted = (*NEEDED, FAST_ALL, *((module, name) for module, name, _ in GPU_BEHAVIOUR))
    if sharded:
        wanted += NEEDED_BY_SHARDING
    missing = [f"{module}.{name}" for module, name in wanted if not _has(module, name)]
    if missing:
        raise EnvironmentProblem(
            "trace-unknown-stack",
            f"tracing needs {', '.join(missing)}, which the installed versions do not have. Use --method formula, or "
            f"the versions that tracing was tested with: {TESTED}.",
        )


@contextlib.contextmanager
def _replaced(names: tuple[tuple[str, str, Any], ...]) -> Iterator[None]:
    """Set names for a while; those that their module or class did not have itself are gone again afterwards."""
    owners = [(_owner(module, name), name.rpartition(".")[2], value) for module, name, value in names]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in owners if name in vars(owner)]
    absent = [(owner, name) for owner, name, _ in owners if name not in vars(owner)]
    try:
        for owner, name, value in owners:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        for owner, name in absent:
            delattr(owner, name)


def _owner(module: str, name: str) -> Any:
    """The module, or the class in it, that has the last part of a dotted name."""
    inside = name.rpartition(".")[0]
    return _find(module, inside) if inside else importlib.import_module(module)


@contextlib.contextmanager
def gpu_behaviour(*, sharded: bool = False, padded: bool = False) -> Iterator[None]:
    """Let the traced code take the paths it takes on a GPU.

    Raises:
        EnvironmentProblem: when an installed library no longer has one of the names.
    """
    check_stack(sharded=sharded)
    missing = tuple(each for each in MAY_BE_MISSING if not _has(*each[:2]))
    # whether a row is padded is a value, which a fake mask does not have
    whole_rows = (*FAST_ALL, lambda _tensor: not padded)
    with _replaced((*GPU_BEHAVIOUR, whole_rows, *missing)):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the libraries say of a job that is not one: labels and positions made by themselves, old meshes."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


@contextlib.contextmanager
def watched_storages(changed: Callable[[Any], None]) -> Iterator[None]:
    """Call ``changed`` with each tensor that FSDP2 empties or fills: it resizes storages, which no operator shows.

    What DTensor makes to learn a shape is nothing that a GPU holds, and runs apart.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    propagate = _find(*PROPAGATION)

    def aside(propagator: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return propagate(propagator, schema)

    alloc, free = _find(FSDP_PARAM, "alloc_storage"), _find(FSDP_PARAM, "free_storage")

    def watched(resize: Callable[[Any], None]) -> Callable[[Any], None]:
        def resize_and_tell(tensor: Any) -> None:
            resize(tensor)
            changed(tensor)

        return resize_and_tell

    names = ((FSDP_PARAM, "alloc_storage", watched(alloc)), (FSDP_PARAM, "free_storage", watched(free)))
    with _replaced((*names, (*PROPAGATION, aside))):
        yield


@contextlib.contextmanager
def shards_on_host() -> Iterator[None]:
    """Copy each shard before it is cast and gathered, as FSDP2 does from the host; here both are the same device."""
    cast = _find(FSDP_PARAM, "_to_dtype_if_needed")
    with _replaced(((FSDP_PARAM, "_to_dtype_if_needed", lambda tensor, dtype: cast(tensor.clone(), dtype)),)):
        yield


@contextlib.contextmanager
def shards_padded_once() -> Iterator[None]:
    """Leave shards as ``fully_shard`` padded them.

    The first forward pads again what was replaced since. It tells that by addresses, which fake storages do not have:
    a rank with a smaller shard than the others would get a second one in the middle of the step.
    """
    with _replaced(((FSDP_PARAM, "FSDPParam.reset_sharded_param", lambda _param: None),)):
        yield


@contextlib.contextmanager
def fsdp_as_in(torch_version: str | None) -> Iterator[None]:
    """FSDP2 as in another torch release, as far as it matters for memory; None is the installed one.

    From 2.13 on a group of modules of which only some run (the norm before a fused head) has its backward hook on the
    model's outputs, so the last layer is gathered before the loss head's backward; torch 2.11 gathers it after it
    (pytorch pull request 180428; rows m036, m043, m076, m096, m097 and m104 agree within 0.002%).
    """
    numbers = [int(part) for part in (torch_version or "").split("+")[0].split(".")[:2] if part.isdigit()]
    if len(numbers) < 2 or numbers >= [2, 12]:
        yield
        return
    with _replaced(((FSDP_STATE, "FSDPState._force_complete_incomplete_states", lambda _state, output: output),)):
        yield


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """A process group of ``world_size`` ranks of which only this one exists.

    Raises:
        EnvironmentProblem: when this process has a process group already.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise EnvironmentProblem(
            "trace-in-a-job",
            "this process has a process group already, and tracing needs one of its own. Trace in another process.",
        )
    store = _find("torch.testing._internal.distributed.fake_pg", "FakeStore")()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # equal meshes are one key to DTensor's cache, which would bring back the groups of this one
        _find("torch.distributed.tensor.debug", "_clear_sharding_prop_cache")()


@contextlib.contextmanager
def few_ring_rounds(cp_rank: int) -> Iterator[None]:
    """Of ring attention's rounds run the first three, the three from where the sizes change, and the last.

    Up to this rank's own number a round has half of the keys, and after it half of the queries. What one round made is
    still alive in the next, so the third of its kind holds what every later one does.
    """

    def rounds(*bounds: int) -> Sequence[int]:
        every = range(*bounds)
        if len(bounds) > 1:  # the list of ranks
            return every
        return [i for i in every if i < 3 or cp_rank < i <= cp_rank + 3 or i == every[-1]]

    with _replaced(((RING, "range", rounds),)):
        yield


@contextlib.contextmanager
def ring_attention_on_cpu(plan: TrainPlan | None = None) -> Iterator[None]:
    """Let torch's ring attention run with the CPU's attention operator, whose outputs are those of the GPU's.

    As the job of ``plan`` sets it up.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from lcplan.backends.templates import ring_attention

    ring: Any = importlib.import_module(RING)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def local(value: Any) -> Any:
        return value.to_local() if isinstance(value, DTensor) else value

    def sharded(results: tuple[Any, ...], like: Any) -> tuple[Any, ...]:
        return tuple(DTensor.from_local(x, like.device_mesh, like.placements, run_check=False) for x in results)

    def run_forward(_op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        query = args[0]
        causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
        results = ring._templated_ring_attention(
            query.device_mesh.get_group(), 2, forward, *map(local, args[:3]), is_causal=causal,
            scale=kwargs.get("scale"),
        )  # fmt: skip
        return sharded(results, query)

    def run_backward(_op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        query = args[1]
        grad_out, *saved = map(local, args[:6])
        query_, key, value, out, logsumexp = saved
        results = ring._templated_ring_attention_backward(
            query.device_mesh.get_group(), 2, _positional(backward), grad_out, "grad_out", query_, key, value, out,
            logsumexp, is_causal=args[7], scale=kwargs.get("scale"),
        )  # fmt: skip
        return sharded(results, query)

    before, in_float32 = dict(ring.custom_ops), ring._cp_options.convert_to_f32
    ring.custom_ops |= {forward: run_forward, backward: run_backward}
    if plan is not None:
        ring_attention.install(head_chunks=plan.cp_head_chunks, merge_dtype=plan.cp_merge_dtype)
    try:
        yield
    finally:
        ring._cp_options.convert_to_f32 = in_float32
        ring.custom_ops.clear()
        ring.custom_ops.update(before)


def _positional(backward: Any) -> Callable[..., Any]:
    """The backward operator of the CPU's attention, called by the names that ring attention uses."""

    def call(
        *, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, scale: Any
    ) -> Any:
        return backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale)

    return call


@contextlib.contextmanager
def trl_offloading(model: Any) -> Iterator[Any]:
    """TRL's activation offloading for one step, with the CPU as the accelerator.

    Fake storages have no addresses, so they are told apart by identity.
    """
    import torch

    name = "trl.models.activation_offloading"
    module = importlib.import_module(name)

    def key(tensor: Any) -> tuple[int, Any]:
        return tensor.untyped_storage()._cdata, tensor.dtype

    with _replaced(
        (
            (name, "_get_unique_tensor_key", key),
            ("torch.accelerator", "current_accelerator", lambda *_args: torch.device("cpu")),
            ("torch", "get_device_module", lambda _device=None: STREAMS),
            # it puts off when memory may be used again, not when it counts as free
            ("torch", "Tensor.record_stream", lambda _tensor, _stream: None),
        )
    ):
        yield module.get_act_offloading_ctx_manager(model=model)
