"""The Hopper forward whose tiles have all keys of a key head, compiled for sm_90 without a GPU: limits, spills, products and
copies, read off its machine code. What it computes: tests/launching/test_one_tile_forward_in_python.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hopper_builds import MOST_SPILLS, TESTED, Asked, Built, asked_of, check_limits, written_under_way

from fa2tune.compiling import registry, sass
from fa2tune.search_spaces.lib.hopper import BARRIER_BYTES, narrow_blocks, o_fits_q, used_columns
from fa2tune.search_spaces.sm90 import fwd_one_tile
from fa2tune.spec.problem import Config, Specialization

ONE_TILE = registry.variant_named("sm90/fwd_one_tile")


class Case(NamedTuple):
    dims: tuple[int, int]
    mask: str
    rows: int
    keys: int
    dtype: str = "bf16"
    score: str = "none"

    @property
    def spec(self) -> Specialization:
        return Specialization(self.dtype, *self.dims, self.mask, score=self.score)

    @property
    def config(self) -> Config:
        return fwd_one_tile.config_of(self.spec, self.rows, self.keys)

    @property
    def asked(self) -> Asked:
        return asked_of(ONE_TILE, self.spec, self.config)

    @property
    def parts(self) -> tuple[int, int]:
        """Of Q and K, and of V and O."""
        found = narrow_blocks(self.spec)
        return 1 + (found["REST_D"] > 0), 1 + (found["REST_DV"] > 0)


CASES = [
    Case((64, 64), "full", 64, 64), Case((64, 64), "band", 64, 128), Case((64, 64), "causal", 128, 256),
    Case((24, 24), "full", 64, 64), Case((40, 40), "causal", 64, 256), Case((80, 80), "causal", 64, 128),
    Case((128, 128), "full", 64, 64), Case((128, 128), "causal", 128, 128), Case((128, 128), "band", 64, 256),
    Case((128, 128), "full", 128, 256, "fp16"), Case((128, 128), "causal_stacked", 128, 128),
    Case((192, 192), "full", 64, 64), Case((192, 192), "full", 64, 256), Case((192, 192), "causal", 128, 128, "fp16"),
    Case((200, 200), "full", 64, 64), Case((200, 200), "causal", 64, 128), Case((200, 200), "band", 128, 128),
    Case((256, 256), "full", 64, 64), Case((256, 256), "causal", 128, 128), Case((176, 40), "full", 128, 64),
    Case((64, 128), "causal", 64, 128), Case((160, 56), "band", 128, 256), Case((176, 176), "full", 64, 128),
    Case((192, 128), "causal", 64, 64), Case((128, 128), "causal", 128, 128, score="softcap"),
    Case((256, 256), "full", 64, 128, score="softcap"),
]  # fmt: skip
every = pytest.mark.parametrize("case", CASES, ids=str)


@every
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    """And a multiprocessor holds as many programs as estimates take it to. By other compilers than the tested one it may hold
    one less, of V in two parts, the second of which is narrow."""
    held = fwd_one_tile.held(case.spec, case.rows, case.keys) - (not TESTED and case.parts[1] > 1)
    check_limits(built(case.asked), ONE_TILE, case.spec, case.config, held)


@every
def test_its_shared_memory_is_what_its_tiles_say(case: Case, built: Callable[[Asked], Built]) -> None:
    spare = fwd_one_tile.shared_bytes(case.spec, case.rows, case.keys) - built(case.asked).binary.shared_bytes
    assert 0 <= spare <= BARRIER_BYTES


@every
def test_nothing_spills(case: Case, built: Callable[[Asked], Built]) -> None:
    found = built(case.asked)
    assert found.binary.spills <= (0 if TESTED else MOST_SPILLS)
    assert bool(found.binary.spills) == bool(re.search(r"\b(STL|LDL)\b", found.listing))


@every
def test_its_products_are_those_of_one_tile(case: Case, built: Callable[[Asked], Built]) -> None:
    """Of scores a step for 16 columns of Q that are not all zeros, of values one for 16 keys and part, whose weights stay in
    registers; of V's parts as many columns as a head dim has, where that was measured to pay."""
    blocks, narrower = narrow_blocks(case.spec), ONE_TILE.used(case.spec, case.config).results
    expected = Counter({case.keys: used_columns(case.spec) // 16})
    for width in (blocks["BLOCK_DV"], blocks["REST_DV"]):
        expected += Counter({narrower.get(width, width): case.keys // 16 if width else 0})
    found = re.findall(r"HGMMA\.64x(\d+)x16\S* R\d+, (\w+)", built(case.asked).listing)
    assert Counter(int(wide) for wide, _ in found) == expected
    assert sum(left.startswith("R") for _, left in found) == case.keys // 16 * case.parts[1]
    assert written_under_way(built(case.asked).operations) == ([], 0)


@every
def test_it_has_no_loop_over_keys(case: Case, built: Callable[[Asked], Built]) -> None:
    """Its loops wait for barriers."""
    assert all(loop.mufu == loop.products == loop.local_bytes == 0 for loop in sass.loops(built(case.asked).listing))


@every
def test_all_warps_have_read_q_before_o_takes_its_memory(case: Case, built: Callable[[Asked], Built]) -> None:
    """They meet after the scores' product and before O is written, where Triton has them wait for V."""
    names = [one.split()[0] for one in built(case.asked).operations]
    scores = next(place for place, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR"))
    output = next(place for place, name in enumerate(names) if name.startswith("STSM"))
    assert scores < output and any(name.startswith("BAR.SYNC") for name in names[scores:output])


@every
def test_q_k_v_and_o_are_copied_once(case: Case, built: Callable[[Asked], Built]) -> None:
    """One load or store for each part. Of lse each thread stores two rows, and nothing else reads or writes global memory."""
    listing, (of_d, of_dv) = built(case.asked).listing, case.parts
    assert listing.count("UTMALDG.4D") == listing.count("UTMALDG") == 2 * of_d + of_dv
    assert listing.count("UTMASTG.4D") == listing.count("UTMASTG") == of_dv
    assert len(re.findall(r"\bSTG\.E ", listing)) == len(re.findall(r"\bSTG\b", listing)) == 2
    assert not re.search(r"\b(LDG|ATOMG|REDG)\b", listing)


def test_every_tile_of_some_head_dim_is_among_the_cases() -> None:
    """So is each form of its output: through Q's memory, through the first of Q's parts, through its own."""
    assert {(case.rows, case.keys) for case in CASES} == {
        (rows, keys) for rows in fwd_one_tile.ROWS for keys in fwd_one_tile.KEYS
    }
    forms = {(o_fits_q(narrow_blocks(case.spec)), *case.parts) for case in CASES}
    assert forms >= {(True, 1, 1), (True, 2, 2), (True, 2, 1), (False, 2, 2), (False, 1, 1)}
