"""Packed sequences in ``fa2tune bench``: how they are written and described, and the implementations that have a call for them.

Importable without torch: a peer imports what it needs when it is built.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa2tune.bench.peers import (
    PEERS,
    SUBJECT,
    Peer,
    fa4_options,
    kernels_of,
    library_missing,
    refuse_masks,
    refuse_scores,
    soft_cap,
    window_sides,
)
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, Mask
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import NONE, Score

if TYPE_CHECKING:
    import torch

    from fa2tune.bench.peers import Attention

#: Of one packing: its sequences, and tokens in all.
MOST_SEQUENCES, MOST_TOKENS = 1 << 14, 1 << 24
LONGEST_LABEL = 24  #: letters of a packing in a table
FA3_LIBRARY = "FA3_LIBRARY"  #: environment variable


def lengths_of(text: str) -> tuple[int, ...]:
    """ "16x1024": 16 sequences of 1024; "4096,2048,700"; or both: "4x2048,100". ValueError: it is neither, or too much."""
    found = re.fullmatch(r"(?:\d{1,9}x)?\d{1,9}(?:,(?:\d{1,9}x)?\d{1,9})*", text)
    parts = [part.rpartition("x") for part in text.split(",")] if found else []
    counted = [(int(count or 1), int(length)) for count, _, length in parts]
    if not counted or any(0 in one for one in counted):
        raise ValueError(
            f"got {text!r:.40}, expected LENGTH or COUNTxLENGTH with commas between, from 1 up, as 16x1024 or 4096,2048,700"
        )
    sequences, tokens = sum(count for count, _ in counted), sum(count * length for count, length in counted)
    if sequences > MOST_SEQUENCES or tokens > MOST_TOKENS:
        raise ValueError(
            f"got {text!r:.40}, {sequences} sequences with {tokens} tokens, allowed are at most {MOST_SEQUENCES} and "
            f"{MOST_TOKENS}"
        )
    return tuple(length for count, length in counted for _ in range(count))


def label_of(lengths: Sequence[int]) -> str:
    """As ``lengths_of`` reads it where that is short."""
    runs = [(len([*alike]), length) for length, alike in groupby(lengths)]
    text = ",".join(f"{count}x{length}" if count > 1 else str(length) for count, length in runs)
    return text if len(text) <= LONGEST_LABEL else f"{len(lengths)} of {min(lengths)} to {max(lengths)}"


@dataclass(frozen=True)
class PackedProblem(Problem):
    """Sequences of these lengths, one after the other."""

    lengths: tuple[int, ...] = ()

    def of(self) -> Problem:
        """Without lengths."""
        return Problem(**{one.name: getattr(self, one.name) for one in fields(Problem)})

    def flops(self, pass_: str) -> float:
        """Of each sequence, as ``Problem.flops``."""
        return self.flops_of_sequences(pass_, self.lengths)


def posed(
    dtype: str, head_dim: int, heads: int, mask: Mask, lengths: tuple[int, ...], score: Score = NONE
) -> PackedProblem:  # fmt: skip
    total, extent = sum(lengths), Extent(RAGGED, len(lengths), max(lengths))
    return PackedProblem(
        dtype, 1, heads, heads, total, total, head_dim, head_dim, mask, score=score, extent=extent, lengths=lengths
    )


# ---- the calls: offsets of queries and of keys, the longest of each; then q, k, v of (total, heads, dim)

Sides = tuple[Any, Any, int, int]


def sides_of(queries: Sequence[int], keys: Sequence[int]) -> Sides:
    """Of lengths. On the GPU where there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    of_q, of_k = (torch.tensor([0, *accumulate(one)], dtype=torch.int32, device=device) for one in (queries, keys))
    return of_q, of_k, max(queries), max(keys)


def own_call(sides: Sides, mask: Mask, score: Score = NONE) -> Attention:
    import fa2tune

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = fa2tune.attention_varlen(q, k, v, *sides, mask=mask, score=score)
        assert not isinstance(out, tuple)  # return_lse was not asked for
        return out

    return attention


def fa4_call(sides: Sides, mask: Mask, score: Score = NONE) -> Attention:
    from flash_attn.cute import flash_attn_varlen_func

    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options: dict[str, Any] = {**dict(zip(names, sides, strict=True)), **fa4_options(mask, score)}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out = flash_attn_varlen_func(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return attention


def fa3_call(sides: Sides, mask: Mask, score: Score = NONE) -> Attention:
    """FlashAttention-3's operator of vLLM. It has no backward."""
    import torch

    refuse_masks("FlashAttention-3", mask)
    cap = soft_cap("FlashAttention-3", score)
    torch.ops.load_library(os.environ[FA3_LIBRARY])
    operator, causal = torch.ops._vllm_fa3_C.fwd, mask == CAUSAL
    starts_q, starts_k, longest_q, longest_k = sides
    return lambda q, k, v: operator(
        q, k, v, *[None] * 4, starts_q, starts_k, *[None] * 3, longest_q, longest_k, *[None] * 9, q.shape[-1] ** -0.5,
        causal, *window_sides(mask), cap, True, None, 0, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip


def torch_call(sides: Sides, mask: Mask, score: Score = NONE) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    refuse_masks("varlen_attn", mask)
    refuse_scores("varlen_attn", score)
    window = (-1, 0) if mask == CAUSAL else window_sides(mask)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = varlen_attn(q, k, v, *sides, window_size=window)
        assert not isinstance(out, tuple)  # lse was not asked for
        return out

    return attention


# ---- the peers


def _fa3_missing() -> str | None:
    return library_missing(FA3_LIBRARY, "_vllm_fa3_C::fwd, FlashAttention-3's operator")


def torch_missing() -> str | None:
    """torch is not imported to find out."""
    found = importlib.util.find_spec("torch")
    if found and found.origin and (Path(found.origin).parent / "nn" / "attention" / "varlen.py").exists():
        return None
    return "this torch has no torch.nn.attention.varlen"


def _forward_alone(_problem: Problem, pass_: str, _free: int) -> str | None:
    return None if pass_ == "fwd" else "it has no backward"


def _made(call: Callable[[Sides, Mask, Score], Attention]) -> Callable[[Problem], Attention]:
    """Of tensors as bench has them, (1, total, heads, dim)."""

    def make(problem: Problem) -> Attention:
        assert isinstance(problem, PackedProblem)
        attention = call(sides_of(problem.lengths, problem.lengths), problem.mask, problem.score)

        def of_one_entry(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q.squeeze(0), k.squeeze(0), v.squeeze(0)).unsqueeze(0)

        return of_one_entry

    return make


def _kernels(problem: Problem, pass_: str) -> dict[str, str]:
    return kernels_of(problem.of() if isinstance(problem, PackedProblem) else problem, pass_)


#: In the order of tables.
PACKED_PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(SUBJECT, PEERS[SUBJECT].label, _made(own_call), "bshd", kernels=_kernels),
        Peer("fa4", PEERS["fa4"].label, _made(fa4_call), "bshd", PEERS["fa4"].missing),
        Peer("fa3", "FlashAttention-3", _made(fa3_call), "bshd", _fa3_missing, _forward_alone),
        Peer("torch-varlen", "torch varlen_attn", _made(torch_call), "bshd", torch_missing),
    )
}
#: As BY_MMA_SYNC in peers.py.
PACKED_BY_MMA_SYNC = ("torch-varlen",)
