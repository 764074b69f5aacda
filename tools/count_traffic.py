"""Memory traffic of one decoder layer's elementwise operations, counted on the modeling code itself.

    python tools/count_traffic.py [MODEL_TYPE ...]

Runs two models that differ by one layer on fake tensors under a dispatch mode, and adds up the bytes that every
operation reads and writes which is no matrix product, no attention kernel and no view. The slopes over the four widths
of a layer are the rows of ``FORWARD_TRAFFIC`` and ``BACKWARD_TRAFFIC`` in ``lcplan/estimators/step_time.py``. Needs the
train extra, no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VIEWS = (
    "view", "_unsafe_view", "t", "transpose", "slice", "unsqueeze", "detach", "expand", "permute", "split", "alias",
    "reshape", "select", "squeeze", "as_strided", "unbind", "split_with_sizes", "chunk", "device", "is_contiguous",
)  # fmt: skip
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
PRODUCTS = (
    "mm", "addmm", "bmm", "matmul", "linear", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip
NO_TRAFFIC = frozenset((*VIEWS, *ALLOCATIONS, *PRODUCTS))
"""Views, allocations, and what counts as FLOPs."""
BASE = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
HEAD_DIM = 64
TOKENS = 65_536
WIDER: dict[str, tuple[str, int, int]] = {
    "hidden": ("hidden_size", 2048, 1024),
    "mlp": ("intermediate_size", 4096, 2048),
    "query": ("num_attention_heads", 32, 16 * HEAD_DIM),
    "key": ("num_key_value_heads", 8, 4 * HEAD_DIM),
}
"""Width -> (config key, its value when widened, entries that adds)."""


class TrafficCounter(TorchDispatchMode):
    """Adds up bytes read and written by what is elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation."""
        out = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] not in NO_TRAFFIC:
            tensors = [x for x in tree_leaves((args, kwargs or {}, out)) if isinstance(x, torch.Tensor)]
            self.num_bytes += sum(_bytes(tensor) for tensor in tensors)
        return out


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor; a broadcast one is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


@contextmanager
def counted(counter: TrafficCounter, *, float32: bool) -> Iterator[None]:
    """Count, under autocast where the weights are float32."""
    with counter, torch.autocast("cpu", dtype=torch.bfloat16, enabled=float32):
        yield


def traffic(model_type: str, *, layers: int, float32: bool = False, **sizes: int) -> tuple[int, int]:
    """Bytes of the forward and of the backward of a whole decoder."""
    config = CONFIG_MAPPING[model_type](
        **BASE | sizes, num_hidden_layers=layers, head_dim=HEAD_DIM, vocab_size=64, max_position_embeddings=4096,
        pad_token_id=None, eos_token_id=None, bos_token_id=None, sliding_window=None, use_sliding_window=False,
    )  # fmt: skip
    counter = TrafficCounter()
    with FakeTensorMode():
        dtype = torch.float32 if float32 else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        with counted(counter, float32=float32):
            hidden = model.model(tokens, use_cache=False).last_hidden_state
        forward, counter.num_bytes = counter.num_bytes, 0
        with counter:
            hidden.backward(torch.ones_like(hidden))
    return forward, counter.num_bytes


def layer_traffic(model_type: str, **sizes: Any) -> tuple[float, float]:
    """Bytes a token of one layer."""
    one, two = (traffic(model_type, layers=layers, **sizes) for layers in (1, 2))
    return (two[0] - one[0]) / TOKENS, (two[1] - one[1]) / TOKENS


def slopes(model_type: str, *, float32: bool = False) -> dict[str, tuple[int, int]]:
    """Width -> bytes per token and entry in the forward and in the backward, to the nearest byte."""
    base = layer_traffic(model_type, float32=float32)
    found = {}
    for width, (key, value, entries) in WIDER.items():
        wider = layer_traffic(model_type, float32=float32, **{key: value})
        found[width] = (round((wider[0] - base[0]) / entries), round((wider[1] - base[1]) / entries))
    return found


def main() -> None:
    """Print one line a family and dtype."""
    for model_type in sys.argv[1:] or ("llama", "qwen3", "phi3", "olmo2", "glm4"):
        for float32 in (False, True):
            print(model_type, "float32" if float32 else "bfloat16", slopes(model_type, float32=float32))


if __name__ == "__main__":
    main()
