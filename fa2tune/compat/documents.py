"""Batches with padding or packed documents as packed sequences of their own lengths.

Padding costs no wait for the GPU: tokens are sorted to the front in their order, and ``attention_varlen`` leaves the rows
behind the last sequence alone. How many documents a batch holds is not known without reading it, so packing waits once a batch;
so does padding with a window, which must not lie between tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from fa2tune.calling import arguments
from fa2tune.calling.distributed import by_parts, given, rows_of_batches, whole
from fa2tune.calling.packing import cu_seqlens
from fa2tune.calling.varlen_schedules import VarlenSchedule, varlen_schedule
from fa2tune.compat import terms
from fa2tune.compat.remembered import held, remembered
from fa2tune.spec.combinations import why

#: Type of a mask of a cache of fixed size: one of 4 dimensions that a user makes has another.
OF_FIXED_CACHE = torch.uint8


class _Permuted(torch.autograd.Function):
    """Rows in another order; the gradient takes the inverse order, without sums."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        order, back = ctx.saved_tensors
        return _permuted(gradient, back, order), None, None


def _permuted(rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    return _Permuted.apply(rows, order, back)  # type: ignore[no-untyped-call]


def _compacted(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of (batch, length) bool: (order that brings tokens to the front, its inverse, where each row's tokens start there)."""
    order = torch.argsort(~tokens.flatten(), stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = tokens.sum(1).cumsum(0)
    return order, back, torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


def _even(batch: int, rows: int, device: torch.device) -> torch.Tensor:
    """Where each batch entry's rows start."""
    return torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)


def _schedule(
    numbers: torch.Tensor, sequences: str, starts_q: torch.Tensor, starts_k: torch.Tensor, rows_q: int, rows_k: int
) -> VarlenSchedule | None:
    """What all layers share, made once for a tensor of numbers and what its ``sequences`` are, as their offsets are; None: a
    graph is made, where each layer would make it."""
    if torch.compiler.is_compiling():
        return None
    made: VarlenSchedule = remembered(
        numbers, ("schedule", sequences, rows_q, rows_k),
        lambda: varlen_schedule(starts_q, starts_k, total_q=rows_q, total_k=rows_k),
    )  # fmt: skip
    return made


def _refuse_holes(call: str, tokens: torch.Tensor, options: dict[str, Any]) -> None:
    """NotImplementedError: padding between tokens of a row, which are counted without it, and a mask that counts positions: a
    window that hides keys of the row, or chunks. Reads the mask, once for a tensor; not while a graph is made."""
    window, mask = options["window"], options.get("mask")
    if torch.compiler.is_compiling() or terms.capturing():
        return
    # a side of 0 is the query's own position
    if mask is None and not any(side and side < tokens.shape[1] - 1 for side in window or ()):
        return

    def holes() -> bool:
        begins = tokens.clone()
        begins[:, 1:] &= ~tokens[:, :-1]
        return bool((begins.sum(1) > 1).any())

    if remembered(tokens, "holes", holes):
        what, given = ("chunks", "chunks") if mask else ("a window", f"the window {window}")
        hole = "padding between the tokens of a row"
        raise NotImplementedError(f"{call}: attention_mask: got {hole} with {given}: {why(what, hole)}")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, length, heads, dim) as (batch * length, heads, dim)."""
    return tensor.flatten(0, 1)


def flat(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(batch, 1, 1, length) as (batch, length), one tensor for all layers of a model."""
    # copied, as a view would keep the mask alive
    found: torch.Tensor = remembered(mask, "flat", lambda: mask[:, 0, 0].to(dtype, copy=True))
    return found


def by_positions(name: str, positions: torch.Tensor, layer: object) -> torch.Tensor | None:
    """The documents of tokens with these positions, (1, length) -> int32, the same; each begins at the least position, as to
    flash_attention_2 in Transformers. None: there is one, for which the host waits once for a tensor that ``layer`` and others
    share; or nothing can be read: a fake tensor, or one that no call has read while a CUDA graph is captured. While
    torch.compile makes a graph one document has numbers, too.

    NotImplementedError: a CUDA graph is captured of a tensor that was read, and has several."""

    def numbers() -> torch.Tensor | None:
        here = whole(name, positions)
        begins = here == here.min()
        several = torch.compiler.is_compiling() or bool(begins[:, 1:].any())
        return begins.cumsum(1).to(torch.int32) if several else None

    if torch.compiler.is_compiling():
        return numbers()
    if terms.is_traced(positions):
        return None
    if terms.capturing():
        if held(positions).get("by positions") is not None:
            raise NotImplementedError(
                f"{name}: got documents while a CUDA graph is captured, which cannot follow their lengths: pass cu_seq_lens_q"
            )
        return None
    anew = False
    if positions.is_inference():
        # nothing tells whether it was changed in place: a layer that has read it reads it anew
        layers = remembered(positions, "layers", set)
        if anew := id(layer) in layers:
            layers.clear()
        layers.add(id(layer))
    found: torch.Tensor | None = remembered(positions, "by positions", numbers, anew)
    return found


def _offsets(call: str, name: str, asked: Any) -> torch.Tensor:
    """int32. TypeError, ValueError: no tensor, or a DTensor that is divided."""
    arguments.check_dense(f"{call}: {name}", asked)
    offsets: torch.Tensor = whole(f"{call}: {name}", asked)
    return offsets if offsets.dtype is torch.int32 else offsets.to(torch.int32)


def by_offsets(
    call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: Any, max_seqlen_k: Any, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """(batch, length, heads, dim) tensors whose tokens, all rows one after the other, are those of the sequences -> out."""
    cu_seqlens_q = _offsets(call, "cu_seq_lens_q", cu_seqlens_q)
    cu_seqlens_k = _offsets(call, "cu_seq_lens_k", cu_seqlens_k)
    out, _ = terms.packed(
        call, _flat(q), _flat(k), _flat(v), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse=False,
        **options,
    )  # fmt: skip
    return out.view(*q.shape[:2], *out.shape[1:])


def _check(call: str, k: torch.Tensor, v: torch.Tensor, numbers: torch.Tensor, batch: int) -> None:
    """ValueError: what ``attention_varlen`` cannot know of tensors whose batches are one row after the other."""
    if k.shape[0] != batch:
        raise ValueError(f"{call}: k: got batch {k.shape[0]}, q has {batch}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"{call}: v: got batch and length {tuple(v.shape[:2])}, k has {tuple(k.shape[:2])}")
    if numbers.shape[0] != batch or numbers.shape[1] > k.shape[1]:
        shape = tuple(numbers.shape)
        raise ValueError(f"{call}: attention_mask: got shape {shape}, must be ({batch}, at most {k.shape[1]} keys)")
    if numbers.device != k.device:
        raise ValueError(f"{call}: attention_mask: got device {numbers.device}, k is on {k.device}")


def _rows(call: str, numbers: torch.Tensor, q: Any) -> Any:
    """The rows of ``numbers`` that belong to this rank's batches of q, one tensor for all layers of a model."""

    def rows() -> torch.Tensor:
        found: torch.Tensor = rows_of_batches(f"{call}: attention_mask", numbers, q)
        # no view of ``numbers``, which would keep it alive in what is remembered
        return found if given(numbers) else found.clone()

    return remembered(numbers, ("rows", q.device_mesh, q.placements), rows)


def by_numbers(
    call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: torch.Tensor, at_last_token: bool = False,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    """(batch, length, heads, dim) tensors and of the keys (batch, at most length) bool, True for a token, or integers, the
    documents of tokens -> out. Keys behind the last of ``numbers`` are not there.

    NotImplementedError: padding between the tokens of a row, with a window or chunks.

    bool: the queries are those of the last keys, and rows of padding give 0; without a causal mask and a window they may be of
    anything, and all of them attend. With ``at_last_token`` one query is that of a row's last token, and sees those before.
    Integers: as many queries as keys."""
    arguments.check_dense(f"{call}: attention_mask", numbers)
    if given(q, k, v):

        def part(here_q: torch.Tensor, here_k: torch.Tensor, here_v: torch.Tensor) -> torch.Tensor:
            _check(call, k, v, numbers, q.shape[0])
            return by_numbers(call, here_q, here_k, here_v, _rows(call, numbers, q), at_last_token, **options)

        divided: Any = by_parts(part, q, k, v, "bshd", (), options.get("score"))
        return divided
    if given(numbers):
        numbers = remembered(numbers, "whole", lambda: whole(f"{call}: attention_mask", numbers))
    batch, rows = q.shape[:2]
    _check(call, k, v, numbers, batch)
    k, v = k[:, : numbers.shape[1]], v[:, : numbers.shape[1]]
    length = k.shape[1]
    if numbers.dtype != torch.bool:
        if rows != length:
            raise ValueError(
                f"{call}: attention_mask: got documents of {length} keys for {rows} queries, must be as many"
            )
        offsets = remembered(numbers, "offsets", lambda: cu_seqlens(document_ids=numbers))
        schedule = _schedule(numbers, "documents", offsets, offsets, batch * rows, batch * rows)
        return by_offsets(call, q, k, v, offsets, offsets, None, None, schedule=schedule, **options)
    _refuse_holes(call, numbers, options)
    order, back, starts_k = remembered(numbers, "keys", lambda: _compacted(numbers))
    keys, values = _permuted(_flat(k), order, back), _permuted(_flat(v), order, back)
    plain = not options["causal"] and options["window"] is None and options.get("mask") is None
    if plain or (at_last_token and rows == 1):
        starts_q = remembered(numbers, ("starts", rows), lambda: _even(batch, rows, q.device))
        schedule = _schedule(numbers, "rows", starts_q, starts_k, batch * rows, batch * length)
        out, _ = terms.packed(
            call, _flat(q), keys, values, starts_q, starts_k, rows, length, return_lse=False, schedule=schedule, **options
        )  # fmt: skip
        return out.view(batch, rows, *out.shape[1:])
    if rows > length:
        raise ValueError(f"{call}: attention_mask: got {length} keys for {rows} queries, must be as many or more")
    last = remembered(numbers, ("queries", rows), lambda: _compacted(numbers[:, length - rows :]))
    order, back, starts_q = last
    schedule = _schedule(numbers, "tokens", starts_q, starts_k, batch * rows, batch * length)
    out, _ = terms.packed(
        call, _permuted(_flat(q), order, back), keys, values, starts_q, starts_k, rows, length, return_lse=False,
        schedule=schedule, **options,
    )  # fmt: skip
    return _permuted(out, back, order).view(batch, rows, *out.shape[1:])
