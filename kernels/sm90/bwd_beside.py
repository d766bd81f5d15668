"""What sm90/bwd_prepare.py does before the fused Hopper backward, overlapped with it: a few programs go through the rows in
the order in which the main kernel takes its heads, and signal by a flag a chunk what is prepared.

Main starts early (griddepcontrol): once every program here has started and cleared its flags, so no program is waited for
that could not run. Alone, all multiprocessors wait for memory; overlapped with main, a few do."""
# ruff: noqa: RUF059  # tuples of tiles and barriers are unpacked whole, by name

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import LOG2E
from fa2tune.kernels.lib.hopper import PACKED_ROWS, fence_async_shared, load_block, mbarrier, thread_barrier, tma_store
from fa2tune.kernels.lib.hopper_extent import place
from fa2tune.kernels.lib.hopper_fused import BLOCK_N, CHUNK, do_once
from fa2tune.search_spaces.lib.hopper import block_dims
from fa2tune.search_spaces.sm90 import bwd_beside as bwd_beside_hopper
from fa2tune.search_spaces.sm90 import bwd_fused as bwd_fused_hopper
from fa2tune.spec.variant import Variant

WARPS = gl.constexpr(bwd_beside_hopper.WARPS)
TERMS = gl.constexpr(bwd_fused_hopper.TERMS)
#: Rows of zeros that one TMA stores; it takes PARTS of them for a chunk of rows.
ZERO_ROWS = gl.constexpr(bwd_beside_hopper.ZERO_ROWS)
PARTS = gl.constexpr(bwd_fused_hopper.CHUNK // bwd_beside_hopper.ZERO_ROWS)
#: Chunks that one fence is for: no more than lanes, each of which sets a flag.
BATCH = gl.constexpr(bwd_beside_hopper.BATCH)
#: Chunks whose terms may be written before their flags: no fewer than a batch, or the warp that writes them and the one that
#: sets flags would wait for each other.
SLOTS = gl.constexpr(bwd_beside_hopper.SLOTS)

_CLEARED = gl.constexpr("fence.acq_rel.gpu; mov.b32 $0, 0;")
_START_MAIN = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
#: but for the last batch
_STORED_BEFORE = gl.constexpr(
    f"cp.async.bulk.wait_group {bwd_beside_hopper.BATCH * (bwd_fused_hopper.CHUNK // bwd_beside_hopper.ZERO_ROWS)};"
    " mov.b32 $0, 0;"
)
_STORED = gl.constexpr("cp.async.bulk.wait_group 0; mov.b32 $0, 0;")
#: Behind a fence: what these threads have seen stored, by any thread, is visible to each that sees the flag.
_TELL = gl.constexpr(
    "{.reg .pred p; setp.ne.s32 p, $2, 0; @p fence.acq_rel.gpu; @p st.relaxed.gpu.global.b32 [$1], 1; mov.b32 $0, 0;}"
)


@gluon.jit
def _chunk(i, duty):
    """Number of this program's i-th chunk: all programs prepare what main begins with, the first few of them the rest."""
    n, n_first, first, workers = duty
    pid = gl.program_id(0)
    return gl.where(i < n_first, pid + i * gl.num_programs(0), first + pid + (i - n_first) * workers)


@gluon.jit
def _place(i, duty, tiles, heads_q, packed, RAGGED: gl.constexpr):
    """(head of all, batch entry, head, first row) of this program's i-th chunk; a head has so many tiles of a chunk. RAGGED: in
    the order in which main takes tiles, a band's heads fastest; ``packed``: (heads of a band, ...)."""
    chunk = _chunk(i, duty)
    if RAGGED:
        wide = packed[0]
        band = chunk // (tiles * wide)
        inside = chunk - band * (tiles * wide)
        width = gl.maximum(gl.minimum(heads_q - band * wide, wide), 1)  # the last band may be narrower
        head = band * wide + inside % width
        return head, head * 0, head, inside // width * CHUNK
    else:
        head = chunk // tiles
        b = head // heads_q
        return head, b, head - b * heads_q, (chunk - head * tiles) * CHUNK


@gluon.jit
def _in_sequence(row, packed, seqlen_q, seqlen_k, WARPS: gl.constexpr):
    """Of a chunk's first row in the workspaces: (the same in its sequence, the sequence's first row in q, its rows, keys)."""
    wide, sequences, cu_seqlens_q, cu_seqlens_k = packed
    block, first_q, rows, first_k, keys = place(
        cu_seqlens_q, cu_seqlens_k, sequences, seqlen_q, seqlen_k, row // CHUNK, CHUNK, WARPS
    )
    return block * CHUNK, first_q, rows, keys


@gluon.jit
def _load(o, do, smem, duty, tiles, heads_q, seqlen_q, seqlen_k, packed, STAGES: gl.constexpr, RAGGED: gl.constexpr):
    """One warp: O and dO through a ring."""
    o_smem, do_smem, zero_smem, ready, empty, termed, told = smem
    for i in range(duty[0]):
        head, b, h, row = _place(i, duty, tiles, heads_q, packed, RAGGED)
        if RAGGED:  # descriptors that end where the sequence ends
            row, first_q, rows, keys = _in_sequence(row, packed, seqlen_q, seqlen_k, 1)
            b = first_q + rows
            row += PACKED_ROWS - rows
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), o.block_type.nbytes + do.block_type.nbytes)
        load_block(o, b, h, row, 0, ready.index(slot), o_smem.index(slot))
        load_block(do, b, h, row, 0, ready.index(slot), do_smem.index(slot))


@gluon.jit
def _zero(sums, flags, smem, duty, tiles, heads_q, packed, RAGGED: gl.constexpr):
    """One warp: zeros into the sums of dQ, and the flags of the batch of chunks before, whose zeros and terms are stored."""
    o_smem, do_smem, zero_smem, ready, empty, termed, told = smem
    n, n_first, first, workers = duty
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    begin = n * 0  # numbers that a loop carries, no constants
    before = n * 0
    pending = n * 0  # chunks from before on that have no flag yet
    while (begin < n) | (pending > 0):
        # flags of what main begins with do not wait for others
        now = gl.minimum(BATCH, gl.where(begin < n_first, n_first, n) - begin)
        for i in range(begin, begin + now):
            head, b, h, row = _place(i, duty, tiles, heads_q, packed, RAGGED)
            for part in gl.static_range(PARTS):
                tma_store(sums, [b, h, row + part * ZERO_ROWS, 0], zero_smem)
        if now == BATCH:
            do_once(_STORED_BEFORE)
        else:
            do_once(_STORED)
        for i in range(before, before + pending):
            mbarrier.wait(termed.index(i % SLOTS), (i // SLOTS) & 1)
        # the lane that stored the zeros has waited for them, and each mbarrier's wait brings the warp together
        flag = flags + _chunk(before + lane, duty)
        mine = gl.where(lane < pending, 1, 0)
        gl.inline_asm_elementwise(_TELL, "=r,l,r", [flag.to(gl.int64), mine], dtype=gl.int32, is_pure=False, pack=1)
        for i in range(before, before + pending):
            mbarrier.arrive(told.index(i % SLOTS), count=1)
        before = begin
        pending = now
        begin += now


@gluon.jit
def _as_terms(x, layout: gl.constexpr):
    """x [R] as bfloat16 numbers of which it is the sum [R, TERMS]: three hold a float32, the rest are zeros."""
    column = gl.arange(0, TERMS, layout=gl.SliceLayout(0, layout))[None, :]
    high = x.to(gl.bfloat16).to(gl.float32)
    rest = gl.where(high == x, 0.0, x - high)  # of an infinite x: not NaN
    middle = rest.to(gl.bfloat16).to(gl.float32)
    low = rest - middle
    terms = gl.where(column == 0, high[:, None], gl.where(column == 1, middle[:, None], low[:, None]))
    return gl.where(column < 3, terms, 0.0).to(gl.bfloat16)


@gluon.jit
def _lse_and_dlse(
    lse, dlse, where, steps, has_dlse, heads_q, seqlen_q, seqlen_k, window, alive, packed, SEES_A_KEY: gl.constexpr,
    BOUNDED: gl.constexpr, RAGGED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """[CHUNK] each of a chunk's rows; alive: whether there is such a chunk."""
    head, b, h, row = where
    step_b, step_h, step_m = steps
    if RAGGED:
        lse += head.to(gl.int64) * seqlen_q
        row, first_q, seqlen_q, seqlen_k = _in_sequence(row, packed, seqlen_q, seqlen_k, WARPS)
        lse += first_q
        dlse += first_q.to(gl.int64) * step_m
    rows = row + gl.arange(0, CHUNK, layout=layout)
    inside = (rows < seqlen_q) & alive
    if not RAGGED:
        lse += head.to(gl.int64) * seqlen_q
    word = gl.load(lse + rows, mask=inside, other=float("inf"))
    if BOUNDED:
        word = gl.where(~SEES_A_KEY(rows, seqlen_k - seqlen_q, seqlen_k, window), float("inf"), word)
    at = b.to(gl.int64) * step_b + h.to(gl.int64) * step_h
    part = gl.load(dlse + at + rows.to(gl.int64) * step_m, mask=inside & (has_dlse != 0), other=0.0)
    return word, part


@gluon.jit
def _terms(
    lse, dlse, terms, smem, duty, steps, has_dlse, batch, tiles, heads_q, seqlen_q, seqlen_k, rows_padded, window,
    qk_scale, packed, BLOCK_DV: gl.constexpr, SEES_A_KEY: gl.constexpr, BOUNDED: gl.constexpr, STAGES: gl.constexpr,
    RAGGED: gl.constexpr,
):  # fmt: skip
    """The other warps: delta of every row, its terms and those of lse."""
    o_smem, do_smem, zero_smem, ready, empty, termed, told = smem
    n = duty[0]
    own_layout: gl.constexpr = gl.BlockedLayout([1, TERMS], [32, 1], [WARPS, 1], [1, 0])
    rows_layout: gl.constexpr = gl.SliceLayout(1, own_layout)
    tile_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [WARPS, 1], [1, 0])
    entries = batch
    if RAGGED:
        entries = 1
    every = (entries * heads_q).to(gl.int64) * rows_padded * TERMS
    where = _place(0, duty, tiles, heads_q, packed, RAGGED)
    word, part = _lse_and_dlse(
        lse, dlse, where, steps, has_dlse, heads_q, seqlen_q, seqlen_k, window, n > 0, packed, SEES_A_KEY, BOUNDED, RAGGED,
        rows_layout,
    )  # fmt: skip
    for i in range(n):
        rows = where[0].to(gl.int64) * rows_padded + where[3] + gl.arange(0, CHUNK, layout=rows_layout)
        own = rows[:, None] * TERMS + gl.arange(0, TERMS, layout=gl.SliceLayout(0, own_layout))[None, :]
        where = _place(i + 1, duty, tiles, heads_q, packed, RAGGED)
        next_word, next_part = _lse_and_dlse(
            lse, dlse, where, steps, has_dlse, heads_q, seqlen_q, seqlen_k, window, i + 1 < n, packed, SEES_A_KEY, BOUNDED,
            RAGGED, rows_layout,
        )  # fmt: skip
        slot = i % STAGES
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        o_tile = o_smem.index(slot).reshape([CHUNK, BLOCK_DV]).load(tile_layout)
        do_tile = do_smem.index(slot).reshape([CHUNK, BLOCK_DV]).load(tile_layout)
        sums = gl.sum(o_tile.to(gl.float32) * do_tile.to(gl.float32), 1)
        mbarrier.arrive(empty.index(slot), count=1)
        delta = gl.convert_layout(sums, rows_layout) - part
        mbarrier.wait(told.index(i % SLOTS), ((i // SLOTS) & 1) ^ 1)
        gl.store(terms + own, _as_terms(gl.div_rn(word * -LOG2E, qk_scale), own_layout))
        gl.store(terms + every + own, _as_terms(-delta, own_layout))
        mbarrier.arrive(termed.index(i % SLOTS), count=1)
        word = next_word
        part = next_part


@gluon.jit
def bwd_beside_hopper_kernel(
    o, do, lse, dlse, terms, sums, stride_dlseb, stride_dlseh, stride_dlsem, batch, heads_q, group, seqlen_q, seqlen_k,
    rows_padded, has_dlse, counter, counts, flags, rows_worth, keys_seen, heads_at_once, qk_scale, window_left, window_right,
    cu_seqlens_q, cu_seqlens_k, BLOCK_DV: gl.constexpr, SEES_A_KEY: gl.constexpr, LEFT_BOUNDED: gl.constexpr,
    RIGHT_BOUNDED: gl.constexpr, RAGGED: gl.constexpr, SUM_COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    FINISH_BESIDE: gl.constexpr,
):  # fmt: skip
    """o, do [B, Hq, Sq, DV] by descriptors, lse, dlse [B, Hq, Sq] -> terms, zeros in words (here the descriptor sums) and
    counter as sm90/bwd_prepare.py has them, and flags [B, Hq, rows_padded / CHUNK] int32: 1 where those rows are prepared;
    FINISH_BESIDE: behind them a count of tiles [B, Hq]: 0.

    Every program prepares a share of the heads that main begins with, heads_at_once in a band; then the first
    rows_worth / keys_seen of them go on: to prepare a row takes as long as its products with rows_worth keys, and a row sees
    keys_seen on average (FINISH_BESIDE: their share of all work, search_spaces/sm90/bwd_fused.py). rows_padded is a multiple
    of CHUNK. RAGGED: as sm90/bwd_fused.py has it; flags are in the order of preparation, and main begins with the first chunks
    of a band's heads, about as many as its first tiles and one sequence of mean length have."""
    tiles = rows_padded // CHUNK
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    if RAGGED:
        chunks = heads_q * tiles
        wide = heads_at_once * group
        begun = gl.cdiv(programs, gl.minimum(heads_at_once, heads_q // group)) + gl.cdiv(
            gl.cdiv(seqlen_q, batch), CHUNK
        )
        first = gl.minimum(gl.minimum(begun, tiles) * gl.minimum(wide, heads_q), chunks)
        packed = (wide, batch, cu_seqlens_q, cu_seqlens_k)
    else:
        chunks = batch * heads_q * tiles
        bands = gl.cdiv(programs, gl.cdiv(seqlen_k, BLOCK_N) * heads_at_once)
        first = gl.minimum(bands * heads_at_once * group * tiles, chunks)
        packed = ()
    workers = gl.minimum(gl.cdiv(programs * rows_worth, keys_seen), programs)
    n_first = gl.maximum(gl.cdiv(first - pid, programs), 0)
    n = n_first + gl.where(pid < workers, gl.maximum(gl.cdiv(chunks - first - pid, workers), 0), 0)
    duty = (n, n_first, first, workers)
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    for i in range(0, n, 32 * WARPS):
        gl.store(flags + _chunk(i + thread, duty), 0, mask=i + thread < n)
    if FINISH_BESIDE:
        if RAGGED:  # of each chunk, as any may be a sequence's first; and of programs
            heads = heads_q
            counted = heads_q * tiles + 2
        else:
            heads = batch * heads_q
            counted = heads
        for i in range(pid * 32 * WARPS, counted, programs * 32 * WARPS):
            gl.store(flags + heads * tiles + i + thread, 0, mask=i + thread < counted)
    gl.store(counter + thread, 0, mask=(thread == 0) & (pid == 0) & (counts != 0))
    do_once(_CLEARED)
    thread_barrier()
    do_once(_START_MAIN)

    gl.static_assert(BATCH <= 32 and BATCH <= SLOTS)
    if RAGGED:
        o_smem = gl.allocate_shared_memory(o.dtype, [STAGES, 1, 1, 1, CHUNK, BLOCK_DV], o.layout)
        do_smem = gl.allocate_shared_memory(do.dtype, [STAGES, 1, 1, 1, CHUNK, BLOCK_DV], do.layout)
    else:
        o_smem = gl.allocate_shared_memory(o.dtype, [STAGES, 1, 1, CHUNK, BLOCK_DV], o.layout)
        do_smem = gl.allocate_shared_memory(do.dtype, [STAGES, 1, 1, CHUNK, BLOCK_DV], do.layout)
    zero_smem = gl.allocate_shared_memory(gl.float32, [1, 1, ZERO_ROWS, SUM_COLUMNS], sums.layout)
    zero_layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    zero_smem.reshape([ZERO_ROWS, SUM_COLUMNS]).store(gl.zeros([ZERO_ROWS, SUM_COLUMNS], gl.float32, zero_layout))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    termed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(termed.index(i), count=1)
        mbarrier.init(told.index(i), count=1)
    fence_async_shared()
    smem = (o_smem, do_smem, zero_smem, ready, empty, termed, told)
    steps = (stride_dlseb, stride_dlseh, stride_dlsem)
    window = (window_left, window_right)
    BOUNDED: gl.constexpr = LEFT_BOUNDED or RIGHT_BOUNDED
    gl.warp_specialize([
        (_terms, (
            lse, dlse, terms, smem, duty, steps, has_dlse, batch, tiles, heads_q, seqlen_q, seqlen_k, rows_padded, window,
            qk_scale, packed, BLOCK_DV, SEES_A_KEY, BOUNDED, STAGES, RAGGED)),
        (_load, (o, do, smem, duty, tiles, heads_q, seqlen_q, seqlen_k, packed, STAGES, RAGGED)),
        (_zero, (sums, flags, smem, duty, tiles, heads_q, packed, RAGGED)),
    ], [1, 1], [40, 40])  # fmt: skip


VARIANT = Variant(
    kernel=bwd_beside_hopper_kernel,
    space=bwd_beside_hopper.SPACE,
    tensors={"o": "", "do": "", "lse": "fp32", "dlse": "fp32", "terms": "bf16", "sums": "fp32", "counter": "i32",
             "flags": "i32", "cu_seqlens_q": "i32", "cu_seqlens_k": "i32"},
    descriptors={"o": (bwd_fused_hopper.CHUNK, "BLOCK_DV"), "do": (bwd_fused_hopper.CHUNK, "BLOCK_DV"),
                 "sums": (bwd_beside_hopper.ZERO_ROWS, "SUM_COLUMNS")},
    grid=lambda problem, config, sm_count, _early: sm_count,
    constants=lambda spec, config: {
        "BLOCK_DV": block_dims(spec)[1], "STAGES": bwd_beside_hopper.STAGES[bwd_fused_hopper.columns(spec)]},
    min_arch=90, max_arch=90,
)  # fmt: skip
