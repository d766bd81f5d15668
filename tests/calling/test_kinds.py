"""A row of the whole backward pins the implementation of its kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cache_rows import FULL as ROW

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.kinds import (
    PORTABLE_ROWS,
    WARP_SPECIALIZED_ROWS,
    Kind,
    kind_of,
    kinds_in_turn,
    kinds_of,
    other_kind,
)
from fa2tune.compiling.registry import portable_of, variant_named
from fa2tune.rows import reader
from fa2tune.rows.row import MEASURED, PORTED, PREDICTED, Row
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import BACKWARD, FUSED, SPLIT, Problem

A100 = gpus.named("a100")
PROBLEM = Problem("bf16", 1, 16, 16, 2048, 2048, 128, 128, CAUSAL)
SPEC = PROBLEM.specialization
SM80_ROWS = Kind("sm80")


def row(
    kernel: str, implementation: str, config: dict[str, object], time_us: float, obtained: str = PORTED, **more: str
) -> Row:
    key = choosing.key_of(PROBLEM, kernel, A100)
    return replace(
        ROW,
        key=key,
        implementation=implementation,
        config=config,
        time_us=time_us,
        obtained=obtained,
        kernel_hash="",
        **more,
    )


NEW = row("bwd_fused", "sm80", dict(variant_named("sm80/bwd_fused").space.default(SPEC, 80)), 200.0)
OLD = row("bwd_fused", "pointer", dict(portable_of("bwd_fused").space.default(SPEC, 80)), 100.0)


def among(*rows: Row) -> list[reader.Layer]:
    return [reader.Layer("user", Path("rows.sqlite"), rows)]


def served(*rows: Row, problem: Problem = PROBLEM) -> tuple[str, dict[str, object]]:
    layers = among(*rows)
    strategy, kinds = choosing.strategy_of(problem, A100, False, layers)
    kernel = "bwd_fused" if strategy == FUSED else "bwd_dkdv"
    return strategy, dict(choosing.choose(problem, kernel, A100, kinds.get(kernel), layers).config)


def whole(implementation: str, obtained: str = PORTED) -> Row:
    return row(BACKWARD, "portable", {"bwd_fused": implementation}, 300.0, obtained, strategy=FUSED)


def test_the_kernel_that_was_measured_serves_though_another_row_is_faster() -> None:
    assert served(whole("sm80"), NEW, OLD) == (FUSED, NEW.config)
    assert served(whole("pointer"), NEW, OLD) == (FUSED, OLD.config)


def test_a_fused_backward_that_was_ported_serves_and_one_that_was_predicted_does_not() -> None:
    assert served(whole("sm80", PORTED), NEW)[0] == FUSED
    assert served(whole("sm80", MEASURED), NEW)[0] == FUSED
    predicted = whole("sm80", PREDICTED)
    assert choosing.Chooser(PROBLEM, A100, among(predicted, NEW)).find_backward(False)[0] is None
    assert served(predicted, NEW) == (FUSED, NEW.config)  # as without it: the documented default is of this kernel


def test_without_a_row_of_its_kernel_that_can_serve_the_whole_row_does_not_either() -> None:
    assert served(whole("sm80"), OLD)[0] == SPLIT
    unaligned = replace(PROBLEM, aligned=False, tma=False)
    assert served(whole("sm80"), NEW, OLD, problem=unaligned)[0] == SPLIT
    why = choosing.Chooser(unaligned, A100, among(NEW, OLD)).strategy_refusal(whole("sm80"), False)
    assert why == "no row of its sm80 bwd_fused can serve this problem"


def test_kinds() -> None:
    assert [kind_of(name) for name in ("warp_specialized", "pointer", "descriptor", "sm80")] == [
        WARP_SPECIALIZED_ROWS,
        PORTABLE_ROWS,
        PORTABLE_ROWS,
        SM80_ROWS,
    ]
    assert kinds_of(whole("sm80")) == {"bwd_fused": SM80_ROWS}
    assert [kinds_in_turn(kind) for kind in (None, PORTABLE_ROWS, WARP_SPECIALIZED_ROWS, SM80_ROWS)] == [
        (None,),
        (PORTABLE_ROWS,),
        (WARP_SPECIALIZED_ROWS, PORTABLE_ROWS),
        (SM80_ROWS, PORTABLE_ROWS),
    ]


@pytest.mark.parametrize(
    ("one", "kind", "says"),
    [
        (NEW, None, None), (NEW, SM80_ROWS, None), (OLD, PORTABLE_ROWS, None),
        (OLD, SM80_ROWS, "the whole backward was measured with the sm80 kernel"),
        (NEW, PORTABLE_ROWS, "the whole backward was not measured with the sm80 kernel"),
        (OLD, WARP_SPECIALIZED_ROWS, "the whole backward was measured with a warp-specialised kernel"),
    ],
)  # fmt: skip
def test_why_a_row_is_of_another_kind(one: Row, kind: Kind | None, says: str | None) -> None:
    assert other_kind(one, kind) == says
