"""The Hopper backward with dS in memory and its second kernel, which makes dQ of it, without a GPU: what they multiply, what
they spill, what ptxas says, and what fits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hopper_builds import Asked, Built, builder, chosen, written_under_way

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, operandcheck, registry, sass
from fa2tune.launching import stored_ds
from fa2tune.search_spaces.lib.hopper import part_dims
from fa2tune.search_spaces.sm90 import bwd_dkdv, bwd_dkdv_ds
from fa2tune.spec.mask import FULL, Mask
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import Variant

H200 = gpus.named("h200")
MAIN = registry.variant_named("sm90/bwd_dkdv_ds")


class Case(NamedTuple):
    dims: tuple[int, int]
    mask: str
    groups: int  #: of dQ's kernel
    turns: bool = False  #: a program takes tile after tile
    splits: int = 1  #: parts of the keys there

    @property
    def spec(self) -> Specialization:
        return Specialization("bf16", *self.dims, self.mask)

    @property
    def config(self) -> Config:
        usual = {**MAIN.space.default(self.spec, 90), "DQ_GROUPS": self.groups, "DQ_SPLITS": self.splits}
        return (self.turns and bwd_dkdv_ds.tile_after_tile(self.spec, usual)) or usual

    @property
    def kernels(self) -> list[tuple[Variant, Config]]:
        """Main, and dQ's."""
        (after,) = compiler.around(MAIN, self.spec, self.config, 90)[1]
        return [(MAIN, self.config), after]

    @property
    def asked(self) -> list[Asked]:
        return [
            (one.name, self.spec, tuple(sorted(compiler.binary_config(one, config).items())))
            for one, config in self.kernels
        ]


CASES = [
    Case((192, 192), "causal", 3),
    Case((160, 160), "full", 3),
    Case((256, 256), "causal", 2),
    Case((192, 128), "full", 2),
    Case((192, 192), "causal", 3, True),
    Case((160, 160), "full", 3, True),
    Case((136, 136), "causal", 2, True),
    Case((256, 256), "causal", 2, False, 5),
    Case((160, 160), "full", 3, True, 2),
]
every = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], list[Built]]]:
    with builder([asked for case in chosen(request) for asked in case.asked]) as build:
        yield lambda case: [build(asked) for asked in case.asked]


@every
def test_both_fit_spill_nothing_and_are_not_serialised(case: Case, built: Callable[[Case], list[Built]]) -> None:
    for made in built(case):
        assert limits.after_compile(made.binary, H200) is None and made.binary.spills == 0
        assert "Compiling entry function" in made.said and not re.findall(r"C75\d\d", made.said)
        assert not written_under_way(made.operations)[0] and operandcheck.unsound(made.listing) == ()
    main, _ = built(case)
    reckoned = bwd_dkdv_ds.shared_bytes(case.config, case.spec)
    assert reckoned - 1024 <= main.binary.shared_bytes <= reckoned


@every
def test_five_products_in_both(case: Case, built: Callable[[Case], list[Built]]) -> None:
    """S and dV in two loops, dP and dK in one, the first of S and dP before them; dQ once in each group."""
    parts = part_dims(case.spec, case.config)
    d, dv = ([parts[name] for name in names] for names in (("BLOCK_D", "REST_D"), ("BLOCK_DV", "REST_DV")))
    expected = Counter({64: 3 * sum(d) // 16 + 2 * sum(dv) // 16})
    for columns, loops in ((dv, 2), (d, 1)):
        for part in filter(None, columns):
            expected[part] += loops * 64 // 16
    of_dq = Counter({part: case.groups * 64 // 16 for part in d if part})
    for made, products in zip(built(case), (expected, of_dq), strict=True):
        assert Counter(map(int, re.findall(r"HGMMA\.64x(\d+)x16", made.listing))) == products
    loops = [loop for loop in sass.loops(built(case)[0].listing) if loop.products > 8]
    assert len(loops) == 3 and all(loop.local_bytes == 0 for loop in loops)


def test_it_has_the_band_of_a_row_of_dk_and_dv_and_stages_that_fit() -> None:
    dkdv = registry.variant_named("sm90/bwd_dkdv")
    for dim in (136, 160, 192, 256):
        spec = Specialization("bf16", dim, dim, "full")
        legal = [one for one in dkdv.space.points() if limits.before_compile(dkdv, spec, one, H200) is None]
        for rows, groups in ((128, 2), (129, 3 if dim < 256 else 2)):
            problem = Problem("bf16", 1, 2, 2, rows, 500, dim, dim, FULL)
            for row in legal:
                found = bwd_dkdv_ds.of_row(problem, bwd_dkdv.fitted(spec, row))
                turns = bwd_dkdv_ds.tile_after_tile(spec, found)
                assert found["DQ_GROUPS"] == groups and found["HEADS_PER_WAVE"] == row["HEADS_PER_WAVE"]
                assert (turns is None) == (dim > 192) and (turns is None or turns["DQ_GROUPS"] == groups)
                for config in filter(None, (found, turns)):
                    assert limits.before_compile(MAIN, spec, config, H200) is None


@pytest.mark.parametrize("mask", [Mask("full"), Mask("causal"), Mask("causal_top_left"), Mask("band", 300, 0),
                                  Mask("band", -1, 5), Mask("chunked", 64)], ids=str)  # fmt: skip
def test_it_serves_masks_whose_rows_see_all_keys_up_to_one(mask: Mask) -> None:
    problem = Problem("bf16", 1, 2, 2, 500, 700, 192, 192, mask)
    served = mask.name in ("full", "causal")
    why = registry.refused_mask(MAIN, problem.specialization)
    assert stored_ds.able(problem, 90) == served == (why is None)
    if why is not None:
        assert why.endswith(f"computes masks without bounds or with a last key, and {mask.name} has bounds alone")


def test_where_it_is_not_for() -> None:
    assert not bwd_dkdv_ds.fits(Specialization("bf16", 128, 128, "full"), 90)
    spec = Specialization("bf16", 256, 256, "full")
    broken = MAIN.space.broken({**MAIN.space.default(spec, 90), "DQ_GROUPS": 3}, spec, 90)
    assert broken is not None and broken.name == "registers_hold_tiles"


@pytest.mark.parametrize(
    ("dims", "changes", "name"),
    [((192, 128), {}, "same_head_dims"), ((144, 144), {"STAGES": 2}, "stages_ahead"),
     ((256, 256), {}, "tiles_fit_shared_memory")],
)  # fmt: skip
def test_where_no_program_takes_tile_after_tile(dims: tuple[int, int], changes: Config, name: str) -> None:
    spec = Specialization("bf16", *dims, "full")
    config = {**MAIN.space.default(spec, 90), "PERSISTENT": True, "STAGES": 3, **changes}
    broken = MAIN.space.broken(config, spec, 90)
    assert broken is not None and broken.name == name
