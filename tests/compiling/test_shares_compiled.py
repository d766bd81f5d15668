"""The Hopper forward whose programs have equal shares of all key blocks, compiled for sm_90 without a GPU: limits, spills and
its loops, read off its machine code. What it computes: tests/launching/test_shares_in_python.py."""

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
    chosen,
    of_keys,
)

from fa2tune.compiling import compiler, registry
from fa2tune.search_spaces.lib.hopper import columns
from fa2tune.search_spaces.sm90 import fwd_shares, fwd_split
from fa2tune.spec.problem import Config, Specialization

SHARES, SPLIT = registry.variant_named("sm90/fwd_shares"), registry.variant_named("sm90/fwd_split")
COMBINE = registry.variant_named("portable/fwd_combine")
#: Of issued instructions in a loop over keys, over those of the kernel that splits keys evenly; and words spilled outside.
MORE_ISSUED, MORE_SPILLED = 1.04, 24


class Case(NamedTuple):
    dims: tuple[int, int]
    mask: str

    @property
    def spec(self) -> Specialization:
        return Specialization("bf16", *self.dims, self.mask)

    @property
    def config(self) -> Config:
        return fwd_shares.config_of(self.spec, 132, 0, 3)

    @property
    def asked(self) -> Asked:
        return asked_of(SHARES, self.spec, self.config)

    @property
    def split(self) -> Asked:
        return asked_of(SPLIT, self.spec, fwd_split.config_of(self.spec, 128, 3))


CASES = [
    Case((64, 64), "full"), Case((96, 96), "causal"), Case((128, 128), "causal"), Case((160, 160), "full"),
    Case((192, 192), "causal"), Case((192, 128), "full"), Case((200, 200), "full"), Case((256, 256), "causal"),
]  # fmt: skip


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[Asked], Built]]:
    with builder([asked for case in chosen(request) for asked in (case.asked, case.split)]) as build:
        yield build


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    check_limits(built(case.asked), SHARES, case.spec, case.config, 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_loop_over_keys_spills(case: Case, built: Callable[[Asked], Built]) -> None:
    loops = of_keys(built(case.asked).listing, case.config)
    assert len(loops) >= 2 and not any(loop.local_bytes for loop in loops)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_loops_are_those_of_keys_in_even_parts(case: Case, built: Callable[[Asked], Built]) -> None:
    mine, others = (
        [loop.issue for loop in of_keys(built(asked).listing, case.config)] for asked in (case.asked, case.split)
    )
    assert len(mine) == len(others) and max(mine) <= MORE_ISSUED * max(others)
    if TESTED:
        assert built(case.asked).binary.spills <= built(case.split).binary.spills + MORE_SPILLED


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_tiles_leave_rounded_and_parts_two_words_at_a_time(case: Case, built: Callable[[Asked], Built]) -> None:
    """A thread has two neighbouring columns of every eight, of two rows."""
    listing = built(case.asked).listing
    pairs = 2 * 2 * -(-min(case.dims[1], columns(case.spec, case.config)[1]) // 8)
    assert listing.count("STG.E.64 ") == pairs and listing.count("STG.E ") >= pairs


@pytest.mark.parametrize("early", [False, True])
def test_the_next_kernel_is_let_start_only_if_asked(early: bool) -> None:
    case = CASES[0]
    found = compiler.compile_kernel(
        SHARES, case.spec, compiler.binary_config(SHARES, {**case.config, "EARLY": early}), 90
    )
    assert ("griddepcontrol.launch_dependents" in found.asm["ptx"]) == early


def test_shares_and_rounds_are_launch_arguments() -> None:
    case = CASES[0]
    other = {**case.config, "SHARES": 114, "ROUNDS": 2, "SPLITS": 5}
    assert compiler.binary_config(SHARES, other) == compiler.binary_config(SHARES, case.config)


@pytest.mark.parametrize("parts", [4, 8, 16])
def test_parts_that_differ_in_number_are_put_together(parts: int) -> None:
    space = registry.space_file(COMBINE.name)
    spec = Specialization("bf16", 192, 192, "full")
    config = {**space.config_of(90, parts), "UNEVEN": True}
    found = compiler.compile_kernel(COMBINE, spec, compiler.binary_config(COMBINE, config), 90)
    assert found.metadata.num_warps == config["num_warps"] and "setp.neu.f32" in found.asm["ptx"]
