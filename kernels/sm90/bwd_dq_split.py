"""dQ for Hopper with keys split among programs: kernels/sm90/bwd_dq.py for calls of few queries and many keys, whose tiles are
fewer than multiprocessors.

Each program takes one part of the key blocks that its tile of queries sees; kernels/portable/bwd_dq_combine.py adds the parts
up. Part p of P of n blocks has the blocks [n p / P, n (p + 1) / P), counted from the last one, so parts are even under any
mask. One without blocks is zeros. Every part of a tile makes its delta, the same bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import fence_async_shared, mbarrier
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
from fa2tune.kernels.lib.hopper_key_parts import store_parts_of_rows
from fa2tune.kernels.lib.hopper_parts import descriptors_of, product_layout, shared_for, tiles_in, zeros_for
from fa2tune.search_spaces.lib.hopper import part_dims, used_by
from fa2tune.search_spaces.sm90 import bwd_dq, bwd_dq_split
from fa2tune.spec.variant import Variant


@gluon.jit
def _consume(memory, smem, barriers, tile, call, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, form):
    """One group: rows [start_m + CONSUMER * ROWS, + ROWS) of one head. memory.dq: pointer to the head's rows of this part."""
    seqlen_q, seqlen_k, window = call.seqlen_q, call.seqlen_k, call.window
    below, n_all = tile.below, tile.n_all
    s_layout: gl.constexpr = product_layout(form.BLOCK_N)
    first = tile.start_m + CONSUMER * ROWS
    head_row = (tile.b.to(gl.int64) * tile.heads_q + tile.h) * seqlen_q
    do_tile, ready = tiles_in(smem.do, CONSUMER), barriers.q_ready.index(CONSUMER)
    sums = _deltas(memory, memory.delta + head_row, do_tile, ready, first, call, form.HEAD_DIM_V)
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    delta_row = gl.convert_layout(sums, gl.SliceLayout(1, s_layout))
    # past the end +inf, so that p = exp2(s - inf) = 0
    lse_row = gl.load(memory.lse + head_row + rows, mask=rows < seqlen_q, other=float("inf")) * LOG2E
    n_blocks = n_all
    n_full = seqlen_k // form.BLOCK_N
    clear_begin, clear_end = form.CLEAR_BLOCKS(first, first + ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)
    if form.RIGHT_BOUNDED:
        n_full = gl.minimum(n_full, clear_end)
        mine = form.BLOCKS_BELOW(first + ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)
        n_blocks = gl.minimum(gl.maximum(n_all - (below - mine), 0), n_all)
        for j in range(n_all - n_blocks):  # blocks that only later groups see
            stage = j % form.K_STAGES
            mbarrier.wait(barriers.k_ready.index(stage), (j // form.K_STAGES) & 1)
            mbarrier.arrive(barriers.k_empty.index(stage), count=1)
            stage = j % form.V_STAGES
            mbarrier.wait(barriers.v_ready.index(stage), (j // form.V_STAGES) & 1)
            mbarrier.arrive(barriers.v_empty.index(stage), count=1)
    n_full = gl.minimum(gl.maximum(n_full - (below - n_all), 0), n_blocks)  # of those from below - n_all on
    masked_end, full_end = n_all - n_full, n_all
    if form.LEFT_BOUNDED:
        full_end = gl.minimum(gl.maximum(below - clear_begin, masked_end), n_all)
    acc = zeros_for(smem.q, ROWS)
    own = Rows(rows, seqlen_k - seqlen_q, lse_row, delta_row)
    acc = _over_keys(acc, n_all - n_blocks, masked_end, own, tile, smem, barriers, call, CONSUMER, form, True)
    acc = _over_keys(acc, masked_end, full_end, own, tile, smem, barriers, call, CONSUMER, form, False)
    if form.LEFT_BOUNDED:
        acc = _over_keys(acc, full_end, n_all, own, tile, smem, barriers, call, CONSUMER, form, True)
    inside = seqlen_q - first
    place = memory.dq + first.to(gl.int64) * HEAD_DIM
    store_parts_of_rows(acc, place, HEAD_DIM, inside, HEAD_DIM)


@gluon.jit
def _slots(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """An mbarrier a slot."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def bwd_dq_hopper_split_kernel(
    q, k, v, o, do, dlse, lse, delta, dq_parts, qk_scale, softmax_scale,
    stride_ob, stride_oh, stride_om, stride_dlseb, stride_dlseh, stride_dlsem,
    batch, heads_q, group, seqlen_q, seqlen_k, has_dlse, SPLITS, window_left, window_right,
    score_first, score_second, q_rest, k_rest, v_rest, do_rest,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr,
    REST_DV: gl.constexpr, BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr, CLEAR_BLOCKS: gl.constexpr,
    HIDE: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr, SCORED: gl.constexpr,
    APPLY: gl.constexpr, GRAD: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tensors as kernels/sm90/bwd_dq.py has them, but for dq -> dq_parts [SPLITS, B, Hq, Sq, D] float32, not scaled, and delta.
    Sk >= 1. Programs that run at the same time read the same keys: tiles of a head follow one another, then heads, then parts.
    A mask that is bounded on the right has its last tiles first, which see the most keys."""
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    tiles = gl.cdiv(seqlen_q, BLOCK_M)
    index = gl.program_id(0) // tiles  # of (part, batch entry, head)
    number = gl.program_id(0) - index * tiles
    if RIGHT_BOUNDED:
        number = tiles - 1 - number
    part = index // (batch * heads_q)
    head = index - part * (batch * heads_q)
    b = head // heads_q
    h = head - b * heads_q
    start_m = number * BLOCK_M
    window = (window_left, window_right)
    below = BLOCKS_BELOW(start_m + BLOCK_M, seqlen_q, seqlen_k, window, BLOCK_N)
    blocks = below - FIRST_BLOCK(start_m, seqlen_q, seqlen_k, window, BLOCK_N)
    begin = blocks * part // SPLITS
    n_all = blocks * (part + 1) // SPLITS - begin
    below -= begin
    o += b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh
    dlse += b.to(gl.int64) * stride_dlseb + h.to(gl.int64) * stride_dlseh
    dq_parts += index.to(gl.int64) * seqlen_q * HEAD_DIM

    q, do = descriptors_of(q, q_rest), descriptors_of(do, do_rest)
    k, v = descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    q_smem = shared_for(q, GROUPS, ROWS, BLOCK_D, REST_D)
    do_smem = shared_for(do, GROUPS, ROWS, BLOCK_DV, REST_DV)
    k_smem = shared_for(k, K_STAGES, BLOCK_N, BLOCK_D, REST_D)
    v_smem = shared_for(v, V_STAGES, BLOCK_N, BLOCK_DV, REST_DV)
    q_ready = _slots(GROUPS, 1)
    k_ready, k_empty = _slots(K_STAGES, 1), _slots(K_STAGES, GROUPS)
    v_ready, v_empty = _slots(V_STAGES, 1), _slots(V_STAGES, GROUPS)
    fence_async_shared()
    memory = Memory(dq_parts, o, dlse, lse, delta)
    smem = Shared(q_smem, k_smem, v_smem, do_smem)
    barriers = Barriers(q_ready, k_ready, k_empty, v_ready, v_empty)
    tile = Tile(b, h, heads_q, h // group, start_m, below, n_all, ())
    score = (score_first, score_second)
    call = Call(stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k, window, score, qk_scale, softmax_scale)
    form: gl.constexpr = Form(
        GROUPS=GROUPS, BLOCK_N=BLOCK_N, K_STAGES=K_STAGES, V_STAGES=V_STAGES, HEAD_DIM_V=HEAD_DIM_V, LAST_KEY=None,
        BY_HOOKS=True, BLOCKS_BELOW=BLOCKS_BELOW, CLEAR_BLOCKS=CLEAR_BLOCKS, HIDE=HIDE, LEFT_BOUNDED=LEFT_BOUNDED,
        RIGHT_BOUNDED=RIGHT_BOUNDED, SCORED=SCORED, APPLY=APPLY, GRAD=GRAD,
    )  # fmt: skip
    # constants stay constants only in a literal tuple, so each group's is written out
    gl.warp_specialize([
        (_consume, (memory, smem, barriers, tile, call, 0, HEAD_DIM, form)),
        (_consume, (memory, smem, barriers, tile, call, 1, HEAD_DIM, form)),
        (_produce, (q, k, v, do, smem, barriers, tile, form)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


VARIANT = Variant(
    role="bwd_dq_split",
    kernel=bwd_dq_hopper_split_kernel,
    space=bwd_dq_split.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "do": "", "dlse": "fp32", "lse": "fp32", "delta": "fp32", "dq_parts": "fp32",
             "q_rest": "", "k_rest": "", "v_rest": "", "do_rest": ""},
    descriptors={"q": (bwd_dq.ROWS, "BLOCK_D"), "do": (bwd_dq.ROWS, "BLOCK_DV"), "k": ("BLOCK_N", "BLOCK_D"),
                 "v": ("BLOCK_N", "BLOCK_DV"), "q_rest": (bwd_dq.ROWS, "REST_D"), "do_rest": (bwd_dq.ROWS, "REST_DV"),
                 "k_rest": ("BLOCK_N", "REST_D"), "v_rest": ("BLOCK_N", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "do_rest": "do"},
    grid=lambda problem, config, _sm_count, _early: bwd_dq_split.programs(problem, config["SPLITS"]),
    constants=lambda spec, config: {
        **part_dims(spec, config), "CONSUMER_REGISTERS": bwd_dq.REGISTERS[config["GROUPS"]],
    },
    used=lambda spec, config: used_by(spec, part_dims(spec, config), ("D",), ("D", "DV")),
    min_arch=90,
    max_arch=90,
)  # fmt: skip
