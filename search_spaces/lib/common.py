"""Constraints that several kernels share. Each is stated once, with its reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fa2tune.spec.problem import ITEMSIZE, Config, Specialization, padded_head_dim
from fa2tune.spec.variant import DESCRIPTOR, POINTER, WARP_THREADS, Constraint, SearchSpace

#: padded head dim, at least 64 -> (BLOCK_M, BLOCK_N, num_warps, num_stages). Tables for compute capability 9.0 and 10.0 are the
#: best of a sweep at length 8192 on an H200 (docs/experiments.md).
Tiles = Mapping[int, tuple[int, int, int, int]]


#: What several kernels refuse, each for a reason of its own: name, and the words for people.
TILES_FIT = "tiles_fit_shared_memory", "tiles exceed shared memory"
REGISTERS_HOLD_TILES = "registers_hold_tiles", "tiles exceed the registers"
REGISTERS_HOLD_LOOP = "registers_hold_loop", "what lives through the loop exceeds the registers"

REGISTERS_SM = 1 << 16  #: of a multiprocessor
#: Bytes of a row that TMA swizzles together at most.
SWIZZLED_BYTES = 128


def least_stages(spec: Specialization) -> int:
    """Of tiles of K and V that TMA loads. In one stage V takes the place of K. Where they are swizzled differently, as rows of
    less than 128 bytes are, ptxas 12.8 (Triton 3.6) works out V's addresses from a register that holds another value: results
    were wrong at head dims 104 / 32 and 112 / 24 (docs/experiments/defects.md)."""
    widths = (padded_head_dim(dim) * ITEMSIZE[spec.dtype] for dim in (spec.head_dim, spec.head_dim_v))
    return 1 if len({min(width, SWIZZLED_BYTES) for width in widths}) == 1 else 2


def is_narrow(spec: Specialization) -> bool:
    """Whether rows of V are swizzled more narrowly than those of K. Loads by pointer, of single elements, are not pipelined: V
    takes the place of K in any number of stages, and its addresses are wrong in tiles of 64 keys and more."""
    return spec.head_dim_v < spec.head_dim and least_stages(spec) > 1


@dataclass(frozen=True, eq=False)
class Default:
    """The config that serves when no row does, from tables of tiles: called as ``SearchSpace.default`` is."""

    described: Tiles  #: compute capability 9.0 and 10.0, where descriptors can be used
    by_pointer: Tiles  #: and where not
    older: Tiles  #: GPUs without TMA, and those with 99 KiB of shared memory a block
    fp32: Tiles
    masked: Callable[[int], str]  #: MASKED of the wider head dim

    def __call__(self, spec: Specialization, arch: int) -> Config:
        dim = max(64, padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
        hopper = 90 <= arch < 120
        tiles = self.older if not hopper else self.described if spec.aligned else self.by_pointer
        if spec.dtype == "fp32":
            tiles = self.fp32
        block_m, block_n, warps, stages = tiles[dim]
        if tiles is self.described:
            stages = max(stages, least_stages(spec))
        return {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "LOADS": DESCRIPTOR if tiles is self.described else POINTER,
            "num_warps": warps, "num_stages": stages, "maxnreg": 0, "HEADS_PER_WAVE": 4,
            "MASKED": self.masked(max(spec.head_dim, spec.head_dim_v)),
        }  # fmt: skip


DESCRIPTOR_NEEDS_TMA = Constraint(
    "descriptor_needs_tma",
    "descriptor loads without TMA",
    "tensor descriptors need the TMA unit (compute capability 9.0 and later), which addresses only tensors whose base address "
    "and row strides are multiples of 16 bytes",
    lambda config, spec, arch: config["LOADS"] != DESCRIPTOR or (arch >= 90 and spec.aligned),
)


def rows_per_warp(block: str) -> Constraint:
    return Constraint(
        f"rows_per_warp_{block.lower()}",
        f"fewer than 16 rows per warp ({block})",
        f"each warp computes 16 rows of a tensor-core product; with fewer rows in {block} the warps split the columns, and the "
        "softmax or its operand crosses warps through shared memory",
        lambda config, spec, arch: spec.dtype == "fp32" or config[block] >= 16 * config["num_warps"],
    )


def accumulators_fit(name: str, what: str, elements: Callable[[Config, int, int], int], per_thread: int) -> Constraint:
    """elements(config, D, DV): float32 values that live through the loop; ``what``: they are, for people."""
    return Constraint(
        f"accumulators_fit_{name}",
        f"too many accumulators per thread ({what})",
        f"more than {per_thread} float32 accumulators per thread leave too few of its 255 registers for operands, and spill",
        lambda config, spec, arch: (
            elements(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
            <= per_thread * WARP_THREADS * config["num_warps"]
        ),
    )


def tiles_fit(bytes_needed: Callable[[Config, int, int, int], int]) -> Constraint:
    """bytes_needed(config, D, DV, itemsize): what must lie in shared memory at once, at the least."""
    return Constraint(
        *TILES_FIT,
        "the tiles that must be in shared memory at the same time exceed 227 KiB, the largest limit per block of any GPU",
        lambda config, spec, arch: (
            bytes_needed(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v), ITEMSIZE[spec.dtype])
            <= 227 * 1024
        ),
    )


def loop_tiles_fit(kept: str, passing: str) -> Constraint:
    """``tiles_fit`` of a backward: ``kept`` names the block whose two tiles stay, ``passing`` that of the loop's."""
    return tiles_fit(
        lambda c, d, dv, size: size * (c[kept] * (d + dv) + c[passing] * (d + dv) * max(1, c["num_stages"] - 1))
    )


def sixteen_bit(why: str) -> Constraint:
    return Constraint(
        "sixteen_bit",
        "float32 in a kernel for 16-bit types",
        f"{why}; float32 is left to the portable kernel",
        lambda config, spec, arch: spec.dtype in ("bf16", "fp16"),
    )


REGISTER_CAP_BINDS = Constraint(
    "register_cap_binds",
    "maxnreg is no lower than the block's own limit",
    "the block size limits the registers of a thread (16 warps: 128); a cap at or above that limit changes nothing",
    lambda config, spec, arch: (
        config["maxnreg"] == 0 or config["maxnreg"] * WARP_THREADS * config["num_warps"] < REGISTERS_SM
    ),
)


def register_cap_holds(columns: Callable[[int, int], int]) -> Constraint:
    """columns(D, DV): of the widest product whose rows are split over all warps."""
    return Constraint(
        "register_cap_holds_wgmma",
        "maxnreg leaves too few registers for a product",
        "a Hopper tensor-core instruction keeps a 64-row accumulator of up to 256 columns in registers, columns / 2 per "
        "thread; ptxas rejects a cap that leaves fewer than 30 more",
        lambda config, spec, arch: (
            arch != 90
            or config["maxnreg"] == 0
            or config["maxnreg"] >= 30 + columns(padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)) // 2
        ),
    )


def tile_space(
    name: str,
    block_m: tuple[int, ...],
    block_n: tuple[int, ...],
    stages: tuple[int, ...],
    own: tuple[Constraint, ...],
    default: Callable[[Specialization, int], Config],
) -> SearchSpace:
    """Of a portable kernel that loops over tiles of keys or queries. ``own``: its constraints beside those of every such
    kernel."""
    return SearchSpace(
        name=name,
        dimensions={
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "LOADS": (POINTER, DESCRIPTOR),
            "MASKED": ("last", "first", "inside"),  # tiles under the mask: a loop of their own, or a branch
            "HEADS_PER_WAVE": (1, 4, 16),
            "num_warps": (4, 8),
            "num_stages": stages,
            "maxnreg": (0, 128, 168),
        },
        constraints=(DESCRIPTOR_NEEDS_TMA, REGISTER_CAP_BINDS, *own),
        default=default,
    )


def keys_space(name: str, default: Default) -> SearchSpace:
    """Of kernels/lib/bwd_keys.py, with dQ's sums in it or without."""
    return tile_space(
        name,
        block_m=(16, 32, 64, 128),
        block_n=(16, 32, 64, 128),
        stages=(1, 2, 3),
        own=(
            accumulators_fit(
                "dk_dv_s_dp", "dK, dV, scores, dP", lambda c, d, dv: c["BLOCK_N"] * (d + dv + 2 * c["BLOCK_M"]), 288
            ),
            loop_tiles_fit("BLOCK_N", "BLOCK_M"),
        ),
        default=default,
    )
