"""The Hopper forward whose programs have equal shares of all key blocks, compiled for sm_90 without a GPU: limits, spills and
its loops, read off its machine code. What it computes: tests/launching/test_shares_in_python.py."""

from __future__ import annotations

import tempfile
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
JOIN = registry.variant_named("sm90/fwd_join")
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
        return fwd_shares.config_of(self.spec, 132, 0)

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
    other = {**case.config, "SHARES": 114, "ROUNDS": 2}
    assert compiler.binary_config(SHARES, other) == compiler.binary_config(SHARES, case.config)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_are_loaded_four_words_at_a_time_and_nothing_spills(case: Case) -> None:
    _before, after = compiler.around(SHARES, case.spec, case.config, 90)
    ((join, config),) = after
    assert join is JOIN and {name: config[name] for name in ("BLOCK_N", "SHARES", "ROUNDS", "EARLY")} == {
        name: case.config[name] for name in ("BLOCK_N", "SHARES", "ROUNDS", "EARLY")
    }
    found = compiler.compile_kernel(JOIN, case.spec, compiler.binary_config(JOIN, config), 90)
    assert found.asm["ptx"].count("ld.global.v4") >= 3 and "griddepcontrol.wait" in found.asm["ptx"]
    other = {**config, "SHARES": 7, "ROUNDS": 3, "BLOCK_N": 64}
    assert compiler.binary_config(JOIN, other) == compiler.binary_config(JOIN, config)
    assert built_stack(found.asm["cubin"]) == 0


def built_stack(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return compiler.resources(file.name)[1]
