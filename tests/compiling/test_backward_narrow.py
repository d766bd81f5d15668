"""Head dims up to 32 in tiles of 32 columns in the fused Hopper backward, without a GPU: what it multiplies, what it spills,
what ptxas says, and which config serves them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hopper_builds import TESTED, Asked, Built, asked_of, builder, chosen, written_under_way

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, operandcheck, registry, sass
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import RAGGED
from fa2tune.spec.problem import Config, Specialization

H200 = gpus.named("h200")
FUSED = registry.variant_named("sm90/bwd_fused")
BESIDE = {"BESIDE": True, "FINISH_BESIDE": True, "DYNAMIC": True}
APART = {"BLOCK_M": 128, "REDUCE": "vector", "num_warps": 4, "EXPONENTIALS_FIRST": False}
CONCATENATED = {"BLOCK_M": 64, "REDUCE": "vector", "ORDER": "together", "num_warps": 8, "EXPONENTIALS_FIRST": False}
#: The forms that rows of 64 columns name, and those that the search of 32 begins with or may find.
FORMS: dict[str, dict[str, Any]] = {
    "behind": {**APART, "ORDER": "behind"},
    "behind, exponentials first": {**APART, "ORDER": "behind", "EXPONENTIALS_FIRST": True},
    "together, tma": {**APART, "ORDER": "together", "REDUCE": "tma"},
    "concatenated": CONCATENATED,
    "ahead": {**APART, "ORDER": "ahead", "EXPONENTIALS_FIRST": True},
    "a third stage": {**APART, "ORDER": "ahead", "EXPONENTIALS_FIRST": True, "STAGES": 3},
}
#: A group's products for 128 keys of a tile or, concatenated, of both groups: loops that hold them, and dQ behind them.
LOOPS = 4


class Case(NamedTuple):
    form: str
    dim: int
    mask: str
    extent: str = "dense"
    beside: bool = False

    @property
    def spec(self) -> Specialization:
        return Specialization("bf16", self.dim, self.dim, self.mask, extent=self.extent)

    @property
    def config(self) -> dict[str, Any]:
        packed = bwd_fused.PACKED if self.spec.ragged else {}
        own = {**FUSED.space.default(self.spec, 90), **FORMS[self.form], **packed, "NARROW": True}
        return {**own, **BESIDE} if self.beside else own

    @property
    def asked(self) -> Asked:
        return asked_of(FUSED, self.spec, self.config)


CASES = [
    *(Case(form, 32, ("causal", "full")[place % 2]) for place, form in enumerate(FORMS)),
    Case("behind", 16, "band"), Case("concatenated", 24, "causal", beside=True), Case("ahead", 32, "causal", RAGGED),
    Case("behind", 32, "full", RAGGED, beside=True),
]  # fmt: skip
every = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Built]]:
    with builder([case.asked for case in chosen(request)]) as build:
        yield lambda case: build(case.asked)


@every
def test_it_fits_and_is_not_serialised(case: Case, built: Callable[[Case], Built]) -> None:
    made = built(case)
    assert limits.after_compile(made.binary, H200) is None
    assert "Compiling entry function" in made.said and not re.findall(r"C75\d\d", made.said)
    reckoned = bwd_fused.shared_bytes(case.config, case.spec)
    assert reckoned - 8 * 1024 <= made.binary.shared_bytes <= reckoned
    written, of_ones = written_under_way(made.operations)
    assert not written and of_ones >= (4 if case.config["num_warps"] == 8 else 8)
    assert operandcheck.unsound(made.listing) == ()


@every
def test_it_multiplies_32_columns(case: Case, built: Callable[[Case], Built]) -> None:
    """Of S and dP two steps and one for their terms. Joined groups stand once in the code, for half as many loops."""
    m, concatenated = case.config["BLOCK_M"], case.config["num_warps"] == 8
    order = case.config["ORDER"]
    loops = LOOPS // 2 if concatenated else LOOPS
    expected = Counter({m: loops * 2 * 3})
    if order == "ahead":  # S of a tile's first block, in each group
        expected[m] += 2 * 3
    expected[32] += loops * 2 * m // 16  # dV and dK
    expected[16 if concatenated else 32] += (
        (loops + (0 if order == "together" else 2)) * 128 // 16
    )  # dQ, and of the last block
    assert Counter(map(int, re.findall(r"HGMMA\.64x(\d+)x16", built(case).listing))) == expected


@every
def test_its_loops_spill_next_to_nothing(case: Case, built: Callable[[Case], Built]) -> None:
    """dK and dV take 32 registers, not 64."""
    loops = [loop for loop in sass.loops(built(case).listing) if loop.products > 8 and loop.mufu]
    assert loops
    if TESTED:
        assert all(loop.local_bytes <= 512 for loop in loops), "four words of a warp at the most"


def narrow_dims() -> list[tuple[int, int]]:
    return [(32, 32), (24, 24), (16, 16), (16, 32)]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dims", narrow_dims(), ids=str)
def test_a_row_of_64_columns_is_legal_in_32(dims: tuple[int, int], mask: str) -> None:
    whole, asked = (Specialization("bf16", *one, mask) for one in ((64, 64), dims))
    legal = [config for config in FUSED.space.points() if limits.before_compile(FUSED, whole, config, H200) is None]
    assert legal and not any(config["NARROW"] or config["STAGES"] == 3 for config in legal)
    for config in legal:
        found = FUSED.fitted(asked, config)
        assert limits.before_compile(FUSED, asked, found, H200) is None, (config, found)
        loop = {} if bwd_fused.concatenated(config) or not config["PERSISTENT"] else bwd_fused.NARROW_LOOP
        assert found == {**config, **loop, "NARROW": True}
    assert FUSED.space.default(asked, 90)["NARROW"]


def test_where_32_columns_are_refused() -> None:
    space = FUSED.space
    for dims in ((64, 64), (40, 40), (32, 40), (40, 16), (96, 96), (128, 128)):
        spec = Specialization("bf16", *dims, "full")
        default = space.default(spec, 90)
        broken = space.broken({**default, "NARROW": True}, spec, 90)
        assert not default["NARROW"] and broken is not None and broken.name == "narrow_tiles_hold_head_dims"
    spec = Specialization("bf16", 32, 32, "full")
    third: Config = {**space.default(spec, 90), "STAGES": 3}
    assert space.broken(third, spec, 90) is None
    for change in ({"NARROW": False}, {"ORDER": "together"}):
        broken = space.broken({**third, **change}, spec, 90)
        assert broken is not None and broken.name == "third_stage_of_narrow_tiles"


def test_the_kernels_around_it_have_32_columns_too() -> None:
    for dims, beside in ((dims, beside) for dims in narrow_dims() for beside in (False, True)):
        spec = Specialization("bf16", *dims, "causal")
        for narrow, columns in ((True, 32), (False, 64)):
            config = {**FUSED.space.default(spec, 90), "NARROW": narrow, **(BESIDE if beside else {})}
            before, after = compiler.around(FUSED, spec, config, 90)
            for variant, its_config in (*before, *after):
                values = compiler.constexprs(variant, spec, its_config)
                assert values["SUM_COLUMNS"] == columns
                if variant.name == "sm90/bwd_prepare_overlapped":
                    assert values["BLOCK_DV"] == columns and values["STAGES"] == {32: 8, 64: 5}[columns]
