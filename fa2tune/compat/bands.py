"""Windows as FlashAttention-4 writes them: None is unbounded, and a negative side shifts the band off the diagonal.

Kernels have no such band, and need none. Shifted by n to the right (left = -n), the last n queries see no key, and without them
the mask, which is aligned at the last query, is a plain window. Shifted by n to the left (right = -n), the last n keys are seen
by no query, and without them it is one, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from fa2tune.calling import arguments
from fa2tune.calling.distributed import whole
from fa2tune.compat import terms

Side = int | None


class Band(NamedTuple):
    """What a call asks for as ``window``, without the last ``queries`` and the last ``keys`` of each sequence."""

    window: tuple[Side, Side] | None
    queries: int = 0
    keys: int = 0


#: Of a mask in which no query sees a key: more than any length, and no overflow of int32 where lengths are subtracted.
_ALL = 1 << 30


_UNBOUNDED = Band(None)


def asked(call: str, window_size: Any, causal: Any) -> Band:
    """Two negative sides are no window, as in FlashAttention-4. With ``causal`` the right side is 0 after that.

    TypeError, ValueError: as ``terms.check_sides``."""
    if type(window_size) is tuple and len(window_size) == 2 and window_size[0] is None and window_size[1] is None:
        return _UNBOUNDED
    terms.check_sides(call, window_size, "must be two, each an integer or None")
    left, right = window_size
    before, behind = left is not None and left < 0, right is not None and right < 0
    if before and behind:
        return Band((None, None))
    if not before and not (behind and not causal):
        return Band((left, None if behind else right))  # ``attention`` knows what causal does to it
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        return Band((0, 0), _ALL)
    if before:
        return Band((0, None if right is None else right + left), -left)
    return Band((None if left is None else left + right, 0), 0, -right)


def dense(
    call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``terms.dense`` with its lse, of a band."""
    if not band.queries and not band.keys:
        return terms.dense(call, q, k, v, window=band.window, return_lse=True, **options)
    terms.check(call, {"q": q, "k": k, "v": v}, 4)
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"{call}: v: got sequence length {v.shape[1]}, k has {k.shape[1]}")
    queries, keys = max(0, q.shape[1] - band.queries), max(0, k.shape[1] - band.keys)
    unseeing = q.shape[1] - queries
    q, k, v = q[:, :queries], k[:, :keys], v[:, :keys]
    out, lse = terms.dense(call, q, k, v, window=band.window, return_lse=True, **_without_causal(options))
    return functional.pad(out, (0, 0, 0, 0, 0, unseeing)), functional.pad(lse, (0, unseeing), value=-torch.inf)


def lengths(
    call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, max_seqlen_q: Any, max_seqlen_k: Any, band: Band, *,
    seqused_q: torch.Tensor | None, seqused_k: torch.Tensor | None, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``terms.lengths`` with its lse, of a band."""
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        arguments.check_dense(f"{call}: {name}", tensor)
    if band.queries or band.keys:
        sides = {
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
        }  # fmt: skip
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = (whole(f"{call}: {name}", t) for name, t in sides.items())
        seqused_q = _fewer(q, cu_seqlens_q, seqused_q, band.queries) if band.queries else seqused_q
        seqused_k = _fewer(k, cu_seqlens_k, seqused_k, band.keys) if band.keys else seqused_k
        options = _without_causal(options)
    return terms.lengths(
        call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window=band.window, return_lse=True,
        seqused_q=seqused_q, seqused_k=seqused_k, **options,
    )  # fmt: skip


def _without_causal(options: dict[str, Any]) -> dict[str, Any]:
    """Causal is in the window of a shifted band."""
    return options | {"causal": False}


def _fewer(tensor: torch.Tensor, cu_seqlens: Any, used: Any, fewer: int) -> Any:
    """Used lengths without the last ``fewer`` rows."""
    fewer = min(fewer, _ALL)
    if cu_seqlens is None:
        every = torch.full((len(tensor),), tensor.shape[1], dtype=torch.int32, device=tensor.device)
    elif isinstance(cu_seqlens, torch.Tensor):
        every = cu_seqlens[1:] - cu_seqlens[:-1]
    else:
        return used  # and the offsets are refused by name
    if used is not None and (
        not isinstance(used, torch.Tensor) or used.shape != every.shape or used.device != every.device
    ):
        return used  # likewise
    return ((every if used is None else torch.minimum(used, every)) - fewer).clamp(min=0)
