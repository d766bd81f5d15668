"""Score terms in the Hopper backwards, compiled for sm_90 without a GPU: limits, spills and products, read off their machine
code. What they compute: tests/launching/test_backward_scores_in_python.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from added_terms import add_terms
from hopper_builds import TESTED, Asked, Built, asked_of, written_under_way

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.compiling import compiler, limits, operandcheck, registry, sass
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import DENSE, RAGGED
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import FUSED, SPLIT, STRATEGIES, Problem, Specialization
from fa2tune.spec.score import Score

H200 = gpus.named("h200")
CAP = Score("softcap", 50.0)
#: Words of a thread. Without a term the fused kernel spills up to 40, outside of its loops or at their ends.
MOST_SPILLS = 44
#: Bytes that a warp's threads spill and load again in a trip of any loop: a few words each.
MOST_IN_LOOPS = 2048


class Case(NamedTuple):
    kernel: str
    dim: int
    mask: str
    changes: tuple[tuple[str, Any], ...] = ()
    extent: str = DENSE
    score: str = "softcap"

    @property
    def spec(self) -> Specialization:
        return Specialization("bf16", self.dim, self.dim, self.mask, extent=self.extent, score=self.score)

    @property
    def config(self) -> dict[str, Any]:
        return {**registry.variant_named(f"sm90/{self.kernel}").space.default(self.spec, 90), **dict(self.changes)}

    @property
    def asked(self) -> Asked:
        variant = registry.variant_named(f"sm90/{self.kernel}")
        return asked_of(variant, self.spec, self.config)


CONCATENATED = (("EXPONENTIALS_FIRST", False), ("ORDER", "together"), ("REDUCE", "vector"), ("num_warps", 8))
BY_TMA = (("ORDER", "together"), ("REDUCE", "tma"))
CASES = [
    *(Case("bwd_fused", dim, mask) for dim in (32, 64, 96, 128) for mask in ("full", "causal")),
    Case("bwd_fused", 128, "causal", CONCATENATED), Case("bwd_fused", 64, "causal", BY_TMA),
    Case("bwd_fused", 128, "band"), Case("bwd_fused", 128, "causal", extent=RAGGED),
    *(Case(kernel, dim, "causal") for kernel in ("bwd_dq", "bwd_dkdv") for dim in (64, 128, 256)),
    Case("bwd_dq", 128, "band"), Case("bwd_dkdv", 128, "full", extent=RAGGED),
    Case("bwd_dkdv_ds", 256, "causal"), Case("bwd_dq_split", 256, "causal"), Case("bwd_one_tile", 64, "causal"),
    Case("bwd_query_tiles", 128, "causal"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    """Without products one after the other, and with few spills."""
    found = built(case.asked)
    assert limits.before_compile(registry.variant_named(case.asked[0]), case.spec, case.config, H200) is None
    assert limits.after_compile(found.binary, H200) is None and operandcheck.unsound(found.listing) == ()
    assert not written_under_way(found.operations)[0]
    if case.kernel == "bwd_fused":
        assert found.binary.shared_bytes <= bwd_fused.shared_bytes(case.config, case.spec)
    if TESTED:
        assert not re.findall(r"C75\d\d", found.said), "products one after the other"
        assert found.binary.spills <= MOST_SPILLS
        assert all(loop.local_bytes <= MOST_IN_LOOPS for loop in sass.loops(found.listing) if loop.products)


def test_blocks_of_128_queries_are_refused_beside_a_term() -> None:
    spec = Specialization("bf16", 64, 64, "causal", score="softcap")
    config = {**bwd_fused.default(spec, 90), "BLOCK_M": 128}
    broken = bwd_fused.SPACE.broken(config, spec, 90)
    assert broken is not None and broken.name == "term_has_registers"
    assert bwd_fused.SPACE.broken(config, replace(spec, score="none"), 90) is None
    assert bwd_fused.fitted(spec, config)["BLOCK_M"] == 64


@pytest.mark.parametrize("kernel", ["bwd_fused", "bwd_dq", "bwd_dkdv"])
def test_a_term_of_rows_columns_and_heads(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_terms(monkeypatch)
    case = Case(kernel, 64, "causal", score="alibi")
    binary = compiler.build(registry.variant_named(case.asked[0]), case.spec, case.config, 90)
    assert limits.after_compile(binary, H200) is None and binary.spills <= MOST_SPILLS


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 144, 160, 192, 256])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(1024, 0)], ids=str)
def test_rows_of_calls_without_a_term_serve(dim: int, mask: Mask) -> None:
    for length in (512, 4096, 16384):
        plain = Problem("bf16", 16384 // length, 16, 8, length, length, dim, dim, mask)
        problem = replace(plain, score=CAP)
        for deterministic in (False, True):
            strategy, choices = choosing.choose_backward(choosing.Chooser(problem, H200), deterministic)
            own = choosing.choose_backward(choosing.Chooser(plain, H200), deterministic, in_order=False)
            assert strategy in (own[0], FUSED) and set(choices) <= {*STRATEGIES[SPLIT], *STRATEGIES[FUSED]}
            if strategy == own[0]:
                assert [one.variant for one in choices.values()] == [one.variant for one in own[1].values()]
            for one in choices.values():
                assert limits.before_compile(one.variant, problem.specialization, one.config, H200) is None
