"""The forward with key blocks of 96 keys, compiled for sm_90 without a GPU: limits, products, spills, instructions a key. What
it computes: tests/launching/test_more_keys_in_python.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hopper_builds import (
    TESTED,
    Asked,
    Built,
    builder,
    check_limits,
    check_loops_do_not_spill,
    chosen,
    of_keys,
    written_under_way,
)

from fa2tune.compiling import compiler, registry
from fa2tune.search_spaces.sm90 import fwd
from fa2tune.spec.extent import RAGGED
from fa2tune.spec.problem import Config, Specialization

VARIANT = registry.variant_named("sm90/fwd")


class Case(NamedTuple):
    dims: tuple[int, int]
    mask: str
    dtype: str = "bf16"
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def spec(self) -> Specialization:
        return Specialization(self.dtype, *self.dims, self.mask)

    def config(self, keys: int = 96) -> Config:
        return {**fwd.of_tiles(self.spec, 128, keys, 0), **dict(self.changes)}

    def asked(self, keys: int = 96) -> Asked:
        config = self.config(keys)
        assert VARIANT.space.broken(config, self.spec, 90) is None
        return VARIANT.name, self.spec, tuple(sorted(compiler.binary_config(VARIANT, config).items()))


NEVER, APART, Q_IN_SHARED = (("RESCALE", "never"),), (("PINGPONG", False),), (("Q_IN_REGISTERS", False),)
CASES = [
    *(Case((dim, dim), mask) for dim in (144, 160, 192) for mask in ("full", "causal")),
    Case((192, 192), "full", "bf16", NEVER), Case((192, 192), "causal", "fp16", APART), Case((168, 168), "band"),
    Case((192, 192), "full", "fp16", Q_IN_SHARED), Case((192, 128), "causal"),
]  # fmt: skip


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[Asked], Built]]:
    wanted = [asked for case in chosen(request) for asked in (case.asked(), case.asked(64))]
    with builder(wanted) as build:
        yield build


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    found = built(case.asked())
    check_limits(found, VARIANT, case.spec, case.config(), 1)
    assert not written_under_way(found.operations)[0]
    estimated = fwd._shared_bytes(case.config(), case.spec, case.config()["STAGES"], case.config()["O_THROUGH"])
    assert estimated - 1024 <= found.binary.shared_bytes <= estimated


@pytest.mark.parametrize("case", [case for case in CASES if case.mask != "band"], ids=str)
def test_no_loop_over_keys_spills(case: Case, built: Callable[[Asked], Built]) -> None:
    check_loops_do_not_spill(built(case.asked()), case.config())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_key_takes_as_many_instructions_as_in_blocks_of_64(case: Case, built: Callable[[Asked], Built]) -> None:
    """Of the shortest loop, without a mask, within 2 %, and 5 % with Q in shared memory; maxima of both tiles are exchanged at
    once."""
    loops = {keys: of_keys(built(case.asked(keys)).listing, {"BLOCK_N": keys}) for keys in (64, 96)}
    issue = {keys: min(loop.issue for loop in found) / keys for keys, found in loops.items()}
    assert issue[96] <= issue[64] * (1.05 if case.changes == Q_IN_SHARED else 1.02)
    assert {loop.shuffles for loop in loops[96]} == {loop.shuffles for loop in loops[64]}


def test_the_products_are_of_64_and_of_32_keys(built: Callable[[Asked], Built]) -> None:
    case = Case((192, 192), "full")
    found = Counter(map(int, re.findall(r"HGMMA\.64x(\d+)x16", built(case.asked()).listing)))
    scores, sums = (
        2 * 2 * 192 // 16,
        2 * 2 * 96 // 16,
    )  # of two groups: the first block and the loop, the loop and the end
    assert found == {64: scores + sums, 32: scores, 128: sums}
    kept = re.findall(r"HGMMA\.64x(?:64|32)x16\S* R\d+, R\d+, gdesc\[\w+\],", built(case.asked()).listing)
    assert fwd.kept(case.spec, case.config()) == "first" and len(kept) == 2 * scores * 128 // 192
    assert not TESTED or built(case.asked()).binary.spills < 8


@pytest.mark.parametrize(
    ("spec", "changes"),
    [(Specialization("bf16", 192, 192, "full", extent=RAGGED), {}), (Specialization("bf16", 128, 128, "full"), {}),
     (Specialization("bf16", 144, 144, "full"), {"Q_STAGES": 2}),
     (Specialization("bf16", 144, 144, "full"), {"BLOCK_M": 192})],
    ids=["packed", "one part", "two Q", "192 rows"],
)  # fmt: skip
def test_what_is_not_built_is_said(spec: Specialization, changes: dict[str, Any]) -> None:
    broken = VARIANT.space.broken({**fwd.of_tiles(spec, 128, 96, 0), **changes}, spec, 90)
    assert broken is not None and broken.name == "two_tiles_of_keys"
