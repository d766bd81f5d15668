"""What kernels that are not tuned do for a call, beside the tuned ones or in their place: their roles.

A kernel's file names its role (``role="fwd_combine"`` in the call that VARIANT is), as a tuned kernel's names what it serves.
The launch code asks for a role, never for a file (``compiling/support.py``): any number of kernels may have one. Such a kernel
has to take what stands here, and is refused by name where it does not (``lacking``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa2tune.spec.variant import Variant


PACKED_ORDER = "packed_order"
PACKED_ORDERS = "packed_orders"
FWD_GROUPED = "fwd_grouped"
FWD_ONE_TILE = "fwd_one_tile"
FWD_80_KEYS = "fwd_80_keys"
FWD_MULTISTAGE = "fwd_multistage"
FWD_SPLIT = "fwd_split"
FWD_SHARES = "fwd_shares"
FWD_SPLIT_GROUPED = "fwd_split_grouped"
FWD_COMBINE = "fwd_combine"
BWD_DELTA = "bwd_delta"
BWD_SPREAD = "bwd_spread"
BWD_GATHER = "bwd_gather"
BWD_DQ_SPLIT = "bwd_dq_split"
BWD_DQ_COMBINE = "bwd_dq_combine"
BWD_ONE_TILE = "bwd_one_tile"
BWD_QUERY_TILES = "bwd_query_tiles"
BWD_STORED_DS = "bwd_stored_ds"


@dataclass(frozen=True)
class Role:
    """What is asked of a kernel that has it."""

    what: str
    tensors: tuple[str, ...]  #: that its launch passes
    #: dimensions of its search space that a launch or a schedule reads or sets; the largest value is the most that it takes
    config: tuple[str, ...] = ()
    #: function of its search space's file, which has the kernel's own path -> its parameters. Without any, the kernel runs with
    #: the default config of its space
    functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def asked(self) -> str:
        """The one of ``functions`` that says, of a specialization and an architecture, whether the kernel computes such calls,
        its mask aside; "": it computes all."""
        return next((name for name in ("fits", "tiles") if name in self.functions), "")


_ASKED = ("spec", "arch")
ROLES = {
    PACKED_ORDER: Role(
        "orders the tiles of packed sequences for the kernel that has it in packed_before",
        ("cu_seqlens_q", "cu_seqlens_k", "order"),
        ("BLOCK_Q", "IN_TURNS", "EARLY"),
    ),
    PACKED_ORDERS: Role(
        "makes the orders of all usual tiles at once, for varlen_schedule", ("cu_seqlens_q", "cu_seqlens_k", "order")
    ),
    FWD_GROUPED: Role(
        "a forward whose tiles have the queries of MEMBERS heads of a key head as rows",
        ("q", "k", "v", "o", "lse"),
        ("BLOCK_M", "BLOCK_N", "MEMBERS", "maxnreg"),
        {"tiles": _ASKED, "config_of": ("spec", "rows", "keys", "members")},
    ),
    FWD_ONE_TILE: Role(
        "a forward of at most KEYS keys, all of which a tile has",
        ("q", "k", "v", "o", "lse"),
        ("BLOCK_M", "KEYS"),
        {"tiles": _ASKED, "config_of": ("spec", "rows", "keys"), "held": ("spec", "rows", "keys")},
    ),
    FWD_MULTISTAGE: Role(
        "a forward by programs of one tile each, whose warps load key blocks of STAGE_KEYS keys for themselves",
        ("q", "k", "v", "o", "lse"),
        ("BLOCK_M", "STAGE_KEYS", "STAGES"),
        {"tiles": _ASKED, "config_of": ("spec", "rows", "keys"), "held": ("spec", "rows", "keys")},
    ),
    FWD_80_KEYS: Role(
        "a forward in blocks of 64 and TAIL keys",
        ("q", "k", "v", "o", "lse"),
        ("BLOCK_M", "TAIL", "HEADS_PER_WAVE"),
        {"fits": _ASKED, "config_of": ("spec",)},
    ),
    FWD_SPLIT: Role(
        "a forward whose keys are split into SPLITS parts, 2 or more; its tiles have the queries of one head",
        ("q", "k", "v", "o_parts", "stats"),
        ("BLOCK_M", "BLOCK_N", "SPLITS", "maxnreg"),
        {"tiles": _ASKED, "config_of": ("spec", "rows", "splits")},
    ),
    FWD_SPLIT_GROUPED: Role(
        "the same in 1 part or more; its tiles have the queries of all heads of a key head. Of 1 part it writes o and lse",
        ("q", "k", "v", "o", "lse", "o_parts", "stats"),
        ("BLOCK_M", "BLOCK_N", "SPLITS"),
        {
            "tiles": _ASKED,
            "config_of": ("spec", "arch", "tma", "rows", "splits"),
            "shared_bytes": ("spec", "config"),
        },
    ),
    FWD_SHARES: Role(
        "a forward by SHARES programs that compute equally many key blocks each, after ROUNDS whole tiles each",
        ("q", "k", "v", "o", "lse", "o_parts", "stats"),
        ("BLOCK_M", "BLOCK_N", "PINGPONG", "Q_IN_REGISTERS", "NUMBERED", "SHARES", "ROUNDS", "maxnreg"),
        {
            "fits": _ASKED,
            "config_of": ("spec", "shares", "rounds"),
            "left_over": ("problem", "config"),
            "refused": ("problem", "config"),
        },
    ),
    FWD_COMBINE: Role(
        "puts the parts of both together",
        ("o_parts", "stats", "o", "lse"),
        ("SPLITS",),
        {"config_of": ("arch", "splits")},
    ),
    BWD_DELTA: Role("makes delta for a fused backward that names no kernel before it", ("o", "do", "dlse", "delta")),
    BWD_SPREAD: Role(
        "writes K and V once per part of a query group, for a backward in parts", ("k", "v", "k_parts", "v_parts")
    ),
    BWD_GATHER: Role("adds up the parts' dK and dV", ("dk_parts", "dv_parts", "dk", "dv")),
    BWD_DQ_SPLIT: Role(
        "dQ with keys in SPLITS parts, and delta",
        ("q", "k", "v", "o", "do", "lse", "delta", "dq_parts"),
        ("BLOCK_N", "SPLITS"),
        {"fits": _ASKED, "config_of": ("spec", "splits")},
    ),
    BWD_DQ_COMBINE: Role(
        "adds up dq_parts, of bwd_dq_split, of bwd_query_tiles or of what makes dQ of dS", ("dq_parts", "dq")
    ),
    BWD_ONE_TILE: Role(
        "a whole backward of at most BLOCK_N keys, BLOCK_M queries at a time; in PARTS parts of these, bwd_gather runs after",
        ("q", "k", "v", "o", "do", "lse", "dq", "dk", "dv"),
        ("BLOCK_M", "BLOCK_N", "HALVES", "PERSISTENT", "PARTS"),
        {
            "fits": _ASKED,
            "config_of": ("spec", "parts", "halves", "turns"),
            "halves_of": ("spec",),
            "can_take_turns": ("spec",),
        },
    ),
    BWD_QUERY_TILES: Role(
        "a whole backward whose programs have a tile of BLOCK_M queries each and one of SPLITS parts of the keys; of several "
        "tiles a key head bwd_gather runs after, of several parts bwd_dq_combine",
        ("q", "k", "v", "o", "do", "lse", "dq", "dq_parts", "dk", "dv"),
        ("BLOCK_M", "BLOCK_N", "SPLITS"),
        {"fits": _ASKED, "rows_of": ("spec",), "config_of": ("spec", "rows", "splits"), "at_once": ("spec", "config")},
    ),
    BWD_STORED_DS: Role(
        "dK, dV and, in memory, dS transposed, in whole blocks of 64 x 64; the kernel after it makes dQ of dS, "
        "of DQ_SPLITS parts of the keys, after which bwd_dq_combine runs",
        ("q", "k", "v", "do", "lse", "delta", "ds", "dk", "dv"),
        ("DQ_GROUPS", "DQ_SPLITS", "SLICES"),
        {"fits": _ASKED, "of_row": ("problem", "config"), "ds_shape": ("problem",)},
    ),
}


def lacking(role: str, variant: Variant, space: ModuleType | None) -> Iterator[str]:
    """What a kernel lacks of its role. ``space``: the file of its search space, where the role has functions; None: there is no
    such file."""
    asked = ROLES[role]
    yield from (f"tensor {name}" for name in asked.tensors if name not in variant.tensors)
    yield from (
        f"dimension {name} of its search space" for name in asked.config if name not in variant.space.dimensions
    )
    for name, wanted in asked.functions.items():
        found = getattr(space, name, None)
        taken = tuple(inspect.signature(found).parameters) if callable(found) else ()
        if tuple(each.removeprefix("_") for each in taken) != wanted:
            yield f"{name}({', '.join(wanted)}) of its search space's file"
