"""What a GPU cannot launch, or cannot but lose with: each limit a named constant with its unit, each refusal with its reason.

Before a compile: the space's own constraints first, then arithmetic on the config. After it: what the binary really takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa2tune.compiling.compiler import Binary
from fa2tune.gpus import KIB, Gpu
from fa2tune.problem import ITEMSIZE, KERNELS, Config, Problem, Specialization, padded_head_dim
from fa2tune.variant import WARP_SPECIALIZED, Variant

WARP_THREADS = 32
MAX_BLOCK_THREADS = 1024  #: threads a block may have, on every compute capability
MIN_MMA_SIDE = 16  #: elements: the smallest side of a tl.dot operand
# CUDA's occupancy rules (cuda_occupancy.h), the same from compute capability 8.0 to 12.0
REGISTER_UNIT = 256  #: registers a warp is given at a time
SCHEDULERS = 4  #: quarters of an SM; a warp's registers lie in one of them
SHARED_UNIT = 128  #: bytes a block is given at a time
SHARED_RESERVED = 1 * KIB  #: bytes the system takes beside each block's own
INSTRUCTION_BYTES = 16
INSTRUCTION_CACHE = 128 * KIB  #: bytes of an SM's last instruction cache before L2 (Jia et al. 2018, arXiv 1804.06826)
MANY_SMS = 1 << 16  #: more than any GPU has: so many do not bound a persistent grid
HOPELESS_SPILLS = 1.0  #: spilled words a register, above which a binary is dropped unmeasured


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a config is not worth compiling or launching."""

    name: str  #: short, for counting
    why: str  #: a sentence with the numbers


def owns_queries(variant: Variant, config: Config) -> bool:
    """Whether the kernel's programs own tiles of queries and stream keys, or the other way round: its grid tells."""
    probe = Problem("bf16", 1, 1, 1, seqlen_q=1 << 16, seqlen_k=1, head_dim=64, head_dim_v=64, causal=False)
    return variant.programs(probe, config, MANY_SMS) > 1


def shared_lower_bound(variant: Variant, spec: Specialization, config: Config) -> int:
    """Bytes of shared memory the streamed tiles take at the least: num_stages - 1 copies of both where the loop is
    pipelined, one of the wider where it is not (then one tile's space serves both). Unaligned tensors are not pipelined:
    an asynchronous copy moves 4 bytes or more."""
    if not variant.descriptors:  # streams nothing
        return 0
    d, dv = padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)
    copies = config["num_stages"] - 1 if spec.aligned else 0
    columns = (d + dv) * copies if copies > 0 else max(d, dv)
    rows = config["BLOCK_N" if owns_queries(variant, config) else "BLOCK_M"]
    return ITEMSIZE[spec.dtype] * rows * columns


def unrolled_fmas(variant: Variant, spec: Specialization, config: Config) -> int:
    """FMA instructions one loop iteration holds where products run outside the tensor cores (IEEE float32): Triton unrolls
    them in full. 0 where they run on tensor cores."""
    if spec.dtype != "fp32" or spec.precision != "ieee" or variant.name not in KERNELS:
        return 0
    tile = Problem(
        spec.dtype, 1, 1, 1, config["BLOCK_M"], config["BLOCK_N"], padded_head_dim(spec.head_dim),
        padded_head_dim(spec.head_dim_v), causal=False,
    )  # fmt: skip
    return int(tile.flops(variant.name) / 2) // (config["num_warps"] * WARP_THREADS)


def before_compile(variant: Variant, spec: Specialization, config: Config, gpu: Gpu) -> Refusal | None:
    """Why ``config`` is refused by arithmetic alone, or None."""
    if not variant.min_arch <= gpu.arch <= variant.max_arch:
        needed = f"{variant.min_arch}" + (" alone" if variant.max_arch == variant.min_arch else "")
        return Refusal("architecture", f"{variant.name} needs compute capability {needed}, {gpu.name} has {gpu.arch}")
    broken = variant.space.broken(config, spec, gpu.arch)
    if broken is not None:
        return Refusal(broken.name, broken.why)
    if WARP_SPECIALIZED in variant.ways and variant.descriptors:
        return None  # what its partitions and rings of tiles take is its space's to say
    threads = config["num_warps"] * WARP_THREADS
    if threads > MAX_BLOCK_THREADS:
        return Refusal("threads_per_block", f"{threads} threads, a block has at most {MAX_BLOCK_THREADS}")
    small = {name: value for name, value in config.items() if name in ("BLOCK_M", "BLOCK_N") and value < MIN_MMA_SIDE}
    if small and variant.descriptors:
        return Refusal("mma_shape", f"{small}: a matrix product needs sides of {MIN_MMA_SIDE} at the least")
    shared = shared_lower_bound(variant, spec, config)
    if shared > gpu.shared_per_block:
        return Refusal(
            "shared_memory_of_tiles",
            f"the streamed tiles alone take {shared} B of shared memory, {gpu.name} gives a block {gpu.shared_per_block}",
        )
    fmas = unrolled_fmas(variant, spec, config)
    if fmas * INSTRUCTION_BYTES > INSTRUCTION_CACHE:
        return Refusal(
            "instruction_cache",
            f"IEEE float32 products unroll to {fmas} FMA a thread and iteration, the instruction cache holds "
            f"{INSTRUCTION_CACHE // INSTRUCTION_BYTES}: minutes to compile, and each iteration fetches its code anew",
        )
    return None


def _warps_by_registers(binary: Binary, gpu: Gpu) -> int:
    """Warps an SM has registers for."""
    per_warp = -(-binary.registers * WARP_THREADS // REGISTER_UNIT) * REGISTER_UNIT
    return gpu.registers_per_sm // SCHEDULERS // max(per_warp, REGISTER_UNIT) * SCHEDULERS


def blocks_per_sm(binary: Binary, gpu: Gpu) -> int:
    """Blocks of ``binary`` that one SM holds at a time; 0: it cannot launch."""
    if binary.shared_bytes > gpu.shared_per_block:
        return 0
    shared = -(-(binary.shared_bytes + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
    return min(
        gpu.blocks_per_sm,
        gpu.shared_per_sm // shared,
        gpu.warps_per_sm // binary.num_warps,
        _warps_by_registers(binary, gpu) // binary.num_warps,
    )


def hopeless_spills(binary: Binary) -> bool:
    """Whether more of a thread's values lie in memory than in registers. Any spill at all would be the wrong rule: of 1879
    configs measured on an H200 (24 keys, bf16, length 8192) winners spilled up to 0.49 words a register; of the 194 above 1 the
    best took 1.16 times the winner's time, above 1.5 2.3 times."""
    return binary.spills > HOPELESS_SPILLS * binary.registers


def after_compile(binary: Binary, gpu: Gpu) -> Refusal | None:
    """Why a compiled config is refused, or None."""
    if binary.shared_bytes > gpu.shared_per_block:
        return Refusal(
            "shared_memory",
            f"{binary.shared_bytes} B of shared memory, {gpu.name} gives a block {gpu.shared_per_block}",
        )
    if _warps_by_registers(binary, gpu) < binary.num_warps:
        return Refusal(
            "registers",
            f"{binary.num_warps} warps of {binary.registers} registers a thread exceed the {gpu.registers_per_sm} of an SM",
        )
    if hopeless_spills(binary):
        return Refusal("spills", f"{binary.spills} values spilled beside {binary.registers} in registers")
    return None
