"""After kernels/sm90/bwd_dkdv_ds.py: dQ = dS K, for Hopper. One warp feeds K and dS by TMA, each group of four warps owns 64
query rows. A program sums up all of its rows' keys, so results have the same bits on every run. Of few tiles keys are in parts,
each a program's, and kernels/portable/bwd_dq_combine.py adds these up."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import (
    await_kernel_before,
    fence_async_shared,
    load_block,
    mbarrier,
    opaque,
    tma_store_wait,
    warpgroup_mma,
)
from fa2tune.kernels.lib.hopper_key_parts import store_parts_of_rows
from fa2tune.kernels.lib.hopper_parts import (
    descriptors_of,
    load_parts,
    products_done,
    put_parts,
    scaled,
    shared_for,
    tiles_in,
    zeros_for,
)
from fa2tune.search_spaces.lib.hopper import part_dims, used_by
from fa2tune.search_spaces.sm90 import bwd_dq_ds as space
from fa2tune.spec.variant import Variant

ROWS = gl.constexpr(space.BLOCK)
PRODUCER_REGISTERS = gl.constexpr(24)


class Form(NamedTuple):
    """What is compiled in."""

    GROUPS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    LAST_KEY: gl.constexpr  #: or None
    WHOLE: gl.constexpr  #: keys in one part
    HEAD_DIM: gl.constexpr


class Shared(NamedTuple):
    """Shared memory: of k and dq the parts, [slots, 1, 1, rows, columns]; ds [STAGES * GROUPS, 1, 1, BLOCK_N, ROWS]."""

    k: tuple
    ds: gl.shared_memory_descriptor
    dq: tuple


class Tile(NamedTuple):
    """Query rows of a program."""

    b: gl.tensor
    h: gl.tensor
    h_kv: gl.tensor
    start_m: gl.tensor  #: first row
    below: gl.tensor  #: the key block behind the part's last
    n_all: gl.tensor  #: key blocks of the part, all of which one of the rows sees


@gluon.jit
def _blocks(rows_end, seqlen_q, seqlen_k, form):
    """How many key blocks the rows below rows_end see."""
    end = seqlen_k
    if form.LAST_KEY is not None:
        end = gl.maximum(form.LAST_KEY(gl.minimum(rows_end, seqlen_q), seqlen_k - seqlen_q, seqlen_k), 0)
    return gl.cdiv(end, form.BLOCK_N)


@gluon.constexpr_function
def _bytes_of(descriptors):
    """Of a block of all parts."""
    return sum([one.block_type.nbytes for one in descriptors])


@gluon.jit
def _produce(k, ds, smem, ready, empty, tile, form):
    """One warp: blocks of K and of dS through a ring, the last key block first."""
    await_kernel_before()
    for j in range(tile.n_all):
        row = (tile.below - 1 - j) * form.BLOCK_N
        stage = j % form.STAGES
        barrier = ready.index(stage)
        mbarrier.wait(empty.index(stage), ((j // form.STAGES) & 1) ^ 1)
        mbarrier.expect(barrier, form.GROUPS * ds.block_type.nbytes + _bytes_of(k))
        load_parts(k, tile.b, tile.h_kv, row, barrier, smem.k, stage)
        for c in gl.static_range(form.GROUPS):
            place = smem.ds.index(stage * form.GROUPS + c)
            load_block(ds, tile.b, tile.h, row, tile.start_m + c * ROWS, barrier, place)


@gluon.jit
def _add(ds, k, acc):
    """acc + dS K in each part, asynchronously. ds: [keys, rows] in shared memory."""
    left = ds.permute((1, 0))
    found = (warpgroup_mma(left, k[0], acc[0], is_async=True),)
    if len(acc) > 1:
        found = (found[0], warpgroup_mma(left, k[1], acc[1], is_async=True))
    return found


@gluon.jit
def _consume(dq, dq_parts, smem, ready, empty, tile, softmax_scale, seqlen_q, seqlen_k, CONSUMER: gl.constexpr, form):
    """One group: rows [start_m + CONSUMER * ROWS, + ROWS) of one head. dq_parts: pointer to the head's rows of this part."""
    first = tile.start_m + CONSUMER * ROWS
    n_blocks = tile.n_all
    if form.LAST_KEY is not None:
        mine = _blocks(first + ROWS, seqlen_q, seqlen_k, form)
        n_blocks = gl.minimum(gl.maximum(tile.n_all - (tile.below - mine), 0), tile.n_all)
        for j in range(tile.n_all - n_blocks):  # blocks that only later groups see; dS of these is not there
            stage = j % form.STAGES
            mbarrier.wait(ready.index(stage), (j // form.STAGES) & 1)
            mbarrier.arrive(empty.index(stage), count=1)
    acc = zeros_for(smem.k, ROWS)
    for j in range(tile.n_all - n_blocks, tile.n_all):
        stage = j % form.STAGES
        mbarrier.wait(ready.index(stage), (j // form.STAGES) & 1)
        place = opaque(stage * form.GROUPS + CONSUMER)
        ds = smem.ds.index(place).reshape([form.BLOCK_N, ROWS])
        acc = products_done(_add(ds, tiles_in(smem.k, stage), acc))
        mbarrier.arrive(empty.index(stage), count=1)
    if form.WHOLE:
        put_parts(scaled(acc, softmax_scale), dq, tile.b, tile.h, first, smem.dq, CONSUMER)
        tma_store_wait(0)
    else:
        place = dq_parts + first.to(gl.int64) * form.HEAD_DIM
        store_parts_of_rows(acc, place, form.HEAD_DIM, seqlen_q - first, form.HEAD_DIM)


@gluon.jit
def bwd_dq_ds_hopper_kernel(
    k, ds, dq, dq_parts, softmax_scale, batch, heads_q, group, seqlen_q, seqlen_k, SPLITS, k_rest, dq_rest,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, REST_D: gl.constexpr, LAST_KEY: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """k [B, Hkv, Sk, D], ds [B, Hq, keys, rows] (dS transposed, in whole blocks; those that the mask hides hold anything) by
    descriptors -> dq [B, Hq, Sq, D] if WHOLE, where SPLITS is 1, else dq_parts [SPLITS, B, Hq, Sq, D] float32, not scaled.
    Part p of P of n key blocks has [n p / P, n (p + 1) / P), counted from the last one; one without blocks is zeros. The heads
    whose dS was written last are the first, as the L2 still holds it. Rows see all keys up to one, LAST_KEY of the mask, in
    which case the longest tiles of a head are first, or all. It starts early, and waits for the kernel that writes ds."""
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    tiles = gl.cdiv(seqlen_q, BLOCK_M)
    index = gl.program_id(0) // tiles  # of (part, batch entry, head)
    number = gl.program_id(0) - index * tiles
    if LAST_KEY is not None:
        number = tiles - 1 - number
    part = index // (batch * heads_q)
    head = batch * heads_q - 1 - (index - part * (batch * heads_q))
    b = head // heads_q
    h = head - b * heads_q
    start_m = number * BLOCK_M
    form: gl.constexpr = Form(
        GROUPS=GROUPS, BLOCK_N=BLOCK_N, STAGES=STAGES, LAST_KEY=LAST_KEY, WHOLE=WHOLE, HEAD_DIM=HEAD_DIM
    )  # fmt: skip
    blocks = _blocks(start_m + BLOCK_M, seqlen_q, seqlen_k, form)
    begin = blocks * part // SPLITS
    tile = Tile(b, h, h // group, start_m, blocks - begin, blocks * (part + 1) // SPLITS - begin)
    dq_parts += ((part * batch + b).to(gl.int64) * heads_q + h) * seqlen_q * HEAD_DIM
    k, dq = descriptors_of(k, k_rest), descriptors_of(dq, dq_rest)
    k_smem = shared_for(k, STAGES, BLOCK_N, BLOCK_D, REST_D)
    ds_smem = gl.allocate_shared_memory(ds.dtype, [STAGES * GROUPS, 1, 1, BLOCK_N, ROWS], ds.layout)
    dq_smem = shared_for(dq, GROUPS, ROWS, BLOCK_D, REST_D)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    smem = Shared(k_smem, ds_smem, dq_smem)
    # constants stay constants only in a literal tuple, so each group's is written out
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (dq, dq_parts, smem, ready, empty, tile, softmax_scale, seqlen_q, seqlen_k, 0, form)),
            (_consume, (dq, dq_parts, smem, ready, empty, tile, softmax_scale, seqlen_q, seqlen_k, 1, form)),
            (_produce, (k, ds, smem, ready, empty, tile, form)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (dq, dq_parts, smem, ready, empty, tile, softmax_scale, seqlen_q, seqlen_k, 0, form)),
            (_consume, (dq, dq_parts, smem, ready, empty, tile, softmax_scale, seqlen_q, seqlen_k, 1, form)),
            (_consume, (dq, dq_parts, smem, ready, empty, tile, softmax_scale, seqlen_q, seqlen_k, 2, form)),
            (_produce, (k, ds, smem, ready, empty, tile, form)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


VARIANT = Variant(
    kernel=bwd_dq_ds_hopper_kernel,
    space=space.SPACE,
    tensors={"k": "", "ds": "", "dq": "", "dq_parts": "fp32", "k_rest": "", "dq_rest": ""},
    descriptors={"k": ("BLOCK_N", "BLOCK_D"), "ds": ("BLOCK_N", space.BLOCK), "dq": (space.BLOCK, "BLOCK_D"),
                 "k_rest": ("BLOCK_N", "REST_D"), "dq_rest": (space.BLOCK, "REST_D")},
    rest_of={"k_rest": "k", "dq_rest": "dq"},
    grid=lambda problem, config, _sm_count, _early: space.programs(problem, config),
    constants=lambda spec, config: {
        **{name: wide for name, wide in part_dims(spec, config).items() if name in ("BLOCK_D", "REST_D")},
        "STAGES": space.stages(spec, config), "CONSUMER_REGISTERS": space.REGISTERS[config["GROUPS"]],
    },
    used=lambda spec, config: used_by(spec, part_dims(spec, config), ("D",)),
    min_arch=90,
    max_arch=90,
    early=lambda _problem, _config, _sm_count: True,
)  # fmt: skip
