"""FlashAttention-2 backward over query tiles for Hopper: dQ without atomics, half of the deterministic strategy. One warp
feeds Q, dO, K and V by TMA; each group of four warps owns 64 query rows. It also makes delta = rowsum(dO * O) - dlse, which
the other half reads."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.extent import packed_tiles
from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    mbarrier,
    opaque,
    tma_store_wait,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    descriptors_of,
    expect_both,
    expect_parts,
    load_parts,
    product_layout,
    product_of_rows,
    products_done,
    put_parts,
    scaled,
    shared_for,
    tiles_in,
    zeros_for,
)
from fa2tune.kernels.lib.hopper_split import of_keys, of_queries, rows_of_head, tile_in_order
from fa2tune.search_spaces.lib.hopper import part_dims
from fa2tune.search_spaces.portable.packed_order import order_shape
from fa2tune.search_spaces.sm90 import bwd_dq as space
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import Variant, Workspaces

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
    IS_CAUSAL: gl.constexpr
    BY_HOOKS: gl.constexpr
    BLOCKS_BELOW: gl.constexpr
    CLEAR_BLOCKS: gl.constexpr
    HIDE: gl.constexpr
    LEFT_BOUNDED: gl.constexpr
    RIGHT_BOUNDED: gl.constexpr


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
    qk_scale: gl.tensor
    softmax_scale: gl.tensor


class Rows(NamedTuple):
    """Those of a group, [ROWS] each."""

    rows: gl.tensor
    offset: gl.tensor  #: bottom-right: row i sees keys up to i + offset
    lse: gl.tensor  #: base 2
    delta: gl.tensor


@gluon.jit
def _tile(tiles, heads, heads_per_wave, IS_CAUSAL: gl.constexpr):
    """(query tile, head) of this program; as tile_and_head of kernels/lib/common.py, which works out the head before it counts
    tiles from the last one: other PTX. Causal: the last tiles are the longest."""
    pid = gl.program_id(0)
    band = pid // (tiles * heads_per_wave)
    first = band * heads_per_wave
    width = gl.minimum(heads - first, heads_per_wave)  # the last band may be narrower
    inside = pid - band * (tiles * heads_per_wave)
    tile = inside // width
    if IS_CAUSAL:
        tile = tiles - 1 - tile
    return tile, first + inside % width


@gluon.jit
def _blocks(rows_end, offset, seqlen_k, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """How many key blocks the rows below rows_end see."""
    end = seqlen_k
    if IS_CAUSAL:
        end = gl.maximum(gl.minimum(rows_end + offset, seqlen_k), 0)
    return gl.cdiv(end, BLOCK_N)


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
        p = gl.exp2(gl.fma(s, call.qk_scale, -own.lse[:, None]))
        if MASK and form.BY_HOOKS:  # a score of 0 stays 0 where it is seen
            column = (tile.below - 1 - j) * form.BLOCK_N
            seen = form.HIDE(zero, own.rows, column, own.offset, call.seqlen_k, call.window, s_layout) == 0.0
            p = gl.where(seen, p, 0.0)
        elif MASK:
            column = (tile.below - 1 - j) * form.BLOCK_N
            columns = column + gl.arange(0, form.BLOCK_N, layout=gl.SliceLayout(0, s_layout))
            if form.IS_CAUSAL:  # one comparison a score: the last key that a row sees
                last = gl.minimum(own.rows + own.offset, call.seqlen_k - 1)
                p = gl.where(columns[None, :] <= last[:, None], p, 0.0)
            else:
                p = gl.where((columns < call.seqlen_k)[None, :], p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        mbarrier.arrive(barriers.v_empty.index(v_stage), count=1)
        ds = gl.convert_layout((p * (dp - own.delta[:, None])).to(dtype), a_layout)
        acc = products_done(add_products(ds, k_tile, acc))
        mbarrier.arrive(barriers.k_empty.index(k_stage), count=1)
    return acc


@gluon.jit
def _consume(memory, smem, barriers, tile, call, CONSUMER: gl.constexpr, form):
    """One group: rows [start_m + CONSUMER * ROWS, + ROWS) of one head."""
    seqlen_q, seqlen_k, window = call.seqlen_q, call.seqlen_k, call.window
    below, n_all = tile.below, tile.n_all
    s_layout: gl.constexpr = product_layout(form.BLOCK_N)
    offset = seqlen_k - seqlen_q
    first = tile.start_m + CONSUMER * ROWS
    head_row = (tile.b.to(gl.int64) * tile.heads_q + tile.h) * rows_of_head(seqlen_q, tile)
    do_tile, ready = tiles_in(smem.do, CONSUMER), barriers.q_ready.index(CONSUMER)
    sums = _deltas(memory, memory.delta + head_row, do_tile, ready, first, call, form.HEAD_DIM_V)
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    delta_row = gl.convert_layout(sums, gl.SliceLayout(1, s_layout))
    # past the end +inf, so that p = exp2(s - inf) = 0
    lse_row = gl.load(memory.lse + head_row + rows, mask=rows < seqlen_q, other=float("inf")) * LOG2E
    n_blocks = n_all
    if form.BY_HOOKS:
        mine = form.BLOCKS_BELOW(first + ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)
        n_blocks = gl.maximum(n_all - (below - mine), 0)
        clear_begin, clear_end = form.CLEAR_BLOCKS(first, first + ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)
        n_full = seqlen_k // form.BLOCK_N
        if form.RIGHT_BOUNDED:
            n_full = gl.minimum(n_full, clear_end)
        n_full = gl.minimum(gl.maximum(n_full - (below - n_all), 0), n_blocks)
        full_end = n_all
        if form.LEFT_BOUNDED:
            full_end = gl.minimum(gl.maximum(below - clear_begin, n_all - n_full), n_all)
    elif form.IS_CAUSAL:
        n_blocks = _blocks(gl.minimum(first + ROWS, seqlen_q), offset, seqlen_k, form.BLOCK_N, form.IS_CAUSAL)
    if form.IS_CAUSAL or form.BY_HOOKS:
        for j in range(n_all - n_blocks):  # blocks that only later groups see
            stage = j % form.K_STAGES
            mbarrier.wait(barriers.k_ready.index(stage), (j // form.K_STAGES) & 1)
            mbarrier.arrive(barriers.k_empty.index(stage), count=1)
            stage = j % form.V_STAGES
            mbarrier.wait(barriers.v_ready.index(stage), (j // form.V_STAGES) & 1)
            mbarrier.arrive(barriers.v_empty.index(stage), count=1)
    if not form.BY_HOOKS:
        n_full = seqlen_k // form.BLOCK_N
        if form.IS_CAUSAL:
            n_full = gl.minimum(seqlen_k, gl.maximum(first + 1 + offset, 0)) // form.BLOCK_N
        n_full = gl.minimum(n_full, n_blocks)
        full_end = n_all
    masked_end = n_all - n_full
    acc = zeros_for(smem.q, ROWS)
    own = Rows(rows, offset, lse_row, delta_row)
    acc = _over_keys(acc, n_all - n_blocks, masked_end, own, tile, smem, barriers, call, CONSUMER, form, True)
    acc = _over_keys(acc, masked_end, full_end, own, tile, smem, barriers, call, CONSUMER, form, False)
    if form.BY_HOOKS and form.LEFT_BOUNDED:
        acc = _over_keys(acc, full_end, n_all, own, tile, smem, barriers, call, CONSUMER, form, True)
    # this group alone reads its Q
    b_q, row_q = of_queries(tile.b, first, tile)
    put_parts(scaled(acc, call.softmax_scale), memory.dq, b_q, tile.h, row_q, smem.q, CONSUMER)
    tma_store_wait(0)


@gluon.jit
def bwd_dq_hopper_kernel(
    q, k, v, o, do, dlse, lse, delta, dq, qk_scale, softmax_scale,
    stride_ob, stride_oh, stride_om, stride_dlseb, stride_dlseh, stride_dlsem,
    batch, heads_q, group, seqlen_q, seqlen_k, has_dlse, HEADS_PER_WAVE, window_left, window_right,
    q_rest, k_rest, v_rest, do_rest, dq_rest, order,
    HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    IS_CAUSAL: gl.constexpr, BY_HOOKS: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr,
    LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr, RAGGED: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D], k, v [B, Hkv, Sk, D] by descriptors, o by pointer; lse as the forward leaves it -> dq
    [B, Hq, Sq, D] by a descriptor, delta [B, Hq, Sq] float32. Sk >= 1. dlse is read only if has_dlse. Columns behind BLOCK_D or
    BLOCK_DV, where REST_D or REST_DV is not 0, by descriptors of their own, q_rest, ..., dq_rest. BY_HOOKS: the mask is
    neither causal nor none, whose code, which rows were measured with, is compiled in.

    RAGGED: B is 1, batch the number of sequences, which lie one after the other. order: what packed_order_kernel makes of where
    they start. Rows without keys and those behind the last sequence: dq = 0; their delta is not read."""
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    LAST_FIRST: gl.constexpr = IS_CAUSAL and not RAGGED
    if RAGGED:
        tiles, heads = packed_tiles(seqlen_q, batch, BLOCK_M), heads_q
    else:
        tiles, heads = gl.cdiv(seqlen_q, BLOCK_M), batch * heads_q
    number, head = _tile(tiles, heads, HEADS_PER_WAVE, LAST_FIRST)
    b = head // heads_q
    h = head % heads_q
    start_m = number * BLOCK_M
    packed = ()
    if RAGGED:  # in their order; the numbers that no tile has are the last ones
        start_m, packed = tile_in_order(order, number, seqlen_q)
        end_q, seqlen_q, _end_k, seqlen_k, _total_q = packed
        first_q = end_q - seqlen_q
        o += first_q.to(gl.int64) * stride_om
        dlse += first_q.to(gl.int64) * stride_dlsem
        lse += first_q
        delta += first_q
    window = (window_left, window_right)
    if BY_HOOKS:
        below = BLOCKS_BELOW(start_m + BLOCK_M, seqlen_q, seqlen_k, window, BLOCK_N)
        n_all = below - FIRST_BLOCK(start_m, seqlen_q, seqlen_k, window, BLOCK_N)
        if RAGGED:  # behind the last sequence dO may be NaN
            n_all = gl.where(seqlen_k > 0, n_all, 0)
    else:
        n_all = _blocks(gl.minimum(start_m + BLOCK_M, seqlen_q), seqlen_k - seqlen_q, seqlen_k, BLOCK_N, IS_CAUSAL)
        below = n_all
    o += b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh
    dlse += b.to(gl.int64) * stride_dlseb + h.to(gl.int64) * stride_dlseh

    q, do, dq = descriptors_of(q, q_rest), descriptors_of(do, do_rest), descriptors_of(dq, dq_rest)
    k, v = descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    q_smem = shared_for(q, GROUPS, ROWS, BLOCK_D, REST_D)
    do_smem = shared_for(do, GROUPS, ROWS, BLOCK_DV, REST_DV)
    k_smem = shared_for(k, K_STAGES, BLOCK_N, BLOCK_D, REST_D)
    v_smem = shared_for(v, V_STAGES, BLOCK_N, BLOCK_DV, REST_DV)
    q_ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_ready.index(i), count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    memory = Memory(dq, o, dlse, lse, delta)
    smem = Shared(q_smem, k_smem, v_smem, do_smem)
    barriers = Barriers(q_ready, k_ready, k_empty, v_ready, v_empty)
    tile = Tile(b, h, heads_q, h // group, start_m, below, n_all, packed)
    call = Call(stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k, window, qk_scale, softmax_scale)
    form: gl.constexpr = Form(
        GROUPS=GROUPS, BLOCK_N=BLOCK_N, K_STAGES=K_STAGES, V_STAGES=V_STAGES, HEAD_DIM_V=HEAD_DIM_V, IS_CAUSAL=IS_CAUSAL,
        BY_HOOKS=BY_HOOKS, BLOCKS_BELOW=BLOCKS_BELOW, CLEAR_BLOCKS=CLEAR_BLOCKS, HIDE=HIDE, LEFT_BOUNDED=LEFT_BOUNDED,
        RIGHT_BOUNDED=RIGHT_BOUNDED,
    )  # fmt: skip
    # constants stay constants only in a literal tuple, so each group's is written out
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (memory, smem, barriers, tile, call, 0, form)),
            (_produce, (q, k, v, do, smem, barriers, tile, form)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (_consume, (memory, smem, barriers, tile, call, 0, form)),
            (_consume, (memory, smem, barriers, tile, call, 1, form)),
            (_produce, (q, k, v, do, smem, barriers, tile, form)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (memory, smem, barriers, tile, call, 0, form)),
            (_consume, (memory, smem, barriers, tile, call, 1, form)),
            (_consume, (memory, smem, barriers, tile, call, 2, form)),
            (_produce, (q, k, v, do, smem, barriers, tile, form)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    return {"order": (order_shape(problem, space.rows(config)), "i32")} if problem.extent.ragged else {}


def _passes_on(spec: Specialization, config: Config) -> dict[str, int]:
    return {"BLOCK_Q": space.rows(config), "IN_TURNS": space.IN_TURNS} if spec.ragged else {}


VARIANT = Variant(
    serves="bwd_dq",
    kernel=bwd_dq_hopper_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "do": "", "dlse": "fp32", "lse": "fp32", "delta": "fp32", "dq": "",
             "q_rest": "", "k_rest": "", "v_rest": "", "do_rest": "", "dq_rest": "", "order": "i32"},
    descriptors={"q": (space.ROWS, "BLOCK_D"), "do": (space.ROWS, "BLOCK_DV"), "k": ("BLOCK_N", "BLOCK_D"),
                 "v": ("BLOCK_N", "BLOCK_DV"), "dq": (space.ROWS, "BLOCK_D"),
                 "q_rest": (space.ROWS, "REST_D"), "do_rest": (space.ROWS, "REST_DV"), "k_rest": ("BLOCK_N", "REST_D"),
                 "v_rest": ("BLOCK_N", "REST_DV"), "dq_rest": (space.ROWS, "REST_D")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "do_rest": "do", "dq_rest": "dq"},
    grid=lambda problem, config, _sm_count, _early: problem.query_tiles(space.rows(config)) * problem.heads_q,
    constants=lambda spec, config: {
        **part_dims(spec, config),
        "CONSUMER_REGISTERS": space.REGISTERS[config["GROUPS"]], "BY_HOOKS": spec.mask not in ("full", "causal"),
    },
    min_arch=90,
    max_arch=90,
    packed_before=("portable/packed_order",),
    passes_on=_passes_on,
    workspaces=_workspaces,
    fitted=space.fitted,
)  # fmt: skip
