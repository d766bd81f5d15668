"""Forward of few keys for Hopper: one tile has all keys of a key head. A program loads K and V once, at its start, and needs no
running maximum.

A program has 64 or 128 query rows of one head, 16 a warp. Its warps load for themselves: with one product of scores and one of
values there is nothing to do ahead, and no warp to start for it. K and V have a barrier each: scores are multiplied while V
comes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import LOWEST
from fa2tune.kernels.lib.division import divide, divisors
from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    mbarrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_forward import quotients, sum_parts, where_seen
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
from fa2tune.search_spaces.sm90 import fwd_one_tile as space
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def fwd_hopper_one_tile_kernel(
    q, k, v, o, lse, qk_scale, heads_q, group, seqlen_q, seqlen_k, window_left, window_right,
    score_first, score_second, q_rest, k_rest, v_rest, o_rest, by_tiles, by_heads, by_group,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    HIDE: gl.constexpr, SEES_A_KEY: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr,
    NEGATE: gl.constexpr, APPLY: gl.constexpr, BLOCK_M: gl.constexpr, KEYS: gl.constexpr, USED_D: gl.constexpr,
    THROUGH_Q: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log.
    1 <= Sk <= KEYS.

    q, k, v, o, the rest of each and qk_scale as kernels/sm90/fwd.py has them. Rows that see no key: o = 0, lse = -inf. One
    program a tile. by_tiles, by_heads, by_group: divisors of a head's tiles, a batch entry's heads and a group."""
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = product_layout(KEYS, BLOCK_M)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(BLOCK_DV, BLOCK_M), 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    q, k = descriptors_of(q, q_rest), descriptors_of(k, k_rest)
    v, o = descriptors_of(v, v_rest), descriptors_of(o, o_rest)
    q_smem = shared_for(q, 1, BLOCK_M, BLOCK_D, REST_D)
    k_smem = shared_for(k, 1, KEYS, BLOCK_D, REST_D)
    v_smem = shared_for(v, 1, KEYS, BLOCK_DV, REST_DV)
    o_smem = first_parts(q_smem, o) if THROUGH_Q else shared_for(o, 1, BLOCK_M, BLOCK_DV, REST_DV)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    fence_async_shared()
    tiles = gl.cdiv(seqlen_q, BLOCK_M)
    head = divide(gl.program_id(0), tiles, (by_tiles,))  # of all batch entries
    first = (gl.program_id(0) - head * tiles) * BLOCK_M
    b = divide(head, heads_q, (by_heads,))
    h = head - b * heads_q
    h_kv = divide(h, group, (by_group,))
    expect_both(q, k, ready.index(0))
    load_parts(k, b, h_kv, 0, ready.index(0), k_smem, 0)
    load_parts(q, b, h, first, ready.index(0), q_smem, 0)
    expect_parts(v, ready.index(1))
    load_parts(v, b, h_kv, 0, ready.index(1), v_smem, 0)

    rows = first + gl.arange(0, BLOCK_M, layout=row_s)
    window, offset = (window_left, window_right), seqlen_k - seqlen_q
    q_tile, k_tile = used_of(tiles_in(q_smem, 0), USED_D), used_of(tiles_in(k_smem, 0), USED_D)
    mbarrier.wait(ready.index(0), 0)
    s = product_of_rows(q_tile, k_tile, gl.zeros([BLOCK_M, KEYS], gl.float32, s_layout))
    s = warpgroup_mma_wait(0, deps=[s])
    if NEGATE:
        s = -s
    columns = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
    # vanishes without a score term
    s = APPLY(s, (score_first, score_second), rows[:, None], columns[None, :], offset, b, h)
    s = HIDE(s, rows, 0, offset, seqlen_k, window, s_layout)
    peak = gl.maximum(gl.max(s, 1) * qk_scale, LOWEST)
    weights = gl.exp2(gl.fma(s, qk_scale, -peak[:, None]))
    total = sum_parts(weights)
    p = gl.convert_layout(weights.to(dtype), p_layout)
    mbarrier.wait(ready.index(1), 0)
    acc = add_products(p, tiles_in(v_smem, 0), zeros_for(v_smem, BLOCK_M))
    # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
    row_total = gl.sum(total, 1)
    word = (peak + gl.log2(gl.convert_layout(row_total, row_s))) * LN2
    if LEFT_BOUNDED or RIGHT_BOUNDED:
        word = gl.where(SEES_A_KEY(rows, offset, seqlen_k, window), word, float("-inf"))
    gl.store(lse + head.to(gl.int64) * seqlen_q + rows, word, mask=rows < seqlen_q)
    found = quotients(products_done(acc), row_total)
    if LEFT_BOUNDED or RIGHT_BOUNDED:
        found = where_seen(found, first, offset, seqlen_k, window, SEES_A_KEY, False)
    put_parts(found, o, b, h, first, o_smem, 0)
    tma_store_wait(0)


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    tiles = problem.query_tiles(config["BLOCK_M"]) // problem.batch
    return divisors(("by_tiles", "by_heads", "by_group"), tiles, problem.heads_q, problem.group)


VARIANT = Variant(
    role="fwd_one_tile",
    kernel=fwd_hopper_one_tile_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32", "q_rest": "", "k_rest": "", "v_rest": "", "o_rest": ""},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "k": ("KEYS", "BLOCK_D"), "v": ("KEYS", "BLOCK_DV"),
                 "o": ("BLOCK_M", "BLOCK_DV"),
                 "q_rest": ("BLOCK_M", "REST_D"), "k_rest": ("KEYS", "REST_D"), "v_rest": ("KEYS", "REST_DV"),
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
