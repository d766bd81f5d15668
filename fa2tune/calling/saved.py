"""Whether what a backward got is what its forward saved."""

from __future__ import annotations

from typing import Any

import torch

from fa2tune.calling.varlen_schedules import check_order
from fa2tune.launching.passes import lse_shape
from fa2tune.spec.extent import OFFSETS, Extent


def of_offsets(offsets: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """What of them is checked, for a plan's key."""
    return tuple((one.dtype, one.device, one.shape, one.stride()) for one in offsets)


def _check_offsets(offsets: tuple[torch.Tensor, ...], sequences: int, device: torch.device) -> None:
    """Kernels read them by address, as int32 one after the other."""
    for name, one in zip(OFFSETS, offsets, strict=False):
        if one.dtype is not torch.int32:
            raise TypeError(
                f"attention_varlen's backward: got {name} of dtype {one.dtype}, the forward had torch.int32"
            )
        if one.device != device:
            raise ValueError(f"attention_varlen's backward: got {name} on {one.device}, q is on {device}")
        if tuple(one.shape) != (sequences + 1,):
            raise ValueError(
                f"attention_varlen's backward: got {name} of shape {tuple(one.shape)}, the forward had ({sequences + 1},)"
            )
        if not one.is_contiguous():
            raise ValueError(f"attention_varlen's backward: got {name} with strides {one.stride()}, must be contiguous")


def check_saved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    extent: Extent, offsets: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
    """TypeError or ValueError names a tensor that hooks on saved tensors have changed since the forward."""
    if extent.ragged:
        _check_offsets(offsets, extent.sequences, q.device)
    for order in offsets[len(OFFSETS) :]:
        check_order(order, q.shape[2], k.shape[2], extent.sequences, q.device)
    keys, columns = k.shape[:3], v.shape[3]
    shapes = {"k": (*keys, q.shape[3]), "v": (*keys, columns)}
    shapes |= dict.fromkeys(("o", "the gradient of o"), (*q.shape[:3], columns))
    for name, tensor in (("k", k), ("v", v), ("o", o), ("the gradient of o", do)):
        if tensor.dtype is not q.dtype:
            raise TypeError(
                f"attention's backward: got {name} of dtype {tensor.dtype}, q has {q.dtype}; all must agree"
            )
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"attention's backward: got {name} of shape {tuple(tensor.shape)}, the forward had {shapes[name]}"
            )
    for name, tensor in (("k", k), ("v", v), ("o", o), ("lse", lse), ("the gradient of o", do)):
        if tensor.device != q.device:
            raise ValueError(f"attention's backward: got {name} on {tensor.device}, q is on {q.device}")
    if lse.dtype is not torch.float32 or tuple(lse.shape) != lse_shape(q):
        raise TypeError(
            f"attention's backward: got lse of dtype {lse.dtype}, shape {tuple(lse.shape)}; the forward of q of dtype "
            f"{q.dtype} saved torch.float32, {lse_shape(q)}"
        )
