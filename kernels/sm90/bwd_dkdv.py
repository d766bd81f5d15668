"""FlashAttention-2 backward over key tiles for Hopper: dK and dV, half of the deterministic strategy. A warp feeds Q and dO by
TMA to two groups of four warps. Either each owns 64 keys; or one owns dV and the other dK, so that 64 keys of head dim 256 fit:
the first makes P and passes it on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import tile_and_head
from fa2tune.kernels.lib.division import BY, Divisors, banded, divide_with_rest, of_bands
from fa2tune.kernels.lib.extent import packed_tiles
from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    mbarrier,
    opaque,
    thread_barrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_blocks import query_blocks
from fa2tune.kernels.lib.hopper_dkdv import (
    LOG2E,
    Barriers,
    Call,
    Form,
    Head,
    Memory,
    Shared,
    Tile,
    _consume_dv,
    produce,
    row_values,
    weights,
)
from fa2tune.kernels.lib.hopper_fused import do_once
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    alike,
    descriptors_of,
    product_layout,
    product_of_rows,
    products_done_with,
    put_parts,
    scaled,
    shared_for,
    tiles_in,
    zeros_for,
)
from fa2tune.kernels.lib.hopper_split import key_tile, of_keys, rows_of_head
from fa2tune.search_spaces.lib.hopper import part_dims, used_by
from fa2tune.search_spaces.sm90 import bwd_dkdv as space
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant

#: Keys of a group that owns keys: the rows of one wgmma.
KEYS = gl.constexpr(space.KEYS)
PRODUCER_REGISTERS = gl.constexpr(24)
_DELTA_IS_THERE = gl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")


@gluon.jit
def _dk_over_queries(acc, dp, delta_values, done, total, delta, smem, barriers, tile, call, form):
    """Query blocks at places [first, end) of one head into dK. dp and delta_values: dP^T and delta of the first. done: turns of
    the ring before place 0."""
    dtype: gl.constexpr = smem.q[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.q[0].shape[-1]), 2)
    zero = gl.zeros([form.BLOCK_N, form.BLOCK_M], gl.float32, s_layout)
    for j in range(tile.first, tile.end):
        turn = done + j
        later = turn + 1
        v_tile = tiles_in(smem.v, opaque(j * 0))
        shift = gl.convert_layout(delta_values, gl.SliceLayout(0, s_layout))
        delta_values = row_values(delta, j + 1, tile, later < total, call.seqlen_q, 0.0, form)
        buffer = turn % form.P_STAGES
        mbarrier.wait(barriers.p_ready.index(buffer), (turn // form.P_STAGES) & 1)
        p = smem.p.index(buffer).load(s_layout).to(gl.float32)
        ds = gl.convert_layout((p * (dp - shift[None, :])).to(dtype), a_layout)
        thread_barrier()
        mbarrier.arrive(barriers.p_empty.index(buffer), count=1)
        stage = turn % form.STAGES
        mbarrier.wait(barriers.q_ready.index(stage), (turn // form.STAGES) & 1)  # over already: P was made of it
        acc_next = add_products(ds, tiles_in(smem.q, stage), acc)
        # dP^T of the next block; the last one multiplies whatever lies in the ring, a product that is not read
        ahead = later % form.STAGES
        do_tile = tiles_in(smem.do, ahead)
        mbarrier.wait(barriers.do_ready.index(ahead), (later // form.STAGES) & 1, pred=later < total)
        dp_next = product_of_rows(v_tile, do_tile, zero)
        acc, ds = products_done_with(acc_next, ds, len(smem.v))
        mbarrier.arrive(barriers.q_empty.index(stage), count=1)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        mbarrier.arrive(barriers.do_empty.index(ahead), count=1)
    return acc, dp, delta_values


@gluon.jit
def _consume_dk(memory, smem, barriers, tile, call, form):
    """Four warps: dP^T = V dO^T, dS^T = P^T (dP^T - delta), and dK += dS^T Q."""
    delta = memory.delta  # first: a loop carries variables in the order of their first assignments
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    n_blocks = tile.end - tile.first
    total = tile.group * n_blocks
    acc = zeros_for(smem.k, form.BLOCK_N)
    zero = gl.zeros([form.BLOCK_N, form.BLOCK_M], gl.float32, s_layout)
    seqlen_q = call.seqlen_q
    of_head = rows_of_head(seqlen_q, tile)
    delta += (tile.b.to(gl.int64) * tile.heads_q + tile.h_kv * tile.group) * of_head
    if not form.EARLY_START:
        delta_values = row_values(delta, tile.first, tile, total > 0, seqlen_q, 0.0, form)
    mbarrier.wait(barriers.v_ready, 0, pred=total > 0)
    v_tile = tiles_in(smem.v, 0)
    do_tile = tiles_in(smem.do, 0)
    mbarrier.wait(barriers.do_ready.index(0), 0, pred=total > 0)
    dp_next = product_of_rows(v_tile, do_tile, zero)
    dp = warpgroup_mma_wait(0, deps=[dp_next])
    mbarrier.arrive(barriers.do_empty.index(0), count=1)
    if form.EARLY_START:
        do_once(_DELTA_IS_THERE)
        delta_values = row_values(delta, tile.first, tile, total > 0, seqlen_q, 0.0, form)
    for g in range(tile.group):  # every query head that reads this key head
        acc, dp, delta_values = _dk_over_queries(
            acc, dp, delta_values, g * n_blocks - tile.first, total, delta, smem, barriers, tile, call, form
        )
        delta += of_head
    slot = smem.v
    if not alike(smem.k, smem.v):
        mbarrier.arrive(barriers.read, count=1)
        mbarrier.wait(barriers.read, 0)
        slot = smem.k
    b, row = of_keys(tile.b, tile.start_n, tile)
    put_parts(scaled(acc, call.softmax_scale), memory.dk, b, tile.h_kv, row, slot, 0)
    tma_store_wait(0)


@gluon.jit
def _keys_over_queries(
    dk_acc, dv_acc, lse_values, delta_values, done, total, lse, delta, head, smem, barriers, tile, call,
    CONSUMER: gl.constexpr, form, MASK: gl.constexpr,
):  # fmt: skip
    """Query blocks of one head into dK and dV of this group's keys: with MASK those under the mask, else those that see every
    key. lse_values and delta_values: of the first; done: turns of the ring before place 0."""
    dtype: gl.constexpr = smem.q[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    k_layout: gl.constexpr = product_layout(smem.k[0].shape[-1])
    v_layout: gl.constexpr = product_layout(smem.v[0].shape[-1])
    zero = gl.zeros([KEYS, form.BLOCK_M], gl.float32, s_layout)
    for j in range(tile.first if MASK else tile.full, tile.full if MASK else tile.end):
        turn = done + j
        later = turn + 1
        stage = turn % form.STAGES
        mine = opaque(j * 0 + CONSUMER)
        k_tile, v_tile = tiles_in(smem.k, mine), tiles_in(smem.v, mine)
        q_tile, do_tile = tiles_in(smem.q, stage), tiles_in(smem.do, stage)
        shift = gl.convert_layout(lse_values * -LOG2E, gl.SliceLayout(0, s_layout))
        lse_values = row_values(lse, j + 1, tile, later < total, call.seqlen_q, float("inf"), form)
        mbarrier.wait(barriers.q_ready.index(stage), (turn // form.STAGES) & 1)
        s_next = product_of_rows(k_tile, q_tile, zero)
        mbarrier.wait(barriers.do_ready.index(stage), (turn // form.STAGES) & 1)
        dp_next = product_of_rows(v_tile, do_tile, zero)
        s = warpgroup_mma_wait(len(smem.v), deps=[s_next])
        p, slope = weights(s, shift, j, head, tile, call, form, MASK)
        operand = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, v_layout, 2))
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        dv_next = add_products(operand, do_tile, dv_acc)
        delta_row = gl.convert_layout(delta_values, gl.SliceLayout(0, s_layout))
        delta_values = row_values(delta, j + 1, tile, later < total, call.seqlen_q, 0.0, form)
        ds = gl.convert_layout((slope * (dp - delta_row[None, :])).to(dtype), gl.DotOperandLayout(0, k_layout, 2))
        dk_next = add_products(ds, q_tile, dk_acc)
        dv_acc, operand = products_done_with(dv_next, operand, len(smem.k))
        mbarrier.arrive(barriers.do_empty.index(stage), count=1)
        dk_acc, ds = products_done_with(dk_next, ds, 0)
        mbarrier.arrive(barriers.q_empty.index(stage), count=1)
    return dk_acc, dv_acc, lse_values, delta_values


@gluon.jit
def _consume_keys(memory, smem, barriers, tile, call, CONSUMER: gl.constexpr, form):
    """Four warps: dK and dV of KEYS keys."""
    # first: a loop carries variables in the order of their first assignments
    lse, delta = memory.lse, memory.delta
    seqlen_q = call.seqlen_q
    key = tile.start_n + CONSUMER * KEYS
    offset = call.seqlen_k - seqlen_q
    n_blocks = tile.end - tile.first
    total = tile.group * n_blocks
    dk_acc = zeros_for(smem.k, KEYS)
    dv_acc = zeros_for(smem.v, KEYS)
    of_head = rows_of_head(seqlen_q, tile)
    lse += (tile.b.to(gl.int64) * tile.heads_q + tile.h_kv * tile.group) * of_head
    delta += (tile.b.to(gl.int64) * tile.heads_q + tile.h_kv * tile.group) * of_head
    lse_values = row_values(lse, tile.first, tile, total > 0, seqlen_q, float("inf"), form)
    if form.EARLY_START:
        do_once(_DELTA_IS_THERE)
    delta_values = row_values(delta, tile.first, tile, total > 0, seqlen_q, 0.0, form)
    mbarrier.wait(barriers.k_ready, 0, pred=total > 0)
    mbarrier.wait(barriers.v_ready, 0, pred=total > 0)
    for g in range(tile.group):  # every query head that reads this key head
        turns = g * n_blocks - tile.first
        head = Head(tile.h_kv * tile.group + g, key, offset)
        dk_acc, dv_acc, lse_values, delta_values = _keys_over_queries(
            dk_acc, dv_acc, lse_values, delta_values, turns, total, lse, delta, head, smem, barriers, tile, call, CONSUMER,
            form, True,
        )  # fmt: skip
        dk_acc, dv_acc, lse_values, delta_values = _keys_over_queries(
            dk_acc, dv_acc, lse_values, delta_values, turns, total, lse, delta, head, smem, barriers, tile, call, CONSUMER,
            form, False,
        )  # fmt: skip
        lse += of_head
        delta += of_head
    b, row = of_keys(tile.b, key, tile)
    put_parts(
        scaled(dk_acc, call.softmax_scale), memory.dk, b, tile.h_kv, row, smem.k, CONSUMER
    )  # this group alone reads its keys
    put_parts(dv_acc, memory.dv, b, tile.h_kv, row, smem.v, CONSUMER)
    tma_store_wait(0)


@gluon.jit
def bwd_dkdv_hopper_kernel(
    q, k, v, do, lse, delta, dk, dv, qk_scale, softmax_scale, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE,
    window_left, window_right, score_first, score_second, q_rest, k_rest, v_rest, do_rest, dk_rest, dv_rest,
    cu_seqlens_q, cu_seqlens_k, key_heads, by_band, by_width, by_rest, by_heads, by_group,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    QUERY_BLOCKS: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RAGGED: gl.constexpr,
    SCORED: gl.constexpr, APPLY: gl.constexpr, GRAD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, P_STAGES: gl.constexpr, OWN: gl.constexpr,
    ROWS_N: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, EARLY_START: gl.constexpr, DIVISORS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D / DV], k, v [B, Hkv, Sk, D / DV] by descriptors, lse and delta [B, Hq, Sq] float32 -> dk, dv. Columns
    behind BLOCK_D or BLOCK_DV, where REST_D or REST_DV is not 0, by descriptors of their own, q_rest, ..., dv_rest.
    EARLY_START: it may start once all programs of the kernel before have, which makes delta. DIVISORS, of a dense call:
    key_heads is how many a batch entry has, and by_band, ..., by_heads are those of ``Divisors``.

    RAGGED: B is 1, batch the number of sequences, which lie one after the other from cu_seqlens_q[s] and cu_seqlens_k[s] on.
    Keys without queries and those behind the last sequence: dk = dv = 0."""
    dtype: gl.constexpr = q.dtype
    heads_kv = key_heads if DIVISORS else heads_q // group
    # causal: the first tiles are the longest
    if RAGGED:
        tiles, heads = packed_tiles(seqlen_k, batch, BLOCK_N), heads_kv
    else:
        tiles, heads = gl.cdiv(seqlen_k, BLOCK_N), batch * heads_kv
    if DIVISORS:
        by = Divisors((by_band,), (by_width,), (by_rest,), (by_heads,), (by_group,))
        number, head, _band = banded(gl.program_id(0), tiles, heads, HEADS_PER_WAVE, by)
        b, h_kv = divide_with_rest(head, heads_kv, by.heads)
    else:
        number, head = tile_and_head(tiles, heads, HEADS_PER_WAVE, False)
        b = head // heads_kv
        h_kv = head % heads_kv
    start_n = number * BLOCK_N
    packed = ()
    if RAGGED:
        start_n, packed = key_tile(
            number, (cu_seqlens_q, cu_seqlens_k), batch, seqlen_q, seqlen_k, BLOCK_N, num_warps, SCORED
        )
        end_q, seqlen_q, seqlen_k = packed[0], packed[1], packed[3]
        lse += end_q - seqlen_q
        delta += end_q - seqlen_q
    window = (window_left, window_right)
    first, full, end, rotation = query_blocks(
        start_n, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, QUERY_BLOCKS, LEFT_BOUNDED
    )

    TILES: gl.constexpr = BLOCK_N // ROWS_N
    q, do = descriptors_of(q, q_rest), descriptors_of(do, do_rest)
    k, v = descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    dk, dv = descriptors_of(dk, dk_rest), descriptors_of(dv, dv_rest)
    q_smem = shared_for(q, STAGES, BLOCK_M, BLOCK_D, REST_D)
    do_smem = shared_for(do, STAGES, BLOCK_M, BLOCK_DV, REST_DV)
    k_smem = shared_for(k, TILES, ROWS_N, BLOCK_D, REST_D)
    v_smem = shared_for(v, TILES, ROWS_N, BLOCK_DV, REST_DV)
    once = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = once.index(0)
    v_ready = once.index(1)
    read = once.index(2)
    mbarrier.init(k_ready, count=1)
    mbarrier.init(v_ready, count=1)
    mbarrier.init(read, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_empty.index(i), count=2)
    p_smem, p_ready, p_empty = (), (), ()
    if OWN == "products":
        p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
        p_smem = gl.allocate_shared_memory(dtype, [P_STAGES, BLOCK_N, BLOCK_M], p_layout)
        p_ready = gl.allocate_shared_memory(gl.int64, [P_STAGES, 1], mbarrier.MBarrierLayout())
        p_empty = gl.allocate_shared_memory(gl.int64, [P_STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(P_STAGES):
            mbarrier.init(p_ready.index(i), count=1)
            mbarrier.init(p_empty.index(i), count=1)
    fence_async_shared()
    memory = Memory(dk, dv, lse, delta)
    smem = Shared(k_smem, v_smem, q_smem, do_smem, p_smem)
    barriers = Barriers(k_ready, v_ready, q_ready, q_empty, do_ready, do_empty, p_ready, p_empty, read)
    tile = Tile(b, h_kv, heads_q, group, start_n, first, full, end, rotation, packed)
    call = Call(seqlen_q, seqlen_k, window, (score_first, score_second), qk_scale, softmax_scale)
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, ROWS_N=ROWS_N, TILES=TILES, STAGES=STAGES, P_STAGES=P_STAGES,
        HIDE_QUERIES=HIDE_QUERIES, LEFT_BOUNDED=LEFT_BOUNDED, EARLY_START=EARLY_START, DIVISORS=DIVISORS, num_warps=num_warps,
        SCORED=SCORED, APPLY=APPLY, GRAD=GRAD,
    )  # fmt: skip
    # constants stay constants only in a literal tuple, so each group's is written out
    if OWN == "keys":
        gl.warp_specialize([
            (_consume_keys, (memory, smem, barriers, tile, call, 0, form)),
            (_consume_keys, (memory, smem, barriers, tile, call, 1, form)),
            (produce, (q, k, v, do, smem, barriers, tile, form)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume_dv, (memory, smem, barriers, tile, call, form)),
            (_consume_dk, (memory, smem, barriers, tile, call, form)),
            (produce, (q, k, v, do, smem, barriers, tile, form)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    if not config.get("DIVISORS"):
        return dict.fromkeys(("key_heads", *BY), 0)
    tiles = problem.key_tiles(config["BLOCK_N"]) // problem.batch
    found = of_bands(tiles, config["HEADS_PER_WAVE"], problem.batch, problem.heads_kv, problem.group)
    return {"key_heads": problem.heads_kv, **found}


VARIANT = Variant(
    serves="bwd_dkdv",
    kernel=bwd_dkdv_hopper_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "do": "", "lse": "fp32", "delta": "fp32", "dk": "", "dv": "",
             "q_rest": "", "k_rest": "", "v_rest": "", "do_rest": "", "dk_rest": "", "dv_rest": "",
             "cu_seqlens_q": "i32", "cu_seqlens_k": "i32"},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "do": ("BLOCK_M", "BLOCK_DV"), "k": ("ROWS_N", "BLOCK_D"),
                 "v": ("ROWS_N", "BLOCK_DV"), "dk": ("ROWS_N", "BLOCK_D"), "dv": ("ROWS_N", "BLOCK_DV"),
                 "q_rest": ("BLOCK_M", "REST_D"), "do_rest": ("BLOCK_M", "REST_DV"), "k_rest": ("ROWS_N", "REST_D"),
                 "v_rest": ("ROWS_N", "REST_DV"), "dk_rest": ("ROWS_N", "REST_D"), "dv_rest": ("ROWS_N", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "do_rest": "do", "dk_rest": "dk", "dv_rest": "dv"},
    grid=lambda problem, config, _sm_count, _early: (
        problem.key_tiles(config["BLOCK_N"]) * problem.heads_kv
    ),
    constants=lambda spec, config: {
        **part_dims(spec, config),
        "ROWS_N": space.KEYS if config["OWN"] == "keys" else config["BLOCK_N"],
        "CONSUMER_REGISTERS": space.REGISTERS,
        "DIVISORS": config.get("DIVISORS", False),
    },
    used=lambda spec, config: used_by(spec, part_dims(spec, config), ("D", "DV"), ("D", "DV")),
    min_arch=90,
    max_arch=90,
    early=lambda _problem, config, _sm_count: bool(config.get("EARLY_START")),
    scalars=_scalars,
    fitted=space.fitted,
)  # fmt: skip
