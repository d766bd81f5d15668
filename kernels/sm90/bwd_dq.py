"""FlashAttention-2 backward over query tiles for Hopper: dQ without atomics, half of the deterministic strategy. One warp
feeds Q, dO, K and V by TMA; each group of four warps owns 64 query rows. It also makes delta = rowsum(dO * O) - dlse, which
the other half reads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.division import BY, Divisors, banded, divide, divide_with_rest, of_bands
from fa2tune.kernels.lib.extent import packed_tiles
from fa2tune.kernels.lib.hopper import fence_async_shared, mbarrier, tma_store_wait
from fa2tune.kernels.lib.hopper_dq import (
    LOG2E,
    PRODUCER_REGISTERS,
    ROWS,
    Barriers,
    Call,
    Form,
    Memory,
    Rows,
    Shared,
    Tile,
    _deltas,
    _over_keys,
    _produce,
)
from fa2tune.kernels.lib.hopper_fused import do_once
from fa2tune.kernels.lib.hopper_parts import (
    descriptors_of,
    product_layout,
    put_parts,
    scaled,
    shared_for,
    tiles_in,
    zeros_for,
)
from fa2tune.kernels.lib.hopper_split import of_queries, rows_of_head, tile_in_order
from fa2tune.search_spaces.lib.hopper import part_dims, used_by
from fa2tune.search_spaces.portable import packed_order
from fa2tune.search_spaces.sm90 import bwd_dq as space
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import Variant, Workspaces

_START_NEXT = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


@gluon.jit
def _tile(tiles, heads, heads_per_wave, LAST_FIRST: gl.constexpr):
    """(query tile, head) of this program; as tile_and_head of kernels/lib/common.py, which works out the head before it counts
    tiles from the last one: other PTX."""
    pid = gl.program_id(0)
    band = pid // (tiles * heads_per_wave)
    first = band * heads_per_wave
    width = gl.minimum(heads - first, heads_per_wave)  # the last band may be narrower
    inside = pid - band * (tiles * heads_per_wave)
    tile = inside // width
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, first + inside % width


@gluon.jit
def _blocks(rows_end, offset, seqlen_k, BLOCK_N: gl.constexpr, LAST_KEY: gl.constexpr):
    """How many key blocks the rows below rows_end see."""
    end = seqlen_k
    if LAST_KEY is not None:
        end = gl.maximum(LAST_KEY(rows_end, offset, seqlen_k), 0)
    return gl.cdiv(end, BLOCK_N)


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
    elif form.LAST_KEY is not None:
        n_blocks = _blocks(gl.minimum(first + ROWS, seqlen_q), offset, seqlen_k, form.BLOCK_N, form.LAST_KEY)
    if form.LAST_KEY is not None or form.BY_HOOKS:
        for j in range(n_all - n_blocks):  # blocks that only later groups see
            stage = j % form.K_STAGES
            mbarrier.wait(barriers.k_ready.index(stage), (j // form.K_STAGES) & 1)
            mbarrier.arrive(barriers.k_empty.index(stage), count=1)
            stage = j % form.V_STAGES
            mbarrier.wait(barriers.v_ready.index(stage), (j // form.V_STAGES) & 1)
            mbarrier.arrive(barriers.v_empty.index(stage), count=1)
    if not form.BY_HOOKS:
        n_full = form.CLEAR_BLOCKS(first, first + ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)[1]
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
    score_first, score_second, q_rest, k_rest, v_rest, do_rest, dq_rest, order, by_band, by_width, by_rest, by_heads, by_group,
    HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr,
    LAST_KEY: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr, RAGGED: gl.constexpr,
    SCORED: gl.constexpr, APPLY: gl.constexpr, GRAD: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, EARLY_START: gl.constexpr, DIVISORS: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D], k, v [B, Hkv, Sk, D] by descriptors, o by pointer; lse as the forward leaves it -> dq
    [B, Hq, Sq, D] by a descriptor, delta [B, Hq, Sq] float32. Sk >= 1. dlse is read only if has_dlse. Columns behind BLOCK_D or
    BLOCK_DV, where REST_D or REST_DV is not 0, by descriptors of their own, q_rest, ..., dq_rest. Where
    every row sees all keys up to one, LAST_KEY of the mask, or to the end, that key is compared with, as rows were measured;
    other masks are asked by their other hooks. EARLY_START: the next kernel may start once all programs of this one have.
    DIVISORS, of a dense call: by_band, ..., by_group are those of ``Divisors``.

    RAGGED: B is 1, batch the number of sequences, which lie one after the other. order: what packed_order_kernel makes of where
    they start. Rows without keys and those behind the last sequence: dq = 0; their delta is not read."""
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    if EARLY_START:
        do_once(_START_NEXT)
    BY_HOOKS: gl.constexpr = LEFT_BOUNDED or (RIGHT_BOUNDED and LAST_KEY is None)
    LAST_FIRST: gl.constexpr = LAST_KEY is not None and not RAGGED  # they are the longest
    if RAGGED:
        tiles, heads = packed_tiles(seqlen_q, batch, BLOCK_M), heads_q
    else:
        tiles, heads = gl.cdiv(seqlen_q, BLOCK_M), batch * heads_q
    if DIVISORS:
        by = Divisors((by_band,), (by_width,), (by_rest,), (by_heads,), (by_group,))
        number, head, _band = banded(gl.program_id(0), tiles, heads, HEADS_PER_WAVE, by)
        if LAST_FIRST:
            number = tiles - 1 - number
        b, h = divide_with_rest(head, heads_q, by.heads)
        h_kv = divide(h, group, by.group)
    else:
        number, head = _tile(tiles, heads, HEADS_PER_WAVE, LAST_FIRST)
        b = head // heads_q
        h = head % heads_q
    start_m = number * BLOCK_M
    packed = ()
    if RAGGED:  # in their order; the numbers that no tile has are the last ones
        start_m, packed = tile_in_order(order, number, seqlen_q, SCORED)
        end_q, seqlen_q, seqlen_k = packed[0], packed[1], packed[3]
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
        n_all = _blocks(gl.minimum(start_m + BLOCK_M, seqlen_q), seqlen_k - seqlen_q, seqlen_k, BLOCK_N, LAST_KEY)
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
    if not DIVISORS:  # here, as rows were measured
        h_kv = h // group
    tile = Tile(b, h, heads_q, h_kv, start_m, below, n_all, packed)
    score = (score_first, score_second)
    call = Call(stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k, window, score, qk_scale, softmax_scale)
    form: gl.constexpr = Form(
        GROUPS=GROUPS, BLOCK_N=BLOCK_N, K_STAGES=K_STAGES, V_STAGES=V_STAGES, HEAD_DIM_V=HEAD_DIM_V, LAST_KEY=LAST_KEY,
        BY_HOOKS=BY_HOOKS, BLOCKS_BELOW=BLOCKS_BELOW, CLEAR_BLOCKS=CLEAR_BLOCKS, HIDE=HIDE, LEFT_BOUNDED=LEFT_BOUNDED,
        RIGHT_BOUNDED=RIGHT_BOUNDED, SCORED=SCORED, APPLY=APPLY, GRAD=GRAD,
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
    return {"order": (packed_order.order_shape(problem, space.rows(config)), "i32")} if problem.extent.ragged else {}


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    if not config.get("DIVISORS"):
        return dict.fromkeys(BY, 0)
    tiles = problem.query_tiles(space.rows(config)) // problem.batch
    return of_bands(tiles, config["HEADS_PER_WAVE"], problem.batch, problem.heads_q, problem.group)


def _passes_on(spec: Specialization, config: Config) -> dict[str, int]:
    return {"BLOCK_Q": space.rows(config), "IN_TURNS": packed_order.DQ_IN_TURNS} if spec.ragged else {}


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
        "CONSUMER_REGISTERS": space.REGISTERS[config["GROUPS"]],
        "DIVISORS": config.get("DIVISORS", False),
    },
    used=lambda spec, config: used_by(spec, part_dims(spec, config), ("D",), ("D", "DV")),
    min_arch=90,
    max_arch=90,
    packed_before=("portable/packed_order",),
    passes_on=_passes_on,
    workspaces=_workspaces,
    scalars=_scalars,
    fitted=space.fitted,
)  # fmt: skip
