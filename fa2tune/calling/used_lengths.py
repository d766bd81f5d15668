"""Sequences of which only the first rows are used, as packed sequences of other offsets: kernels know nothing of it.

A sequence becomes three: its used queries and keys, its unused queries, which have no key, and its unused keys, which have no
query. All of it is arithmetic on the GPU: nothing waits for it.
"""

from __future__ import annotations

import torch

from fa2tune.calling.distributed import whole

OffsetPair = tuple[torch.Tensor, torch.Tensor]
PARTS = 3  #: sequences that one becomes
DIVIDES = "seqused_q or seqused_k", "sequences"  #: as ``score.refuse_numbered`` says it


def divided(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None, seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, int]:  # fmt: skip
    """``offsets``, and how many sequences each became; without used lengths what is given, and 1."""
    if seqused_q is None and seqused_k is None:
        return cu_seqlens_q, cu_seqlens_k, 1
    given = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
    }  # fmt: skip
    return *offsets(**{name: whole(name, tensor) for name, tensor in given.items()}), PARTS


def offsets(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None, seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> OffsetPair:  # fmt: skip
    """cu_seqlens (sequences + 1,), used lengths (sequences,), int32 -> cu_seqlens (PARTS * sequences + 1,) of queries and keys.
    A used length is taken to lie between 0 and its sequence's length.

    TypeError, ValueError: no int32 tensors of one dimension on one device, or not as many as there are sequences."""
    keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    sequences = entries("cu_seqlens_q", cu_seqlens_q) - 1
    if entries("cu_seqlens_k", keys) - 1 != sequences:
        raise ValueError(f"cu_seqlens_k: got {keys.shape[0]} entries, cu_seqlens_q has {sequences + 1}")
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is None:
            continue
        if entries(name, used) != sequences:
            raise ValueError(f"{name}: got {used.shape[0]} entries, must have one a sequence, {sequences}")
        if used.device != cu_seqlens_q.device:
            raise ValueError(f"{name}: got device {used.device}, cu_seqlens_q is on {cu_seqlens_q.device}")
    starts_q, unused_q, ends_q = _parts(cu_seqlens_q, seqused_q)
    starts_k, unused_k, _ = _parts(keys, seqused_k)
    # where each of the three starts; a sequence of unused queries begins and ends at the first unused key
    return _starts(cu_seqlens_q, starts_q, unused_q, ends_q), _starts(keys, starts_k, unused_k, unused_k)


def entries(name: str, tensor: object) -> int:
    """How many. TypeError, ValueError: no int32 tensor of one dimension."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, must be a torch.Tensor")
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, must be torch.int32")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, must have 1 dimension")
    return tensor.shape[0]


def _parts(cu_seqlens: torch.Tensor, used: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each sequence: its first row, the first unused one, the one behind its last."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    return starts, ends if used is None else starts + torch.minimum(used.clamp(min=0), ends - starts), ends


def _starts(cu_seqlens: torch.Tensor, *starts: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.stack(starts, 1).flatten(), cu_seqlens[-1:]))
