"""Calls of DTensors, as tensor parallelism makes them: heads and batches are independent, so each rank computes its part, and
nothing is sent. Other placements are an error.

A DTensor is known by its type's name: ``torch.distributed.tensor`` is not imported for calls without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fa2tune.spec.score import refuse_numbered

Called = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
#: Layout -> dimension that may be divided -> (what it is, which dimension of lse that is).
DIVIDED: Mapping[str, Mapping[int, tuple[str, int]]] = {
    "bhsd": {0: ("batches", 0), 1: ("heads", 1)}, "bshd": {0: ("batches", 0), 2: ("heads", 1)}, "packed": {1: ("heads", 0)},
}  # fmt: skip


def given(*tensors: Any) -> bool:
    """Whether one of them is a DTensor."""
    return any(type(tensor).__name__ == "DTensor" for tensor in tensors)


def whole(name: str, tensor: Any) -> Any:
    """Of what every rank needs (offsets, lengths, masks of tokens) a plain tensor, or what a replicated DTensor holds; what is
    no DTensor as it is. ValueError: it is divided."""
    if type(tensor).__name__ != "DTensor":
        return tensor
    if not all(place.is_replicate() for place in tensor.placements):
        raise ValueError(f"{name}: got placements {tensor.placements}, must be Replicate() or a plain tensor")
    return tensor.to_local()


def rows_of_batches(name: str, tensor: Any, q: Any) -> Any:
    """Of what has one row a batch (masks of tokens), whole or divided by batches as q is: the rows of this rank's part of q,
    a DTensor whose dimension 0 is batches. ValueError: it is divided in another way."""
    batches = [place.is_shard() and place.dim % q.dim() == 0 for place in q.placements]
    if given(tensor) and tensor.device_mesh == q.device_mesh:
        pairs = zip(tensor.placements, batches, strict=True)
        if all(place.is_shard(0) if divided else place.is_replicate() for place, divided in pairs):
            return tensor.to_local()
    rows = whole(name, tensor)
    for number, divided in enumerate(batches):
        if divided:
            rows = rows.chunk(q.device_mesh.size(number))[q.device_mesh.get_local_rank(number)]
    return rows


def local_parts(q: Any, k: Any, v: Any, layout: Any, score: Any) -> tuple[torch.Tensor, ...]:
    """This rank's q, k and v; what is no DTensor as it is. ``layout``: of ``DIVIDED``; ``score``: the call's.

    TypeError, ValueError: placements or meshes differ, or they divide another dimension or a size that is no multiple, or the
    score term reads numbers that a rank counts anew."""
    if not given(q, k, v):
        return q, k, v
    refuse_numbered(score, "a DTensor", "batches or heads")
    from torch.distributed.tensor import DTensor

    tensors = {"q": q, "k": k, "v": v}
    known = isinstance(layout, str) and layout in DIVIDED
    if not known or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        # the call's own checks say what is wrong
        return tuple(tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values())
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            raise TypeError(
                f"{name}: got {type(tensor).__name__} with a DTensor: q, k and v must all be DTensors, or none "
                "(.to_local() is a rank's part)"
            )
    ranks = _ranks(q, DIVIDED.get(layout, {}))
    for name, tensor in tensors.items():
        if tensor.device_mesh != q.device_mesh or tensor.placements != q.placements:
            here, there = (f"{one.placements} on {one.device_mesh}" for one in (tensor, q))
            raise ValueError(f"{name}: got placements {here}, q has {there}")
        for dim, count in ranks.items():
            if tensor.shape[dim] % count:
                what = DIVIDED[layout][dim][0]
                raise ValueError(f"{name}: got {tensor.shape[dim]} {what} on {count} ranks, must be a multiple")
    return tuple(tensor.to_local() for tensor in tensors.values())


def _ranks(q: Any, allowed: Mapping[int, tuple[str, int]]) -> dict[int, int]:
    """Dimension -> how many ranks divide it."""
    ranks = dict.fromkeys(allowed, 1)
    for number, place in enumerate(q.placements):
        if place.is_replicate():
            continue
        dim = place.dim % q.dim() if place.is_shard() else None
        if dim not in ranks:
            said = ", ".join(f"Shard({dim}) ({what})" for dim, (what, _) in allowed.items())
            raise ValueError(
                f"q: got placements {q.placements}, allowed are Replicate(), {said}: redistribute q, k and v, or pass "
                ".to_local() of each"
            )
        ranks[dim] *= q.device_mesh.size(number)
    return ranks


def by_parts(
    call: Callable[..., Called], q: Any, k: Any, v: Any, layout: str, rest: tuple[Any, ...], score: Any
) -> Called:  # fmt: skip
    """``call(q, k, v, *rest)`` of this rank's part, as DTensors placed as q. Errors: as ``local_parts``."""
    from torch.distributed.tensor import DTensor, Shard

    result = call(*local_parts(q, k, v, layout, score), *rest)
    mesh, placements = q.device_mesh, q.placements
    if isinstance(result, torch.Tensor):
        return DTensor.from_local(result, mesh, placements, run_check=False)
    o, lse = result
    dims = DIVIDED[layout]
    of_lse = [Shard(dims[place.dim % q.dim()][1]) if place.is_shard() else place for place in placements]
    return (
        DTensor.from_local(o, mesh, placements, run_check=False), DTensor.from_local(lse, mesh, of_lse, run_check=False),
    )  # fmt: skip
