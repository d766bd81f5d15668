"""A whole backward of few queries for Hopper: a program has a tile of queries of one head, their dO and delta, and walks key
blocks. dQ stays in registers; dK and dV of a block are done at once. No kernel runs before it, nothing is added by atomics, so
results are the same bits on every run.

Where a key head has several tiles of queries, over all of its query heads, dK and dV of each are written for themselves, and
kernels/portable/bwd_gather.py adds them up. Key blocks may be split into SPLITS parts, each a program's, whose dQ is written as
float32 sums that kernels/portable/bwd_dq_combine.py adds up. Under a mask that is bounded on the left the blocks in front of it
are walked, too.

Each group of four warps has 64 query rows of S, dP and dQ. Of 128 rows there are two, each with half of the columns of dK and
dV; of 64 rows a multiprocessor holds two programs, if shared memory does. All warps are one partition, which loads for
itself."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    mbarrier,
    opaque,
    thread_barrier,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_fused import do_once
from fa2tune.kernels.lib.hopper_key_parts import store_parts_of_rows
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    descriptors_of,
    expect_both,
    load_parts,
    product_layout,
    product_of_rows,
    products_done,
    products_done_with,
    put_parts,
    scaled,
    shared_for,
    tiles_in,
    zeros_for,
)
from fa2tune.search_spaces.lib.hopper import part_dims
from fa2tune.search_spaces.sm90 import bwd_query_tiles as space
from fa2tune.spec.variant import Variant

LOG2E = gl.constexpr(1.4426950408889634)
_START_NEXT = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


class Shared(NamedTuple):
    """Shared memory, of each the parts of columns: [slots, 1, 1, rows, columns]; p, ds [1, M, N]."""

    q: tuple
    k: tuple
    v: tuple
    do: tuple
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor


class Tile(NamedTuple):
    """Query rows of a program, and the key blocks that it walks."""

    b: gl.tensor
    h: gl.tensor  #: query head
    h_kv: gl.tensor
    place: gl.tensor  #: head of dk and dv that it writes
    begin: gl.tensor  #: first key block
    end: gl.tensor  #: behind the last one


class Rows(NamedTuple):
    """[M] each."""

    rows: gl.tensor
    lse: gl.tensor  #: base 2; past the end +inf, so that p = exp2(s - inf) = 0
    delta: gl.tensor


class Memory(NamedTuple):
    """Descriptors, of each the parts of columns."""

    k: tuple
    v: tuple
    dk: tuple
    dv: tuple


class Call(NamedTuple):
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    window: tuple
    score: tuple
    qk_scale: gl.tensor
    softmax_scale: gl.tensor


class Form(NamedTuple):
    """What is compiled in. Kept as gl.constexpr: assigned without, its fields would be values of the running program."""

    M: gl.constexpr
    N: gl.constexpr
    STAGES: gl.constexpr
    ONE_AT_A_TIME: gl.constexpr  #: registers do not hold dK and dV of a block both
    HIDE: gl.constexpr
    APPLY: gl.constexpr
    GRAD: gl.constexpr


@gluon.constexpr_function
def _keys_layout(columns, rows):
    """Of a product of 64 keys, of a tile of so many query rows: each group of four warps has its share of the columns."""
    groups = rows // 64
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, columns // groups, 16])


@gluon.jit
def _by_keys(left, right):
    """left^T right, for left [M, N] in shared memory: [N, columns] of each part, asynchronously."""
    M: gl.constexpr = left.shape[0]
    N: gl.constexpr = left.shape[1]
    WIDTH: gl.constexpr = right[0].shape[1]
    zero = gl.zeros([N, WIDTH], gl.float32, _keys_layout(WIDTH, M))
    found = (warpgroup_mma(left.permute((1, 0)), right[0], zero, use_acc=False, is_async=True),)
    if len(right) > 1:
        REST: gl.constexpr = right[1].shape[1]
        zero_rest = gl.zeros([N, REST], gl.float32, _keys_layout(REST, M))
        found = (found[0], warpgroup_mma(left.permute((1, 0)), right[1], zero_rest, use_acc=False, is_async=True))
    return found


@gluon.jit
def _await(tiles, BEHIND: gl.constexpr):
    """Until only the last BEHIND products may be under way."""
    if len(tiles) == 1:
        found = (warpgroup_mma_wait(BEHIND, deps=[tiles[0]]),)
    else:
        first, rest = warpgroup_mma_wait(BEHIND, deps=[tiles[0], tiles[1]])
        found = (first, rest)
    return found


@gluon.jit
def _load(block, stage, tile, smem, ready, memory, form):
    """K and V of a block."""
    expect_both(memory.k, memory.v, ready.index(stage))
    load_parts(memory.k, tile.b, tile.h_kv, block * form.N, ready.index(stage), smem.k, stage)
    load_parts(memory.v, tile.b, tile.h_kv, block * form.N, ready.index(stage), smem.v, stage)


@gluon.jit
def _columns_of_o(
    o, rows, inside, stride_om, FIRST: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr
):
    columns = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    mask = inside[:, None]
    if FIRST + WIDTH > DIM:
        mask = mask & (columns < DIM)[None, :]
    return gl.load(o + (rows.to(gl.int64)[:, None] * stride_om + columns[None, :]), mask=mask, other=0.0)


@gluon.jit
def _delta_of(o, dlse, do_tile, start_m, seqlen_q, stride_om, stride_dlsem, has_dlse, ready, HEAD_DIM_V: gl.constexpr):
    """rowsum(dO * O) - dlse of the rows from start_m on. The gradient of lse enters here: d lse / d s = p."""
    M: gl.constexpr = do_tile[0].shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [M // 16, 1], [1, 0])
    rows = start_m + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    inside = rows < seqlen_q
    WIDTH: gl.constexpr = do_tile[0].shape[1]
    first = _columns_of_o(o, rows, inside, stride_om, 0, WIDTH, HEAD_DIM_V, layout)
    if len(do_tile) > 1:
        rest = _columns_of_o(o, rows, inside, stride_om, WIDTH, do_tile[1].shape[1], HEAD_DIM_V, layout)
    own = gl.load(dlse + rows.to(gl.int64) * stride_dlsem, mask=inside & (has_dlse != 0), other=0.0)
    mbarrier.wait(ready, 0)
    sums = gl.sum(first.to(gl.float32) * do_tile[0].load(layout).to(gl.float32), 1)
    if len(do_tile) > 1:
        sums += gl.sum(rest.to(gl.float32) * do_tile[1].load(layout).to(gl.float32), 1)
    return sums - own


@gluon.jit
def _over_keys(acc, begin, end, own, tile, smem, ready, memory, call, form, MASK: gl.constexpr):
    """Key blocks [begin, end) into acc, dQ [M, D], not scaled, and their dK and dV to memory."""
    dtype: gl.constexpr = smem.k[0].dtype
    s_layout: gl.constexpr = product_layout(form.N, form.M)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.k[0].shape[-1], form.M), 2)
    zero = gl.zeros([form.M, form.N], gl.float32, s_layout)
    offset = call.seqlen_k - call.seqlen_q
    for block in range(begin, end):
        turn = block - tile.begin
        # LLVM would keep the descriptors of all operands in registers through the loop, and ptxas spill them
        only = opaque(turn * 0)
        stage = turn % form.STAGES
        q_tile, do_tile = tiles_in(smem.q, only), tiles_in(smem.do, only)
        k_tile, v_tile = tiles_in(smem.k, stage), tiles_in(smem.v, stage)
        p_tile, ds_tile = smem.p.index(only), smem.ds.index(only)
        mbarrier.wait(ready.index(stage), (turn // form.STAGES) & 1)
        s_next = product_of_rows(q_tile, k_tile, zero)
        dp_next = product_of_rows(do_tile, v_tile, zero)
        s = warpgroup_mma_wait(len(smem.v), deps=[s_next])
        # all vanish without a score term
        keys = (block * form.N + gl.arange(0, form.N, layout=gl.SliceLayout(0, s_layout)))[None, :]
        queries = own.rows[:, None]
        s = form.APPLY(s, call.score, queries, keys, offset, tile.b, tile.h)
        p = gl.exp2(gl.fma(s, call.qk_scale, -own.lse[:, None]))
        if MASK:  # a score of 0 stays 0 where it is seen
            seen = form.HIDE(zero, own.rows, block * form.N, offset, call.seqlen_k, call.window, s_layout) == 0.0
            p = gl.where(seen, p, 0.0)
        p_tile.store(p.to(dtype))
        slope = form.GRAD(p, s, call.score, queries, keys, offset, tile.b, tile.h)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        ds = (slope * (dp - own.delta[:, None])).to(dtype)
        left = gl.convert_layout(ds, a_layout)
        ds_tile.store(ds)
        fence_async_shared()
        tma_store_wait(0)
        thread_barrier()  # P and dS of all rows are there; V is not read any more; the block before has left its stage
        if form.STAGES > 1:
            if block + 1 < tile.end:
                _load(block + 1, (turn + 1) % form.STAGES, tile, smem, ready, memory, form)
        dv = _by_keys(p_tile, do_tile)
        acc = add_products(left, k_tile, acc)
        if form.ONE_AT_A_TIME:
            dv = _await(dv, len(smem.k))
            put_parts(dv, memory.dv, tile.b, tile.place, block * form.N, smem.v, stage)
            dk = _by_keys(ds_tile, q_tile)
        else:
            dk = _by_keys(ds_tile, q_tile)
            dv = _await(dv, 2 * len(smem.k))
            put_parts(dv, memory.dv, tile.b, tile.place, block * form.N, smem.v, stage)
        acc, left = products_done_with(acc, left, len(smem.k))
        dk = products_done(dk)
        thread_barrier()  # K is not read any more
        put_parts(scaled(dk, call.softmax_scale), memory.dk, tile.b, tile.place, block * form.N, smem.k, stage)
        if form.STAGES == 1:
            if block + 1 < tile.end:
                tma_store_wait(0)
                thread_barrier()
                _load(block + 1, stage, tile, smem, ready, memory, form)
    return acc


@gluon.jit
def _zeros_by_keys(smem, M: gl.constexpr):
    """Of each part of columns, as ``_by_keys`` has them."""
    N: gl.constexpr = smem[0].shape[-2]
    WIDTH: gl.constexpr = smem[0].shape[-1]
    found = (gl.zeros([N, WIDTH], gl.float32, _keys_layout(WIDTH, M)),)
    if len(smem) > 1:
        REST: gl.constexpr = smem[1].shape[-1]
        found = (found[0], gl.zeros([N, REST], gl.float32, _keys_layout(REST, M)))
    return found


@gluon.jit
def _store_zeros(begin, end, tile, smem, memory, form):
    """dK and dV of key blocks [begin, end)."""
    for block in range(begin, end):
        tma_store_wait(0)
        thread_barrier()
        put_parts(_zeros_by_keys(smem.v, form.M), memory.dv, tile.b, tile.place, block * form.N, smem.v, 0)
        put_parts(_zeros_by_keys(smem.k, form.M), memory.dk, tile.b, tile.place, block * form.N, smem.k, 0)


@gluon.jit
def bwd_hopper_query_tiles_kernel(
    q, k, v, o, do, dlse, lse, dq, dq_parts, dk, dv, qk_scale, softmax_scale,
    stride_ob, stride_oh, stride_om, stride_dlseb, stride_dlseh, stride_dlsem,
    batch, heads_q, group, seqlen_q, seqlen_k, has_dlse, SPLITS, window_left, window_right, score_first, score_second,
    q_rest, k_rest, v_rest, do_rest, dq_rest, dk_rest, dv_rest,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, REST_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    REST_DV: gl.constexpr, BLOCKS_BELOW: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr,
    LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr, APPLY: gl.constexpr, GRAD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D / DV], k, v [B, Hkv, Sk, D / DV] by descriptors, o by pointer, lse [B, Hq, Sq] as the forward leaves
    it, dlse [B, Hq, Sq] float32 (read only if has_dlse) -> dk, dv [B, Hq * tiles, Sk, D / DV], where tiles of queries are of
    BLOCK_M, head h * tiles + t of tile t of query head h; and dq [B, Hq, Sq, D] if WHOLE, where SPLITS is 1, else dq_parts
    [SPLITS, B, Hq, Sq, D] float32, not scaled. Columns behind BLOCK_D or BLOCK_DV, where REST_D or REST_DV is not 0, by
    descriptors of their own. 1 <= SPLITS <= key blocks."""
    do_once(_START_NEXT)  # what adds up waits for this kernel's end
    s_layout: gl.constexpr = product_layout(BLOCK_N, BLOCK_M)
    of_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    tiles = gl.cdiv(seqlen_q, BLOCK_M)
    # programs that read the same keys run at the same time
    index = gl.program_id(0) // tiles
    number = gl.program_id(0) - index * tiles
    key_head = index // group
    member = index - key_head * group
    head = key_head // SPLITS
    part = key_head - head * SPLITS
    heads_kv = heads_q // group
    b = head // heads_kv
    h_kv = head - b * heads_kv
    h = h_kv * group + member
    start_m = number * BLOCK_M
    window = (window_left, window_right)
    blocks = gl.cdiv(seqlen_k, BLOCK_N)
    seen = blocks
    if RIGHT_BOUNDED:
        seen = BLOCKS_BELOW(start_m + BLOCK_M, seqlen_q, seqlen_k, window, BLOCK_N)  # at least one
    begin, end = seen * part // SPLITS, seen * (part + 1) // SPLITS
    tile = Tile(b, h, h_kv, h * tiles + number, begin, end)

    q, do, dq = descriptors_of(q, q_rest), descriptors_of(do, do_rest), descriptors_of(dq, dq_rest)
    k, v = descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    memory = Memory(k, v, descriptors_of(dk, dk_rest), descriptors_of(dv, dv_rest))
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    smem = Shared(
        shared_for(q, 1, BLOCK_M, BLOCK_D, REST_D), shared_for(k, STAGES, BLOCK_N, BLOCK_D, REST_D),
        shared_for(v, STAGES, BLOCK_N, BLOCK_DV, REST_DV), shared_for(do, 1, BLOCK_M, BLOCK_DV, REST_DV),
        gl.allocate_shared_memory(q[0].dtype, [1, BLOCK_M, BLOCK_N], layout),
        gl.allocate_shared_memory(q[0].dtype, [1, BLOCK_M, BLOCK_N], layout),
    )  # fmt: skip
    #: registers do not hold dK and dV both, next to dQ
    ONE_AT_A_TIME: gl.constexpr = (192 if BLOCK_M == 128 else 128) < BLOCK_D + REST_D
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    form: gl.constexpr = Form(
        M=BLOCK_M, N=BLOCK_N, STAGES=STAGES, ONE_AT_A_TIME=ONE_AT_A_TIME, HIDE=HIDE, APPLY=APPLY, GRAD=GRAD,
    )  # fmt: skip
    expect_both(q, do, q_ready.index(0))
    load_parts(q, b, h, start_m, q_ready.index(0), smem.q, 0)
    load_parts(do, b, h, start_m, q_ready.index(0), smem.do, 0)
    if begin < end:
        _load(begin, 0, tile, smem, ready, memory, form)

    call = Call(seqlen_q, seqlen_k, window, (score_first, score_second), qk_scale, softmax_scale)
    head_row = (b * heads_q + h).to(gl.int64) * seqlen_q
    rows = start_m + gl.arange(0, BLOCK_M, layout=of_row)
    lse_row = gl.load(lse + head_row + rows, mask=rows < seqlen_q, other=float("inf")) * LOG2E
    o += b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh
    dlse += b.to(gl.int64) * stride_dlseb + h.to(gl.int64) * stride_dlseh
    sums = _delta_of(
        o, dlse, tiles_in(smem.do, 0), start_m, seqlen_q, stride_om, stride_dlsem, has_dlse, q_ready.index(0), HEAD_DIM_V,
    )  # fmt: skip
    own = Rows(rows, lse_row, gl.convert_layout(sums, of_row))
    clear = seqlen_k // BLOCK_N
    if RIGHT_BOUNDED:
        clear = gl.minimum(clear, CLEAR_BLOCKS(start_m, start_m + BLOCK_M, seqlen_q, seqlen_k, window, BLOCK_N)[1])
    if LEFT_BOUNDED:
        clear = 0
    clear = gl.minimum(gl.maximum(clear, begin), end)
    acc = zeros_for(smem.q, BLOCK_M)
    acc = _over_keys(acc, begin, clear, own, tile, smem, ready, memory, call, form, False)
    acc = _over_keys(acc, clear, end, own, tile, smem, ready, memory, call, form, True)
    if RIGHT_BOUNDED:  # keys that no row of the tile sees
        hidden = blocks - seen
        first = seen + hidden * part // SPLITS
        _store_zeros(first, seen + hidden * (part + 1) // SPLITS, tile, smem, memory, form)
    if WHOLE:
        thread_barrier()  # no group reads Q any more
        put_parts(scaled(acc, softmax_scale), dq, b, h, start_m, smem.q, 0)
    else:
        all_rows = (batch * heads_q).to(gl.int64) * seqlen_q
        place = dq_parts + (part * all_rows + head_row + start_m) * HEAD_DIM
        store_parts_of_rows(acc, place, HEAD_DIM, seqlen_q - start_m, HEAD_DIM)
    tma_store_wait(0)


VARIANT = Variant(
    role="bwd_query_tiles",
    kernel=bwd_hopper_query_tiles_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "do": "", "dlse": "fp32", "lse": "fp32", "dq": "", "dq_parts": "fp32",
             "dk": "", "dv": "", "q_rest": "", "k_rest": "", "v_rest": "", "do_rest": "", "dq_rest": "", "dk_rest": "",
             "dv_rest": ""},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV"),
                 "do": ("BLOCK_M", "BLOCK_DV"), "dq": ("BLOCK_M", "BLOCK_D"), "dk": ("BLOCK_N", "BLOCK_D"),
                 "dv": ("BLOCK_N", "BLOCK_DV"), "q_rest": ("BLOCK_M", "REST_D"), "k_rest": ("BLOCK_N", "REST_D"),
                 "v_rest": ("BLOCK_N", "REST_DV"), "do_rest": ("BLOCK_M", "REST_DV"), "dq_rest": ("BLOCK_M", "REST_D"),
                 "dk_rest": ("BLOCK_N", "REST_D"), "dv_rest": ("BLOCK_N", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "do_rest": "do", "dq_rest": "dq", "dk_rest": "dk", "dv_rest": "dv"},
    grid=lambda problem, config, _sm_count, _early: space.programs(problem, config),
    constants=part_dims,
    min_arch=90,
    max_arch=90,
)  # fmt: skip
