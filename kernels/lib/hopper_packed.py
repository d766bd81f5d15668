"""Packed sequences in the fused Hopper backward: which key tile a program works on, and where its rows lie. Device side.

A sequence's rows of q, k, v, do, dk and dv are addressed by descriptors that end where the sequence ends (``_addressed`` in
fa2tune/launching/launch.py): row r of a sequence of n rows has the coordinates [PACKED_ROWS, ``end``, head,
PACKED_ROWS - n + r, 0], where ``end`` is the tensor's row behind the sequence. Blocks that reach past it are filled with
zeros, and what is stored there is dropped. Workspaces have whole blocks of CHUNK rows for each sequence: that of sequence s
starts at block cu_seqlens_q[s] // CHUNK + s."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.extent import packed_tiles
from fa2tune.kernels.lib.gluon_extent import place
from fa2tune.kernels.lib.hopper import PACKED_ROWS, mbarrier, store_block
from fa2tune.kernels.lib.hopper_blocks import query_blocks
from fa2tune.kernels.lib.warps import WARP
from fa2tune.search_spaces.sm90 import bwd_fused as space

#: Keys of a tile.
BLOCK_N = gl.constexpr(space.GROUPS * space.KEYS)
#: Query rows of a block of the workspaces.
CHUNK = gl.constexpr(space.CHUNK)
_COUNTER_IS_SET = gl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")


@gluon.jit
def store_packed(descriptor, end, h, row, stage):
    """A block to a packed tensor; row: of its sequence less the sequence's rows, so below 0 where there is such a row."""
    store_block(descriptor, end, h, PACKED_ROWS + row, 0, stage)


@gluon.jit
def _place_of(index, order, offsets, sequences, heads, total_q, total_k, heads_per_wave, LONGER_FIRST: gl.constexpr):
    """(head, first key in its sequence, queries of the sequence, its keys, its first row in q, in k, in workspaces) of the
    tile with this number. Heads vary fastest, in bands of heads_per_wave; of a sequence the first keys come first, which under
    a causal mask most queries see. LONGER_FIRST: the tiles of a head come as ``order`` has them (kernels/lib/packed_order.py).
    One warp."""
    cu_seqlens_q, cu_seqlens_k = offsets
    tiles = packed_tiles(total_k, sequences, BLOCK_N)
    band = index // (tiles * heads_per_wave)
    first_head = band * heads_per_wave
    width = gl.maximum(gl.minimum(heads - first_head, heads_per_wave), 1)  # the last band may be narrower
    inside = index - band * (tiles * heads_per_wave)
    number = gl.minimum(inside // width, tiles - 1)
    if LONGER_FIRST:  # whatever it holds, no row outside the tensors is addressed
        number = gl.minimum(gl.maximum(gl.load(order + number), 0), tiles - 1)
    tile, first_k, keys, first_q, queries = place(
        cu_seqlens_k, cu_seqlens_q, sequences, total_k, total_q, number, BLOCK_N, 1
    )
    sequence = number - tile - first_k // BLOCK_N
    return (
        first_head + inside % width,
        tile * BLOCK_N,
        queries,
        keys,
        first_q,
        first_k,
        (first_q // CHUNK + sequence) * CHUNK,
    )


@gluon.jit
def send_place(
    lap, counter, channel, offsets, sequences, heads, total_q, total_k, heads_per_wave, EARLY_START: gl.constexpr,
    LONGER_FIRST: gl.constexpr, SCORED: gl.constexpr,
):  # fmt: skip
    """The producer takes the next tile that has keys and sends it to the other warps: (whether there is one, then what
    ``_place_of`` gives). A program's first one follows from its number; EARLY_START: others are taken once the kernel before,
    which sets the counter to 0, has ended."""
    tile_smem, sent, received = channel
    every = packed_tiles(total_k, sequences, BLOCK_N) * heads
    index = gl.program_id(0)
    own = lap == 0
    looking = lap >= 0
    head = index
    start_n = index
    queries = index
    keys = index
    first_q = index
    first_k = index
    row = index
    while looking:
        if not own:
            if EARLY_START:
                gl.inline_asm_elementwise(
                    _COUNTER_IS_SET, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
                )
            index = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        head, start_n, queries, keys, first_q, first_k, row = _place_of(
            index, counter + 1, offsets, sequences, heads, total_q, total_k, heads_per_wave, LONGER_FIRST
        )
        own = lap < 0  # never again
        looking = (index < every) & (start_n >= keys)
    alive = index < every
    slot = lap % 2
    mbarrier.wait(received.index(slot), ((lap // 2) & 1) ^ 1)
    n = gl.arange(0, WARP, layout=gl.BlockedLayout([1], [WARP], [1], [0]))
    words = gl.where(n == 0, alive.to(gl.int32), gl.where(n == 1, head, gl.where(n == 2, start_n, queries)))
    words = gl.where(n == 4, keys, gl.where(n == 5, first_k, gl.where(n == 6, row, words)))
    if SCORED:
        words = gl.where(n == 7, row // CHUNK - first_q // CHUNK, words)
    tile_smem.index(slot).store(words)
    mbarrier.arrive(sent.index(slot), count=1)
    return alive, head, start_n, queries, keys, first_q, first_k, row


@gluon.jit
def _word(words, number: gl.constexpr):
    """That of a lane [32], for every thread: the compiler knows that it is the same for all."""
    n = gl.arange(0, WARP, layout=words.type.layout)
    return gl.sum(gl.where(n == number, words, 0), 0)


@gluon.jit
def received_work(lap, channel, window, WARPS: gl.constexpr, form):
    """What the producer sent for this lap: (whether there is a tile, head, first key in its sequence, queries, keys, the
    sequence's first row in k, and in workspaces; number of the sequence, where a score term wants it), then what
    ``query_blocks`` gives. WARPS: of this partition."""
    tile_smem, sent, received = channel
    slot = lap % 2
    mbarrier.wait(sent.index(slot), (lap // 2) & 1)
    words = tile_smem.index(slot).load(gl.BlockedLayout([1], [WARP], [WARPS], [0]))
    alive = _word(words, 0) != 0
    head = _word(words, 1)
    start_n = _word(words, 2)
    queries = _word(words, 3)
    keys = _word(words, 4)
    first_k = _word(words, 5)
    row = _word(words, 6)
    sequence = 0
    if form.SCORED:
        sequence = _word(words, 7)
    mbarrier.arrive(received.index(slot), count=1)
    first, full, end, rotation = query_blocks(
        start_n, queries, keys, window, form.BLOCK_M, BLOCK_N, form.QUERY_BLOCKS, form.LEFT_BOUNDED
    )
    return alive, head, start_n, queries, keys, first_k, row, sequence, first, full, end, rotation
