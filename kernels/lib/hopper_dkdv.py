"""What both forms of kernels/sm90/bwd_dkdv.py share: what travels together, the warp that loads, lse and delta of a block."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import mbarrier
from fa2tune.kernels.lib.hopper_blocks import block_at
from fa2tune.kernels.lib.hopper_parts import expect_tiles, load_parts
from fa2tune.kernels.lib.hopper_split import of_keys, of_queries, rows_of_head


class Form(NamedTuple):
    """What is compiled in. Kept as gl.constexpr: assigned without, its fields would be values of the running program."""

    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    ROWS_N: gl.constexpr  #: keys that a TMA load brings
    TILES: gl.constexpr  #: such loads
    STAGES: gl.constexpr
    P_STAGES: gl.constexpr
    HIDE_QUERIES: gl.constexpr
    LEFT_BOUNDED: gl.constexpr
    EARLY_START: gl.constexpr
    num_warps: gl.constexpr  #: of a group


# Partitions get the fields of these in their order; another one is other machine code.
class Memory(NamedTuple):
    """Global memory, but for what the producer loads."""

    dk: tuple  #: descriptors of its parts
    dv: tuple
    lse: gl.tensor  #: pointers to [B, Hq, Sq]
    delta: gl.tensor


class Shared(NamedTuple):
    """Shared memory, of each the parts: [slots, 1, 1, rows, columns]; p [P_STAGES, BLOCK_N, BLOCK_M]."""

    k: tuple
    v: tuple
    q: tuple
    do: tuple
    p: gl.shared_memory_descriptor


class Barriers(NamedTuple):
    """mbarriers: one of K, of V, and of ``read``: both groups have read K and V; of the others one a slot."""

    k_ready: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    do_ready: gl.shared_memory_descriptor
    do_empty: gl.shared_memory_descriptor
    p_ready: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


class Tile(NamedTuple):
    """Keys of a program, and the query blocks that see them, as ``query_blocks`` has them."""

    b: gl.tensor
    h_kv: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor
    start_n: gl.tensor  #: first key
    first: gl.tensor
    full: gl.tensor
    end: gl.tensor
    rotation: gl.tensor
    packed: tuple  #: as kernels/lib/hopper_split.py has it


class Call(NamedTuple):
    """Lengths are those of the tile's sequence."""

    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    window: tuple
    qk_scale: gl.tensor
    softmax_scale: gl.tensor


@gluon.jit
def produce(q, k, v, do, smem, barriers, tile, form):
    """One warp: K and V once, then Q and dO through a ring, for every query head of the group."""
    h_kv = tile.h_kv
    b_k, start_n = of_keys(tile.b, tile.start_n, tile)
    n_blocks = tile.end - tile.first
    for turn in range(tile.group * n_blocks):
        h = h_kv * tile.group + turn // n_blocks
        b_q, row = of_queries(tile.b, block_of(tile.first + turn % n_blocks, tile, form) * form.BLOCK_M, tile)
        stage = turn % form.STAGES
        phase = (turn // form.STAGES) & 1
        if turn == 0:
            expect_tiles(k, barriers.k_ready, form.TILES)
            for c in gl.static_range(form.TILES):
                load_parts(k, b_k, h_kv, start_n + c * form.ROWS_N, barriers.k_ready, smem.k, c)
        mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
        expect_tiles(q, barriers.q_ready.index(stage), 1)
        load_parts(q, b_q, h, row, barriers.q_ready.index(stage), smem.q, stage)
        if turn == 0:
            expect_tiles(v, barriers.v_ready, form.TILES)
            for c in gl.static_range(form.TILES):
                load_parts(v, b_k, h_kv, start_n + c * form.ROWS_N, barriers.v_ready, smem.v, c)
        mbarrier.wait(barriers.do_empty.index(stage), phase ^ 1)
        expect_tiles(do, barriers.do_ready.index(stage), 1)
        load_parts(do, b_q, h, row, barriers.do_ready.index(stage), smem.do, stage)


@gluon.jit
def block_of(j, tile, form):
    """The query block at place j of a head."""
    return block_at(j, tile.first, tile.end, tile.rotation, form.LEFT_BOUNDED)


@gluon.jit
def row_words(words, j, tile, alive, seqlen_q, other: gl.constexpr, form):
    """lse or delta of the query block at place j of a head (block_at), [M]; of j = end: at ``first`` of the next head. words:
    of the head. One value a thread, which then goes through shared memory: loaded as the scores want them, 16 a thread and
    block, these words took 7 % of the time."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [form.num_warps], [0])
    wraps = j == tile.end
    block = block_of(gl.where(wraps, tile.first, j), tile, form)
    rows = block * form.BLOCK_M + gl.arange(0, form.BLOCK_M, layout=layout)
    words += gl.where(wraps, rows_of_head(seqlen_q, tile), 0)
    return gl.load(words + rows, mask=(rows < seqlen_q) & alive, other=other)
