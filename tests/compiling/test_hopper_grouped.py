"""The Hopper forward whose tiles have the query heads of a key head as rows, compiled for sm_90 without a GPU: limits, spills,
its loops and its copies, read off its machine code. What it computes: tests/launching/test_grouped_in_python.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hopper_builds import Asked, Built, asked_of, check_limits, check_loops_do_not_spill

from fa2tune.compiling import registry
from fa2tune.search_spaces.lib.hopper import narrow_blocks
from fa2tune.search_spaces.sm90 import fwd_grouped
from fa2tune.spec.extent import DENSE, RAGGED
from fa2tune.spec.problem import Config, Specialization

GROUPED = registry.variant_named("sm90/fwd_grouped")


class Case(NamedTuple):
    dims: tuple[int, int]
    mask: str
    rows: int
    keys: int
    members: int
    extent: str = DENSE

    @property
    def spec(self) -> Specialization:
        return Specialization("bf16", *self.dims, self.mask, extent=self.extent)

    @property
    def config(self) -> Config:
        return fwd_grouped.config_of(self.spec, self.rows, self.keys, self.members)

    @property
    def asked(self) -> Asked:
        return asked_of(GROUPED, self.spec, self.config)


CASES = [
    Case((128, 128), "full", 128, 128, 4), Case((128, 128), "causal", 64, 64, 4), Case((64, 64), "band", 64, 128, 64),
    Case((24, 24), "full", 64, 64, 8), Case((160, 160), "full", 128, 128, 2), Case((224, 224), "causal", 128, 64, 32),
    Case((128, 128), "band", 64, 64, 4, RAGGED), Case((96, 96), "causal", 128, 64, 4, RAGGED),
    Case((64, 64), "causal", 64, 64, 8, RAGGED), Case((256, 256), "full", 128, 64, 2, RAGGED),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    check_limits(built(case.asked), GROUPED, case.spec, case.config, fwd_grouped.HELD[case.rows][0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_loop_over_keys_spills(case: Case, built: Callable[[Asked], Built]) -> None:
    check_loops_do_not_spill(built(case.asked), case.config)


@pytest.mark.parametrize("case", [case for case in CASES if case.extent == DENSE], ids=str)
def test_q_and_o_are_copied_by_boxes_of_five_dimensions(case: Case, built: Callable[[Asked], Built]) -> None:
    """Of each group and part one store, which its warps share, and at least one load; o leaves by nothing else, and of lse each
    thread stores two rows."""
    groups, listing = case.rows // 64, built(case.asked).listing
    parts = 2 if narrow_blocks(case.spec)["REST_DV"] else 1
    assert listing.count("UTMALDG.5D") >= groups * parts and listing.count("UTMASTG.5D") == groups * parts
    assert "UTMASTG.4D" not in listing and len(re.findall(r"\bSTG\.E", listing)) == 2 * groups
