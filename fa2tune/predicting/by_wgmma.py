"""What the model takes for a block of a warp-specialised kernel: groups of four warps, each with a loop of its own over a part
of the tile, beside warps that ask for what comes next.

The groups meet in no barrier of the block, so they count as so many blocks that share an SM: customers of the same tensor cores
and schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa2tune.compiling import limits
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import WARP_GROUP, WARP_SPECIALIZED, Variant

GROUP_ROWS = 64  #: that a group owns
HEADS_PER_BAND = 16  #: heads of a band whose config leaves them to what L2 holds
RINGS = ("STAGES", "K_STAGES", "V_STAGES")  #: dimensions that say how many tiles are under way


def warp_specialized(variant: Variant) -> bool:
    """Whether a kernel is one of these, and tuned."""
    return bool(variant.serves) and WARP_SPECIALIZED in variant.implementations


def groups_of(num_warps: int) -> int:
    """Groups that multiply, by all warps of a block: the last four produce, or idle."""
    return max(1, num_warps // WARP_GROUP - 1)


def tile(config: Mapping[str, Any], groups: int) -> tuple[int, int]:
    """(query rows, keys) of a block; of the side that the groups own, where the config names no size, as many as they have."""
    own = GROUP_ROWS * groups
    return config.get("BLOCK_M", own), config.get("BLOCK_N", own)


def stages(config: Mapping[str, Any], otherwise: int) -> int:
    """As how many stages of a pipeline without a producer its rings count: a tile is asked for as soon as its place is free,
    a trip before such a pipeline does."""
    rings = [config[name] for name in RINGS if name in config]
    return min(rings) + 1 if rings else otherwise


def persistent(variant: Variant, config: Config) -> bool:
    """Whether a program takes several tiles, found from its grid."""
    probe = Problem("bf16", 1, 1, 1, 1 << 16, 1 << 16, 64, 64, FULL)
    few, many = (variant.programs(probe, config, sms, early=False) for sms in (1, limits.MANY_SMS))
    return few < many
