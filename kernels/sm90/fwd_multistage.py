"""Forward of short calls for Hopper: the warps that multiply load for themselves, several key blocks ahead (the multistage main
loop of CUTLASS).

kernels/sm90/fwd.py starts a warp that loads, and sets registers apart for it: 1.5 us of a call of 10 us. Here a program has one
tile, of 64 query rows of one head, 16 a warp. It asks for Q and the first stages of K and V at its start, and for each
further block once all its warps have read what lay there. With no more blocks than stages no warp waits for another."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import LOWEST
from fa2tune.kernels.lib.division import divide, divisors
from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    mbarrier,
    thread_barrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_forward import quotients, shrunk, sum_parts, where_seen
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    descriptors_of,
    expect_both,
    expect_parts,
    first_parts,
    load_parts,
    product_layout,
    product_of_rows,
    products_done,
    put_parts,
    shared_for,
    tiles_in,
    used_of,
    zeros_for,
)
from fa2tune.search_spaces.lib.hopper import narrow_blocks, o_fits_q, used_by, used_columns
from fa2tune.search_spaces.sm90 import fwd_multistage as space
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant

LN2 = gl.constexpr(0.6931471805599453)


class Ring(NamedTuple):
    """Key blocks of a tile, the last one first, in shared memory."""

    k: tuple  #: descriptors of its parts
    v: tuple
    k_smem: tuple
    v_smem: tuple
    k_ready: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    b: gl.tensor
    h: gl.tensor
    below: gl.tensor  #: the last block, and one


class Rows(NamedTuple):
    """What the mask and scores of a tile depend on."""

    rows: gl.tensor  #: [BLOCK_M]
    offset: gl.tensor
    seqlen_k: gl.tensor
    window: tuple
    qk_scale: gl.tensor


class Stages(NamedTuple):
    """What is compiled in."""

    BLOCK_M: gl.constexpr
    KEYS: gl.constexpr  #: of a block
    COUNT: gl.constexpr
    MASKED: gl.constexpr  #: by more than the number of keys
    NEGATE: gl.constexpr
    HIDE: gl.constexpr


@gluon.jit
def _load(descriptors, smem, ready, ring, entry, stages):
    """The entry-th block of K or V into its stage, whose barrier expects it."""
    row = (ring.below - 1 - entry) * stages.KEYS
    stage = entry % stages.COUNT
    load_parts(descriptors, ring.b, ring.h, row, ready.index(stage), smem, stage)


@gluon.jit
def _load_next(descriptors, smem, ready, ring, entry, stages):
    expect_parts(descriptors, ready.index(entry % stages.COUNT))
    _load(descriptors, smem, ready, ring, entry, stages)


@gluon.jit
def _issue_scores(q_tile, ring, entry, USED_D: gl.constexpr, stages):
    """Starts Q K^T [BLOCK_M, KEYS] of a block, once it is there."""
    stage = entry % stages.COUNT
    mbarrier.wait(ring.k_ready.index(stage), (entry // stages.COUNT) & 1)
    layout: gl.constexpr = product_layout(stages.KEYS, stages.BLOCK_M)
    k_tile = used_of(tiles_in(ring.k_smem, stage), USED_D)
    return product_of_rows(q_tile, k_tile, gl.zeros([stages.BLOCK_M, stages.KEYS], gl.float32, layout))


@gluon.jit
def _add_values(p, acc, ring, entry, stages):
    """acc + P V of a block, asynchronously."""
    stage = entry % stages.COUNT
    mbarrier.wait(ring.v_ready.index(stage), (entry // stages.COUNT) & 1)
    return add_products(p, tiles_in(ring.v_smem, stage), acc)


@gluon.jit
def _scores(s, block, at, MASK: gl.constexpr, stages):
    """Products of a block as the mask leaves them."""
    if stages.NEGATE:
        s = -s
    layout: gl.constexpr = product_layout(stages.KEYS, stages.BLOCK_M)
    if MASK:
        s = stages.HIDE(s, at.rows, block * stages.KEYS, at.offset, at.seqlen_k, at.window, layout)
    return s


@gluon.jit
def _awaited(x):
    """x [R, 4], sums that are not negative, behind a branch that is never taken: ptxas moves no wait for products across it,
    and so leaves products under way beneath the exponentials that x sums. Under a mask, with two loops, calls took longer with
    it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.lt.f32 p, $2, 0f00000000; setp.lt.f32 q, $3, 0f00000000; or.pred p, p, q; "
        "@!p bra DONE; trap; DONE: mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def _over_keys(
    acc, total, peak, p, begin, end, blocks, q_tile, ring, at, MASK: gl.constexpr, USED_D: gl.constexpr, stages
):
    """Blocks [begin, end): Q K^T of a block is under way together with P V of the one before, whose P is carried."""
    for j in range(begin, end):
        s_next = _issue_scores(q_tile, ring, j, USED_D, stages)
        o_next = _add_values(p, acc, ring, j - 1, stages)
        s = warpgroup_mma_wait(len(acc), deps=[s_next])
        s = _scores(s, ring.below - 1 - j, at, MASK, stages)
        new_peak = gl.maximum(peak, gl.max(s, 1) * at.qk_scale)
        new_peak = gl.where(new_peak - peak > 8.0, new_peak, peak)
        shrink = gl.exp2(peak - new_peak)
        weights = gl.exp2(gl.fma(s, at.qk_scale, -new_peak[:, None]))
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + sum_parts(weights)
        if not stages.MASKED:
            total = _awaited(total)
        peak = new_peak
        p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
        acc = products_done(o_next)
        if j - 1 + stages.COUNT < blocks:  # all warps have read K of this block, and V of the one before
            thread_barrier()
            _load_next(ring.v, ring.v_smem, ring.v_ready, ring, j - 1 + stages.COUNT, stages)
            if j + stages.COUNT < blocks:
                _load_next(ring.k, ring.k_smem, ring.k_ready, ring, j + stages.COUNT, stages)
        acc = shrunk(acc, shrink, True)
    return acc, total, peak, p


@gluon.jit
def fwd_hopper_multistage_kernel(
    q, k, v, o, lse, qk_scale, heads_q, group, seqlen_q, seqlen_k, window_left, window_right,
    q_rest, k_rest, v_rest, o_rest, by_first, by_heads, by_group,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr, SEES_A_KEY: gl.constexpr,
    RIGHT_BOUNDED: gl.constexpr, NEGATE: gl.constexpr, BLOCK_M: gl.constexpr, STAGE_KEYS: gl.constexpr,
    STAGES: gl.constexpr, USED_D: gl.constexpr, THROUGH_Q: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log.

    q, k, v, o, the rest of each and qk_scale as kernels/sm90/fwd.py has them; Sk >= 1. Rows that see no key: o = 0,
    lse = -inf. One program a tile: tiles of a head one after the other, or RIGHT_BOUNDED the last tiles of all heads first, as
    they are the longest. by_first, by_heads, by_group: divisors of a head's tiles, or of all heads, of a batch entry's heads,
    and of a group."""
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = product_layout(STAGE_KEYS, BLOCK_M)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(BLOCK_DV, BLOCK_M), 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    q, k = descriptors_of(q, q_rest), descriptors_of(k, k_rest)
    v, o = descriptors_of(v, v_rest), descriptors_of(o, o_rest)
    q_smem = shared_for(q, 1, BLOCK_M, BLOCK_D, REST_D)
    k_smem = shared_for(k, STAGES, STAGE_KEYS, BLOCK_D, REST_D)
    v_smem = shared_for(v, STAGES, STAGE_KEYS, BLOCK_DV, REST_DV)
    o_smem = first_parts(q_smem, o) if THROUGH_Q else shared_for(o, 1, BLOCK_M, BLOCK_DV, REST_DV)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
    fence_async_shared()
    tiles = gl.cdiv(seqlen_q, BLOCK_M)
    if RIGHT_BOUNDED:
        heads = gl.num_programs(0) // tiles
        rank = divide(gl.program_id(0), heads, (by_first,))
        head = gl.program_id(0) - rank * heads  # of all batch entries
        first = (tiles - 1 - rank) * BLOCK_M
    else:
        head = divide(gl.program_id(0), tiles, (by_first,))
        first = (gl.program_id(0) - head * tiles) * BLOCK_M
    b = divide(head, heads_q, (by_heads,))
    h = head - b * heads_q
    window, offset = (window_left, window_right), seqlen_k - seqlen_q
    below = BLOCKS_BELOW(first + BLOCK_M, seqlen_q, seqlen_k, window, STAGE_KEYS)
    ring = Ring(k, v, k_smem, v_smem, k_ready, v_ready, b, divide(h, group, (by_group,)), below)
    stages: gl.constexpr = Stages(
        BLOCK_M=BLOCK_M, KEYS=STAGE_KEYS, COUNT=STAGES, MASKED=RIGHT_BOUNDED, NEGATE=NEGATE, HIDE=HIDE
    )
    expect_both(q, k, k_ready.index(0))
    _load(k, k_smem, k_ready, ring, 0, stages)
    load_parts(q, b, h, first, k_ready.index(0), q_smem, 0)
    _load_next(v, v_smem, v_ready, ring, 0, stages)
    for i in gl.static_range(1, STAGES):
        if i < below:
            _load_next(k, k_smem, k_ready, ring, i, stages)
            _load_next(v, v_smem, v_ready, ring, i, stages)

    at = Rows(first + gl.arange(0, BLOCK_M, layout=row_s), offset, seqlen_k, window, qk_scale)
    n_masked = 1
    if RIGHT_BOUNDED:
        _begin, clear_end = CLEAR_BLOCKS(first, first + BLOCK_M, seqlen_q, seqlen_k, window, STAGE_KEYS)
        n_masked = gl.maximum(below - clear_end, 1)
    q_tile = used_of(tiles_in(q_smem, 0), USED_D)
    s = warpgroup_mma_wait(0, deps=[_issue_scores(q_tile, ring, 0, USED_D, stages)])
    if below > STAGES:
        thread_barrier()
        _load_next(k, k_smem, k_ready, ring, STAGES, stages)
    # ---- the last block, which may be ragged
    s = _scores(s, below - 1, at, True, stages)
    peak = gl.maximum(gl.max(s, 1) * qk_scale, LOWEST)
    weights = gl.exp2(gl.fma(s, qk_scale, -peak[:, None]))
    total = sum_parts(weights)
    p = gl.convert_layout(weights.to(dtype), p_layout)
    acc = zeros_for(v_smem, BLOCK_M)
    if RIGHT_BOUNDED:
        acc, total, peak, p = _over_keys(
            acc, total, peak, p, 1, n_masked, below, q_tile, ring, at, True, USED_D, stages
        )
    acc, total, peak, p = _over_keys(
        acc, total, peak, p, n_masked, below, below, q_tile, ring, at, False, USED_D, stages
    )
    acc = products_done(_add_values(p, acc, ring, below - 1, stages))
    # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
    row_total = gl.sum(total, 1)
    word = (peak + gl.log2(gl.convert_layout(row_total, row_s))) * LN2
    if RIGHT_BOUNDED:
        word = gl.where(SEES_A_KEY(at.rows, offset, seqlen_k, window), word, float("-inf"))
    gl.store(lse + head.to(gl.int64) * seqlen_q + at.rows, word, mask=at.rows < seqlen_q)
    found = quotients(acc, row_total)
    if RIGHT_BOUNDED:
        found = where_seen(found, first, offset, seqlen_k, window, SEES_A_KEY, False)
    put_parts(found, o, b, h, first, o_smem, 0)
    tma_store_wait(0)


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    tiles = problem.query_tiles(config["BLOCK_M"]) // problem.batch
    first = problem.batch * problem.heads_q if problem.mask.hooks.right else tiles
    return divisors(("by_first", "by_heads", "by_group"), first, problem.heads_q, problem.group)


VARIANT = Variant(
    role="fwd_multistage",
    kernel=fwd_hopper_multistage_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32", "q_rest": "", "k_rest": "", "v_rest": "", "o_rest": ""},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "k": ("STAGE_KEYS", "BLOCK_D"), "v": ("STAGE_KEYS", "BLOCK_DV"),
                 "o": ("BLOCK_M", "BLOCK_DV"),
                 "q_rest": ("BLOCK_M", "REST_D"), "k_rest": ("STAGE_KEYS", "REST_D"), "v_rest": ("STAGE_KEYS", "REST_DV"),
                 "o_rest": ("BLOCK_M", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "o_rest": "o"},
    grid=lambda problem, config, _sm_count, _early: space.programs(problem, config),
    constants=lambda spec, _config: {
        "NEGATE": spec.negate, **narrow_blocks(spec), "USED_D": used_columns(spec), "THROUGH_Q": o_fits_q(narrow_blocks(spec)),
    },
    used=lambda spec, _config: used_by(spec, narrow_blocks(spec), ("DV",)),
    scalars=_scalars,
    min_arch=90,
    max_arch=90,
)  # fmt: skip
