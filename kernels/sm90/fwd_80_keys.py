"""FlashAttention forward for Hopper in blocks of 80 keys, without a mask, for head dims in tiles of 256 columns.

A product of Q and K reads both from shared memory: in blocks of 64 keys as many bytes of Q as of K, and all that it has
bandwidth for, in blocks of 80 keys 90 % of it. Gluon's tiles are powers of two wide and high. So a chunk of K, 64 columns, is
loaded as 64 rows and 16 right behind them, and read as the first of 128 rows; the PTX of the product then names 80
(fa2tune/compiling/trimmed.py). Its result is parted where it is used: scores of 64 keys and of 16, two products for O.

Programs, groups, turns and the order of tiles are those of kernels/sm90/fwd.py. Maxima are "lazy", and O leaves through the
memory of Q."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import LOWEST
from fa2tune.kernels.lib.division import Divisors, divide, divide_with_rest, of_bands
from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    load_block,
    mbarrier,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_forward import (
    ROWS,
    Barriers,
    await_turn,
    quotients,
    shrunk,
    signal_next_turn,
    sum_parts,
    tile_of,
    turns_of,
)
from fa2tune.kernels.lib.hopper_parts import (
    expect_both,
    expect_parts,
    load_parts,
    product_layout,
    products_done,
    shared_for,
    store_parts,
    tiles_in,
    zeros_for,
)
from fa2tune.kernels.lib.hopper_units import UNIT, unit_as_block, unit_as_rows, units_for
from fa2tune.search_spaces.lib.hopper import narrow_blocks, used_by, used_columns
from fa2tune.search_spaces.sm90 import fwd_80_keys as space
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import Used, Variant

MAIN, TAIL, KEYS = gl.constexpr(space.MAIN), gl.constexpr(space.TAIL), gl.constexpr(space.KEYS)
CHUNK, STAGES = gl.constexpr(space.CHUNK), gl.constexpr(space.STAGES)
GROUPS = gl.constexpr(space.GROUPS)
REGISTERS = gl.constexpr(space.CONSUMER_REGISTERS)
PRODUCER_REGISTERS = gl.constexpr(space.PRODUCER_REGISTERS)
LN2 = gl.constexpr(0.6931471805599453)


class Memory(NamedTuple):
    """Shared memory; parts as ``shared_for`` has them."""

    q: tuple
    k: gl.shared_memory_descriptor  #: of each stage and chunk KEYS // UNIT units
    v: tuple  #: of a block's first keys
    v_tail: tuple  #: of the others


class Shape(NamedTuple):
    """What is compiled in."""

    BLOCK_M: gl.constexpr
    CHUNKS: gl.constexpr  #: of K's columns
    USED_D: gl.constexpr  #: of these, the first ones that are not all zeros
    PINGPONG: gl.constexpr
    NEGATE: gl.constexpr
    HIDE: gl.constexpr


class WholeCall(NamedTuple):
    """What a program has of the call."""

    heads_q: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    heads_per_wave: gl.tensor
    by: tuple  #: Divisors
    tiles: gl.tensor  #: of a head
    heads: gl.tensor  #: of all batch entries
    blocks: gl.tensor  #: of keys


@gluon.jit
def _load_k(k, k_tail, b, h, row, barrier, smem, stage, CHUNKS: gl.constexpr):
    mbarrier.expect(barrier, CHUNKS * (k.block_type.nbytes + k_tail.block_type.nbytes))
    for c in gl.static_range(CHUNKS):
        unit = (stage * CHUNKS + c) * (KEYS // UNIT)
        load_block(k, b, h, row, c * CHUNK, barrier, unit_as_block(smem.k, unit, k))
        load_block(k_tail, b, h, row + MAIN, c * CHUNK, barrier, unit_as_block(smem.k, unit + MAIN // UNIT, k_tail))


@gluon.jit
def _produce(q, k, k_tail, v, v_tail, smem, barriers, given, shape):
    """One warp: the tiles of Q, K and V, in the order in which the consumers want them."""
    done = 0  # key blocks of earlier tiles
    for turn in range(turns_of(given.tiles * given.heads, given.by)):
        start_m, head = tile_of(turn, given.tiles, given.heads, given.heads_per_wave, given.by, shape.BLOCK_M, False)
        b, h = divide_with_rest(head, given.heads_q, given.by.heads)
        h_kv = divide(h, given.group, given.by.group)
        for j in range(given.blocks):
            stage, round_ = (done + j) % STAGES, (done + j) // STAGES
            row = (given.blocks - 1 - j) * KEYS  # the last block, which may be ragged, comes first
            mbarrier.wait(barriers.k_empty.index(stage), (round_ & 1) ^ 1)
            _load_k(k, k_tail, b, h_kv, row, barriers.k_ready.index(stage), smem, stage, shape.CHUNKS)
            if j == 0:
                for c in gl.static_range(GROUPS):
                    mbarrier.wait(barriers.q_empty.index(c), (turn & 1) ^ 1)
                    expect_parts(q, barriers.q_ready.index(c))
                    load_parts(q, b, h, start_m + c * ROWS, barriers.q_ready.index(c), smem.q, c)
            mbarrier.wait(barriers.v_empty.index(stage), (round_ & 1) ^ 1)
            expect_both(v, v_tail, barriers.v_ready.index(stage))
            load_parts(v, b, h_kv, row, barriers.v_ready.index(stage), smem.v, stage)
            load_parts(v_tail, b, h_kv, row + MAIN, barriers.v_ready.index(stage), smem.v_tail, stage)
        done += given.blocks


@gluon.constexpr_function
def _pieces(used):
    """(chunk, first column in it, columns) of pieces of chunks that are powers of two wide, of the first ``used`` columns."""
    found, begin = [], 0
    while begin < used:
        width = min(space.CHUNK, 1 << ((used - begin).bit_length() - 1))
        found.append((begin // space.CHUNK, begin % space.CHUNK, width))
        begin += width
    return tuple(found)


@gluon.jit
def _issue_scores(q_tile, smem, barriers, entry, CONSUMER: gl.constexpr, shape):
    """Starts Q K^T [ROWS, 2 MAIN], its first KEYS columns, once K is there and, with PINGPONG, it is this group's turn."""
    stage = entry % STAGES
    mbarrier.wait(barriers.k_ready.index(stage), (entry // STAGES) & 1)
    if shape.PINGPONG:
        await_turn(CONSUMER)
    found = gl.zeros([ROWS, 2 * MAIN], gl.float32, product_layout(2 * MAIN))
    PIECES: gl.constexpr = _pieces(shape.USED_D)
    for i in gl.static_range(len(PIECES)):
        k_piece = unit_as_rows(smem.k, (stage * shape.CHUNKS + PIECES[i][0]) * (KEYS // UNIT), 2 * MAIN)
        if PIECES[i][2] != CHUNK:
            k_piece = k_piece.slice(PIECES[i][1], PIECES[i][2], 1)
        q_piece = q_tile.slice(PIECES[i][0] * CHUNK + PIECES[i][1], PIECES[i][2], 1)
        found = warpgroup_mma(q_piece, k_piece.permute((1, 0)), found, use_acc=i > 0, is_async=True)
    return found


@gluon.jit
def _left_of(x):
    """The left half of [R, N], and the right one."""
    R: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    left, right = gl.split(x.reshape([R, 2, N // 2]).permute((0, 2, 1)))
    return left, right


@gluon.jit
def _parted(s, shape):
    """Products [ROWS, 2 MAIN] -> scores of a block's first MAIN keys, and of the TAIL behind them."""
    if shape.NEGATE:
        s = -s
    main, behind = _left_of(s)
    for _ in gl.static_range(2):  # 64, 32, 16 columns
        behind, _right = _left_of(behind)
    return gl.convert_layout(main, product_layout(MAIN)), gl.convert_layout(behind, product_layout(TAIL))


@gluon.jit
def _max_parts(x):
    """x [R, N] -> [R, 4]: maxima of what each of the four threads of a row holds, as ``sum_parts`` has sums."""
    R: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.max(gl.max(x.reshape([R, N // 8, 4, 2]), 3), 1)


@gluon.jit
def _largest(main, tail):
    """[ROWS]: maxima of both, with one exchange between threads."""
    parts = _max_parts(main)
    parts = gl.maximum(parts, gl.convert_layout(_max_parts(tail), parts.type.layout))
    return gl.convert_layout(gl.max(parts, 1), gl.SliceLayout(1, product_layout(MAIN)))


@gluon.jit
def _weights(main, tail, peak, qk_scale):
    """(weights of both, their sums by ``sum_parts``)"""
    of_tail = gl.convert_layout(peak, gl.SliceLayout(1, product_layout(TAIL)))
    main = gl.exp2(gl.fma(main, qk_scale, -peak[:, None]))
    tail = gl.exp2(gl.fma(tail, qk_scale, -of_tail[:, None]))
    sums = sum_parts(main)
    return main, tail, sums + gl.convert_layout(sum_parts(tail), sums.type.layout)


@gluon.jit
def _add_values(p, acc, smem, barriers, entry):
    """acc + P V of a block, asynchronously: two products. p: of both pieces of the block."""
    stage = entry % STAGES
    mbarrier.wait(barriers.v_ready.index(stage), (entry // STAGES) & 1)
    found = warpgroup_mma(p[0], tiles_in(smem.v, stage)[0], acc[0], is_async=True)
    return (warpgroup_mma(p[1], tiles_in(smem.v_tail, stage)[0], found, is_async=True),)


@gluon.jit
def _rounded(main, tail, acc, dtype: gl.constexpr):
    """Weights as left factors of the products for O."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    return gl.convert_layout(main.to(dtype), layout), gl.convert_layout(tail.to(dtype), layout)


@gluon.jit
def _over_keys(acc, total, peak, p, done, q_tile, smem, barriers, qk_scale, blocks, CONSUMER: gl.constexpr, shape):
    """The key blocks but for the first one that is loaded: Q K^T of a block is in flight together with P V of the one before,
    whose P is carried."""
    for j in range(1, blocks):
        entry = done + j
        s_next = _issue_scores(q_tile, smem, barriers, entry, CONSUMER, shape)
        o_next = _add_values(p, acc, smem, barriers, entry - 1)
        if shape.PINGPONG:
            signal_next_turn(CONSUMER, GROUPS)
        s = warpgroup_mma_wait(2, deps=[s_next])
        mbarrier.arrive(barriers.k_empty.index(entry % STAGES), count=1)
        main, tail = _parted(s, shape)
        new_peak = gl.maximum(peak, _largest(main, tail) * qk_scale)
        new_peak = gl.where(new_peak - peak > 8.0, new_peak, peak)
        shrink = gl.exp2(peak - new_peak)
        main, tail, sums = _weights(main, tail, new_peak, qk_scale)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + sums
        peak = new_peak
        p = _rounded(main, tail, acc, q_tile.dtype)
        acc = products_done(o_next)
        mbarrier.arrive(barriers.v_empty.index((entry - 1) % STAGES), count=1)
        acc = shrunk(acc, shrink, True)
    return acc, total, peak, p


@gluon.jit
def _one_tile(done, start_m, head, turn, o, lse, smem, barriers, qk_scale, given, CONSUMER: gl.constexpr, shape):
    """This group's rows of a program's turn-th tile."""
    row_s: gl.constexpr = gl.SliceLayout(1, product_layout(MAIN))
    first = start_m + CONSUMER * ROWS
    rows = first + gl.arange(0, ROWS, layout=row_s)
    mbarrier.wait(barriers.q_ready.index(CONSUMER), turn & 1)
    q_tile = tiles_in(smem.q, CONSUMER)[0]
    s = _issue_scores(q_tile, smem, barriers, done, CONSUMER, shape)
    if shape.PINGPONG:
        signal_next_turn(CONSUMER, GROUPS)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(barriers.k_empty.index(done % STAGES), count=1)

    # ---- the last block, which may be ragged
    main, tail = _parted(s, shape)
    column = (given.blocks - 1) * KEYS
    of_tail = gl.convert_layout(rows, gl.SliceLayout(1, product_layout(TAIL)))
    main = shape.HIDE(main, rows, column, 0, given.seqlen_k, (0, 0), product_layout(MAIN))
    tail = shape.HIDE(tail, of_tail, column + MAIN, 0, given.seqlen_k, (0, 0), product_layout(TAIL))
    peak = gl.maximum(_largest(main, tail) * qk_scale, LOWEST)
    main, tail, total = _weights(main, tail, peak, qk_scale)
    acc = zeros_for(smem.v, ROWS)
    p = _rounded(main, tail, acc, q_tile.dtype)
    acc, total, peak, p = _over_keys(
        acc, total, peak, p, done, q_tile, smem, barriers, qk_scale, given.blocks, CONSUMER, shape
    )
    acc = products_done(_add_values(p, acc, smem, barriers, done + given.blocks - 1))
    mbarrier.arrive(barriers.v_empty.index((done + given.blocks - 1) % STAGES), count=1)

    # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it
    row_total = gl.sum(total, 1)
    word = (peak + gl.log2(gl.convert_layout(row_total, row_s))) * LN2
    gl.store(lse + head.to(gl.int64) * given.seqlen_q + rows, word, mask=rows < given.seqlen_q)
    b, h = divide_with_rest(head, given.heads_q, given.by.heads)
    store_parts(quotients(acc, row_total), o, b, h, first, smem.q, CONSUMER)
    tma_store_wait(0)
    mbarrier.arrive(barriers.q_empty.index(CONSUMER), count=1)


@gluon.jit
def _consume(o, lse, smem, barriers, qk_scale, given, CONSUMER: gl.constexpr, shape):
    """One consumer group: rows [CONSUMER * ROWS, (CONSUMER + 1) * ROWS) of every tile."""
    if shape.PINGPONG and CONSUMER == GROUPS - 1:
        signal_next_turn(CONSUMER, GROUPS)  # the first turn is group 0's
    for turn in range(turns_of(given.tiles * given.heads, given.by)):
        start_m, head = tile_of(turn, given.tiles, given.heads, given.heads_per_wave, given.by, shape.BLOCK_M, False)
        done = turn * given.blocks
        _one_tile(done, start_m, head, turn, o, lse, smem, barriers, qk_scale, given, CONSUMER, shape)
    if shape.PINGPONG and CONSUMER == 0:
        await_turn(CONSUMER)  # the last group has passed on once more than it was passed


@gluon.jit
def fwd_hopper_80_keys_kernel(
    q, k, v, o, lse, qk_scale, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE, k_tail, v_tail,
    by_band, by_width, by_rest, by_heads, by_group,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HIDE: gl.constexpr, BLOCK_M: gl.constexpr, PINGPONG: gl.constexpr,
    USED_D: gl.constexpr, NEGATE: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log.

    q, v, o: descriptors of blocks [1, 1, rows, columns]; k: of CHUNK columns; k_tail, v_tail: of the same columns and TAIL
    rows. qk_scale is |softmax_scale| * log2(e), and not 0. Sk >= 1. Any number of programs up to that of tiles. by_band, ...,
    by_group: those of ``Divisors``."""
    CHUNKS: gl.constexpr = BLOCK_D // CHUNK
    q, o, v, v_tail = (q,), (o,), (v,), (v_tail,)
    q_smem = shared_for(q, GROUPS, ROWS, BLOCK_D, 0)
    k_smem = units_for(k.dtype, STAGES * CHUNKS * (KEYS // UNIT), CHUNK)
    v_smem = shared_for(v, STAGES, MAIN, BLOCK_DV, 0)
    v_tail_smem = shared_for(v_tail, STAGES, TAIL, BLOCK_DV, 0)
    q_ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    by = Divisors((by_band,), (by_width,), (by_rest,), (by_heads,), (by_group,))
    given = WholeCall(
        heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE, by, gl.cdiv(seqlen_q, BLOCK_M), batch * heads_q,
        gl.cdiv(seqlen_k, KEYS),
    )  # fmt: skip
    smem = Memory(q_smem, k_smem, v_smem, v_tail_smem)
    barriers = Barriers(q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    shape: gl.constexpr = Shape(
        BLOCK_M=BLOCK_M, CHUNKS=CHUNKS, USED_D=USED_D, PINGPONG=PINGPONG, NEGATE=NEGATE, HIDE=HIDE
    )
    gl.warp_specialize([
        (_consume, (o, lse, smem, barriers, qk_scale, given, 0, shape)),
        (_consume, (o, lse, smem, barriers, qk_scale, given, 1, shape)),
        (_produce, (q, k, k_tail, v, v_tail, smem, barriers, given, shape)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    band = 1  # without a mask tiles of a head are of one length: heads one by one keep K and V in L2
    tiles = problem.query_tiles(config["BLOCK_M"]) // problem.batch
    return {"HEADS_PER_WAVE": band, **of_bands(tiles, band, problem.batch, problem.heads_q, problem.group)}


def _used(spec: Specialization, _config: Config) -> Used:
    return used_by(spec, narrow_blocks(spec), ("DV",))._replace(rows={2 * space.MAIN: space.KEYS})


VARIANT = Variant(
    role="fwd_80_keys",
    kernel=fwd_hopper_80_keys_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32", "k_tail": "", "v_tail": ""},
    descriptors={"q": (space.ROWS, "BLOCK_D"), "k": (space.MAIN, space.CHUNK), "v": (space.MAIN, "BLOCK_DV"),
                 "o": (space.ROWS, "BLOCK_DV"), "k_tail": (space.TAIL, space.CHUNK), "v_tail": (space.TAIL, "BLOCK_DV")},
    rest_of={"k_tail": "k", "v_tail": "v"},
    grid=lambda problem, config, sm_count, _early: min(
        problem.query_tiles(config["BLOCK_M"]) * problem.heads_q, sm_count
    ),
    constants=lambda spec, _config: {"NEGATE": spec.negate, **narrow_blocks(spec), "USED_D": used_columns(spec)},
    used=_used,
    scalars=_scalars,
    min_arch=90,
    max_arch=90,
)  # fmt: skip
