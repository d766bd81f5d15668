"""The Hopper forward in blocks of 80 keys, compiled for sm_90 without a GPU: limits, spills, products and copies, read off its
machine code. What it computes: tests/launching/test_longer_blocks_in_python.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest
from hopper_builds import MOST_SPILLS, TESTED, Asked, Built, asked_of, check_limits, written_under_way

from fa2tune.calling.schedules import longer_blocks_schedule
from fa2tune.compiling import compiler, fingerprint, registry, sass, trimmed
from fa2tune.search_spaces.lib.hopper import BARRIER_BYTES, used_columns
from fa2tune.search_spaces.sm90 import fwd_80_keys as space
from fa2tune.spec.problem import Specialization
from fa2tune.spec.variant import Used

pytestmark = pytest.mark.skipif(
    not fingerprint.triton_version().startswith(longer_blocks_schedule.COMPILED_BY),
    reason="this Triton does not compile it",
)
KERNEL = registry.variant_named("sm90/fwd_80_keys")


class Case(NamedTuple):
    dim: int
    dtype: str = "bf16"

    @property
    def spec(self) -> Specialization:
        return Specialization(self.dtype, self.dim, self.dim, "full")

    @property
    def asked(self) -> Asked:
        return asked_of(KERNEL, self.spec, space.config_of(self.spec))


CASES = [Case(200), Case(232), Case(248), Case(256, "fp16")]
every = pytest.mark.parametrize("case", CASES, ids=str)


@every
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    found = built(case.asked)
    check_limits(found, KERNEL, case.spec, space.config_of(case.spec), 1)
    assert 0 <= space.SHARED - found.binary.shared_bytes <= BARRIER_BYTES
    assert found.binary.spills <= (0 if TESTED else MOST_SPILLS)


@every
def test_products_have_80_columns_of_scores_and_those_of_the_head_dim(
    case: Case, built: Callable[[Asked], Built]
) -> None:
    """Of each of two groups, in the loop and before or behind it: scores a step for 16 columns, values one for 16 keys."""
    found = built(case.asked)
    wide = Counter(int(one) for one in re.findall(r"HGMMA\.64x(\d+)x16", found.listing))
    places = 4
    assert wide == {space.KEYS: places * used_columns(case.spec) // 16, case.dim: places * space.KEYS // 16}
    assert written_under_way(found.operations) == ([], 0)


@every
def test_its_loop_has_one_exchange_of_maxima(case: Case, built: Callable[[Asked], Built]) -> None:
    """Of both pieces of a block together, two steps between the four threads of a row, of which each thread has two. Nothing
    goes through local memory."""
    listing = built(case.asked).listing
    loops = [loop for loop in sass.loops(listing) if loop.products]
    assert len(loops) == 2
    assert all(loop.mufu == space.KEYS // 2 + 2 and loop.local_bytes == 0 for loop in loops)
    maxima, sums = 2 * 2, 2 * 2  # of a block; sums are exchanged once a tile
    groups, places = 2, 2  # in the loop and before it
    assert len(re.findall(r"\bSHFL\.BFLY\b", listing)) == groups * (places * maxima + sums)


def test_a_wgmma_names_the_rows_that_are_read() -> None:
    result = ", ".join(f"%f{i}" for i in range(64))
    product = f"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{result}}}, %rd1, %rd2, p, 1, 1, 0, "
    kept, changed = (f"{product}{transposed};" for transposed in (1, 0))
    found = trimmed.edited(f"{kept}\n{changed}\n", Used(rows={128: 80}))
    assert kept in found and changed not in found
    assert (
        "m64n80k16.f32.bf16.bf16 {" + ", ".join(f"%f{i}" for i in range(40)) + "}, %rd1, %rd2, p, 1, 1, 0, 0;" in found
    )
    assert trimmed.suffix(Used(rows={128: 80})) == " trimmed 1 [] [] [(128, 80)]"
    assert trimmed.suffix(Used(results={256: 232})) == " trimmed 1 [(256, 232)] []"


def test_without_the_hook_it_is_refused() -> None:
    """It would read behind its shared memory."""
    spec = Specialization("bf16", 240, 240, "full")
    with (
        mock.patch.object(trimmed, "suffix", lambda _used: " without a hook"),
        mock.patch.object(trimmed, "_hook", lambda *_: ("", "")),
        pytest.raises(compiler.CompileError, match="runs no hook for PTX"),
    ):
        compiler.compile_kernel(KERNEL, spec, space.config_of(spec), 90)
