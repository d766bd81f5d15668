"""Key tiles of kernels/sm90/bwd_dkdv_ds.py one after the other. K and V of the next tile are loaded while this one is computed,
and its first products run while dK and dV of this one leave.

Q and K share their slots of shared memory, dO and V theirs. A tile's K and V stay where they are to its end. The other slots
are a ring, from which K and V of the next tile take one, and which gets theirs when the tile is over. Each tile has a query
block: masks have a last key, or no bounds. Device side."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.division import Divisors
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
from fa2tune.kernels.lib.hopper_dkdv import LOG2E, Head, Tile, weights
from fa2tune.kernels.lib.hopper_forward import tile_of, turns_of
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    expect_tiles,
    load_parts,
    product_layout,
    product_of_rows,
    products_done_with,
    put_parts,
    scaled,
    tiles_in,
    zeros_for,
)
from fa2tune.kernels.lib.warps import WARP


class TileBarriers(NamedTuple):
    """mbarriers, each one a slot; of K those of Q, and of V those of dO."""

    q_ready: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    do_ready: gl.shared_memory_descriptor
    do_empty: gl.shared_memory_descriptor
    p_ready: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor


class Walk(NamedTuple):
    """The key tiles of a call, of which a program takes one a round."""

    tiles: gl.tensor  #: of a head
    heads: gl.tensor  #: of keys, over the batch
    band: gl.tensor  #: of these that are given out together
    heads_kv: gl.tensor
    group: gl.tensor


class Ring(NamedTuple):
    """The STAGES slots that K and V do not have, in the order in which they are free again. Each partition keeps its own."""

    queue: gl.tensor  #: 4 bits a slot, the first one lowest
    phases: gl.tensor  #: a bit a slot: whether it was taken an odd number of times


class Place(NamedTuple):
    """A slot, and the phase of its barriers."""

    slot: gl.tensor
    phase: gl.tensor


class Left(NamedTuple):
    """The slot through which the tile before left, which is free in the first block of this one."""

    slot: gl.tensor
    turn: gl.tensor  #: that block, counted over all tiles; of the first tile -1


class Going(NamedTuple):
    """What one block leaves for the next one, which it has begun."""

    product: gl.tensor  #: S^T or dP^T
    terms: gl.tensor  #: lse or delta of its queries, [M]
    kept: tuple  #: the Place of K and V
    now: tuple  #: of Q and dO
    ring: tuple


class Member(NamedTuple):
    """A query head of a tile, and what follows its last block."""

    h: gl.tensor
    at: gl.tensor  #: where its lse and delta begin
    done: gl.tensor  #: blocks before its place 0, counted over all tiles
    then_at: gl.tensor  #: where those of the next head begin
    then_block: gl.tensor  #: its first
    crosses: gl.tensor  #: whether the next head is of the next tile
    more: gl.tensor  #: whether there is a next tile


@gluon.constexpr_function
def _in_order(stages):
    return sum(slot << 4 * (slot - 1) for slot in range(1, stages + 1))


@gluon.jit
def _taken(ring, freed, form):
    """The ring after its first slot is taken. ``freed``: the slot that goes to its end."""
    return Ring((ring.queue >> 4) | (freed << 4 * (form.STAGES - 1)), ring.phases ^ (1 << (ring.queue & 15)))


@gluon.jit
def _place(ring):
    """The slot that is taken next, and its phase."""
    slot = ring.queue & 15
    return Place(slot, (ring.phases >> slot) & 1)


@gluon.jit
def _first(form):
    """(place of K and V of the first tile, place of its first block, the ring behind both)."""
    ring = Ring(gl.to_tensor(_in_order(form.STAGES)), gl.to_tensor(1))
    now = _place(ring)
    return Place(gl.to_tensor(0), gl.to_tensor(0)), now, _taken(ring, now.slot, form)


@gluon.jit
def _next(ring, kept, crosses, form):
    """(place of K and V, place of the block, the ring behind both) of the block that follows. ``kept``: the place of K and V
    now; ``crosses``: whether the block is of the next tile."""
    pinned = _place(ring)
    behind = _taken(ring, kept.slot, form)
    ring = Ring(gl.where(crosses, behind.queue, ring.queue), gl.where(crosses, behind.phases, ring.phases))
    kept = Place(gl.where(crosses, pinned.slot, kept.slot), gl.where(crosses, pinned.phase, kept.phase))
    place = _place(ring)
    return kept, place, _taken(ring, place.slot, form)


@gluon.jit
def _tile(nth, walk, call, QUERY_BLOCKS: gl.constexpr, form):
    """The tile of this program's nth round. Causal: the first tiles are the longest, so places count from a head's end."""
    by = Divisors((), (), (), (), ())
    from_end, head = tile_of(nth, walk.tiles, walk.heads, walk.band, by, form.BLOCK_N, True)
    start_n = (walk.tiles - 1) * form.BLOCK_N - from_end
    first, full, end, rotation = query_blocks(
        start_n, call.seqlen_q, call.seqlen_k, call.window, form.BLOCK_M, form.BLOCK_N, QUERY_BLOCKS, False
    )
    b = head // walk.heads_kv
    return Tile(
        b, head - b * walk.heads_kv, walk.heads_kv * walk.group, walk.group, start_n, first, full, end, rotation, ()
    )  # fmt: skip


@gluon.jit
def _rounds(walk):
    return turns_of(walk.tiles * walk.heads, Divisors((), (), (), (), ()))


@gluon.jit
def _load(descriptors, b, h, row, ready, empty, smem, place):
    mbarrier.wait(empty.index(place.slot), place.phase ^ 1)
    expect_tiles(descriptors, ready.index(place.slot), 1)
    load_parts(descriptors, b, h, row, ready.index(place.slot), smem, place.slot)


@gluon.jit
def produce_tiles(q, k, v, do, smem, barriers, walk, call, QUERY_BLOCKS: gl.constexpr, form):
    """One warp: of each tile K and V once, then Q and dO through the ring, for every query head of the group."""
    kept, place, ring = _first(form)
    for nth in range(_rounds(walk)):
        tile = _tile(nth, walk, call, QUERY_BLOCKS, form)
        _load(k, tile.b, tile.h_kv, tile.start_n, barriers.q_ready, barriers.q_empty, smem.q, kept)
        n_blocks = tile.end - tile.first
        for turn in range(tile.group * n_blocks):
            member = turn // n_blocks
            h = tile.h_kv * tile.group + member
            row = (tile.first + turn - member * n_blocks) * form.BLOCK_M
            _load(q, tile.b, h, row, barriers.q_ready, barriers.q_empty, smem.q, place)
            if turn == 0:
                _load(v, tile.b, tile.h_kv, tile.start_n, barriers.do_ready, barriers.do_empty, smem.do, kept)
            _load(do, tile.b, h, row, barriers.do_ready, barriers.do_empty, smem.do, place)
            kept, place, ring = _next(ring, kept, turn + 1 == tile.group * n_blocks, form)


@gluon.jit
def _values(values, block, seqlen_q, other: gl.constexpr, form):
    """lse or delta of a query block, [M], one value a thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [WARP], [form.num_warps], [0])
    rows = block * form.BLOCK_M + gl.arange(0, form.BLOCK_M, layout=layout)
    return gl.load(values + rows, mask=rows < seqlen_q, other=other)


@gluon.jit
def _begin(tile, seqlen_q):
    """Where lse and delta of a tile's first query head begin."""
    return (tile.b.to(gl.int64) * tile.heads_q + tile.h_kv * tile.group) * seqlen_q


@gluon.jit
def _member(g, done, nth, rounds, tile, after, seqlen_q):
    """Query head number g of the group. done: blocks before the tile. ``after``: the next tile."""
    last = g == tile.group - 1
    at = _begin(tile, seqlen_q) + g * seqlen_q
    return Member(
        tile.h_kv * tile.group + g, at, done + g * (tile.end - tile.first) - tile.first,
        gl.where(last, _begin(after, seqlen_q), at + seqlen_q), gl.where(last, after.first, tile.first), last,
        nth + 1 < rounds,
    )  # fmt: skip


@gluon.jit
def _following(going, j, values, other: gl.constexpr, member, tile, call, form):
    """Behind the block at place j: (lse or delta, slot of K and V, slot of Q and dO, the ring behind both, whether K and V are
    the next tile's, whether there is such a block)."""
    wraps = j + 1 == tile.end
    crosses = wraps & member.crosses
    block = gl.where(wraps, member.then_block, j + 1)
    loaded = _values(values + gl.where(wraps, member.then_at, member.at), block, call.seqlen_q, other, form)
    kept, following, ring = _next(going.ring, going.kept, crosses, form)
    return loaded, kept, following, ring, crosses & member.more, member.more | (crosses == 0)


@gluon.jit
def _started(values, other: gl.constexpr, own, ready, empty, walk, call, QUERY_BLOCKS: gl.constexpr, form):
    """What the first block of all begins with. values: lse or delta; own, ready, empty: of Q and K, or of dO and V."""
    kept, now, ring = _first(form)
    tile = _tile(0, walk, call, QUERY_BLOCKS, form)
    terms = _values(values + _begin(tile, call.seqlen_q), tile.first, call.seqlen_q, other, form)
    mbarrier.wait(ready.index(kept.slot), 0)
    mbarrier.wait(ready.index(now.slot), 0)
    zero = gl.zeros([form.BLOCK_N, form.BLOCK_M], gl.float32, product_layout(form.BLOCK_M))
    product = product_of_rows(tiles_in(own, kept.slot), tiles_in(own, now.slot), zero)
    product = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(empty.index(now.slot), count=1)
    return Going(product, terms, kept, now, ring)


@gluon.jit
def _dv_over_queries(acc, going, left, lse, member, smem, barriers, tile, call, MASK: gl.constexpr, form):
    """Query blocks of one head into dV: with MASK those under the mask, else those that see every key."""
    dtype: gl.constexpr = smem.q[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.do[0].shape[-1]), 2)
    zero = gl.zeros([form.BLOCK_N, form.BLOCK_M], gl.float32, s_layout)
    head = Head(member.h, tile.start_n, call.seqlen_k - call.seqlen_q)
    for j in range(tile.first if MASK else tile.full, tile.full if MASK else tile.end):
        turn = member.done + j
        shift = gl.convert_layout(going.terms * -LOG2E, gl.SliceLayout(0, s_layout))
        values, kept, following, ring, enters, there = _following(
            going, j, lse, float("inf"), member, tile, call, form
        )  # fmt: skip
        p, slope = weights(going.product, shift, j, head, tile, call, form, MASK)
        buffer = turn % form.P_STAGES
        mbarrier.wait(barriers.p_empty.index(buffer), ((turn // form.P_STAGES) & 1) ^ 1)
        smem.p.index(buffer).store(slope.to(dtype))
        tma_store_wait(0)  # dV of the tile before has left its slot
        thread_barrier()
        mbarrier.arrive(barriers.p_ready.index(buffer), count=1)
        mbarrier.arrive(barriers.q_empty.index(left.slot), count=2, pred=turn == left.turn)  # for both groups
        operand = gl.convert_layout(p.to(dtype), a_layout)
        now = going.now
        # its phase tells apart the last two loads of the slot alone: by p_empty an older one is over
        mbarrier.wait(barriers.do_ready.index(now.slot), now.phase)
        acc_next = add_products(operand, tiles_in(smem.do, now.slot), acc)
        # S^T of the next block; the last one of all multiplies whatever lies there, a product that is not read
        mbarrier.wait(barriers.q_ready.index(kept.slot), kept.phase, pred=enters)
        mbarrier.wait(barriers.q_ready.index(following.slot), following.phase, pred=there)
        s_next = product_of_rows(tiles_in(smem.q, opaque(kept.slot)), tiles_in(smem.q, following.slot), zero)
        acc, operand = products_done_with(acc_next, operand, len(smem.q))
        mbarrier.arrive(barriers.do_empty.index(now.slot), count=1)
        s = warpgroup_mma_wait(0, deps=[s_next])
        mbarrier.arrive(barriers.q_empty.index(following.slot), count=1)
        going = Going(s, values, kept, following, ring)
    return acc, going


@gluon.jit
def consume_dv(memory, smem, barriers, walk, call, QUERY_BLOCKS: gl.constexpr, form):
    """Four warps: S^T = K Q^T, P^T, and dV += P^T dO. This group alone reads K: dV leaves through its slot."""
    rounds = _rounds(walk)
    going = _started(
        memory.lse, float("inf"), smem.q, barriers.q_ready, barriers.q_empty, walk, call, QUERY_BLOCKS, form
    )  # fmt: skip
    done = 0
    left = Left(gl.to_tensor(0), gl.to_tensor(-1))
    for nth in range(rounds):
        tile = _tile(nth, walk, call, QUERY_BLOCKS, form)
        after = _tile(gl.minimum(nth + 1, rounds - 1), walk, call, QUERY_BLOCKS, form)
        own = going.kept.slot
        acc = zeros_for(smem.do, form.BLOCK_N)
        for g in range(tile.group):  # every query head that reads this key head
            member = _member(g, done, nth, rounds, tile, after, call.seqlen_q)
            acc, going = _dv_over_queries(
                acc, going, left, memory.lse, member, smem, barriers, tile, call, True, form
            )  # fmt: skip
            acc, going = _dv_over_queries(
                acc, going, left, memory.lse, member, smem, barriers, tile, call, False, form
            )  # fmt: skip
        put_parts(acc, memory.dv, tile.b, tile.h_kv, tile.start_n, smem.q, own)
        done += tile.group * (tile.end - tile.first)
        left = Left(own, done)
    tma_store_wait(0)


@gluon.jit
def _dk_over_queries(acc, going, left, delta, ds, ds_smem, member, smem, barriers, tile, call, form):
    """Query blocks of one head into dK, and their dS into memory."""
    dtype: gl.constexpr = smem.q[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.q[0].shape[-1]), 2)
    zero = gl.zeros([form.BLOCK_N, form.BLOCK_M], gl.float32, s_layout)
    for j in range(tile.first, tile.end):
        turn = member.done + j
        shift = gl.convert_layout(going.terms, gl.SliceLayout(0, s_layout))
        values, kept, following, ring, enters, there = _following(going, j, delta, 0.0, member, tile, call, form)
        buffer = turn % form.P_STAGES
        mbarrier.wait(barriers.p_ready.index(buffer), (turn // form.P_STAGES) & 1)
        p = smem.p.index(buffer).load(s_layout).to(gl.float32)
        tile_ds = (p * (going.product - shift[None, :])).to(dtype)
        operand = gl.convert_layout(tile_ds, a_layout)
        tma_store_wait(0)  # dS of the block before has left its shared memory, and dK of the tile before its slot
        thread_barrier()
        mbarrier.arrive(barriers.p_empty.index(buffer), count=1)
        mbarrier.arrive(barriers.do_empty.index(left.slot), count=2, pred=turn == left.turn)
        now = going.now
        mbarrier.wait(barriers.q_ready.index(now.slot), now.phase)  # over already: P was made of it
        acc_next = add_products(operand, tiles_in(smem.q, now.slot), acc)
        # dP^T of the next block; the last one of all multiplies whatever lies there, a product that is not read
        mbarrier.wait(barriers.do_ready.index(kept.slot), kept.phase, pred=enters)
        mbarrier.wait(barriers.do_ready.index(following.slot), following.phase, pred=there)
        dp_next = product_of_rows(tiles_in(smem.do, opaque(kept.slot)), tiles_in(smem.do, following.slot), zero)
        # under both products
        place = ds_smem.index(0)
        place.reshape([form.BLOCK_N, form.BLOCK_M]).store(tile_ds)
        fence_async_shared()
        store_block(ds, tile.b, member.h, tile.start_n, j * form.BLOCK_M, place)
        acc, operand = products_done_with(acc_next, operand, len(smem.do))
        mbarrier.arrive(barriers.q_empty.index(now.slot), count=1)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        mbarrier.arrive(barriers.do_empty.index(following.slot), count=1)
        going = Going(dp, values, kept, following, ring)
    return acc, going


@gluon.jit
def consume_dk(memory, ds, ds_smem, smem, barriers, walk, call, QUERY_BLOCKS: gl.constexpr, form):
    """Four warps: dP^T = V dO^T, dS^T = P^T (dP^T - delta), which goes to memory, and dK += dS^T Q. This group alone reads
    V: dK leaves through its slot."""
    await_kernel_before()  # which makes delta, or of an earlier slice reads dS
    rounds = _rounds(walk)
    going = _started(
        memory.delta, 0.0, smem.do, barriers.do_ready, barriers.do_empty, walk, call, QUERY_BLOCKS, form
    )  # fmt: skip
    done = 0
    left = Left(gl.to_tensor(0), gl.to_tensor(-1))
    for nth in range(rounds):
        tile = _tile(nth, walk, call, QUERY_BLOCKS, form)
        after = _tile(gl.minimum(nth + 1, rounds - 1), walk, call, QUERY_BLOCKS, form)
        own = going.kept.slot
        acc = zeros_for(smem.q, form.BLOCK_N)
        for g in range(tile.group):
            member = _member(g, done, nth, rounds, tile, after, call.seqlen_q)
            acc, going = _dk_over_queries(
                acc, going, left, memory.delta, ds, ds_smem, member, smem, barriers, tile, call, form
            )  # fmt: skip
        put_parts(scaled(acc, call.softmax_scale), memory.dk, tile.b, tile.h_kv, tile.start_n, smem.do, own)
        done += tile.group * (tile.end - tile.first)
        left = Left(own, done)
    tma_store_wait(0)
