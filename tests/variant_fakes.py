"""A warp-specialised variant of every tuned kernel, of which no kernel is ever compiled: for tests of the tuner's records."""

from __future__ import annotations

from fa2tune.compiling import registry
from fa2tune.search_spaces.lib.hopper import SIXTEEN_BIT
from fa2tune.spec.variant import Constraint, SearchSpace, Variant

DEFAULT = {"BLOCK_M": 128, "BLOCK_N": 128, "GROUPS": 2, "STAGES": 2, "HEADS_PER_WAVE": 4, "num_warps": 4}
SPACE = SearchSpace(
    name="specialized",
    dimensions={
        "BLOCK_M": (64, 128, 192), "BLOCK_N": (64, 128), "GROUPS": (1, 2, 3), "STAGES": (1, 2, 3), "HEADS_PER_WAVE": (1, 4, 16),
        "num_warps": (4,),
    },
    constraints=(
        SIXTEEN_BIT,
        Constraint("whole_groups", "not whole groups", "64 a group", lambda c, spec, arch: c["BLOCK_M"] == 64 * c["GROUPS"]),
    ),
    default=lambda spec, arch: DEFAULT,
)  # fmt: skip


def fake(kernel: str) -> Variant:
    portable = registry.portable_of(kernel)
    return Variant(
        name=f"sm90/{kernel}", serves=kernel, kernel=portable.kernel, space=SPACE, tensors=portable.tensors,
        descriptors=portable.descriptors, grid=portable.grid, min_arch=90, max_arch=90,
    )  # fmt: skip


def with_fakes(*kernels: str) -> dict[str, Variant]:
    """What the folder of portable kernels holds, and a fake one of each of these kernels."""
    portable = {name: variant for name, variant in registry.variants().items() if name.startswith("portable/")}
    return portable | {variant.name: variant for variant in map(fake, kernels)}
