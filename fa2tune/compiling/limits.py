"""Which configs are dropped unmeasured: those that a GPU cannot launch, and those that are certain to be slow. (Whether it
runs a kernel at all: ``support.py``.)

Each limit is a named constant with its unit, each refusal has a name and a reason. Before a compile: the search space's own
constraints first, then arithmetic on the config. After a compile: registers, shared memory and spills of the binary.
"""

from __future__ import annotations

from fa2tune.catalogue import SCHEDULERS
from fa2tune.compiling.compiler import Binary
from fa2tune.compiling.registry import refused_extent
from fa2tune.compiling.support import Refusal, unsupported
from fa2tune.gpus import KIB, Gpu
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import ITEMSIZE, KERNELS, Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import WARP_THREADS, Variant

MAX_BLOCK_THREADS = 1024  #: threads a block may have, on every compute capability
MIN_MMA_SIDE = 16  #: elements: the smallest side of a tl.dot operand
# CUDA's occupancy rules (cuda_occupancy.h of CUDA 13.0), the same from compute capability 8.0 to 12.1
REGISTER_UNIT = 256  #: registers are allocated to a warp in units of this many
SHARED_UNIT = 128  #: shared memory is allocated to a block in units of this many bytes
SHARED_RESERVED = 1 * KIB  #: bytes of shared memory that the system takes for each block
INSTRUCTION_BYTES = 16
INSTRUCTION_CACHE = 128 * KIB  #: bytes of an SM's largest instruction cache (Jia et al. 2018, arXiv 1804.06826)
MANY_SMS = 1 << 16  #: more SMs than any GPU has, so that they do not limit a persistent grid
MOST_SPILLS = 1.0  #: spilled words per register; a binary with more is dropped unmeasured


def owns_queries(variant: Variant, config: Config) -> bool:
    """Whether each program of the kernel has a tile of queries and streams keys (True) or the reverse, found from its grid."""
    probe = Problem("bf16", 1, 1, 1, seqlen_q=1 << 16, seqlen_k=1, head_dim=64, head_dim_v=64, mask=FULL)
    return variant.programs(probe, config, MANY_SMS) > 1


def shared_lower_bound(variant: Variant, spec: Specialization, config: Config) -> int:
    """The least shared memory, in bytes, that the streamed tiles take. A pipelined loop holds num_stages - 1 copies of both
    tiles; one that is not pipelined holds one copy of the wider tile, in whose space the other follows. Loads of unaligned
    tensors are not pipelined: an asynchronous copy moves 4 bytes or more."""
    if not variant.descriptors:  # streams nothing
        return 0
    d, dv = padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)
    copies = config["num_stages"] - 1 if spec.aligned else 0
    columns = (d + dv) * copies if copies > 0 else max(d, dv)
    rows = config["BLOCK_N" if owns_queries(variant, config) else "BLOCK_M"]
    return ITEMSIZE[spec.dtype] * rows * columns


def unrolled_fmas(variant: Variant, spec: Specialization, config: Config) -> int:
    """FMA instructions per thread in one loop iteration where products run outside the tensor cores (IEEE float32): Triton
    unrolls them completely. 0 where they run on tensor cores."""
    if spec.dtype != "fp32" or spec.precision != "ieee" or variant.serves not in KERNELS or not variant.modelled:
        return 0
    tile = Problem(
        spec.dtype, 1, 1, 1, config["BLOCK_M"], config["BLOCK_N"], padded_head_dim(spec.head_dim),
        padded_head_dim(spec.head_dim_v), FULL,
    )  # fmt: skip
    return int(tile.flops(variant.serves) / 2) // (config["num_warps"] * WARP_THREADS)


def before_compile(variant: Variant, spec: Specialization, config: Config, gpu: Gpu) -> Refusal | None:
    """Why ``config`` is dropped before it is compiled, or None."""
    return unsupported(variant, spec, gpu) or refused_config(variant, spec, config, gpu)


def refused_config(variant: Variant, spec: Specialization, config: Config, gpu: Gpu) -> Refusal | None:
    """The same of a variant that is known to support such calls on this GPU (``unsupported``)."""
    if (why := refused_extent(variant, spec, config)) is not None:
        return Refusal("extent", why)
    broken = variant.space.broken(config, spec, gpu.arch)
    if broken is not None:
        return Refusal(broken.name, broken.why)
    if not variant.portable and not variant.modelled:
        return None  # its search space has constraints of its own on threads and shared memory
    threads = config["num_warps"] * WARP_THREADS
    if threads > MAX_BLOCK_THREADS:
        return Refusal("threads_per_block", f"{threads} threads per block; the limit is {MAX_BLOCK_THREADS}")
    small = {name: value for name, value in config.items() if name in ("BLOCK_M", "BLOCK_N") and value < MIN_MMA_SIDE}
    if small and variant.descriptors:
        sides = ", ".join(f"{name} = {value}" for name, value in small.items())
        return Refusal("mma_shape", f"{sides}; a matrix product needs sides of at least {MIN_MMA_SIDE}")
    shared = shared_lower_bound(variant, spec, config)
    if shared > gpu.shared_per_block:
        return Refusal(
            "shared_memory_of_tiles",
            f"the streamed tiles take at least {shared} bytes of shared memory; the limit per block on {gpu.name} is "
            f"{gpu.shared_per_block}",
        )
    fmas = unrolled_fmas(variant, spec, config)
    if fmas * INSTRUCTION_BYTES > INSTRUCTION_CACHE:
        return Refusal(
            "instruction_cache",
            f"IEEE float32 products unroll to {fmas} FMA instructions per iteration; the instruction cache holds "
            f"{INSTRUCTION_CACHE // INSTRUCTION_BYTES} instructions, so the loop takes minutes to compile and runs slowly",
        )
    return None


def _warps_by_registers(binary: Binary, gpu: Gpu) -> int:
    """How many warps the registers of an SM suffice for."""
    per_warp = -(-binary.registers * WARP_THREADS // REGISTER_UNIT) * REGISTER_UNIT
    return gpu.registers_per_sm // SCHEDULERS // max(per_warp, REGISTER_UNIT) * SCHEDULERS


def blocks_per_sm(binary: Binary, gpu: Gpu) -> int:
    """Blocks of ``binary`` that are resident on an SM at a time; 0: it cannot launch."""
    if binary.shared_bytes > gpu.shared_per_block:
        return 0
    shared = -(-(binary.shared_bytes + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
    return min(
        gpu.blocks_per_sm,
        gpu.shared_per_sm // shared,
        gpu.warps_per_sm // binary.num_warps,
        _warps_by_registers(binary, gpu) // binary.num_warps,
    )


def spills_too_much(binary: Binary) -> bool:
    """Whether a thread spills more words than it has registers. Fewer spills are no reason to drop a config: of 1879 configs
    measured on an H200 (24 keys, bf16, length 8192) winners spilled up to 0.49 words per register. Of the 194 configs above 1,
    the best took 1.16 times the winner's time; of those above 1.5, 2.3 times."""
    return binary.spills > MOST_SPILLS * binary.registers


def after_compile(binary: Binary, gpu: Gpu) -> Refusal | None:
    """Why a compiled config is dropped, or None."""
    if binary.shared_bytes > gpu.shared_per_block:
        return Refusal(
            "shared_memory",
            f"{binary.shared_bytes} bytes of shared memory; the limit per block on {gpu.name} is {gpu.shared_per_block}",
        )
    if _warps_by_registers(binary, gpu) < binary.num_warps:
        return Refusal(
            "registers",
            f"{binary.num_warps} warps with {binary.registers} registers per thread; an SM has {gpu.registers_per_sm}",
        )
    if spills_too_much(binary):
        return Refusal("spills", f"{binary.spills} spilled words per thread with {binary.registers} registers")
    return None
