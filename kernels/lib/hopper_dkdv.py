"""What the forms of kernels/sm90/bwd_dkdv.py share, and kernels/sm90/bwd_dkdv_ds.py: what travels together, the warp that
loads, lse and delta of a block, and the group that makes dV. Device side.

Device functions keep the underscores they had in one file: rows are filed under the text of what they were measured with,
wherever it stands (fa2tune/compiling/composition.py)."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import mbarrier, opaque, thread_barrier, tma_store_wait, warpgroup_mma_wait
from fa2tune.kernels.lib.hopper_blocks import block_at
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    alike,
    expect_tiles,
    load_parts,
    product_layout,
    product_of_rows,
    products_done_with,
    put_parts,
    tiles_in,
    zeros_for,
)
from fa2tune.kernels.lib.hopper_split import of_keys, of_queries, rows_of_head, sequence_of
from fa2tune.kernels.lib.warps import WARP

LOG2E = gl.constexpr(1.4426950408889634)


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
    DIVISORS: gl.constexpr
    num_warps: gl.constexpr  #: of a group
    SCORED: gl.constexpr  #: there is a score term
    APPLY: gl.constexpr
    GRAD: gl.constexpr


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
    score: tuple
    qk_scale: gl.tensor
    softmax_scale: gl.tensor


@gluon.jit
def produce(q, k, v, do, smem, barriers, tile, form):
    """One warp: K and V once, then Q and dO through a ring, for every query head of the group."""
    h_kv = tile.h_kv
    b_k, start_n = of_keys(tile.b, tile.start_n, tile)
    n_blocks = tile.end - tile.first
    member = 0  # of the query heads that read this key head
    place = tile.first
    for turn in range(tile.group * n_blocks):
        if form.DIVISORS:
            h = h_kv * tile.group + member
            b_q, row = of_queries(tile.b, block_of(place, tile, form) * form.BLOCK_M, tile)
            place += 1
            member += gl.where(place == tile.end, 1, 0)
            place = gl.where(place == tile.end, tile.first, place)
        else:
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
def row_values(values, j, tile, alive, seqlen_q, other: gl.constexpr, form):
    """lse or delta of the query block at place j of a head (block_at), [M]; of j = end: at ``first`` of the next head. values:
    of the head. One value a thread, which then goes through shared memory: loaded as the scores want them, 16 a thread and
    block, these values took 7 % of the time."""
    layout: gl.constexpr = gl.BlockedLayout([1], [WARP], [form.num_warps], [0])
    wraps = j == tile.end
    block = block_of(gl.where(wraps, tile.first, j), tile, form)
    rows = block * form.BLOCK_M + gl.arange(0, form.BLOCK_M, layout=layout)
    values += gl.where(wraps, rows_of_head(seqlen_q, tile), 0)
    return gl.load(values + rows, mask=(rows < seqlen_q) & alive, other=other)


class Head(NamedTuple):
    """A query head, and the keys that a group of consumers has."""

    h: gl.tensor
    key: gl.tensor  #: first one
    offset: gl.tensor  #: query i is at place i + offset of the keys


@gluon.jit
def weights(s, shift, j, head, tile, call, form, MASK: gl.constexpr):
    """(P^T, and what dS^T is dP^T - delta times) of S^T = s of the head's keys and the query block at its place j; shift: -lse
    of its queries."""
    layout: gl.constexpr = s.type.layout
    if form.SCORED:
        first = block_of(j, tile, form) * form.BLOCK_M
        queries = (first + gl.arange(0, form.BLOCK_M, layout=gl.SliceLayout(0, layout)))[None, :]
        columns = (head.key + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout)))[:, None]
        s = form.APPLY(s, call.score, queries, columns, head.offset, sequence_of(tile), head.h)
    p = gl.exp2(gl.fma(s, call.qk_scale, shift[None, :]))
    if MASK:
        row = block_of(j, tile, form) * form.BLOCK_M
        keys = head.key + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout))
        p = form.HIDE_QUERIES(p, keys, row, head.offset, call.seqlen_k, call.window, layout)
    slope = p
    if form.SCORED:
        slope = form.GRAD(p, s, call.score, queries, columns, head.offset, sequence_of(tile), head.h)
    return p, slope


@gluon.jit
def _dv_over_queries(acc, s, lse_values, done, total, lse, head, smem, barriers, tile, call, form, MASK: gl.constexpr):
    """Query blocks of one head into dV: with MASK those under the mask, else those that see every key. s and lse_values: S^T
    and lse of the first; lse is +inf past the end, so that p = exp2(s - inf) = 0. done: turns of the ring before place 0."""
    dtype: gl.constexpr = smem.q[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.do[0].shape[-1]), 2)
    zero = gl.zeros([form.BLOCK_N, form.BLOCK_M], gl.float32, s_layout)
    for j in range(tile.first if MASK else tile.full, tile.full if MASK else tile.end):
        turn = done + j
        later = turn + 1
        k_tile = tiles_in(smem.k, opaque(j * 0))
        shift = gl.convert_layout(lse_values * -LOG2E, gl.SliceLayout(0, s_layout))
        lse_values = row_values(lse, j + 1, tile, later < total, call.seqlen_q, float("inf"), form)
        p, slope = weights(s, shift, j, head, tile, call, form, MASK)
        buffer = turn % form.P_STAGES
        mbarrier.wait(barriers.p_empty.index(buffer), ((turn // form.P_STAGES) & 1) ^ 1)
        smem.p.index(buffer).store(slope.to(dtype))
        thread_barrier()
        mbarrier.arrive(barriers.p_ready.index(buffer), count=1)
        operand = gl.convert_layout(p.to(dtype), a_layout)
        stage = turn % form.STAGES
        mbarrier.wait(barriers.do_ready.index(stage), (turn // form.STAGES) & 1)
        acc_next = add_products(operand, tiles_in(smem.do, stage), acc)
        # S^T of the next block; the last one multiplies whatever lies in the ring, a product that is not read
        ahead = later % form.STAGES
        q_tile = tiles_in(smem.q, ahead)
        mbarrier.wait(barriers.q_ready.index(ahead), (later // form.STAGES) & 1, pred=later < total)
        s_next = product_of_rows(k_tile, q_tile, zero)
        acc, operand = products_done_with(acc_next, operand, len(smem.k))
        mbarrier.arrive(barriers.do_empty.index(stage), count=1)
        s = warpgroup_mma_wait(0, deps=[s_next])
        mbarrier.arrive(barriers.q_empty.index(ahead), count=1)
    return acc, s, lse_values


@gluon.jit
def _consume_dv(memory, smem, barriers, tile, call, form):
    """Four warps: S^T = K Q^T, P^T, and dV += P^T dO."""
    lse = memory.lse  # first: a loop carries variables in the order of their first assignments
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    seqlen_q = call.seqlen_q
    offset = call.seqlen_k - seqlen_q
    of_head = rows_of_head(seqlen_q, tile)
    n_blocks = tile.end - tile.first
    total = tile.group * n_blocks
    acc = zeros_for(smem.v, form.BLOCK_N)
    zero = gl.zeros([form.BLOCK_N, form.BLOCK_M], gl.float32, s_layout)
    lse += (tile.b.to(gl.int64) * tile.heads_q + tile.h_kv * tile.group) * of_head
    lse_values = row_values(lse, tile.first, tile, total > 0, seqlen_q, float("inf"), form)
    mbarrier.wait(barriers.k_ready, 0, pred=total > 0)
    k_tile = tiles_in(smem.k, 0)
    # the first S^T; with no block at all, of whatever lies there, and not read
    q_tile = tiles_in(smem.q, 0)
    mbarrier.wait(barriers.q_ready.index(0), 0, pred=total > 0)
    s_next = product_of_rows(k_tile, q_tile, zero)
    s = warpgroup_mma_wait(0, deps=[s_next])
    mbarrier.arrive(barriers.q_empty.index(0), count=1)
    for g in range(tile.group):  # every query head that reads this key head
        turns = g * n_blocks - tile.first
        head = Head(tile.h_kv * tile.group + g, tile.start_n, offset)
        acc, s, lse_values = _dv_over_queries(
            acc, s, lse_values, turns, total, lse, head, smem, barriers, tile, call, form, True
        )
        acc, s, lse_values = _dv_over_queries(
            acc, s, lse_values, turns, total, lse, head, smem, barriers, tile, call, form, False
        )
        lse += of_head
    # K's shared memory is read by this group alone; where dV is not as wide, V's, once the other group is done with it
    slot = smem.k
    if not alike(smem.k, smem.v):
        mbarrier.arrive(barriers.read, count=1)
        mbarrier.wait(barriers.read, 0)
        slot = smem.v
    b, row = of_keys(tile.b, tile.start_n, tile)
    put_parts(acc, memory.dv, b, tile.h_kv, row, slot, 0)
    tma_store_wait(0)
