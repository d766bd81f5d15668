"""The Hopper forward whose keys are split among programs, compiled for sm_90 without a GPU: limits, spills, its loops and its
stores, read off its machine code. What it computes: tests/launching/test_key_parts_in_python.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hopper_builds import (
    TESTED,
    Asked,
    Built,
    asked_of,
    builder,
    check_limits,
    check_loops_do_not_spill,
    chosen,
    of_keys,
)

from fa2tune.compiling import compiler, registry
from fa2tune.search_spaces.lib.hopper import columns
from fa2tune.search_spaces.lib.hopper_key_parts import HELD
from fa2tune.search_spaces.sm90 import fwd_split
from fa2tune.spec.extent import DENSE, RAGGED
from fa2tune.spec.problem import Config, Specialization

SPLIT, WHOLE = registry.variant_named("sm90/fwd_split"), registry.variant_named("sm90/fwd")


class Case(NamedTuple):
    dims: tuple[int, int]
    mask: str
    rows: int
    extent: str = DENSE

    @property
    def spec(self) -> Specialization:
        return Specialization("bf16", *self.dims, self.mask, extent=self.extent)

    @property
    def config(self) -> Config:
        return fwd_split.config_of(self.spec, self.rows, 2)

    @property
    def asked(self) -> Asked:
        return asked_of(SPLIT, self.spec, self.config)

    @property
    def whole(self) -> Asked:
        """The forward whose keys are not split, in the same form."""
        alike = {name: value for name, value in self.config.items() if name in WHOLE.space.dimensions}
        config = {**WHOLE.space.default(self.spec, 90), **alike, "IN_PARTS": "none", "Q_STAGES": 1, "STAGES": 2}
        assert WHOLE.space.broken(config, self.spec, 90) is None
        return asked_of(WHOLE, self.spec, config)


ALIKE = [
    Case((128, 128), mask, rows)
    for mask in ("full", "causal")
    for rows in fwd_split.ROWS
    if (mask, rows) != ("full", 64)
]
ALIKE += [Case((128, 128), "causal", 128, RAGGED)]
CASES = [
    *ALIKE, Case((128, 128), "band", 128), Case((128, 128), "chunked", 128), Case((64, 64), "causal", 64),
    Case((64, 64), "full", 128), Case((192, 192), "causal", 128), Case((192, 128), "full", 128), Case((200, 200), "full", 128),
    Case((256, 256), "causal", 128), Case((72, 40), "causal", 64),
    *(Case(*case, RAGGED) for case in (
        ((64, 64), "causal", 64), ((64, 64), "full", 128), ((96, 96), "causal", 64), ((128, 128), "band", 128),
        ((256, 256), "causal", 128), ((72, 40), "causal", 64),
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[Asked], Built]]:
    wanted = [
        asked
        for case in chosen(request)
        for asked in ([case.asked, case.whole] if case in ALIKE and case.rows == 128 else [case.asked])
    ]
    with builder(wanted) as build:
        yield build


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    check_limits(built(case.asked), SPLIT, case.spec, case.config, HELD[case.rows][0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_loop_over_keys_spills(case: Case, built: Callable[[Asked], Built]) -> None:
    check_loops_do_not_spill(built(case.asked), case.config)


@pytest.mark.parametrize("case", [case for case in ALIKE if case.rows == 128], ids=str)
def test_its_loops_are_those_of_keys_that_are_not_split(case: Case, built: Callable[[Asked], Built]) -> None:
    mine, others = (
        [loop.issue for loop in of_keys(built(asked).listing, case.config)] for asked in (case.asked, case.whole)
    )
    assert len(mine) == len(others) and max(mine) <= 1.02 * max(others) and min(mine) <= 1.02 * min(others)
    if TESTED:
        more = 6 if case.spec.ragged else 0  # outside of loops: the numbers that came from the queue
        assert built(case.asked).binary.spills <= built(case.whole).binary.spills + more


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_stored_two_at_a_time_and_no_column_but_those_of_the_head_dim(
    case: Case, built: Callable[[Asked], Built]
) -> None:
    """A thread has two neighbouring columns of every eight, of two rows; and of these two rows a maximum and a sum."""
    groups, columns_v = case.rows // 64, columns(case.spec, case.config)[1]
    listing = built(case.asked).listing
    pairs, words = listing.count("STG.E.64 "), listing.count("STG.E ")
    assert pairs == groups * 2 * -(-min(case.dims[1], columns_v) // 8) and words == groups * 4


@pytest.mark.parametrize("early", [False, True])
def test_the_next_kernel_is_let_start_only_if_asked(early: bool) -> None:
    case = CASES[0]
    config = {**case.config, "EARLY": early}
    found = compiler.compile_kernel(SPLIT, case.spec, compiler.binary_config(SPLIT, config), 90)
    assert ("griddepcontrol.launch_dependents" in found.asm["ptx"]) == early


def test_a_tile_that_no_head_dim_has_is_refused() -> None:
    with pytest.raises(ValueError, match="rows: got 64 for head dims 256 and 256"):
        fwd_split.config_of(Specialization("bf16", 256, 256, "full"), 64, 2)
    assert fwd_split.tiles(Specialization("fp32", 64, 64, "full"), 90) == ()
