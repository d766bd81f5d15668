"""What the search spaces of the Hopper kernels share."""

from fa2tune.spec.problem import Specialization, padded_head_dim
from fa2tune.spec.variant import Constraint

SHARED_BYTES = 227 * 1024  #: a block's most on compute capability 9.0
BARRIER_BYTES = 1024  #: barriers, and what a partition's arguments take


def block_dims(spec: Specialization) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of those of V, O and dO: head dims padded to a power of two, at least 64."""
    return max(64, padded_head_dim(spec.head_dim)), max(64, padded_head_dim(spec.head_dim_v))


SIXTEEN_BIT = Constraint(
    "sixteen_bit",
    "Hopper's tensor cores take only bf16 and fp16 operands from registers and transposed; float32 is left to the portable "
    "kernel",
    lambda config, spec, arch: spec.dtype in ("bf16", "fp16"),
)
TMA_ADDRESSES_TENSORS = Constraint(
    "tma_addresses_tensors",
    "TMA addresses only tensors whose base address and row strides are multiples of 16 bytes",
    lambda config, spec, arch: spec.aligned,
)
