"""FlashAttention forward for Hopper: one warp feeds K and V by TMA, groups of four warps multiply and exponentiate."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.hopper import (
    fence_async_shared,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fa2tune.problem import Config, Problem
from fa2tune.search_spaces.fwd_hopper import REGISTERS, SPACE, o_columns
from fa2tune.variant import Variant

LN2 = gl.constexpr(0.6931471805599453)
#: Start of the running row maximum, as in kernels/common.py.
LOWEST = gl.constexpr(-3.0e38)


@gluon.jit
def _turns(tiles):
    """How many of the tiles this program takes: one of every round of as many tiles as there are programs."""
    programs = gl.num_programs(0)
    rounds = tiles // programs
    return rounds + (_lane(rounds) < tiles - rounds * programs).to(gl.int32)


@gluon.jit
def _lane(turn):
    """This program's place in a round. Every other round runs backwards, which evens out tiles that get shorter and shorter."""
    return gl.where(turn % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def _tile(turn, tiles, heads_q, heads, heads_per_wave, BLOCK_M: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """(first row, batch entry, query head) of this program's turn-th tile, of ``tiles`` a head. Order as in tile_and_head of
    kernels/common.py."""
    index = turn * gl.num_programs(0) + _lane(turn)
    band = index // (tiles * heads_per_wave)
    first = band * heads_per_wave
    width = gl.minimum(heads - first, heads_per_wave)  # the last band may be narrower
    inside = index - band * (tiles * heads_per_wave)
    tile = inside // width
    head = first + inside % width
    if IS_CAUSAL:
        tile = tiles - 1 - tile  # longest first
    return tile * BLOCK_M, head // heads_q, head % heads_q


@gluon.jit
def _heads_per_wave(tiles, heads, IS_CAUSAL: gl.constexpr):
    """A band that suits the length: heads one by one, so that their K and V stay in L2; all at once where rounds of long
    causal heads would not even out (docs/hopper.md)."""
    if IS_CAUSAL:
        return gl.where(tiles * 4 > gl.num_programs(0), heads, 1)
    else:
        return 1


@gluon.jit
def _blocks(rows_end, seqlen_q, seqlen_k, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """How many key blocks the rows below rows_end see; at least one, so that blind rows need no road of their own."""
    end = seqlen_k
    if IS_CAUSAL:
        end = gl.maximum(gl.minimum(rows_end + seqlen_k - seqlen_q, seqlen_k), 1)
    return gl.cdiv(end, BLOCK_N)


@gluon.jit
def _load_q(
    q, b, h, start_m, turn, q_smem, q_ready, q_empty, FIRST: gl.constexpr, LAST: gl.constexpr, ROWS: gl.constexpr,
    GROUPS: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Q of the consumer groups [FIRST, LAST)."""
    for c in gl.static_range(FIRST, LAST):
        slot = (turn % Q_STAGES) * GROUPS + c
        mbarrier.wait(q_empty.index(slot), ((turn // Q_STAGES) & 1) ^ 1)
        mbarrier.expect(q_ready.index(slot), q.block_type.nbytes)
        tma_load(q, [b, h, start_m + c * ROWS, 0], q_ready.index(slot), q_smem.index(slot))


@gluon.jit
def _produce(
    q, k, v, q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: the tiles of Q, K and V, in the order in which the consumers want them."""
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    tiles = gl.cdiv(seqlen_q, BLOCK_M)
    heads = batch * heads_q
    done = 0  # key blocks of earlier tiles
    for turn in range(_turns(tiles * heads)):
        start_m, b, h = _tile(turn, tiles, heads_q, heads, HEADS_PER_WAVE, BLOCK_M, IS_CAUSAL)
        h_kv = h // group
        n_blocks = _blocks(start_m + BLOCK_M, seqlen_q, seqlen_k, BLOCK_N, IS_CAUSAL)
        if Q_STAGES > 1:
            _load_q(q, b, h, start_m, turn, q_smem, q_ready, q_empty, 0, 1, ROWS, GROUPS, Q_STAGES)
        for j in range(n_blocks):
            stage = (done + j) % STAGES
            phase = ((done + j) // STAGES) & 1
            row = (n_blocks - 1 - j) * BLOCK_N  # the last block, the one under the mask, comes first
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_ready.index(stage), k.block_type.nbytes)
            tma_load(k, [b, h_kv, row, 0], k_ready.index(stage), k_smem.index(stage))
            if j == 0:
                FIRST: gl.constexpr = 1 if Q_STAGES > 1 else 0
                _load_q(q, b, h, start_m, turn, q_smem, q_ready, q_empty, FIRST, GROUPS, ROWS, GROUPS, Q_STAGES)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_ready.index(stage), v.block_type.nbytes)
            tma_load(v, [b, h_kv, row, 0], v_ready.index(stage), v_smem.index(stage))
        done += n_blocks


@gluon.jit
def _pass_by(
    turn, done, alive, tiles, heads_q, heads, HEADS_PER_WAVE, seqlen_q, seqlen_k, k_ready, k_empty, v_ready, v_empty, pass_on,
    CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    PINGPONG: gl.constexpr,
):  # fmt: skip
    """Lets go by the key blocks of a causal tile that only later groups see. Returns how many are done then."""
    start_m, _, _ = _tile(turn, tiles, heads_q, heads, HEADS_PER_WAVE, BLOCK_M, True)
    n_all = _blocks(start_m + BLOCK_M, seqlen_q, seqlen_k, BLOCK_N, True)
    n_mine = _blocks(start_m + (CONSUMER + 1) * (BLOCK_M // GROUPS), seqlen_q, seqlen_k, BLOCK_N, True)
    unseen = gl.where(alive, n_all - n_mine, 0)
    for j in range(unseen):
        stage = (done + j) % STAGES
        phase = ((done + j) // STAGES) & 1
        mbarrier.wait(k_ready.index(stage), phase)
        if PINGPONG:
            mbarrier.wait(pass_on.index(CONSUMER), ((done + j) & 1) ^ (1 if CONSUMER == 0 else 0))
            mbarrier.arrive(pass_on.index((CONSUMER + 1) % GROUPS), count=1)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_ready.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
    return done + unseen


@gluon.jit
def _masked(
    s, rows, column, offset, seqlen_k, NEGATE: gl.constexpr, MASK: gl.constexpr, IS_CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scores [ROWS, BLOCK_N] of keys from column on, -inf where a row does not see the key."""
    if NEGATE:
        s = -s
    if MASK:
        columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        if IS_CAUSAL:  # one comparison a score: the last key that a row sees
            last = gl.minimum(rows + offset, seqlen_k - 1) - column
            s = gl.where(columns[None, :] <= last[:, None], s, float("-inf"))
        else:
            s = gl.where((columns < seqlen_k - column)[None, :], s, float("-inf"))
    return s


@gluon.jit
def _sum_parts(x):
    """x [R, N] -> [R, 4]: sums of what each of the four threads of a row holds, so no exchange between threads."""
    R: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.sum(gl.sum(x.reshape([R, N // 8, 4, 2]), 3), 1)


@gluon.jit
def _repack(p):
    """p unchanged. Values carried from one loop to the next fall apart into halves that every iteration puts together again."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2)


@gluon.jit
def _pinned(x):
    """x unchanged, but what follows from it is not computed before this point."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def _issue_scores(
    q_tile, k_smem, k_ready, pass_on, entry, pred, CONSUMER: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Starts Q K^T [ROWS, BLOCK_N] of a ring entry, once it is there and, with PINGPONG, it is this group's turn. Without
    pred it waits for nothing and multiplies what lies there."""
    stage = entry % STAGES
    mbarrier.wait(k_ready.index(stage), (entry // STAGES) & 1, pred=pred)
    if PINGPONG:
        mbarrier.wait(pass_on.index(CONSUMER), (entry & 1) ^ (1 if CONSUMER == 0 else 0), pred=pred)
    k_tile = k_smem.index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))  # [D, N]
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)


@gluon.jit
def _over_keys(
    acc, total, peak, shrink, p, begin, end, done, n_blocks, q_tile, k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
    pass_on, rows, offset, seqlen_k, qk_scale,
    CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr, RESCALE: gl.constexpr,
    NEGATE: gl.constexpr, IS_CAUSAL: gl.constexpr, MASK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Key blocks [begin, end), counted from the last one: Q K^T of block j is in flight together with P V of block j - 1."""
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    dtype: gl.constexpr = v_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    for j in range(begin, end):
        stage = (done + j) % STAGES
        v_stage = (done + j - 1) % STAGES
        v_phase = ((done + j - 1) // STAGES) & 1
        s_next = _issue_scores(
            q_tile, k_smem, k_ready, pass_on, done + j, True, CONSUMER, ROWS, BLOCK_N, BLOCK_D, STAGES, PINGPONG, s_layout,
        )  # fmt: skip
        mbarrier.wait(v_ready.index(v_stage), v_phase)
        if RESCALE == "late":
            acc = acc * gl.convert_layout(_pinned(shrink), row_o)[:, None]
        o_next = warpgroup_mma(p, v_smem.index(v_stage).reshape([BLOCK_N, BLOCK_DV]), acc, is_async=True)
        if PINGPONG:
            mbarrier.arrive(pass_on.index((CONSUMER + 1) % GROUPS), count=1)
        s = warpgroup_mma_wait(1, deps=[s_next])
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = _masked(s, rows, (n_blocks - 1 - j) * BLOCK_N, offset, seqlen_k, NEGATE, MASK, IS_CAUSAL, BLOCK_N, s_layout)
        new_peak = gl.maximum(peak, gl.max(s, 1) * qk_scale)
        if RESCALE == "lazy":
            new_peak = gl.where(new_peak - peak > 8.0, new_peak, peak)
        shrink = gl.exp2(peak - new_peak)
        weights = gl.exp2(gl.fma(s, qk_scale, -new_peak[:, None]))
        if RESCALE == "lazy":
            moved = gl.max((new_peak != peak).to(gl.int32), 0)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + _sum_parts(weights)
        peak = new_peak
        next_p = gl.convert_layout(weights.to(dtype), p_layout)
        acc = warpgroup_mma_wait(0, deps=[o_next])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        if RESCALE == "now":
            acc = acc * gl.convert_layout(shrink, row_o)[:, None]
        elif RESCALE == "lazy":
            if moved != 0:
                acc = acc * gl.convert_layout(shrink, row_o)[:, None]
        p = next_p
    return acc, total, peak, shrink, p


@gluon.jit
def _consume(
    o, lse, q_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, pass_on, qk_scale,
    batch, heads_q, seqlen_q, seqlen_k, HEADS_PER_WAVE,
    CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    O_COLUMNS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    RESCALE: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, O_THROUGH: gl.constexpr, NEGATE: gl.constexpr,
    IS_CAUSAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One consumer group: rows [CONSUMER * ROWS, (CONSUMER + 1) * ROWS) of every tile."""
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    tiles = gl.cdiv(seqlen_q, BLOCK_M)
    heads = batch * heads_q
    offset = seqlen_k - seqlen_q  # bottom-right: row i sees keys up to i + offset
    turns = _turns(tiles * heads)
    done = 0  # key blocks of earlier tiles
    if Q_STAGES > 1:  # the scores of a tile's first block are computed while the tile before it ends
        if IS_CAUSAL:
            done = _pass_by(
                0, done, True, tiles, heads_q, heads, HEADS_PER_WAVE, seqlen_q, seqlen_k, k_ready, k_empty, v_ready, v_empty,
                pass_on, CONSUMER, BLOCK_M, BLOCK_N, GROUPS, STAGES, PINGPONG,
            )  # fmt: skip
        mbarrier.wait(q_ready.index(CONSUMER), 0)
        s = _issue_scores(
            q_smem.index(CONSUMER).reshape([ROWS, BLOCK_D]), k_smem, k_ready, pass_on, done, True,
            CONSUMER, ROWS, BLOCK_N, BLOCK_D, STAGES, PINGPONG, s_layout,
        )  # fmt: skip
        if PINGPONG:
            mbarrier.arrive(pass_on.index((CONSUMER + 1) % GROUPS), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(done % STAGES), count=1)
    for turn in range(turns):
        start_m, b, h = _tile(turn, tiles, heads_q, heads, HEADS_PER_WAVE, BLOCK_M, IS_CAUSAL)
        first = start_m + CONSUMER * ROWS
        rows = first + gl.arange(0, ROWS, layout=row_s)
        n_blocks = _blocks(first + ROWS, seqlen_q, seqlen_k, BLOCK_N, IS_CAUSAL)
        n_masked = 1
        if IS_CAUSAL:
            n_full = gl.minimum(seqlen_k, gl.maximum(first + 1 + offset, 0)) // BLOCK_N
            n_masked = gl.maximum(n_blocks - n_full, 1)
        q_slot = (turn % Q_STAGES) * GROUPS + CONSUMER
        q_shared = q_smem.index(q_slot).reshape([ROWS, BLOCK_D])
        if Q_STAGES == 1:
            if IS_CAUSAL:
                done = _pass_by(
                    turn, done, True, tiles, heads_q, heads, HEADS_PER_WAVE, seqlen_q, seqlen_k, k_ready, k_empty, v_ready,
                    v_empty, pass_on, CONSUMER, BLOCK_M, BLOCK_N, GROUPS, STAGES, PINGPONG,
                )  # fmt: skip
            mbarrier.wait(q_ready.index(q_slot), turn & 1)
        q_tile = q_shared.load(gl.DotOperandLayout(0, s_layout, 2)) if Q_IN_REGISTERS else q_shared
        if Q_STAGES == 1:
            s = _issue_scores(
                q_tile, k_smem, k_ready, pass_on, done, True, CONSUMER, ROWS, BLOCK_N, BLOCK_D, STAGES, PINGPONG, s_layout,
            )  # fmt: skip
            if PINGPONG:
                mbarrier.arrive(pass_on.index((CONSUMER + 1) % GROUPS), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(done % STAGES), count=1)

        # ---- the last block, which may be ragged
        s = _masked(s, rows, (n_blocks - 1) * BLOCK_N, offset, seqlen_k, NEGATE, True, IS_CAUSAL, BLOCK_N, s_layout)
        peak = gl.maximum(gl.max(s, 1) * qk_scale, LOWEST)
        weights = gl.exp2(gl.fma(s, qk_scale, -peak[:, None]))
        total = _sum_parts(weights)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, o_layout)
        shrink = gl.exp2(peak - peak)  # 1
        if IS_CAUSAL:
            acc, total, peak, shrink, p = _over_keys(
                acc, total, peak, shrink, p, 1, n_masked, done, n_blocks, q_tile, k_smem, v_smem, k_ready, k_empty, v_ready,
                v_empty, pass_on, rows, offset, seqlen_k, qk_scale, CONSUMER, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, GROUPS,
                STAGES, PINGPONG, RESCALE, NEGATE, IS_CAUSAL, True, num_warps,
            )  # fmt: skip
        p = _repack(p)
        acc, total, peak, shrink, p = _over_keys(
            acc, total, peak, shrink, p, n_masked, n_blocks, done, n_blocks, q_tile, k_smem, v_smem, k_ready, k_empty, v_ready,
            v_empty, pass_on, rows, offset, seqlen_k, qk_scale, CONSUMER, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, GROUPS,
            STAGES, PINGPONG, RESCALE, NEGATE, IS_CAUSAL, False, num_warps,
        )  # fmt: skip
        if O_THROUGH != "q":
            mbarrier.arrive(q_empty.index(q_slot), count=1)

        # ---- the last P V, and Q K^T of the next tile's first block
        done += n_blocks
        v_stage = (done - 1) % STAGES
        v_phase = ((done - 1) // STAGES) & 1
        if Q_STAGES > 1:
            more = turn + 1 < turns
            if IS_CAUSAL:
                done = _pass_by(
                    turn + 1, done, more, tiles, heads_q, heads, HEADS_PER_WAVE, seqlen_q, seqlen_k, k_ready, k_empty, v_ready,
                    v_empty, pass_on, CONSUMER, BLOCK_M, BLOCK_N, GROUPS, STAGES, PINGPONG,
                )  # fmt: skip
            q_slot = ((turn + 1) % Q_STAGES) * GROUPS + CONSUMER
            mbarrier.wait(q_ready.index(q_slot), ((turn + 1) // Q_STAGES) & 1, pred=more)
            s_next = _issue_scores(
                q_smem.index(q_slot).reshape([ROWS, BLOCK_D]), k_smem, k_ready, pass_on, done, more,
                CONSUMER, ROWS, BLOCK_N, BLOCK_D, STAGES, PINGPONG, s_layout,
            )  # fmt: skip
        mbarrier.wait(v_ready.index(v_stage), v_phase)
        if RESCALE == "late":
            acc = acc * gl.convert_layout(_pinned(shrink), row_o)[:, None]
        acc = warpgroup_mma(p, v_smem.index(v_stage).reshape([BLOCK_N, BLOCK_DV]), acc, is_async=True)
        if Q_STAGES > 1:
            if PINGPONG:
                mbarrier.arrive(pass_on.index((CONSUMER + 1) % GROUPS), count=1, pred=more)
            s = warpgroup_mma_wait(1, deps=[s_next])
            mbarrier.arrive(k_empty.index(done % STAGES), count=1, pred=more)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage), count=1)

        # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
        row_total = gl.sum(total, 1)
        word = (peak + gl.log2(gl.convert_layout(row_total, row_s))) * LN2
        out = acc * (1.0 / gl.convert_layout(row_total, row_o))[:, None]
        if IS_CAUSAL:
            word = gl.where(rows + offset >= 0, word, float("-inf"))
            rows_o = first + gl.arange(0, ROWS, layout=row_o)
            out = gl.where((rows_o + offset >= 0)[:, None], out, 0.0)
        head_lse = lse + (b.to(gl.int64) * heads_q + h) * seqlen_q
        gl.store(head_lse + rows, word, mask=rows < seqlen_q)
        o_slot = o_smem.index(CONSUMER)
        tma_store_wait(0)  # the last tile's O has left its place
        if O_THROUGH == "halves":
            left, right = gl.split(out.to(dtype).reshape([ROWS, 2, O_COLUMNS]).permute((0, 2, 1)))
            o_slot.reshape([ROWS, O_COLUMNS]).store(left)
            fence_async_shared()
            tma_store(o, [b, h, first, 0], o_slot)
            tma_store_wait(0)
            o_slot.reshape([ROWS, O_COLUMNS]).store(right)
            fence_async_shared()
            tma_store(o, [b, h, first, O_COLUMNS], o_slot)
        else:
            o_slot.reshape([ROWS, BLOCK_DV]).store(out.to(dtype))
            fence_async_shared()
            tma_store(o, [b, h, first, 0], o_slot)
        if O_THROUGH == "q":
            tma_store_wait(0)
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)
    tma_store_wait(0)


@gluon.jit
def fwd_hopper_kernel(
    q, k, v, o, lse, qk_scale, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, IS_CAUSAL: gl.constexpr, NEGATE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, RESCALE: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
    O_THROUGH: gl.constexpr, O_COLUMNS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log.

    q, k, v, o: descriptors of blocks [1, 1, rows, columns]. qk_scale is |softmax_scale| * log2(e), and not 0. Sk >= 1. Rows
    that see no key: o = 0, lse = -inf. Any number of programs: each takes every n-th tile.
    HEADS_PER_WAVE 0: by _heads_per_wave.
    """
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    q_smem = gl.allocate_shared_memory(q.dtype, [Q_STAGES * GROUPS, 1, 1, ROWS, BLOCK_D], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v.layout)
    heads_per_wave = HEADS_PER_WAVE
    if HEADS_PER_WAVE == 0:
        heads_per_wave = _heads_per_wave(gl.cdiv(seqlen_q, BLOCK_M), batch * heads_q, IS_CAUSAL)
    o_shape: gl.constexpr = [GROUPS, 1, 1, ROWS, O_COLUMNS]
    o_smem = q_smem if O_THROUGH == "q" else gl.allocate_shared_memory(o.dtype, o_shape, o.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_STAGES * GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * GROUPS, 1], mbarrier.MBarrierLayout())
    pass_on = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES * GROUPS):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(GROUPS):
        mbarrier.init(pass_on.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    # constants stay constants only in a literal tuple, so each group's is written out
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (
                o, lse, q_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, pass_on, qk_scale,
                batch, heads_q, seqlen_q, seqlen_k, heads_per_wave, 0, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, O_COLUMNS, GROUPS,
                STAGES, Q_STAGES, PINGPONG, RESCALE, Q_IN_REGISTERS, O_THROUGH, NEGATE, IS_CAUSAL, num_warps)),
            (_consume, (
                o, lse, q_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, pass_on, qk_scale,
                batch, heads_q, seqlen_q, seqlen_k, heads_per_wave, 1, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, O_COLUMNS, GROUPS,
                STAGES, Q_STAGES, PINGPONG, RESCALE, Q_IN_REGISTERS, O_THROUGH, NEGATE, IS_CAUSAL, num_warps)),
            (_produce, (
                q, k, v, q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, batch, heads_q, group,
                seqlen_q, seqlen_k, heads_per_wave, BLOCK_M, BLOCK_N, GROUPS, STAGES, Q_STAGES, IS_CAUSAL)),
        ], [4, 1], [CONSUMER_REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                o, lse, q_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, pass_on, qk_scale,
                batch, heads_q, seqlen_q, seqlen_k, heads_per_wave, 0, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, O_COLUMNS, GROUPS,
                STAGES, Q_STAGES, PINGPONG, RESCALE, Q_IN_REGISTERS, O_THROUGH, NEGATE, IS_CAUSAL, num_warps)),
            (_consume, (
                o, lse, q_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, pass_on, qk_scale,
                batch, heads_q, seqlen_q, seqlen_k, heads_per_wave, 1, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, O_COLUMNS, GROUPS,
                STAGES, Q_STAGES, PINGPONG, RESCALE, Q_IN_REGISTERS, O_THROUGH, NEGATE, IS_CAUSAL, num_warps)),
            (_consume, (
                o, lse, q_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, pass_on, qk_scale,
                batch, heads_q, seqlen_q, seqlen_k, heads_per_wave, 2, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, O_COLUMNS, GROUPS,
                STAGES, Q_STAGES, PINGPONG, RESCALE, Q_IN_REGISTERS, O_THROUGH, NEGATE, IS_CAUSAL, num_warps)),
            (_produce, (
                q, k, v, q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, batch, heads_q, group,
                seqlen_q, seqlen_k, heads_per_wave, BLOCK_M, BLOCK_N, GROUPS, STAGES, Q_STAGES, IS_CAUSAL)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24])  # fmt: skip


def _grid(problem: Problem, config: Config, sm_count: int) -> int:
    tiles = triton.cdiv(problem.seqlen_q, config["BLOCK_M"]) * problem.batch * problem.heads_q
    return min(tiles, sm_count) if config["PERSISTENT"] else tiles


VARIANT = Variant(
    name="fwd_hopper",
    serves="fwd",
    kernel=fwd_hopper_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32"},
    descriptors={"q": ("ROWS", "BLOCK_D"), "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV"),
                 "o": ("ROWS", "O_COLUMNS")},
    grid=_grid,
    grid_dimensions=("PERSISTENT",),
    constants=lambda spec, config: {
        "NEGATE": spec.negate,
        "ROWS": config["BLOCK_M"] // config["GROUPS"],
        "O_COLUMNS": o_columns(spec, config),
        "CONSUMER_REGISTERS": REGISTERS[config["GROUPS"]],
    },
    min_arch=90,
    max_arch=90,
)  # fmt: skip
