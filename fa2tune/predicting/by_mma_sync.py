"""What the model takes for the trip of a kernel of kernels/sm80, whose loops are written out and not pipelined by Triton.

A loop of such a kernel may take several key or query blocks before it comes round: their number follows from the products that
it runs. Blocks are asked for about one trip ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fa2tune.compiling.sass import Loop
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import Variant

FOLDER = "sm80"  #: of kernels/
STAGES = 2  #: as which copies that are asked for one block ahead count
#: Numbers of a loop that grow with the blocks it takes.
PER_BLOCK = (
    "tensor_flops", "mufu", "fp32", "ffma", "alu", "compares", "issue", "shared_bytes", "local_bytes", "copies", "atomics",
    "barriers", "products", "product_bytes", "shuffles", "meetings", "arrivals",
)  # fmt: skip


def written_out(variant: Variant) -> bool:
    """Whether a kernel is one of these."""
    return variant.name.partition("/")[0] == FOLDER and {"BLOCK_M", "BLOCK_N"} <= set(variant.space.dimensions)


def blocks_of(loop: Loop, variant: Variant, spec: Specialization, config: Mapping[str, Any], warps: int) -> int:
    """How many blocks a loop takes before it comes round. Products with padding may be left out, so this rounds."""
    d, dv = padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)
    unit = Problem(spec.dtype, 1, 1, 1, 1, 1, d, dv, FULL).flops(variant.serves)
    return max(1, round(loop.tensor_flops * warps / (config["BLOCK_M"] * config["BLOCK_N"] * unit)))


def per_block(
    loops: Sequence[Loop], variant: Variant, spec: Specialization, config: Mapping[str, Any], warps: int
) -> list[Loop]:
    """The same loops, of one block."""
    found = []
    for loop in loops:
        blocks = blocks_of(loop, variant, spec, config, warps)
        found.append(replace(loop, **{name: getattr(loop, name) / blocks for name in PER_BLOCK}))
    return found
