"""What both forms of dQ's Hopper kernel share (kernels/sm90/bwd_dq.py; bwd_dq_split.py, whose keys are split among programs):
what travels together, the warp that loads, delta, and the loop over key blocks. Device side.

Device functions keep the underscores they had in one file: rows are filed under the text of what they were measured with,
wherever it stands (fa2tune/compiling/composition.py)."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import mbarrier, opaque, warpgroup_mma_wait
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    expect_both,
    expect_parts,
    load_parts,
    product_layout,
    product_of_rows,
    products_done,
    tiles_in,
)
from fa2tune.kernels.lib.hopper_split import of_keys, of_queries, sequence_of
from fa2tune.search_spaces.sm90 import bwd_dq as space

LOG2E = gl.constexpr(1.4426950408889634)
#: Query rows of a consumer group: the rows of one wgmma.
ROWS = gl.constexpr(space.ROWS)
PRODUCER_REGISTERS = gl.constexpr(24)


class Form(NamedTuple):
    """What is compiled in. Kept as gl.constexpr: assigned without, its fields would be values of the running program."""

    GROUPS: gl.constexpr  #: of consumers
    BLOCK_N: gl.constexpr
    K_STAGES: gl.constexpr
    V_STAGES: gl.constexpr
    HEAD_DIM_V: gl.constexpr
    LAST_KEY: gl.constexpr  #: or None
    BY_HOOKS: gl.constexpr
    BLOCKS_BELOW: gl.constexpr
    CLEAR_BLOCKS: gl.constexpr
    HIDE: gl.constexpr
    LEFT_BOUNDED: gl.constexpr
    RIGHT_BOUNDED: gl.constexpr
    SCORED: gl.constexpr  #: there is a score term
    APPLY: gl.constexpr
    GRAD: gl.constexpr


# Partitions get the fields of these in their order; another one is other machine code.
class Memory(NamedTuple):
    """Global memory, but for what the producer loads."""

    dq: tuple  #: descriptors of its parts
    o: gl.tensor  #: pointers: to rows of one head
    dlse: gl.tensor
    lse: gl.tensor  #: to [B, Hq, Sq]
    delta: gl.tensor


class Shared(NamedTuple):
    """Shared memory, of each the parts: [slots, 1, 1, rows, columns]."""

    q: tuple
    k: tuple
    v: tuple
    do: tuple


class Barriers(NamedTuple):
    """mbarriers, one a slot; q_ready: of dO, too."""

    q_ready: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor


class Tile(NamedTuple):
    """Query rows of a program. The key blocks that any of them sees: n_all, counted back from block ``below`` - 1."""

    b: gl.tensor
    h: gl.tensor
    heads_q: gl.tensor
    h_kv: gl.tensor
    start_m: gl.tensor  #: first row
    below: gl.tensor
    n_all: gl.tensor
    packed: tuple  #: as kernels/lib/hopper_split.py has it


class Call(NamedTuple):
    """Lengths are those of the tile's sequence."""

    stride_om: gl.tensor
    stride_dlsem: gl.tensor
    has_dlse: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    window: tuple
    score: tuple
    qk_scale: gl.tensor
    softmax_scale: gl.tensor


class Rows(NamedTuple):
    """Those of a group, [ROWS] each."""

    rows: gl.tensor
    offset: gl.tensor  #: bottom-right: row i sees keys up to i + offset
    lse: gl.tensor  #: base 2
    delta: gl.tensor


@gluon.jit
def _produce(q, k, v, do, smem, barriers, tile, form):
    """One warp: Q and dO once, K and V through a ring each, the block under the mask first."""
    b_q, start_m = of_queries(tile.b, tile.start_m, tile)
    expect_both(q, do, barriers.q_ready.index(0))
    load_parts(q, b_q, tile.h, start_m, barriers.q_ready.index(0), smem.q, 0)
    load_parts(do, b_q, tile.h, start_m, barriers.q_ready.index(0), smem.do, 0)
    for j in range(gl.maximum(tile.n_all, 1)):
        if j < tile.n_all:
            b_k, row = of_keys(tile.b, (tile.below - 1 - j) * form.BLOCK_N, tile)
            stage = j % form.K_STAGES
            mbarrier.wait(barriers.k_empty.index(stage), ((j // form.K_STAGES) & 1) ^ 1)
            expect_parts(k, barriers.k_ready.index(stage))
            load_parts(k, b_k, tile.h_kv, row, barriers.k_ready.index(stage), smem.k, stage)
            stage = j % form.V_STAGES
            mbarrier.wait(barriers.v_empty.index(stage), ((j // form.V_STAGES) & 1) ^ 1)
            expect_parts(v, barriers.v_ready.index(stage))
            load_parts(v, b_k, tile.h_kv, row, barriers.v_ready.index(stage), smem.v, stage)
        if j == 0:  # what the first group waits for comes before the others' Q and dO
            for c in gl.static_range(1, form.GROUPS):
                expect_both(q, do, barriers.q_ready.index(c))
                first = start_m + c * ROWS
                load_parts(q, b_q, tile.h, first, barriers.q_ready.index(c), smem.q, c)
                load_parts(do, b_q, tile.h, first, barriers.q_ready.index(c), smem.do, c)


@gluon.jit
def _o_tile(
    o, rows, inside, stride_om, FIRST: gl.constexpr, COLUMNS: gl.constexpr, HEAD_DIM_V: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Columns [FIRST, FIRST + COLUMNS) of O's rows, zeros behind the head dim."""
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    mask = inside[:, None]
    if HEAD_DIM_V != FIRST + COLUMNS:
        mask = mask & (columns < HEAD_DIM_V - FIRST)[None, :]
    return gl.load(
        o + FIRST + (rows.to(gl.int64)[:, None] * stride_om + columns[None, :]), mask=mask, other=0.0
    )  # [ROWS, COLUMNS]


@gluon.jit
def _deltas(memory, delta, do_tile, ready, first, call, HEAD_DIM_V: gl.constexpr):
    """rowsum(dO * O) - dlse of rows [first, first + ROWS): written to delta, the pointer of one head, and returned. do_tile in
    shared memory, from when ``ready`` completes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    inside = rows < call.seqlen_q
    BLOCK_DV: gl.constexpr = do_tile[0].shape[-1]
    o_tile = _o_tile(memory.o, rows, inside, call.stride_om, 0, BLOCK_DV, HEAD_DIM_V, layout)
    if len(do_tile) > 1:
        REST: gl.constexpr = do_tile[1].shape[-1]
        o_rest = _o_tile(memory.o, rows, inside, call.stride_om, BLOCK_DV, REST, HEAD_DIM_V, layout)
    mbarrier.wait(ready, 0)
    sums = gl.sum(o_tile.to(gl.float32) * do_tile[0].load(layout).to(gl.float32), 1)
    if len(do_tile) > 1:
        sums += gl.sum(o_rest.to(gl.float32) * do_tile[1].load(layout).to(gl.float32), 1)
    if call.has_dlse != 0:
        sums -= gl.load(memory.dlse + rows.to(gl.int64) * call.stride_dlsem, mask=inside, other=0.0)
    gl.store(delta + rows, sums, mask=inside)
    return sums


@gluon.jit
def _over_keys(acc, begin, end, own, tile, smem, barriers, call, CONSUMER: gl.constexpr, form, MASK: gl.constexpr):
    """Key blocks [begin, end) of a tile into acc [ROWS, D]. While one group exponentiates, the other multiplies: products of
    its own beside them only cost registers."""
    dtype: gl.constexpr = smem.k[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_N)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.k[0].shape[-1]), 2)
    zero = gl.zeros([ROWS, form.BLOCK_N], gl.float32, s_layout)
    for j in range(begin, end):
        mine = opaque(j * 0 + CONSUMER)
        q_tile = tiles_in(smem.q, mine)
        do_tile = tiles_in(smem.do, mine)
        k_stage = j % form.K_STAGES
        k_tile = tiles_in(smem.k, k_stage)
        mbarrier.wait(barriers.k_ready.index(k_stage), (j // form.K_STAGES) & 1)
        s_next = product_of_rows(q_tile, k_tile, zero)
        v_stage = j % form.V_STAGES
        v_tile = tiles_in(smem.v, v_stage)
        mbarrier.wait(barriers.v_ready.index(v_stage), (j // form.V_STAGES) & 1)
        dp_next = product_of_rows(do_tile, v_tile, zero)
        s = warpgroup_mma_wait(len(smem.v), deps=[s_next])
        if form.SCORED:
            keys = (tile.below - 1 - j) * form.BLOCK_N + gl.arange(0, form.BLOCK_N, layout=gl.SliceLayout(0, s_layout))
            keys, queries, sequence = keys[None, :], own.rows[:, None], sequence_of(tile)
            s = form.APPLY(s, call.score, queries, keys, own.offset, sequence, tile.h)
        p = gl.exp2(gl.fma(s, call.qk_scale, -own.lse[:, None]))
        if MASK and form.BY_HOOKS:  # a score of 0 stays 0 where it is seen
            column = (tile.below - 1 - j) * form.BLOCK_N
            seen = form.HIDE(zero, own.rows, column, own.offset, call.seqlen_k, call.window, s_layout) == 0.0
            p = gl.where(seen, p, 0.0)
        elif MASK:
            column = (tile.below - 1 - j) * form.BLOCK_N
            columns = column + gl.arange(0, form.BLOCK_N, layout=gl.SliceLayout(0, s_layout))
            if form.LAST_KEY is not None:  # one comparison a score
                last = form.LAST_KEY(own.rows, own.offset, call.seqlen_k - 1)
                p = gl.where(columns[None, :] <= last[:, None], p, 0.0)
            else:
                p = gl.where((columns < call.seqlen_k)[None, :], p, 0.0)
        if form.SCORED:
            p = form.GRAD(p, s, call.score, queries, keys, own.offset, sequence, tile.h)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        mbarrier.arrive(barriers.v_empty.index(v_stage), count=1)
        ds = gl.convert_layout((p * (dp - own.delta[:, None])).to(dtype), a_layout)
        acc = products_done(add_products(ds, k_tile, acc))
        mbarrier.arrive(barriers.k_empty.index(k_stage), count=1)
    return acc
