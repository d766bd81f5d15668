"""How a kernel cuts a problem up: the tiles its programs own, the trips each of them takes, what they stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fa2tune.spec import visits
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
    plain, masked = visits.keys_of_tiles(p.mask, p.seqlen_q, p.seqlen_k, m, n).trips(n)
    return tuple(zip(plain.tolist(), masked.tolist(), strict=True))


def of_keys(p: Problem, m: int, n: int) -> tuple[tuple[int, int], ...]:
    """Of kernels that own n keys and stream m queries at a time, for every query head of the group. A tile that has not all of
    its keys is masked throughout."""
    visited = visits.queries_of_tiles(p.mask, p.seqlen_q, p.seqlen_k, n, m)
    plain, masked = (p.group * trips for trips in visited.trips(m))
    if p.seqlen_k % n:
        masked[-1], plain[-1] = masked[-1] + plain[-1], 0
    return tuple(zip(plain.tolist(), masked.tolist(), strict=True))


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
