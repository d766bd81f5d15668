"""dQ's Hopper kernel with keys in parts, compiled for sm_90 without a GPU: limits, spills, its loops and its stores, read off
its machine code. What it computes: tests/launching/test_dq_parts_in_python.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from hopper_builds import TESTED, Asked, Built, asked_of, builder, chosen

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, operandcheck, registry, sass
from fa2tune.search_spaces.lib.hopper import part_dims
from fa2tune.search_spaces.sm90 import bwd_dq_split
from fa2tune.spec.problem import Specialization

H200 = gpus.named("h200")
SPLIT, COMBINE = (registry.variant_named(name) for name in ("sm90/bwd_dq_split", "portable/bwd_dq_combine"))
#: Head dims, mask, loops over keys in each group, and the most instructions of one without a mask: those of whole keys, which
#: docs/experiments/few-queries.md has.
CASES = [((216, 216), "full", 2, 363), ((192, 128), "causal", 2, 294), ((256, 256), "band", 3, 363)]
every = pytest.mark.parametrize("case", CASES, ids=str)


def asked(case: tuple[tuple[int, int], str, int, int]) -> Asked:
    spec = Specialization("bf16", *case[0], case[1])
    return asked_of(SPLIT, spec, bwd_dq_split.config_of(spec, 2))


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[Asked], Built]]:
    with builder([asked(case) for case in chosen(request)]) as build:
        yield build


@every
def test_it_compiles_within_the_limits(
    case: tuple[tuple[int, int], str, int, int], built: Callable[[Asked], Built]
) -> None:
    wanted = asked(case)
    assert limits.before_compile(SPLIT, wanted[1], {**dict(wanted[2]), "SPLITS": 2}, H200) is None
    found = built(wanted)
    assert limits.after_compile(found.binary, H200) is None and not operandcheck.unsound(found.listing)
    if TESTED:
        assert found.binary.spills == 0 and not re.findall(r"C75\d\d", found.said), "products one after the other"


@every
def test_its_loops_multiply_what_those_of_whole_keys_do(
    case: tuple[tuple[int, int], str, int, int], built: Callable[[Asked], Built]
) -> None:
    """Of 64 keys S takes D / 16 products, dP DV / 16, and dQ 4 of each part."""
    dims, _, loops, most = case
    spec, listing = asked(case)[1], built(asked(case)).listing
    found = [loop for loop in sass.loops(listing) if loop.products > 8]
    columns = part_dims(spec, bwd_dq_split.config_of(spec, 2))
    summed = sum(columns.values()) // 16 + 4 * (2 if columns["REST_D"] else 1)
    assert [loop.products for loop in found] == 2 * loops * [summed]
    assert all(loop.local_bytes == 0 for loop in found)
    if TESTED:
        assert sorted(loop.issue for loop in found)[1] <= most
    # a thread has two neighbouring columns of every eight, of two rows; delta is stored by rows
    assert listing.count("STG.E.64 ") == 2 * 2 * dims[0] // 8


def test_the_sums_are_loaded_by_16_bytes_and_all_at_once() -> None:
    spec = Specialization("bf16", 216, 216, "full")
    config = COMBINE.space.default(spec, 90)
    found = compiler.compile_kernel(COMBINE, spec, config, 90)
    ptx = found.asm["ptx"]
    loads = ptx.count("ld.global.v4.b32")
    assert loads * 4 * 128 == config["BLOCK_R"] * config["BLOCK_S"] * 256, "of the padded columns"
    assert (
        compiler.build(COMBINE, spec, config, 90).spills == 0 and compiler.build(COMBINE, spec, config, 80).spills == 0
    )
