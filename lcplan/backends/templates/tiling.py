"""MLPs computed over tiles of tokens, so that one tile's intermediates are alive at a time.

Neither transformers nor TRL tiles an MLP (huggingface/trl#6846 does it by hand). Liger's tiled MLP needs Triton, is not
made for FSDP (linkedin/Liger-Kernel#893, #1128), and sums up gradients in ``.grad`` tile by tile, which hooks on
parameters see once a tile (huggingface/kernels-community#1083). Here weights are inputs of one autograd function and
get their gradients once. Tiles are of so many tokens, not so many tiles: small ones are slow (axolotl#3666).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _Keep(torch.autograd.Function):
    """Saves the MLP's input ahead of the MLP.

    A checkpointed layer is recomputed up to the last tensor it saved: with the input saved here that is before the MLP,
    which so runs forward as often as without tiles.
    """

    @staticmethod
    def forward(ctx: Any, hidden_states: torch.Tensor, *_weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_states)
        return hidden_states.new_empty(0)


class _Tiles(torch.autograd.Function):
    """The MLP without saved tensors of its own; ``names`` are those of ``weights`` in it."""

    @staticmethod
    def forward(
        ctx: Any, mlp: Any, names: list[str], kept: Any, hidden_states: torch.Tensor, *_weights: torch.Tensor
    ) -> torch.Tensor:
        device = hidden_states.device.type
        ctx.mlp, ctx.names, (ctx.kept,) = mlp, names, kept
        ctx.autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
        }
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        output = None
        for tile in _tiles(mlp, rows):
            part = mlp(rows[tile])
            if output is None:
                output = part.new_empty(len(rows), part.shape[-1])
            output[tile] = part
        assert output is not None
        return output.view(*hidden_states.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (hidden_states,) = ctx.kept.grad_fn.saved_tensors
        ctx.kept = None
        weights = dict(ctx.mlp.named_parameters())
        # leaves of their own: what they sum up reaches the parameters once, when all tiles are done
        leaves = {name: weights[name].detach().requires_grad_() for name in ctx.names}
        rows, grads = hidden_states.view(-1, hidden_states.shape[-1]), grad.reshape(-1, grad.shape[-1])
        asked = ctx.needs_input_grad[3]
        result = torch.empty_like(rows) if asked else None
        for tile in _tiles(ctx.mlp, rows):
            part = _backward(ctx.mlp, leaves, rows[tile].detach().requires_grad_(asked), grads[tile], ctx.autocast)
            if result is not None:
                result[tile] = part
            del part
        made = None if result is None else result.view_as(hidden_states)
        return None, None, None, made, *(leaf.grad for leaf in leaves.values())


def _backward(
    mlp: Any, leaves: dict[str, torch.Tensor], rows: torch.Tensor, grads: torch.Tensor, autocast: dict[str, Any]
) -> torch.Tensor | None:
    """Forward once more and backward of one tile; returns the gradient of its input."""
    with torch.enable_grad(), torch.autocast(**autocast):
        output = torch.func.functional_call(mlp, leaves, (rows,))
    torch.autograd.backward(output, grads)
    return rows.grad


def _tiles(mlp: Any, rows: torch.Tensor) -> list[slice]:
    return [slice(start, start + mlp.tile_size) for start in range(0, len(rows), mlp.tile_size)]


class _TiledMLP:
    """In front of an MLP's own class; at most ``tile_size`` tokens go through as they are."""

    tile_size: int

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape[:-1].numel() <= self.tile_size:
            return super().forward(hidden_states)  # type: ignore[misc]
        trained = {name: weight for name, weight in self.named_parameters() if weight.requires_grad}
        # in a list: as an argument it would be part of the graph; its node lives as long as it does
        kept = [_Keep.apply(hidden_states, *trained.values())]
        return _Tiles.apply(self, list(trained), kept, hidden_states, *trained.values())


def tile_mlps(model: Any, tile_size: int) -> None:
    """Let every decoder layer's MLP run over tiles of ``tile_size`` tokens.

    Raises:
        ValueError: when a layer has no dense MLP, or one that draws random numbers or is not its class's own.
    """
    for index, layer in enumerate(model.get_decoder().layers):
        mlp = getattr(layer, "mlp", None)
        if not isinstance(getattr(mlp, "down_proj", None), torch.nn.Linear):
            raise ValueError(f"decoder layer {index} has no dense MLP ({type(mlp).__name__})")
        if "forward" in vars(mlp):
            raise ValueError(f"the MLP of decoder layer {index} was replaced already")
        if any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in mlp.modules()):
            raise ValueError(f"decoder layer {index} has dropout in its MLP, which a tile would draw anew")
        mlp.__class__ = type(f"Tiled{type(mlp).__name__}", (_TiledMLP, type(mlp)), {"tile_size": tile_size})
