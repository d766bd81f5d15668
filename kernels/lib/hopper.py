"""What the Hopper kernels share: names of Gluon that moved between Triton versions, and helpers on top of them. Device side.

Gluon of Triton 3.6 and of 3.9 differ in names only; every kernel takes its names from here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = [
    "PACKED_ROWS", "await_kernel_before", "fence_async_shared", "load_block", "mbarrier", "named_barrier_arrive",
    "named_barrier_arrive_if", "named_barrier_sync", "opaque", "reduce_block",
    "store_block", "thread_barrier", "tma_load", "tma_reduce_add", "tma_store", "tma_store_wait", "warpgroup_mma",
    "warpgroup_mma_wait",
]  # fmt: skip

#: tma_load(descriptor, coordinates, barrier, shared): global to shared memory, completes on the barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: tma_store(descriptor, coordinates, shared): shared to global memory
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
#: tma_store_wait(n): until all but n of this thread's last stores and reductions have read their shared memory
tma_store_wait = tma.store_wait
#: thread_barrier(): of all warps of a partition
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

if hasattr(tma, "async_atomic_add"):
    #: tma_reduce_add(descriptor, coordinates, shared): shared memory added to global memory
    tma_reduce_add = tma.async_atomic_add
else:  # 3.6 has the operation, its Python wrapper is missing
    from triton._C.libtriton import ir

    @builtin
    def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


#: Of packed sequences: row r of a sequence of n rows has the coordinate PACKED_ROWS - n + r, and the batch's coordinate is the
#: row behind the sequence (``_addressed`` in fa2tune/launching/launch.py).
PACKED_ROWS = gl.constexpr(1 << 30)


_ONE_BEFORE_HAS_ENDED = gl.constexpr("griddepcontrol.wait; fence.proxy.async; mov.b32 $0, 0;")


@gluon.jit
def await_kernel_before():
    """Of a kernel that starts before the one before it has ended: until that has, and this thread and what it asks of TMA
    may read what it wrote, and add to it."""
    gl.inline_asm_elementwise(_ONE_BEFORE_HAS_ENDED, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


_BARRIER_SYNC = gl.constexpr("bar.sync $1, $2; mov.b32 $0, 0;")
_BARRIER_ARRIVE = gl.constexpr("bar.arrive $1, $2; mov.b32 $0, 0;")
_BARRIER_ARRIVE_IF = gl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p bar.arrive $1, $2; mov.b32 $0, 0; }")


@gluon.jit
def named_barrier_sync(number, THREADS: gl.constexpr):
    """Waits at a named barrier until so many threads have arrived."""
    gl.inline_asm_elementwise(
        _BARRIER_SYNC, "=r,r,r", [gl.to_tensor(number), gl.to_tensor(THREADS)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def named_barrier_arrive(number, THREADS: gl.constexpr):
    """Arrives at a named barrier and goes on."""
    gl.inline_asm_elementwise(
        _BARRIER_ARRIVE, "=r,r,r", [gl.to_tensor(number), gl.to_tensor(THREADS)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def named_barrier_arrive_if(condition, number, THREADS: gl.constexpr):
    """Arrives at a named barrier, where the condition (the same for every thread) holds, and goes on. Without a branch."""
    gl.inline_asm_elementwise(
        _BARRIER_ARRIVE_IF, "=r,r,r,r",
        [gl.to_tensor(number), gl.to_tensor(THREADS), gl.to_tensor(condition).to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_block(descriptor, b, h, row, column, barrier, place):
    """A block of a (batch, heads, rows, dim) tensor to shared memory of the block's shape; of packed sequences it has one
    dimension more in front."""
    if len(descriptor.block_type.shape) == 5:
        tma_load(descriptor, [PACKED_ROWS, b, h, row, column], barrier, place)
    else:
        tma_load(descriptor, [b, h, row, column], barrier, place)


@gluon.jit
def store_block(descriptor, b, h, row, column, place):
    if len(descriptor.block_type.shape) == 5:
        tma_store(descriptor, [PACKED_ROWS, b, h, row, column], place)
    else:
        tma_store(descriptor, [b, h, row, column], place)


@gluon.jit
def reduce_block(descriptor, b, h, row, column, place):
    if len(descriptor.block_type.shape) == 5:
        tma_reduce_add(descriptor, [PACKED_ROWS, b, h, row, column], place)
    else:
        tma_reduce_add(descriptor, [b, h, row, column], place)


@gluon.jit
def opaque(x):
    """x, of which the compiler knows nothing. The wgmma descriptors of an operand that stays in shared memory, computed from
    an index that is opaque, are not moved out of the loop into registers (16 words a product of head dim 256), and spilled."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
