"""How a kernel cuts a problem up: the tiles its programs own, the trips each of them takes, what they stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fa2tune.spec.problem import ITEMSIZE, Problem


@dataclass(frozen=True)
class Tiling:
    """A problem cut into tiles. Programs own tiles of one side and stream the other."""

    heads: int  #: heads whose tiles programs own, batch included
    tiles: int  #: of one head
    plain: int  #: unmasked trips of one head's tiles together
    masked: int  #: masked ones
    longest: tuple[int, int]  #: unmasked and masked trips of the longest tile
    own_rows: int
    stream_rows: int
    streamed: int  #: bytes of one head's streamed tensors
    shared_by: int  #: owned heads that stream the same tensors
    row_bytes: int  #: of both tensors of a side


def of_queries(p: Problem, m: int, n: int) -> tuple[tuple[int, int], ...]:
    """Of kernels that own m queries and stream n keys at a time: (unmasked, masked) trips of each tile, as the kernels have
    them."""
    tiles = []
    for start in range(0, p.seqlen_q, m):
        end, full = p.seqlen_k, p.seqlen_k // n * n
        if p.mask.row_mask == "causal":
            offset = p.seqlen_k - p.seqlen_q
            end = min(p.seqlen_k, max(start + m + offset, 0))
            full = min(p.seqlen_k, max(start + 1 + offset, 0)) // n * n
        tiles.append((full // n, -(-(end - full) // n)))
    return tuple(tiles)


def of_keys(p: Problem, m: int, n: int) -> tuple[tuple[int, int], ...]:
    """Of kernels that own n keys and stream m queries at a time, for every query head of the group."""
    tiles = []
    last = -(-p.seqlen_q // m) * m
    for start in range(0, p.seqlen_k, n):
        begin = full = 0
        if p.mask.row_mask == "causal":
            offset = p.seqlen_k - p.seqlen_q
            begin = min(max(start - offset, 0) // m * m, last)
            full = min(-(-max(start + n - 1 - offset, 0) // m) * m, last)
        if start + n > p.seqlen_k:
            full = last
        tiles.append(((last - full) // m * p.group, (full - begin) // m * p.group))
    return tuple(tiles)


@lru_cache(maxsize=4096)
def tiling(owns_queries: bool, p: Problem, m: int, n: int) -> Tiling:
    row_bytes = ITEMSIZE[p.dtype] * (p.head_dim + p.head_dim_v)
    if owns_queries:
        tiles, heads = of_queries(p, m, n), p.batch * p.heads_q
        own_rows, stream_rows, streamed, shared_by = m, n, p.seqlen_k * row_bytes, p.group
    else:
        tiles, heads = of_keys(p, m, n), p.batch * p.heads_kv
        own_rows, stream_rows, streamed, shared_by = n, m, p.seqlen_q * p.group * row_bytes, 1
    plain, masked = (sum(tile[way] for tile in tiles) for way in (0, 1))
    longest = max(tiles, key=sum, default=(0, 0))
    return Tiling(
        heads, len(tiles), plain, masked, longest, own_rows, stream_rows, streamed, shared_by, row_bytes
    )  # fmt: skip
