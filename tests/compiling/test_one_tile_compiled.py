"""The Hopper backward whose keys are one tile, compiled for sm_90 without a GPU: limits, spills and the products of its loop,
read off its machine code. What it computes: tests/launching/test_one_tile_in_python.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from hopper_builds import TESTED, Asked, Built, asked_of, builder

from fa2tune import gpus
from fa2tune.compiling import limits, operandcheck, registry, sass
from fa2tune.search_spaces.lib.hopper import block_dims
from fa2tune.search_spaces.sm90 import bwd_one_tile
from fa2tune.spec.problem import Specialization

H200 = gpus.named("h200")
KERNEL = registry.variant_named("sm90/bwd_one_tile")
#: Head dims, mask, and the most words that a thread spills.
CASES = [((64, 64), "full", 0), ((128, 128), "causal", 16), ((256, 256), "full", 32), ((48, 80), "band", 8)]
every = pytest.mark.parametrize("case", CASES, ids=str)
Case = tuple[tuple[int, int], str, int]


def asked(case: Case) -> Asked:
    dims, mask, _ = case
    spec = Specialization("bf16", *dims, mask)
    config = bwd_one_tile.config_of(spec, 1)
    return asked_of(KERNEL, spec, config)


@pytest.fixture(scope="module")
def built() -> Iterator[Callable[[Asked], Built]]:
    with builder([asked(case) for case in CASES]) as build:
        yield build


@every
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    wanted = asked(case)
    assert limits.before_compile(KERNEL, wanted[1], {**dict(wanted[2]), "PARTS": 1}, H200) is None
    found = built(wanted)
    assert limits.after_compile(found.binary, H200) is None and not operandcheck.unsound(found.listing)
    if TESTED:
        assert found.binary.spills <= case[2]
        assert not re.findall(r"C75\d\d", found.said), "products one after the other"


@every
def test_its_loop_has_five_products(case: Case, built: Callable[[Asked], Built]) -> None:
    """Of 64 queries with its keys: S and dP take a step for 16 columns, dV and dK one for 16 queries, dQ one for 16 keys."""
    dims = case[0]
    _, spec, config = asked(case)
    halves, rows = dict(config)["HALVES"], dict(config)["BLOCK_M"]
    steps = sum(block_dims(spec)) // 16 + 2 * rows // 16 + bwd_one_tile.KEYS // 16
    assert halves == (2 if max(dims) > 128 else 1)
    found = [loop for loop in sass.loops(built(asked(case)).listing) if loop.products > 8]
    assert {loop.products for loop in found} == {steps}, spec
