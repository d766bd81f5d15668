"""Where each tile of packed sequences lies, the longest sequences first: one table, for tiles of one number of queries. Device
side."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.extent import STEP, packed_tiles
from fa2tune.search_spaces.portable import packed_order as space

WORDS = tl.constexpr(space.WORDS)


@triton.jit
def _sides(cu_seqlens, index, sequences, total, BEHIND: tl.constexpr):
    """(start, rows) of sequences [STEP]. BEHIND: the rows behind the last one are one more. Whatever cu_seqlens holds, no row
    outside the tensor is meant."""
    start = tl.load(cu_seqlens + index, mask=index <= sequences, other=0)
    end = tl.load(cu_seqlens + index + 1, mask=index < sequences, other=total)
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, 0), total)
    there = index <= sequences if BEHIND else index < sequences
    return start, tl.where(there, tl.maximum(end - start, 0), 0)


@triton.jit
def write_order(
    cu_seqlens_q, cu_seqlens_k, order, own, batch, seqlen_q, seqlen_k, BLOCK_Q: tl.constexpr, IN_TURNS: tl.constexpr,
):  # fmt: skip
    """cu_seqlens_q, cu_seqlens_k [batch + 1] int32 -> order [1 + seqlen_q // BLOCK_Q + batch + 1, WORDS] int32: the head
    [tiles, 0, keys of the longest sequences], and an entry a tile of BLOCK_Q queries, [first row within its sequence, row where
    that ends, its rows, key where it ends, its keys, 0, its number]. seqlen_q, seqlen_k: rows of all together. Sequences of
    more keys come first, and of each the last tile, the longest of a causal mask. Of those of as many keys and tiles one comes
    after the other, and the last ones, which have IN_TURNS tiles, take turns: so the last tiles of all are short ones. Every
    row of q is in a tile: the rows behind the last sequence are one more, without keys. own: the sequence whose tiles are
    written; behind the last one, how many there are."""
    lanes = tl.arange(0, STEP)
    first_q, rows = _sides(cu_seqlens_q, own + lanes * 0, batch, seqlen_q, True)
    first_k, keys = _sides(cu_seqlens_k, own + lanes * 0, batch, seqlen_k, False)
    tiles = tl.cdiv(rows, BLOCK_Q)
    before = tl.zeros([STEP], tl.int32)  # tiles of sequences that come before this one
    alike = tl.zeros([STEP], tl.int32)  # sequences that take turns with it, and those of lower number
    lower = tl.zeros([STEP], tl.int32)
    every = tl.zeros([STEP], tl.int32)
    for first in range(0, batch + 1, STEP):
        index = first + lanes
        _, other_rows = _sides(cu_seqlens_q, index, batch, seqlen_q, True)
        _, other_keys = _sides(cu_seqlens_k, index, batch, seqlen_k, False)
        other_tiles = tl.cdiv(other_rows, BLOCK_Q)
        earlier = (other_keys > keys) | ((other_keys == keys) & (other_tiles > tiles))
        like = (other_keys == keys) & (other_tiles == tiles) & (index <= batch)
        before += tl.where(earlier, other_tiles, 0)
        alike += like.to(tl.int32)
        lower += (like & (index < own)).to(tl.int32)
        every += other_tiles
    room = seqlen_q // BLOCK_Q + batch + 1  # sequences that overlap, against the rules, may have more tiles
    word = tl.arange(0, WORDS)[None, :]
    if own == 0:
        tl.store(order + word, tl.where(word == 0, tl.minimum(tl.sum(every, 0), room), 0), mask=word < 2)
    mine = tl.max(tiles, 0)
    same = tl.sum(alike, 0)
    place = tl.sum(before, 0)
    rank = tl.sum(lower, 0)
    if (place + rank == 0) & (mine > 0):
        tl.store(order + 2, tl.max(keys, 0) * same)
    turns = tl.minimum(same, tl.cdiv(IN_TURNS, tl.maximum(mine, 1)))
    alone = same - turns
    if rank < alone:
        place += rank * mine
        turns = 1
    else:
        place += alone * mine + rank - alone
    place += (mine - 1) * turns  # of the first tile
    for first in range(0, mine, STEP):
        tile = first + lanes
        entry = tl.where(word == 0, (tile * BLOCK_Q)[:, None], 0)
        entry = tl.where(word == 1, (first_q + rows)[:, None], entry)
        entry = tl.where(word == 2, rows[:, None], entry)
        entry = tl.where(word == 3, (first_k + keys)[:, None], entry)
        entry = tl.where(word == 4, keys[:, None], entry)
        entry = tl.where(word == 6, own, entry)
        inside = (tile < mine) & (place - tile * turns < room)
        tl.store(order + (1 + place - tile * turns)[:, None] * WORDS + word, entry, mask=inside[:, None])


@triton.jit
def _key_tiles(
    cu_seqlens_q, cu_seqlens_k, index, sequences, total_q, total_k, BLOCK: tl.constexpr, RIGHT_BOUNDED: tl.constexpr
):
    """(number of the first tile of ``packed_tiles`` over keys, tiles, queries that see the most seen of them) of sequences
    [STEP]; behind the last one come the keys that are in none."""
    first_k, keys = _sides(cu_seqlens_k, index, sequences, total_k, True)
    _, queries = _sides(cu_seqlens_q, index, sequences, total_q, False)
    tiles = tl.where(index <= sequences, (first_k + keys) // BLOCK - first_k // BLOCK + 1, 0)
    return first_k // BLOCK + index, tiles, tl.minimum(queries, keys) if RIGHT_BOUNDED else queries


@triton.jit
def write_longer_first(
    cu_seqlens_q, cu_seqlens_k, order, own, sequences, total_q, total_k, BLOCK: tl.constexpr, RIGHT_BOUNDED: tl.constexpr,
):  # fmt: skip
    """-> order [packed_tiles of total_k] int32: the numbers of all key tiles, sequences of more queries first, those of as many
    one after the other, as they lie, and of each the first keys first. own: the sequence whose tiles are written. Of sequences
    that overlap, against the rules, there may be more tiles or fewer: none is written behind the end."""
    lanes = tl.arange(0, STEP)
    number, tiles, seen = _key_tiles(
        cu_seqlens_q, cu_seqlens_k, own + lanes * 0, sequences, total_q, total_k, BLOCK, RIGHT_BOUNDED
    )
    before = tl.zeros([STEP], tl.int32)
    for first in range(0, sequences + 1, STEP):
        index = first + lanes
        _, other_tiles, other_seen = _key_tiles(
            cu_seqlens_q, cu_seqlens_k, index, sequences, total_q, total_k, BLOCK, RIGHT_BOUNDED
        )
        before += tl.where((other_seen > seen) | ((other_seen == seen) & (index < own)), other_tiles, 0)
    place = tl.sum(before, 0)
    mine = tl.max(tiles, 0)
    every = packed_tiles(total_k, sequences, BLOCK)
    for first in range(0, mine, STEP):
        at = first + lanes
        tl.store(order + place + at, number + at, mask=(at < mine) & (place + at < every))
