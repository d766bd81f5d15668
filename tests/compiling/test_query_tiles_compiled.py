"""The Hopper backward by tiles of queries, compiled for sm_90 without a GPU: limits, spills and the products of its loop, read
off its machine code. What it computes: tests/launching/test_query_tiles_in_python.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from hopper_builds import TESTED, Asked, Built, asked_of, builder

from fa2tune import gpus
from fa2tune.compiling import limits, operandcheck, registry, sass
from fa2tune.search_spaces.lib.hopper import columns, part_dims
from fa2tune.search_spaces.sm90 import bwd_query_tiles
from fa2tune.spec.problem import Specialization

H200 = gpus.named("h200")
KERNEL = registry.variant_named("sm90/bwd_query_tiles")
#: Head dims, mask, rows of a tile, parts of keys, and the most words that a thread spills.
Case = tuple[tuple[int, int], str, int, int, int]
CASES: list[Case] = [
    ((64, 64), "causal", 128, 1, 0), ((128, 128), "full", 64, 2, 4), ((192, 192), "causal", 128, 2, 0),
    ((192, 192), "full", 64, 1, 48), ((256, 256), "causal", 128, 1, 56), ((48, 80), "band", 64, 1, 0),
]  # fmt: skip
every = pytest.mark.parametrize("case", CASES, ids=str)


def asked(case: Case) -> Asked:
    dims, mask, rows, splits, _ = case
    spec = Specialization("bf16", *dims, mask)
    return asked_of(KERNEL, spec, bwd_query_tiles.config_of(spec, rows, splits))


@pytest.fixture(scope="module")
def built() -> Iterator[Callable[[Asked], Built]]:
    with builder([asked(case) for case in CASES]) as build:
        yield build


@every
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    wanted = asked(case)
    assert limits.before_compile(KERNEL, wanted[1], {**dict(wanted[2]), "SPLITS": case[3]}, H200) is None
    found = built(wanted)
    assert limits.after_compile(found.binary, H200) is None and not operandcheck.unsound(found.listing)
    assert found.binary.shared_bytes <= bwd_query_tiles.shared_bytes(wanted[1], dict(wanted[2]))
    if TESTED:
        assert found.binary.spills <= case[4]
        assert not re.findall(r"C75\d\d", found.said), "products one after the other"


@every
def test_a_multiprocessor_holds_as_many_programs_as_is_said(case: Case, built: Callable[[Asked], Built]) -> None:
    wanted = asked(case)
    found, programs = built(wanted).binary, bwd_query_tiles.at_once(wanted[1], dict(wanted[2]))
    registers = -(-found.registers // 8) * 8 * found.num_warps * 32
    assert programs * (found.shared_bytes + 1024) <= H200.shared_per_sm
    if TESTED:
        assert programs * registers <= H200.registers_per_sm


@every
def test_its_loops_have_five_products(case: Case, built: Callable[[Asked], Built]) -> None:
    """S and dP take a step for 16 columns, dV and dK one for 16 queries, dQ one for 16 keys; with columns in two parts those of
    dQ, dK and dV are issued for each."""
    _, spec, config = asked(case)
    settings = dict(config)
    blocks = part_dims(spec, settings)
    parts = [1 + (blocks[rest] > 0) for rest in ("REST_D", "REST_DV")]
    rows, keys = settings["BLOCK_M"] // 16, bwd_query_tiles.KEYS // 16
    steps = sum(columns(spec, settings)) // 16 + parts[0] * (rows + keys) + parts[1] * rows
    found = [loop for loop in sass.loops(built(asked(case)).listing) if loop.products > 8]
    assert found and {loop.products for loop in found} == {steps}, spec
