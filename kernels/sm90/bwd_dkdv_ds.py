"""FlashAttention-2 backward over key tiles for Hopper, of head dims above 128: dK, dV, and dS into memory, of which
kernels/sm90/bwd_dq_ds.py makes dQ. Both take five products together, where kernels/sm90/bwd_dq.py and bwd_dkdv.py take seven.
One group of four warps owns dV, and makes P; the other owns dK, and makes dS of it, as with ``OWN`` "products" there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import tile_and_head
from fa2tune.kernels.lib.hopper import (
    await_kernel_before,
    fence_async_shared,
    mbarrier,
    opaque,
    store_block,
    thread_barrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_blocks import query_blocks
from fa2tune.kernels.lib.hopper_dkdv import (
    Barriers,
    Call,
    Form,
    Memory,
    Shared,
    Tile,
    _consume_dv,
    block_of,
    produce,
    row_values,
)
from fa2tune.kernels.lib.hopper_dkdv_tiles import TileBarriers, Walk, consume_dk, consume_dv, produce_tiles
from fa2tune.kernels.lib.hopper_forward import slots
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
from fa2tune.search_spaces.lib.hopper import part_dims, used_by
from fa2tune.search_spaces.sm90 import bwd_dkdv_ds as space
from fa2tune.search_spaces.sm90 import bwd_dq_ds
from fa2tune.spec.variant import Variant

PRODUCER_REGISTERS = gl.constexpr(24)
_START_NEXT = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


@gluon.jit
def _over_queries(acc, dp, delta_values, h, done, total, delta, ds, ds_smem, smem, barriers, tile, call, form):
    """Query blocks at places [first, end) of head h into dK, and their dS into memory. dp and delta_values: dP^T and delta of
    the first. done: turns of the ring before place 0."""
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
        tile_ds = (p * (dp - shift[None, :])).to(dtype)
        operand = gl.convert_layout(tile_ds, a_layout)
        tma_store_wait(0)  # dS of the block before has left its shared memory
        thread_barrier()
        mbarrier.arrive(barriers.p_empty.index(buffer), count=1)
        stage = turn % form.STAGES
        mbarrier.wait(barriers.q_ready.index(stage), (turn // form.STAGES) & 1)  # over already: P was made of it
        acc_next = add_products(operand, tiles_in(smem.q, stage), acc)
        # dP^T of the next block; the last one multiplies whatever lies in the ring, a product that is not read
        ahead = later % form.STAGES
        do_tile = tiles_in(smem.do, ahead)
        mbarrier.wait(barriers.do_ready.index(ahead), (later // form.STAGES) & 1, pred=later < total)
        dp_next = product_of_rows(v_tile, do_tile, zero)
        # under both products
        place = ds_smem.index(0)
        place.reshape([form.BLOCK_N, form.BLOCK_M]).store(tile_ds)
        fence_async_shared()
        store_block(ds, tile.b, h, tile.start_n, block_of(j, tile, form) * form.BLOCK_M, place)
        acc, operand = products_done_with(acc_next, operand, len(smem.v))
        mbarrier.arrive(barriers.q_empty.index(stage), count=1)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        mbarrier.arrive(barriers.do_empty.index(ahead), count=1)
    return acc, dp, delta_values


@gluon.jit
def _consume(memory, ds, ds_smem, smem, barriers, tile, call, form):
    """Four warps: dP^T = V dO^T, dS^T = P^T (dP^T - delta), which goes to memory, and dK += dS^T Q."""
    delta = memory.delta  # first: a loop carries variables in the order of their first assignments
    await_kernel_before()  # which makes delta, or of an earlier slice reads dS
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    n_blocks = tile.end - tile.first
    total = tile.group * n_blocks
    acc = zeros_for(smem.k, form.BLOCK_N)
    zero = gl.zeros([form.BLOCK_N, form.BLOCK_M], gl.float32, s_layout)
    seqlen_q = call.seqlen_q
    delta += (tile.b.to(gl.int64) * tile.heads_q + tile.h_kv * tile.group) * seqlen_q
    delta_values = row_values(delta, tile.first, tile, total > 0, seqlen_q, 0.0, form)
    mbarrier.wait(barriers.v_ready, 0, pred=total > 0)
    v_tile = tiles_in(smem.v, 0)
    do_tile = tiles_in(smem.do, 0)
    mbarrier.wait(barriers.do_ready.index(0), 0, pred=total > 0)
    dp_next = product_of_rows(v_tile, do_tile, zero)
    dp = warpgroup_mma_wait(0, deps=[dp_next])
    mbarrier.arrive(barriers.do_empty.index(0), count=1)
    for g in range(tile.group):  # every query head that reads this key head
        acc, dp, delta_values = _over_queries(
            acc, dp, delta_values, tile.h_kv * tile.group + g, g * n_blocks - tile.first, total, delta, ds, ds_smem, smem,
            barriers, tile, call, form,
        )  # fmt: skip
        delta += seqlen_q
    slot = smem.v
    if not alike(smem.k, smem.v):
        mbarrier.arrive(barriers.read, count=1)
        mbarrier.wait(barriers.read, 0)
        slot = smem.k
    put_parts(scaled(acc, call.softmax_scale), memory.dk, tile.b, tile.h_kv, tile.start_n, slot, 0)
    tma_store_wait(0)


@gluon.jit
def bwd_dkdv_ds_hopper_kernel(
    q, k, v, do, lse, delta, ds, dk, dv, qk_scale, softmax_scale, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE,
    window_left, window_right, score_first, score_second, q_rest, k_rest, v_rest, do_rest, dk_rest, dv_rest,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    QUERY_BLOCKS: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr, SCORED: gl.constexpr,
    APPLY: gl.constexpr, GRAD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PERSISTENT: gl.constexpr, P_STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D / DV], k, v [B, Hkv, Sk, D / DV] by descriptors, lse and delta [B, Hq, Sq] float32 -> dk, dv, and ds
    [B, Hq, keys, rows] in their dtype: dS transposed, in whole blocks, of the blocks that the mask does not hide. Rows and keys
    behind the last are finite there. Columns behind BLOCK_D or BLOCK_DV, where REST_D or REST_DV is not 0, by descriptors of
    their own, q_rest, ..., dv_rest. It starts early: one group waits for delta. The next kernel may start once all programs of
    this one have."""
    do_once(_START_NEXT)
    dtype: gl.constexpr = q.dtype
    heads_kv = heads_q // group
    window = (window_left, window_right)
    q, do = descriptors_of(q, q_rest), descriptors_of(do, do_rest)
    k, v = descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    dk, dv = descriptors_of(dk, dk_rest), descriptors_of(dv, dv_rest)
    # tile after tile K and V share the slots of Q and dO
    SLOTS: gl.constexpr = STAGES + 1 if PERSISTENT else STAGES
    q_smem = shared_for(q, SLOTS, BLOCK_M, BLOCK_D, REST_D)
    do_smem = shared_for(do, SLOTS, BLOCK_M, BLOCK_DV, REST_DV)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    p_smem = gl.allocate_shared_memory(dtype, [P_STAGES, BLOCK_N, BLOCK_M], p_layout)
    ds_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, BLOCK_M], ds.layout)
    q_ready, do_ready = slots(SLOTS, 1), slots(SLOTS, 1)
    q_empty, do_empty = slots(SLOTS, 2), slots(SLOTS, 2)
    p_ready, p_empty = slots(P_STAGES, 1), slots(P_STAGES, 1)
    memory = Memory(dk, dv, lse, delta)
    call = Call(seqlen_q, seqlen_k, window, (score_first, score_second), qk_scale, softmax_scale)
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, ROWS_N=BLOCK_N, TILES=1, STAGES=STAGES, P_STAGES=P_STAGES,
        HIDE_QUERIES=HIDE_QUERIES, LEFT_BOUNDED=LEFT_BOUNDED, EARLY_START=False, DIVISORS=False, num_warps=num_warps,
        SCORED=SCORED, APPLY=APPLY, GRAD=GRAD,
    )  # fmt: skip
    if PERSISTENT:
        gl.static_assert(not LEFT_BOUNDED, "a key tile may have no query block, and K and V would have no turn")
        gl.static_assert(P_STAGES <= 2, "with more the group that makes P would reach a slot of dO before its dO")
        fence_async_shared()
        smem = Shared(None, None, q_smem, do_smem, p_smem)
        barriers = TileBarriers(q_ready, q_empty, do_ready, do_empty, p_ready, p_empty)
        walk = Walk(gl.cdiv(seqlen_k, BLOCK_N), batch * heads_kv, HEADS_PER_WAVE, heads_kv, group)
        gl.warp_specialize([
            (consume_dv, (memory, smem, barriers, walk, call, QUERY_BLOCKS, form)),
            (consume_dk, (memory, ds, ds_smem, smem, barriers, walk, call, QUERY_BLOCKS, form)),
            (produce_tiles, (q, k, v, do, smem, barriers, walk, call, QUERY_BLOCKS, form)),
        ], [4, 1], [space.REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        # causal: the first tiles are the longest
        number, head = tile_and_head(gl.cdiv(seqlen_k, BLOCK_N), batch * heads_kv, HEADS_PER_WAVE, False)
        start_n = number * BLOCK_N
        first, full, end, rotation = query_blocks(
            start_n, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, QUERY_BLOCKS, LEFT_BOUNDED
        )
        k_smem = shared_for(k, 1, BLOCK_N, BLOCK_D, REST_D)
        v_smem = shared_for(v, 1, BLOCK_N, BLOCK_DV, REST_DV)
        k_ready, v_ready, read = slots(1, 1), slots(1, 1), slots(1, 2)
        fence_async_shared()
        smem = Shared(k_smem, v_smem, q_smem, do_smem, p_smem)
        barriers = Barriers(
            k_ready.index(0), v_ready.index(0), q_ready, q_empty, do_ready, do_empty, p_ready, p_empty, read.index(0)
        )
        tile = Tile(head // heads_kv, head % heads_kv, heads_q, group, start_n, first, full, end, rotation, ())
        gl.warp_specialize([
            (_consume_dv, (memory, smem, barriers, tile, call, form)),
            (_consume, (memory, ds, ds_smem, smem, barriers, tile, call, form)),
            (produce, (q, k, v, do, smem, barriers, tile, form)),
        ], [4, 1], [space.REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


VARIANT = Variant(
    role="bwd_stored_ds",
    kernel=bwd_dkdv_ds_hopper_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "do": "", "lse": "fp32", "delta": "fp32", "ds": "", "dk": "", "dv": "",
             "q_rest": "", "k_rest": "", "v_rest": "", "do_rest": "", "dk_rest": "", "dv_rest": ""},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "do": ("BLOCK_M", "BLOCK_DV"), "k": ("BLOCK_N", "BLOCK_D"),
                 "v": ("BLOCK_N", "BLOCK_DV"), "dk": ("BLOCK_N", "BLOCK_D"), "dv": ("BLOCK_N", "BLOCK_DV"),
                 "ds": ("BLOCK_N", "BLOCK_M"),
                 "q_rest": ("BLOCK_M", "REST_D"), "do_rest": ("BLOCK_M", "REST_DV"), "k_rest": ("BLOCK_N", "REST_D"),
                 "v_rest": ("BLOCK_N", "REST_DV"), "dk_rest": ("BLOCK_N", "REST_D"), "dv_rest": ("BLOCK_N", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "do_rest": "do", "dk_rest": "dk", "dv_rest": "dv"},
    grid=lambda problem, config, sm_count, _early: space.programs(problem, config, sm_count),
    constants=lambda spec, config: part_dims(spec, config),
    used=lambda spec, config: used_by(spec, part_dims(spec, config), ("D", "DV"), ("D", "DV")),
    grid_dimensions=("DQ_GROUPS", "DQ_SPLITS", "SLICES"),
    min_arch=90,
    max_arch=90,
    early=lambda _problem, _config, _sm_count: True,
    before=("portable/bwd_delta",),
    after=("sm90/bwd_dq_ds",),
    passes_on=bwd_dq_ds.passed_on,
    workspaces=lambda problem, _config: {"ds": (space.ds_shape(problem), "")},
)  # fmt: skip
