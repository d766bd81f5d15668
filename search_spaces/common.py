"""Constraints that several kernels share. Each is stated once, with its reason."""

from fa2tune.problem import ITEMSIZE, padded_head_dim
from fa2tune.variant import DESCRIPTOR, Constraint

DESCRIPTOR_NEEDS_TMA = Constraint(
    "descriptor_needs_tma",
    "tensor descriptors are read by the TMA unit, which exists from compute capability 9.0 on and addresses only tensors "
    "whose base and row strides are multiples of 16 bytes",
    lambda config, spec, arch: config["LOADS"] != DESCRIPTOR or (arch >= 90 and spec.aligned),
)


def rows_per_warp(block: str) -> Constraint:
    return Constraint(
        f"rows_per_warp_{block.lower()}",
        f"each warp owns 16 rows of the products; with fewer rows in {block} warps split the columns, and the softmax or "
        "its operand crosses warps through shared memory",
        lambda config, spec, arch: config[block] >= 16 * config["num_warps"],
    )


def accumulators_fit(name: str, elements, per_thread: int) -> Constraint:
    """elements(config, D, DV): float32 values that live through the loop."""
    return Constraint(
        f"accumulators_fit_{name}",
        f"more than {per_thread} float32 accumulators a thread leave nothing of its 255 registers for operands: all spills",
        lambda config, spec, arch: (
            elements(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
            <= per_thread * 32 * config["num_warps"]
        ),
    )


def tiles_fit(bytes_needed) -> Constraint:
    """bytes_needed(config, D, DV, itemsize): what must lie in shared memory at once, at the least."""
    return Constraint(
        "tiles_fit_shared_memory",
        "the tiles that must be in shared memory at once exceed 227 KiB, the most any supported GPU gives a block",
        lambda config, spec, arch: (
            bytes_needed(
                config, padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v), ITEMSIZE[spec.dtype]
            )
            <= 227 * 1024
        ),
    )


REGISTER_CAP_BINDS = Constraint(
    "register_cap_binds",
    "with 16 warps a thread has at most 128 registers anyway: a cap at or above what the block size leaves changes nothing",
    lambda config, spec, arch: config["maxnreg"] == 0 or config["maxnreg"] * 32 * config["num_warps"] < 65536,
)
