"""Whether what a backward got is what its forward saved."""

from __future__ import annotations

import torch

from fa2tune.launching.passes import lse_shape


def check_saved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor
) -> None:
    """TypeError or ValueError names a tensor that hooks on saved tensors have changed since the forward."""
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
