"""The scores of a block of keys, which are one tile or two: 96 keys are a tile of 64 and one of 32, since tiles are powers of
two wide. Both share a row's maximum and total. Device side.

What has a block's keys (scores, weights, P) is a tile [ROWS, BLOCK_N], or of two tiles a tuple. With one tile all of this
inlines to what it is without."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import warpgroup_mma, warpgroup_mma_wait
from fa2tune.kernels.lib.hopper_forward import ROWS, of_carried, repack, sum_parts, to_carry
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    first_keys,
    more_keys,
    of_first_keys,
    product_layout,
    product_of_rows,
    tiles_in,
)


@gluon.constexpr_function
def score_layout(keys):
    """Of the first tile of scores; rows' maxima are in a slice of it."""
    return product_layout(1 << (keys.bit_length() - 1))


@gluon.constexpr_function
def left_layout(columns):
    """Of P, as the left factor of a product with so many columns of V."""
    return gl.DotOperandLayout(0, product_layout(columns), 2)


@gluon.jit
def products_of_keys(q_tile, k_smem, stage, KEYS: gl.constexpr):
    """Starts Q K^T of a block."""
    first = of_first_keys(k_smem, KEYS)
    FIRST: gl.constexpr = first_keys(KEYS)
    k_tile = tiles_in(first, stage)
    found = product_of_rows(q_tile, k_tile, gl.zeros([ROWS, FIRST], gl.float32, product_layout(FIRST)))
    if more_keys(KEYS) > 0:
        MORE: gl.constexpr = more_keys(KEYS)
        start = gl.zeros([ROWS, MORE], gl.float32, product_layout(MORE))
        found = (found, product_of_rows(q_tile, tiles_in(k_smem[1], stage), start))
    return found


@gluon.jit
def scores_done(s, BEHIND: gl.constexpr, KEYS: gl.constexpr):
    """Waits for a block's scores, behind which P V of one tile of keys is BEHIND products, of each."""
    if more_keys(KEYS) > 0:
        first, more = warpgroup_mma_wait(2 * BEHIND, deps=[s[0], s[1]])
        found = (first, more)
    else:
        found = warpgroup_mma_wait(BEHIND, deps=[s])
    return found


@gluon.jit
def _add_more(p, v, under_way):
    """``add_products`` to sums that products under way will make."""
    found = (warpgroup_mma(p, v[0], under_way[0], is_async=True),)
    if len(v) > 1:
        again = gl.convert_layout(p, left_layout(v[1].shape[-1]), assert_trivial=True)
        found = (found[0], warpgroup_mma(again, v[1], under_way[1], is_async=True))
    return found


@gluon.jit
def add_keys(p, v_smem, stage, acc, dtype: gl.constexpr, KEYS: gl.constexpr):
    """Starts acc + P V of a block, as ``add_products`` does."""
    first = of_first_keys(v_smem, KEYS)
    layout: gl.constexpr = left_layout(first[0].shape[-1])
    if more_keys(KEYS) > 0:
        found = add_products(p[0], tiles_in(first, stage), acc)
        found = _add_more(p[1], tiles_in(v_smem[1], stage), found)
    else:
        found = add_products(of_carried(p, dtype, layout), tiles_in(first, stage), acc)
    return found


@gluon.jit
def negated(s, KEYS: gl.constexpr):
    """-s."""
    found = -of_first_keys(s, KEYS)
    if more_keys(KEYS) > 0:
        found = (found, -s[1])
    return found


@gluon.jit
def hidden(s, rows, column, offset, seqlen_k, window, HIDE: gl.constexpr, KEYS: gl.constexpr):
    """Scores of keys from ``column`` on, -inf where a row does not see the key. ``rows`` in a slice of ``score_layout``."""
    if more_keys(KEYS) > 0:
        layout: gl.constexpr = product_layout(more_keys(KEYS))
        again = gl.convert_layout(rows, gl.SliceLayout(1, layout), assert_trivial=True)
        first = HIDE(s[0], rows, column, offset, seqlen_k, window, score_layout(KEYS))
        found = (first, HIDE(s[1], again, column + first_keys(KEYS), offset, seqlen_k, window, layout))
    else:
        found = HIDE(s, rows, column, offset, seqlen_k, window, score_layout(KEYS))
    return found


@gluon.jit
def _largest_parts(x):
    """x [R, N] -> [R, 4], as ``sum_parts``."""
    R: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.max(gl.max(x.reshape([R, N // 8, 4, 2]), 3), 1)


@gluon.jit
def row_maxima(s, KEYS: gl.constexpr):
    """[ROWS] in a slice of ``score_layout``. Of two tiles threads compare what they hold of both before they exchange it."""
    if more_keys(KEYS) > 0:
        first, more = _largest_parts(s[0]), _largest_parts(s[1])
        both = gl.maximum(first, gl.convert_layout(more, first.type.layout, assert_trivial=True))
        found = gl.convert_layout(gl.max(both, 1), gl.SliceLayout(1, score_layout(KEYS)), assert_trivial=True)
    else:
        found = gl.max(s, 1)
    return found


@gluon.jit
def weights_of(s, qk_scale, peak, KEYS: gl.constexpr):
    """2^(s * qk_scale - peak)."""
    if more_keys(KEYS) > 0:
        layout: gl.constexpr = gl.SliceLayout(1, product_layout(more_keys(KEYS)))
        again = gl.convert_layout(peak, layout, assert_trivial=True)
        first = gl.exp2(gl.fma(s[0], qk_scale, -peak[:, None]))
        found = (first, gl.exp2(gl.fma(s[1], qk_scale, -again[:, None])))
    else:
        found = gl.exp2(gl.fma(s, qk_scale, -peak[:, None]))
    return found


@gluon.jit
def sums_of(weights, KEYS: gl.constexpr):
    """``sum_parts`` of all tiles."""
    if more_keys(KEYS) > 0:
        found = sum_parts(weights[0])
        found += gl.convert_layout(sum_parts(weights[1]), found.type.layout, assert_trivial=True)
    else:
        found = sum_parts(weights)
    return found


@gluon.jit
def keys_to_carry(weights, dtype: gl.constexpr, layout: gl.constexpr, AS_WORDS: gl.constexpr, KEYS: gl.constexpr):
    """``to_carry`` of all tiles. Two are never carried as words."""
    if more_keys(KEYS) > 0:
        found = (to_carry(weights[0], dtype, layout, False), to_carry(weights[1], dtype, layout, False))
    else:
        found = to_carry(weights, dtype, layout, AS_WORDS)
    return found


@gluon.jit
def repacked(p, WORDS: gl.constexpr, KEYS: gl.constexpr):
    """``repack`` of all tiles."""
    found = repack(of_first_keys(p, KEYS), WORDS)
    if more_keys(KEYS) > 0:
        found = (found, repack(p[1], WORDS))
    return found
