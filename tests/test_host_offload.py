"""What layers keep on the host: attention or not, nothing changes in loss and gradients, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, run_python, small_job

from lcplan.backends.job import render_job

pytestmark = pytest.mark.train

LAYERS = 3
TRAIN = """
import contextlib, copy, json, os, sys
import torch, transformers
from torch.utils._python_dispatch import TorchDispatchMode
from lcplan.backends.templates import host_offload

LAYERS, TOKENS, VOCAB = 3, int(os.environ.get("TOKENS", "96")), 200
DEVICE = os.environ.get("DEVICE", "cpu")
KERNELS = os.environ.get("KERNELS", "none")
if KERNELS == "liger":
    sys.path.insert(0, os.path.dirname(host_offload.__file__))
    from model import fuse_kernels
torch.manual_seed(0)
config = transformers.Qwen3Config(
    hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=VOCAB, attn_implementation="sdpa", use_cache=False,
)
first = transformers.Qwen3ForCausalLM(config).train()
rows = torch.randint(0, VOCAB, (1, TOKENS))

class Attention(TorchDispatchMode):
    calls = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in host_offload.ATTENTION
        return func(*args, **(kwargs or {}))

def step(checkpointing, *, around=lambda *_: contextlib.nullcontext(), every=1, dtype=torch.float32):
    model = copy.deepcopy(first).to(DEVICE, dtype)
    if checkpointing != "none":
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    if KERNELS == "liger":
        fuse_kernels(model, {"kernels": KERNELS, "mlp_tile_size": None})
    if checkpointing in ("kept", "ahead"):
        host_offload.install(model, keep_attention=checkpointing == "kept")
    ids, labels, positions = (x.to(DEVICE) for x in (rows.clone(), rows.roll(-1, 1), torch.arange(TOKENS)[None]))
    with Attention() as attention, around(model, [ids, labels, positions]):
        for _ in range(2):  # micro steps
            logits = model(input_ids=ids, position_ids=positions).logits
            loss = torch.nn.functional.cross_entropy(logits[0].float(), labels[0], reduction="sum")
            loss.backward()
    return loss.detach(), [weight.grad for weight in model.parameters()], attention.calls

def same(one, other):
    return torch.equal(one[0], other[0]) and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))

def apart(one, other):
    return float(max((a - b).abs().max() / b.abs().max() for a, b in zip(one[1], other[1], strict=True)))
"""
ONE_PROCESS = """
found = {}
for dtype in (torch.float32, torch.bfloat16):
    full, kept, ahead = (step(how, dtype=dtype) for how in ("full", "kept", "ahead"))
    found[str(dtype)] = [same(full, kept), same(full, ahead), full[2], kept[2], ahead[2]]
full, kept, ahead = (step(how, every=2) for how in ("full", "kept", "ahead"))
found["every 2"] = [same(full, kept), same(full, ahead), full[2], kept[2], ahead[2]]
print(json.dumps(found))
"""
ON_GPU = """
step("full", dtype=torch.bfloat16)
torch.cuda.synchronize()
found, peaks = [], []
for checkpointing in ("full", "full", "kept", "ahead"):
    torch.cuda.reset_peak_memory_stats()
    found.append(step(checkpointing, dtype=torch.bfloat16))
    peaks.append(torch.cuda.max_memory_allocated())
full, again, kept, ahead = found
print(json.dumps({
    "loss": [float(full[0]), float(kept[0]), float(ahead[0])], "calls": [full[2], kept[2]], "peaks": peaks[1:],
    "same": same(full, kept), "same again": same(full, again),
    "apart": max(apart(kept, full), apart(ahead, full)), "apart again": apart(again, full),
    "pinned": torch.cuda.host_memory_stats()["allocated_bytes.peak"],
}))
"""
TWO_RANKS = """
import os
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from lcplan.backends.templates import ring_attention
from lcplan.tracing.seams import ring_attention_on_cpu

def rank_of_two(rank, port, results):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    mesh = init_device_mesh("cpu", (2,))

    def split(model, buffers):
        _attach_context_parallel_hooks(model)
        return context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1])

    def ring(checkpointing, **how):
        found = step(checkpointing, around=split, **how)
        for tensor in (found[0], *found[1]):
            dist.all_reduce(tensor)
        return found

    whole, found = step("none"), {}
    with ring_attention_on_cpu():
        for exchange in ("allgather", "alltoall"):
            set_rotate_method(exchange)
            full, kept = ring("full"), ring("kept")
            found[exchange] = [same(full, kept), full[2], kept[2], apart(kept, whole)]
        levers, bf16 = {}, torch.bfloat16
        rounded = ring("full", dtype=bf16)
        operators = dict(torch_ring.custom_ops)
        ring_attention.install(head_chunks=2, merge_dtype="float32")
        parts = ring("kept")
        levers["parts"] = [float(full[0] - parts[0]), apart(parts, full), parts[2]]
        torch_ring.custom_ops.update(operators)
        ring_attention.install(head_chunks=1, merge_dtype="bfloat16")
        narrow = ring("kept", dtype=bf16)
        levers["narrow"] = [apart(narrow, full), apart(rounded, full)]
    results.put([found, levers])
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may abort a Python that ends

if __name__ == "__main__":
    import socket
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    torch.multiprocessing.spawn(rank_of_two, (port, results), nprocs=2)
    print(json.dumps([results.get(), results.get()]))
"""


def printed(script: str, folder: Path, **environment: str) -> Any:
    (folder / "script.py").write_text(TRAIN + script)
    done = run_python("script.py", cwd=folder, PYTHONPATH=ROOT, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_one_process(tmp_path: Path) -> None:
    micro, found = 2, printed(ONE_PROCESS, tmp_path)
    assert found == {
        "torch.float32": [True, True, micro * 2 * LAYERS, micro * LAYERS, micro * 2 * LAYERS],
        "torch.bfloat16": [True, True, micro * 2 * LAYERS, micro * LAYERS, micro * 2 * LAYERS],
        "every 2": [True, True, micro * (LAYERS + 2), micro * LAYERS, micro * (LAYERS + 2)],
    }


def test_two_ranks_of_ring_attention(tmp_path: Path) -> None:
    """Real exchange over gloo; a whole ring is one operator."""
    micro = 2
    for exchanges, levers in printed(TWO_RANKS, tmp_path):
        for same, full, kept, apart in exchanges.values():
            assert (same, full, kept) == (True, micro * 2 * LAYERS, micro * LAYERS)
            assert apart < 1e-5, "the same gradients as one process that has the whole row"
        loss, apart, calls = levers["parts"]
        assert (loss, calls) == (0, micro * LAYERS), "one part of the heads after the other: the same loss"
        assert apart < 1e-6
        narrow, rounded = levers["narrow"]
        assert 0 < narrow < 1.5 * rounded, "as far from float32 as training in bfloat16 is anyway"


@pytest.mark.gpu
@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA GPU")
@pytest.mark.parametrize("kernels", ["none", "liger"])
def test_on_a_gpu_as_exact_as_its_kernels(tmp_path: Path, kernels: str) -> None:
    """Attention's backward may sum up in any order there: two runs with full checkpointing are as far apart."""
    if kernels == "liger":
        pytest.importorskip("liger_kernel")
    found = printed(ON_GPU, tmp_path, DEVICE="cuda", TOKENS=str(1 << 15), KERNELS=kernels)
    assert len(set(found["loss"])) == 1
    assert found["calls"] == [2 * 2 * LAYERS, 2 * LAYERS]
    assert found["same"] is found["same again"] or found["apart"] <= 2 * found["apart again"], found
    full, kept, ahead = found["peaks"]
    assert kept <= full, "nothing more on the GPU"
    assert ahead <= full + 2 * (1 << 15) * 64, "at most one layer's input more"
    assert found["pinned"] > 0


LATE = """
from types import SimpleNamespace

class Side:
    \"\"\"A stream whose copies run when somebody waits for it, and not before.\"\"\"
    active, copies = False, []
    def wait_stream(self, other):
        pass
    def synchronize(self):
        while self.copies:
            self.copies.pop(0)()

side, copy_ = Side(), torch.Tensor.copy_
done = [0]

def late(to, source, non_blocking=False):
    done[0] += 1
    if not side.active:
        return copy_(to, source)
    assert non_blocking
    side.copies.append(lambda: copy_(to, source))
    return to

@contextlib.contextmanager
def on(stream):
    stream.active = True
    yield
    stream.active = False

full = step("full")
empty = torch.empty
torch.Tensor.copy_ = late
torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs).fill_(float("nan"))
host_offload.is_on_gpu = lambda tensor: True
compute = SimpleNamespace(wait_stream=lambda other: other.synchronize())
host_offload.STREAMS = SimpleNamespace(Stream=lambda: side, stream=on, current_stream=lambda: compute)
found = []
for how in ("kept", "ahead"):
    done[0] = 0
    found.append([same(full, step(how)), done[0], len(side.copies)])
print(json.dumps(found))
"""


IN_PLACE = """
from transformers.models.qwen3 import modeling_qwen3

plain = step("full")

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, weight):
        root = (given.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        ctx.save_for_backward(given, weight, root)
        return given * root * weight

    @staticmethod
    def backward(ctx, grad):
        given, weight, root = ctx.saved_tensors
        normed, scaled = given * root, grad * weight
        over_weight = (grad * normed).flatten(0, -2).sum(0)
        grad.data[...] = root * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return grad, over_weight

def turned(given, cos, sin):
    given.data[...] = given * cos[:, None] + modeling_qwen3.rotate_half(given) * sin[:, None]
    return given.transpose(1, 2).transpose(1, 2)

class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turned(query, cos, sin), turned(key, cos, sin)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        return *(turned(grad, cos, -sin) for grad in grads), None, None

class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        part = gate.sigmoid()
        silu = gate * part
        gate.data[...], up.data[...] = grad * up * (part + silu * (1 - part)), grad * silu
        return gate, up

def mlp(self, given):
    return self.down_proj(SwiGLU.apply(self.gate_proj(given), self.up_proj(given)))

modeling_qwen3.Qwen3RMSNorm.forward = lambda self, given: Norm.apply(given, self.weight)
modeling_qwen3.apply_rotary_pos_emb = lambda *given: Rotary.apply(*given)
modeling_qwen3.Qwen3MLP.forward = mlp
written = step("full")
assert 0 < apart(written, plain) < 1e-5, apart(written, plain)
"""
"""Kernels that write where Liger's do (liger-kernel 0.8.5 ops): into queries, keys, gate, up, and into gradients."""


@pytest.mark.parametrize("kernels", ["", IN_PLACE], ids=["plain", "in place"])
def test_copies_that_run_late_are_waited_for(tmp_path: Path, kernels: str) -> None:
    micro, there_and_back = 2, 2
    inputs_outputs_and_sums = 3
    kept, ahead = printed(kernels + LATE, tmp_path, TOKENS="320")
    assert kept == [True, micro * LAYERS * there_and_back * inputs_outputs_and_sums, 0]
    assert ahead == [True, micro * LAYERS * there_and_back, 0]


OUT_OF_TURN = """
import pytest
store = host_offload.HostStore()
first, second = store.queue(torch.ones(4)), store.queue(torch.zeros(4))
with pytest.raises(RuntimeError, match="out of turn"):
    store.next(first)
print(json.dumps(True))
"""


def test_an_input_that_is_asked_for_out_of_turn_is_an_error(tmp_path: Path) -> None:
    assert printed(OUT_OF_TURN, tmp_path)


COUNTED = """
import sys
import torch
import host_offload, train
empty = torch.empty
torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)  # without a GPU none can be pinned
calls = {"take": 0, "next": 0}
def count(owner, name):
    whole = getattr(owner, name)
    def counted(self, *args):
        calls[name] += 1
        return whole(self, *args)
    setattr(owner, name, counted)
count(host_offload.KeptResults, "take")
count(host_offload.HostStore, "next")
code = train.main(train.JOB)
print(calls)
sys.exit(code)
"""


def test_a_job_trains_as_with_full_checkpointing(tmp_path: Path) -> None:
    plans = {
        "full": {},
        "kept": {"activation_checkpointing": "selective", "offload_activations": True},
        "ahead": {"offload_activations": True, "offload_prefetch": True},
        # as transformers and TRL have them
        "none": {"activation_checkpointing": "none"},
        "every 2": {"checkpoint_every_n_layers": 2},
        "selective": {"activation_checkpointing": "selective"},
        "offload": {"offload_activations": True},
    }
    losses = []
    for name, plan in plans.items():
        plan = {"max_length": 64, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **plan}
        folder = render_job(small_job(plan=plan, training={"max_steps": 3, "save_model": False}), tmp_path / name)
        done = run_python("-c", COUNTED, cwd=folder)
        assert done.returncode == 0, done.stderr[-4000:]
        layers, micro_steps, steps = 2, 2, 3
        every = layers * micro_steps * steps
        assert str({"take": every * (name == "kept"), "next": every * (name == "ahead")}) in done.stdout
        losses.append([step["loss"] for step in json.loads((folder / "result.json").read_text())["steps"]])
    assert losses == losses[:1] * len(plans)


def test_nothing_to_install_is_an_error() -> None:
    import torch

    from lcplan.backends.templates import host_offload

    with pytest.raises(RuntimeError, match="no layer of Linear is checkpointed"):
        host_offload.install(torch.nn.Linear(2, 2), keep_attention=True)


def test_pinned_blocks_waste_less_than_one_of_them() -> None:
    from lcplan.backends.templates.host_offload import LAST_BLOCK, block_bytes
    from lcplan.estimators import host

    assert host.LAST_BLOCK == LAST_BLOCK
    for num_bytes in (1, LAST_BLOCK - 2, LAST_BLOCK, 3 * LAST_BLOCK + 6, 5 << 28, (1 << 30) + 2):
        blocks = list(block_bytes(num_bytes))
        assert sum(blocks) == num_bytes
        assert all(block & (block - 1) == 0 for block in blocks[:-1])
        assert blocks[-1] < LAST_BLOCK or blocks[-1] & (blocks[-1] - 1) == 0
