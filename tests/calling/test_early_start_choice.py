"""Which calls have each kernel of a backward started before the one before it ends (EARLY_START), and what says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch, serving
from fa2tune.calling.schedules import (
    fused_schedule,
    group_parts_schedule,
    one_tile_schedule,
    query_tiles_schedule,
    split_backward_schedule,
)
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.compiler import NoTritonError
from fa2tune.fleet import precompile
from fa2tune.launching import group_parts, overlapped
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

H200 = gpus.named("h200")


def posed(batch: int, heads: int | tuple[int, int], queries: int, keys: int, dim: int, mask: Mask) -> Problem:
    heads_q, heads_kv = (heads, heads) if isinstance(heads, int) else heads
    return Problem("bf16", batch, heads_q, heads_kv, queries, keys, dim, dim, mask)


#: Behind FlashAttention-4 where they were drawn.
FUSED = (
    posed(2, 3, 158, 802, 96, FULL), posed(8, 2, 220, 220, 96, CAUSAL), posed(10, 1, 208, 208, 24, CAUSAL),
    posed(1, 1, 85, 386, 56, FULL), posed(5, 3, 647, 647, 128, CAUSAL), posed(8, 8, 515, 515, 32, CAUSAL),
)  # fmt: skip
SPLIT = posed(1, 1, 104, 104, 248, CAUSAL), posed(2, 5, 92, 92, 240, FULL), posed(4, 6, 300, 300, 192, CAUSAL)
LONG = posed(8, 16, 2048, 2048, 128, FULL), posed(2, 8, 4096, 4096, 256, CAUSAL)


def choices(problem: Problem, deterministic: bool = False) -> dict[str, Choice]:
    return choosing.choose_backward(choosing.Chooser(problem, H200), deterministic)[1]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_schedule, "EARLY_START", True)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("problem", FUSED, ids=str)
def test_short_fused_backwards(problem: Problem) -> None:
    choice = choices(problem)["bwd_fused"]
    assert choice.config["EARLY_START"] and not choice.config["BESIDE"] and not choice.of_row.config["EARLY_START"]
    without = {**choice.config, "EARLY_START": False}
    saved = fused_schedule.predicted_us(problem, without, H200) - fused_schedule.predicted_us(
        problem, choice.config, H200
    )
    assert saved == pytest.approx(fused_schedule.EARLY_SAVES_US)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("problem", SPLIT, ids=str)
def test_short_split_backwards(problem: Problem) -> None:
    for deterministic in (False, True):
        found = choices(problem, deterministic)
        assert all(
            choice.config["EARLY_START"] and not choice.of_row.config["EARLY_START"] for choice in found.values()
        )


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("problem", LONG, ids=str)
def test_long_ones_do_not(problem: Problem) -> None:
    for deterministic in (False, True):
        assert not any(choice.config.get("EARLY_START") for choice in choices(problem, deterministic).values())


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(("queries", "us", "starts"), [(2100, 345, True), (2500, 502, False)])
def test_fused_backwards_about_the_limit(queries: int, us: float, starts: bool) -> None:
    """Of EARLY_START_US, both alone on the GPU."""
    problem = posed(4, 16, queries, queries, 96, CAUSAL)
    config = choices(problem)["bwd_fused"].config
    assert not config["BESIDE"] and config["EARLY_START"] == starts
    assert fused_schedule.least_us(problem, config, H200) == pytest.approx(us, rel=0.02)


@pytest.mark.usefixtures("early")
def test_early_starts_save_less_of_a_packed_backward() -> None:
    """Its kernels divide."""
    dense = posed(2, 3, 600, 600, 96, CAUSAL)
    packed = replace(dense, batch=1, seqlen_q=1200, seqlen_k=1200, extent=Extent(RAGGED, 2, 600))
    alone = fused_schedule.apart(choices(dense)["bwd_fused"].of_row.config)
    for problem, saves in ((dense, fused_schedule.EARLY_SAVES_US), (packed, fused_schedule.PACKED_EARLY_SAVES_US)):
        times = [fused_schedule.predicted_us(problem, {**alone, "EARLY_START": early}, H200) for early in (False, True)]
        assert times[0] - times[1] == pytest.approx(saves)
    assert fused_schedule.PACKED_EARLY_SAVES_US < fused_schedule.EARLY_SAVES_US


def test_none_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_schedule, "EARLY_START", False)
    for problem in (*FUSED, *SPLIT):
        assert not any(choice.config.get("EARLY_START") for choice in choices(problem).values())


def packed(heads: tuple[int, int], queries: int, sequences: int, longest: int, dim: int, mask: Mask) -> Problem:
    return Problem("bf16", 1, *heads, queries, queries, dim, dim, mask, extent=Extent(RAGGED, sequences, longest))


#: Behind FlashAttention-4 where they were drawn (benchmarks/calls/random_packings_3.json, _4.json).
SHORT_PACKED = (
    packed((2, 2), 15056, 2, 16384, 96, band(8, 0)), packed((1, 1), 11018, 3, 4096, 64, band(224, 0)),
    packed((1, 1), 2134, 33, 512, 64, CAUSAL), packed((1, 1), 14516, 38, 512, 128, CAUSAL),
    packed((8, 2), 1312, 4, 1024, 96, CAUSAL),
)  # fmt: skip
LONG_PACKED = packed((16, 16), 9898, 15, 2048, 128, FULL), packed((32, 32), 17702, 2, 16384, 64, CAUSAL)


@pytest.mark.parametrize("problem", SHORT_PACKED, ids=str)
def test_short_packed_backwards_where_it_is_on(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> None:
    monkeypatch.setattr(fused_schedule, "EARLY_START", False)
    own = choices(problem)["bwd_fused"]
    assert not own.config.get("EARLY_START") and not own.config["BESIDE"]
    monkeypatch.setattr(fused_schedule, "EARLY_START", True)
    early = choices(problem)["bwd_fused"]
    assert early.config == fused_schedule.started_early(own.config)
    assert early.of_row.config == own.of_row.config  # what serves where the form cannot be had
    assert "kernels started early" in fused_schedule.about(early)
    made = [dict(config) for variant, config, _ in precompile._by_shape("bwd_fused", problem, early.of_row, 90)
            if variant is early.variant]  # fmt: skip
    of_any_heads = [{**config, "HEADS_PER_WAVE": 1} for config in made]
    assert {**early.config, "HEADS_PER_WAVE": 1} in of_any_heads


@pytest.mark.parametrize("problem", LONG_PACKED, ids=str)
def test_long_packed_backwards_do_not(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> None:
    monkeypatch.setattr(fused_schedule, "EARLY_START", True)
    assert not choices(problem)["bwd_fused"].config.get("EARLY_START")


@pytest.mark.usefixtures("early")
def test_other_masks_split_packed_calls_and_no_queries() -> None:
    wide = Problem("bf16", 1, 3, 3, 640, 640, 256, 256, FULL, extent=Extent(RAGGED, 4, 0))
    for problem in (wide, posed(1, 2, 500, 500, 64, band(100, 0)), posed(1, 2, 0, 500, 64, FULL)):
        for deterministic in (False, True):
            assert not any(choice.config.get("EARLY_START") for choice in choices(problem, deterministic).values())


@pytest.mark.usefixtures("early")
def test_not_where_copies_come_between_both_kernels() -> None:
    """With one key head there are none."""
    copied, one_head = posed(1, (32, 2), 300, 300, 256, FULL), posed(1, (32, 1), 300, 300, 256, FULL)
    for problem, starts in ((copied, False), (one_head, True)):
        found = choices(problem)
        assert group_parts_schedule.parts_of(problem, "bwd_dkdv", found["bwd_dkdv"], H200) > 1
        assert group_parts.copies(problem) is not starts
        assert all(choice.config["EARLY_START"] is starts for choice in found.values())


@pytest.mark.usefixtures("early")
def test_not_alone_on_a_side_stream() -> None:
    """Where dQ begins, dK/dV's kernel waits for events."""
    for problem in (posed(4, 6, 400, 400, 192, FULL), posed(2, 6, 721, 721, 256, FULL)):
        found = choices(problem)
        order = split_backward_schedule.order_of(problem, found, group_parts_schedule.parts(problem, found, H200), H200)
        assert order == overlapped.DQ_FIRST
        assert not any(choice.config["EARLY_START"] for choice in found.values())


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(("problem", "kernel"), [(FUSED[1], "bwd_fused"), (SPLIT[0], "bwd_dq"), (SPLIT[0], "bwd_dkdv")])
def test_binaries_are_made_ahead(problem: Problem, kernel: str) -> None:
    """Of the row's form and this one; of kernels around it, too."""
    choice = choices(problem)[kernel]
    asked = [(variant.name, config.get("EARLY_START", False))
             for variant, config, _ in precompile._by_shape(kernel, problem, choice.of_row, 90)]  # fmt: skip
    around = ["sm90/bwd_prepare", "sm90/bwd_finish"] if kernel == "bwd_fused" else []
    for name in (choice.variant.name, *around):
        assert (name, True) in asked
    found = [config for variant, config, _ in precompile._by_shape(kernel, problem, choice.of_row, 90)
             if variant is choice.variant]  # fmt: skip
    assert dict(choice.config) in [dict(config) for config in found]


def check_fallback(problem: Problem, form: str) -> None:
    """The rows' own configs serve where those with ``form`` cannot be had."""
    chooser, first = choosing.Chooser(problem, H200), choices(problem)

    def make(asked: Mapping[str, Choice]) -> Mapping[str, Choice]:
        if any(choice.config[form] for choice in asked.values()):
            raise NoTritonError("x")
        return asked

    assert any(choice.config[form] for choice in first.values())
    assert dispatch._plan(chooser, first, make) == {name: choice.of_row for name, choice in first.items()}


@pytest.mark.usefixtures("early")
def test_the_rows_own_config_serves_where_the_form_cannot_be_had() -> None:
    for problem in (FUSED[1], SPLIT[0]):
        check_fallback(problem, "EARLY_START")


@pytest.mark.usefixtures("early")
def test_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_tile_schedule, "ONE_KEY_TILE", False)
    monkeypatch.setattr(query_tiles_schedule, "QUERY_TILES", False)
    fused = serving.explain_problem(FUSED[1], H200)
    assert "bwd_fused: alone on the GPU, kernels started early, not as the row has it" in str(fused)
    split = str(serving.explain_problem(SPLIT[0], H200))
    assert "bwd_dq: the next kernel started early, divisors from the host, not as" in split
    assert "bwd_dkdv: started early, divisors from the host, not as" in split
    assert "both kernels run at a time" in split
    assert "started early" not in str(serving.explain_problem(LONG[0], H200))


@pytest.mark.usefixtures("early")
def test_what_is_chosen_by_time_is_as_without() -> None:
    """Order and parts of split kernels do not depend on when they start."""
    for problem in SPLIT:
        found = choices(problem)
        rows = {name: choice.of_row for name, choice in found.items()}
        assert split_backward_schedule.order_of(problem, found, {}, H200) == split_backward_schedule.order_of(
            problem, rows, {}, H200
        )
