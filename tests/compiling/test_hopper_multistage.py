"""The Hopper forward whose warps load for themselves, compiled for sm_90 without a GPU: limits, spills, copies, and what runs
beneath exponentials. What it computes: tests/launching/test_multistage_in_python.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hopper_builds import MOST_SPILLS, TESTED, Asked, Built, asked_of, check_limits, written_under_way

from fa2tune.compiling import registry
from fa2tune.search_spaces.lib.hopper import BARRIER_BYTES
from fa2tune.search_spaces.sm90 import fwd_multistage
from fa2tune.spec.problem import Config, Specialization

MULTISTAGE = registry.variant_named("sm90/fwd_multistage")


class Case(NamedTuple):
    dims: tuple[int, int]
    mask: str
    keys: int
    dtype: str = "bf16"

    @property
    def spec(self) -> Specialization:
        return Specialization(self.dtype, *self.dims, self.mask)

    @property
    def config(self) -> Config:
        return fwd_multistage.config_of(self.spec, 64, self.keys)

    @property
    def asked(self) -> Asked:
        return asked_of(MULTISTAGE, self.spec, self.config)


CASES = [
    Case((24, 24), "full", 128), Case((64, 64), "causal", 64), Case((80, 80), "causal", 128), Case((96, 96), "full", 64),
    Case((128, 128), "causal", 128), Case((160, 160), "full", 64), Case((192, 192), "full", 128, "fp16"),
    Case((224, 160), "causal", 64), Case((256, 256), "causal", 64), Case((248, 248), "full", 64),
]  # fmt: skip
every = pytest.mark.parametrize("case", CASES, ids=str)


@every
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    """And a multiprocessor holds as many programs as estimates take it to."""
    held = fwd_multistage.held(case.spec, 64, case.keys) - (not TESTED)
    check_limits(built(case.asked), MULTISTAGE, case.spec, case.config, max(1, held))


@every
def test_its_shared_memory_is_what_its_stages_say(case: Case, built: Callable[[Asked], Built]) -> None:
    asked = fwd_multistage.shared_bytes(case.spec, 64, case.keys, case.config["STAGES"])
    assert 0 <= asked - built(case.asked).binary.shared_bytes <= BARRIER_BYTES


@every
def test_nothing_spills_and_operands_stay(case: Case, built: Callable[[Asked], Built]) -> None:
    found = built(case.asked)
    assert found.binary.spills <= (0 if TESTED else MOST_SPILLS)
    assert written_under_way(found.operations)[0] == []


@pytest.mark.parametrize("case", [case for case in CASES if case.mask == "full"], ids=str)
def test_values_are_multiplied_beneath_exponentials(case: Case, built: Callable[[Asked], Built]) -> None:
    """In the loop over keys the wait for all products stands behind the last exponential of the block."""
    if not TESTED:
        pytest.skip("the order of instructions is that of the tested compiler")
    names = [one.split()[0] for one in built(case.asked).operations]
    waits = [
        place
        for place, one in enumerate(built(case.asked).operations)
        if re.match(r"WARPGROUP\.DEPBAR.*gsb0, 0x[12]$", one)
    ]
    assert waits
    for place in waits:
        last = next(at for at in range(place, len(names)) if names[at].startswith("WARPGROUP.DEPBAR") and at > place)
        assert names[place:last].count("MUFU.EX2") >= case.keys // 2
