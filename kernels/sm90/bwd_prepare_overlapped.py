"""What sm90/bwd_prepare.py does before the fused Hopper backward, overlapped with it: a few programs go through the rows in
the order in which the main kernel takes its heads, and signal by a flag a chunk what is prepared.

Main starts early (griddepcontrol): once every program here has started and cleared its flags, so no program is waited for
that could not run. Alone, all multiprocessors wait for memory; overlapped with main, a few do."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import LOG2E
from fa2tune.kernels.lib.gluon_extent import place
from fa2tune.kernels.lib.hopper import PACKED_ROWS, fence_async_shared, load_block, mbarrier, thread_barrier, tma_store
from fa2tune.kernels.lib.hopper_fused import BLOCK_N, CHUNK, do_once
from fa2tune.kernels.lib.warps import WARP
from fa2tune.search_spaces.lib.hopper import block_dims
from fa2tune.search_spaces.sm90 import bwd_fused as bwd_fused_hopper
from fa2tune.search_spaces.sm90 import bwd_prepare_overlapped as overlapped_space
from fa2tune.spec.variant import Variant

WARPS = gl.constexpr(overlapped_space.WARPS)
#: Of the warps that load and store zeros.
WARP_REGISTERS = gl.constexpr(40)
TERMS = gl.constexpr(bwd_fused_hopper.TERMS)
#: Rows of zeros that one TMA stores; it takes PARTS of them for a chunk of rows.
ZERO_ROWS = gl.constexpr(overlapped_space.ZERO_ROWS)
PARTS = gl.constexpr(bwd_fused_hopper.CHUNK // overlapped_space.ZERO_ROWS)
#: Chunks that one fence is for: no more than lanes, each of which sets a flag.
BATCH = gl.constexpr(overlapped_space.BATCH)
#: Chunks whose terms may be written before their flags: no fewer than a batch, or the warp that writes them and the one that
#: sets flags would wait for each other.
SLOTS = gl.constexpr(overlapped_space.SLOTS)

_CLEARED = gl.constexpr("fence.acq_rel.gpu; mov.b32 $0, 0;")
_START_MAIN = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
#: but for the last batch
_STORED_BEFORE = gl.constexpr(
    f"cp.async.bulk.wait_group {overlapped_space.BATCH * (bwd_fused_hopper.CHUNK // overlapped_space.ZERO_ROWS)};"
    " mov.b32 $0, 0;"
)
_STORED = gl.constexpr("cp.async.bulk.wait_group 0; mov.b32 $0, 0;")
#: Behind a fence: what these threads have seen stored, by any thread, is visible to each that sees the flag.
_SIGNAL = gl.constexpr(
    "{.reg .pred p; setp.ne.s32 p, $2, 0; @p fence.acq_rel.gpu; @p st.relaxed.gpu.global.b32 [$1], 1; mov.b32 $0, 0;}"
)


class Form(NamedTuple):
    """What is compiled in. Kept as gl.constexpr: assigned without, its fields would be values of the running program."""

    BLOCK_DV: gl.constexpr
    SEES_A_KEY: gl.constexpr
    BOUNDED: gl.constexpr  #: whether a row may see no key
    STAGES: gl.constexpr
    RAGGED: gl.constexpr


# Partitions get the fields of these in their order; another one is other machine code.
class Shared(NamedTuple):
    """Shared memory: [slots, 1, 1, rows, columns]."""

    o: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    zero: gl.shared_memory_descriptor


class Barriers(NamedTuple):
    """mbarriers, one a slot."""

    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    termed: gl.shared_memory_descriptor  #: a chunk's terms are written
    flagged: gl.shared_memory_descriptor  #: and its flag is set


class Duty(NamedTuple):
    """A program's chunks: n, of which n_first are among those below ``first``, which main begins with. Behind them
    ``workers`` programs share the rest."""

    n: gl.tensor
    n_first: gl.tensor
    first: gl.tensor
    workers: gl.tensor


class Call(NamedTuple):
    """What a launch is given."""

    tiles: gl.tensor  #: chunks of a head
    heads_q: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    packed: tuple  #: RAGGED: (heads of a band, sequences, cu_seqlens_q, cu_seqlens_k)
    batch: gl.tensor
    rows_padded: gl.tensor
    window: tuple
    qk_scale: gl.tensor


class Rows(NamedTuple):
    """Pointers, strides of dlse, and whether there is a dlse."""

    lse: gl.tensor
    dlse: gl.tensor
    step_b: gl.tensor
    step_h: gl.tensor
    step_m: gl.tensor
    has_dlse: gl.tensor


@gluon.jit
def _chunk(i, duty):
    """Number of this program's i-th chunk: all programs prepare what main begins with, the first few of them the rest."""
    pid = gl.program_id(0)
    return gl.where(
        i < duty.n_first, pid + i * gl.num_programs(0), duty.first + pid + (i - duty.n_first) * duty.workers
    )


@gluon.jit
def _place(i, duty, call, form):
    """(head of all, batch entry, head, first row) of this program's i-th chunk. RAGGED: in the order in which main takes tiles,
    a band's heads fastest."""
    tiles, heads_q = call.tiles, call.heads_q
    chunk = _chunk(i, duty)
    if form.RAGGED:
        wide = call.packed[0]
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
def _in_sequence(row, call, WARPS: gl.constexpr):
    """Of a chunk's first row in the workspaces: (the same in its sequence, the sequence's first row in q, its rows, keys)."""
    _wide, sequences, cu_seqlens_q, cu_seqlens_k = call.packed
    block, first_q, rows, _first_k, keys = place(
        cu_seqlens_q, cu_seqlens_k, sequences, call.seqlen_q, call.seqlen_k, row // CHUNK, CHUNK, WARPS
    )
    return block * CHUNK, first_q, rows, keys


@gluon.jit
def _load(o, do, smem, barriers, duty, call, form):
    """One warp: O and dO through a ring."""
    for i in range(duty.n):
        _head, b, h, row = _place(i, duty, call, form)
        if form.RAGGED:  # descriptors that end where the sequence ends
            row, first_q, rows, _keys = _in_sequence(row, call, 1)
            b = first_q + rows
            row += PACKED_ROWS - rows
        slot = i % form.STAGES
        mbarrier.wait(barriers.empty.index(slot), ((i // form.STAGES) & 1) ^ 1)
        mbarrier.expect(barriers.ready.index(slot), o.block_type.nbytes + do.block_type.nbytes)
        load_block(o, b, h, row, 0, barriers.ready.index(slot), smem.o.index(slot))
        load_block(do, b, h, row, 0, barriers.ready.index(slot), smem.do.index(slot))


@gluon.jit
def _zero(sums, flags, smem, barriers, duty, call, form):
    """One warp: zeros into the sums of dQ, and the flags of the batch of chunks before, whose zeros and terms are stored."""
    n = duty.n
    lane = gl.arange(0, WARP, layout=gl.BlockedLayout([1], [WARP], [1], [0]))
    begin = n * 0  # numbers that a loop carries, no constants
    before = n * 0
    pending = n * 0  # chunks from before on that have no flag yet
    while (begin < n) | (pending > 0):
        # flags of what main begins with do not wait for others
        now = gl.minimum(BATCH, gl.where(begin < duty.n_first, duty.n_first, n) - begin)
        for i in range(begin, begin + now):
            _head, b, h, row = _place(i, duty, call, form)
            for part in gl.static_range(PARTS):
                tma_store(sums, [b, h, row + part * ZERO_ROWS, 0], smem.zero)
        if now == BATCH:
            do_once(_STORED_BEFORE)
        else:
            do_once(_STORED)
        for i in range(before, before + pending):
            mbarrier.wait(barriers.termed.index(i % SLOTS), (i // SLOTS) & 1)
        # the lane that stored the zeros has waited for them, and each mbarrier's wait brings the warp together
        flag = flags + _chunk(before + lane, duty)
        mine = gl.where(lane < pending, 1, 0)
        gl.inline_asm_elementwise(_SIGNAL, "=r,l,r", [flag.to(gl.int64), mine], dtype=gl.int32, is_pure=False, pack=1)
        for i in range(before, before + pending):
            mbarrier.arrive(barriers.flagged.index(i % SLOTS), count=1)
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
def _lse_and_dlse(source, where, alive, call, layout: gl.constexpr, form):
    """[CHUNK] each of a chunk's rows; alive: whether there is such a chunk."""
    lse, dlse, seqlen_q, seqlen_k = source.lse, source.dlse, call.seqlen_q, call.seqlen_k
    head, b, h, row = where
    if form.RAGGED:
        lse += head.to(gl.int64) * seqlen_q
        row, first_q, seqlen_q, seqlen_k = _in_sequence(row, call, WARPS)
        lse += first_q
        dlse += first_q.to(gl.int64) * source.step_m
    rows = row + gl.arange(0, CHUNK, layout=layout)
    inside = (rows < seqlen_q) & alive
    if not form.RAGGED:
        lse += head.to(gl.int64) * seqlen_q
    word = gl.load(lse + rows, mask=inside, other=float("inf"))
    if form.BOUNDED:
        word = gl.where(~form.SEES_A_KEY(rows, seqlen_k - seqlen_q, seqlen_k, call.window), float("inf"), word)
    at = b.to(gl.int64) * source.step_b + h.to(gl.int64) * source.step_h
    part = gl.load(dlse + at + rows.to(gl.int64) * source.step_m, mask=inside & (source.has_dlse != 0), other=0.0)
    return word, part


@gluon.jit
def _terms(source, terms, smem, barriers, duty, call, form):
    """The other warps: delta of every row, its terms and those of lse."""
    n = duty.n
    own_layout: gl.constexpr = gl.BlockedLayout([1, TERMS], [WARP, 1], [WARPS, 1], [1, 0])
    rows_layout: gl.constexpr = gl.SliceLayout(1, own_layout)
    tile_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // form.BLOCK_DV, form.BLOCK_DV // 8], [WARPS, 1], [1, 0])
    entries = call.batch
    if form.RAGGED:
        entries = 1
    every = (entries * call.heads_q).to(gl.int64) * call.rows_padded * TERMS
    where = _place(0, duty, call, form)
    word, part = _lse_and_dlse(source, where, n > 0, call, rows_layout, form)
    for i in range(n):
        rows = where[0].to(gl.int64) * call.rows_padded + where[3] + gl.arange(0, CHUNK, layout=rows_layout)
        own = rows[:, None] * TERMS + gl.arange(0, TERMS, layout=gl.SliceLayout(0, own_layout))[None, :]
        where = _place(i + 1, duty, call, form)
        next_word, next_part = _lse_and_dlse(source, where, i + 1 < n, call, rows_layout, form)
        slot = i % form.STAGES
        mbarrier.wait(barriers.ready.index(slot), (i // form.STAGES) & 1)
        o_tile = smem.o.index(slot).reshape([CHUNK, form.BLOCK_DV]).load(tile_layout)
        do_tile = smem.do.index(slot).reshape([CHUNK, form.BLOCK_DV]).load(tile_layout)
        sums = gl.sum(o_tile.to(gl.float32) * do_tile.to(gl.float32), 1)
        mbarrier.arrive(barriers.empty.index(slot), count=1)
        delta = gl.convert_layout(sums, rows_layout) - part
        mbarrier.wait(barriers.flagged.index(i % SLOTS), ((i // SLOTS) & 1) ^ 1)
        gl.store(terms + own, _as_terms(gl.div_rn(word * -LOG2E, call.qk_scale), own_layout))
        gl.store(terms + every + own, _as_terms(-delta, own_layout))
        mbarrier.arrive(barriers.termed.index(i % SLOTS), count=1)
        word = next_word
        part = next_part


@gluon.jit
def bwd_prepare_overlapped_hopper_kernel(
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
    duty = Duty(n, n_first, first, workers)
    thread = gl.arange(0, WARP * WARPS, layout=gl.BlockedLayout([1], [WARP], [WARPS], [0]))
    for i in range(0, n, WARP * WARPS):
        gl.store(flags + _chunk(i + thread, duty), 0, mask=i + thread < n)
    if FINISH_BESIDE:
        if RAGGED:  # of each chunk, as any may be a sequence's first; and of programs
            heads = heads_q
            counted = heads_q * tiles + 2
        else:
            heads = batch * heads_q
            counted = heads
        for i in range(pid * WARP * WARPS, counted, programs * WARP * WARPS):
            gl.store(flags + heads * tiles + i + thread, 0, mask=i + thread < counted)
    gl.store(counter + thread, 0, mask=(thread == 0) & (pid == 0) & (counts != 0))
    do_once(_CLEARED)
    thread_barrier()
    do_once(_START_MAIN)

    gl.static_assert(BATCH <= WARP and BATCH <= SLOTS)
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
    flagged = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(termed.index(i), count=1)
        mbarrier.init(flagged.index(i), count=1)
    fence_async_shared()
    source = Rows(lse, dlse, stride_dlseb, stride_dlseh, stride_dlsem, has_dlse)
    smem = Shared(o_smem, do_smem, zero_smem)
    barriers = Barriers(ready, empty, termed, flagged)
    window = (window_left, window_right)
    call = Call(tiles, heads_q, seqlen_q, seqlen_k, packed, batch, rows_padded, window, qk_scale)
    form: gl.constexpr = Form(
        BLOCK_DV=BLOCK_DV, SEES_A_KEY=SEES_A_KEY, BOUNDED=LEFT_BOUNDED or RIGHT_BOUNDED, STAGES=STAGES, RAGGED=RAGGED
    )
    gl.warp_specialize([
        (_terms, (source, terms, smem, barriers, duty, call, form)),
        (_load, (o, do, smem, barriers, duty, call, form)),
        (_zero, (sums, flags, smem, barriers, duty, call, form)),
    ], [1, 1], [WARP_REGISTERS, WARP_REGISTERS])  # fmt: skip


VARIANT = Variant(
    kernel=bwd_prepare_overlapped_hopper_kernel,
    space=overlapped_space.SPACE,
    tensors={"o": "", "do": "", "lse": "fp32", "dlse": "fp32", "terms": "bf16", "sums": "fp32", "counter": "i32",
             "flags": "i32", "cu_seqlens_q": "i32", "cu_seqlens_k": "i32"},
    descriptors={"o": (bwd_fused_hopper.CHUNK, "BLOCK_DV"), "do": (bwd_fused_hopper.CHUNK, "BLOCK_DV"),
                 "sums": (overlapped_space.ZERO_ROWS, "SUM_COLUMNS")},
    grid=lambda problem, config, sm_count, _early: sm_count,
    constants=lambda spec, config: {
        "BLOCK_DV": min(block_dims(spec)[1], config["SUM_COLUMNS"]),
        "STAGES": overlapped_space.STAGES[config["SUM_COLUMNS"]]},
    min_arch=90, max_arch=90,
)  # fmt: skip
