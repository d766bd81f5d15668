"""Score terms in the Hopper forwards, compiled for sm_90 without a GPU: limits and spills, read off their machine code. What
they compute: tests/launching/test_hopper_scores_in_python.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from added_terms import add_terms
from hopper_builds import Asked, Built, asked_of, check_limits

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, registry, sass
from fa2tune.search_spaces.lib.hopper_key_parts import HELD
from fa2tune.search_spaces.sm90 import fwd, fwd_grouped, fwd_split
from fa2tune.spec.extent import DENSE, RAGGED
from fa2tune.spec.problem import Specialization

#: Words of a thread.
MOST_SPILLS = 24


class Case(NamedTuple):
    kernel: str
    dim: int
    mask: str
    extent: str = DENSE
    score: str = "softcap"

    @property
    def spec(self) -> Specialization:
        return Specialization("bf16", self.dim, self.dim, self.mask, extent=self.extent, score=self.score)

    @property
    def config(self) -> dict[str, Any]:
        if self.kernel == "fwd":
            return dict(fwd.default(self.spec, 90))
        rows, keys = max(fwd_grouped.tiles(self.spec, 90))
        if self.kernel == "fwd_grouped":
            return dict(fwd_grouped.config_of(self.spec, rows, keys, 4))
        return dict(fwd_split.config_of(self.spec, rows, 2))

    @property
    def asked(self) -> Asked:
        variant = registry.variant_named(f"sm90/{self.kernel}")
        return asked_of(variant, self.spec, self.config)

    @property
    def held(self) -> int:
        return fwd.programs(self.config) if self.kernel == "fwd" else HELD[self.config["BLOCK_M"]][0]


CASES = [
    *(Case("fwd", dim, mask) for dim in (64, 128, 256) for mask in ("full", "causal")), Case("fwd", 128, "band"),
    Case("fwd", 64, "causal", RAGGED), Case("fwd", 128, "full", RAGGED),
    Case("fwd_grouped", 128, "causal"), Case("fwd_grouped", 64, "causal", RAGGED),
    Case("fwd_split", 128, "causal"), Case("fwd_split", 64, "full", RAGGED),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Asked], Built]) -> None:
    """Without products one after the other, and with few spills, in no loop but one under a window's left side."""
    found = built(case.asked)
    check_limits(found, registry.variant_named(case.asked[0]), case.spec, case.config, case.held)
    spilled = [loop.local_bytes > 0 for loop in sass.loops(found.listing)]
    assert found.binary.spills <= MOST_SPILLS and sum(spilled) <= (case.mask == "band")


@pytest.mark.parametrize("kernel", ["fwd", "fwd_grouped"])
def test_a_term_of_rows_columns_and_heads(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_terms(monkeypatch)
    case = Case(kernel, 64, "causal", score="alibi")
    binary = compiler.build(registry.variant_named(case.asked[0]), case.spec, case.config, 90)
    assert limits.after_compile(binary, gpus.named("h200")) is None and binary.spills <= MOST_SPILLS
