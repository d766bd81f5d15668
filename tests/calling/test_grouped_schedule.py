"""Which calls get tiles of several query heads, with GROUPED_TILES on, and what explain says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fa2tune import gpus
from fa2tune.calling import choosing, forward_plans, grouped_schedule, serving, split_schedule
from fa2tune.compiling import limits
from fa2tune.fleet import precompile
from fa2tune.gpus import Gpu
from fa2tune.launching import key_splits
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Config, Problem

H200 = gpus.named("h200")
PROMPT = Problem("bf16", 21, 8, 2, 131, 131, 64, 64, CAUSAL)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(grouped_schedule, "GROUPED_TILES", True)
    yield
    forward_plans.forget()


def chosen(problem: Problem, gpu: Gpu = H200) -> Config | None:
    choice = choosing.choose(problem, "fwd", gpu, True)
    found = grouped_schedule.instead_of(problem, choice.config, gpu, choice.row)
    return found if found and key_splits.is_grouped(found) else None


def test_switched_off_nothing_changes() -> None:
    assert not grouped_schedule.GROUPED_TILES, "on only with a record of benchmarks/few_queries.py --grouped"
    assert chosen(PROMPT) is None and not grouped_schedule.all_kernels(PROMPT, 90)
    served = serving.explain_problem(PROMPT, H200, ("fwd",)).kernels[0]
    assert served.split is None and not served.grouped


def test_few_queries_of_a_group_share_tiles(on: None) -> None:
    tiles = chosen(PROMPT)
    assert tiles is not None and tiles["MEMBERS"] == 4
    assert limits.before_compile(key_splits.splitting(tiles), PROMPT.specialization, tiles, H200) is None
    many = replace(PROMPT, heads_q=84, heads_kv=1, batch=10, seqlen_q=66, seqlen_k=66, head_dim=56, head_dim_v=56)
    assert chosen(many) is not None


def test_heads_that_do_not_fill_their_tiles_are_counted(on: None) -> None:
    """Of 45 heads tiles of 64 waste more than tiles of 4 or 8."""
    problem = Problem("bf16", 17, 90, 2, 94, 94, 24, 24, FULL)
    _, tiles = grouped_schedule.best(problem, H200) or (0.0, {})
    assert tiles["MEMBERS"] < 64
    worst = {**tiles, "MEMBERS": 64}
    assert grouped_schedule.grouped_us(problem, worst, H200) > grouped_schedule.grouped_us(problem, tiles, H200)


@pytest.mark.parametrize(
    "other",
    [
        replace(PROMPT, heads_kv=8),  # no group
        replace(PROMPT, seqlen_q=4096, seqlen_k=4096),  # full tiles
        replace(PROMPT, tma=False),
        replace(PROMPT, aligned=False, tma=False),
        replace(PROMPT, batch=1, extent=Extent(RAGGED, 21, 131)),
        replace(PROMPT, mask=Mask("chunked", 64)),
        replace(PROMPT, seqlen_k=0),
    ],
    ids=str,
)
def test_calls_that_keep_their_kernel(on: None, other: Problem) -> None:
    assert chosen(other) is None


def test_other_gpus_keep_their_kernels(on: None) -> None:
    assert chosen(PROMPT, gpus.named("a100")) is None


def test_decoding_stays_split(on: None) -> None:
    decoding = Problem("bf16", 1, 32, 8, 1, 8192, 128, 128, FULL)
    choice = choosing.choose(decoding, "fwd", H200, True)
    found = grouped_schedule.instead_of(decoding, choice.config, H200, choice.row)
    assert found == split_schedule.config_of(decoding, choice.config, H200, choice.row) and "SPLITS" in found


def test_a_window_is_estimated_by_the_blocks_that_it_visits(on: None) -> None:
    long = replace(PROMPT, seqlen_q=200, seqlen_k=4000)
    config = (grouped_schedule.best(long, H200) or (0.0, {}))[1]
    narrow = grouped_schedule.grouped_us(replace(long, mask=Mask("band", 100, 0)), config, H200)
    assert narrow < 0.5 * grouped_schedule.grouped_us(replace(long, mask=FULL), config, H200)


def test_explain_names_the_kernel_and_its_status(on: None) -> None:
    found = serving.explain_problem(PROMPT, H200, ("fwd",))
    served, told = found.kernels[0], found.as_dict()["kernels"][0]
    assert served.grouped and served.status == "estimated" and set(served.binaries or {}) == {"sm90/fwd_grouped"}
    assert "so sm90/fwd_grouped runs instead" in str(found) and "tiles have 4 of the 4 query heads" in str(found)
    assert told["split"] is None and told["grouped"] == told["config"] == dict(served.split or {})
    assert "tiles of several query heads" in str(served)
    assert serving.served_by(PROMPT, H200, backward=False) == {"fwd": "sm90/fwd_grouped"}


def test_what_was_refused_is_not_tried_again(on: None) -> None:
    choice = choosing.choose(PROMPT, "fwd", H200)
    tiles, refused = forward_plans.split_of(PROMPT, choice, H200)
    assert tiles is not None and refused == ""
    forward_plans._REFUSED[forward_plans._binary(PROMPT, tiles, H200)] = "ptxas failed"
    served = serving.explain_problem(PROMPT, H200, ("fwd",))
    assert served.kernels[0].split is None
    assert "tiles of several query heads are expected to be faster, but ptxas failed" in str(served)
    assert forward_plans.how(tiles) == forward_plans.GROUPED


def test_precompile_has_every_tile(on: None) -> None:
    alone = replace(PROMPT, heads_q=2)  # as rows are tuned
    found = grouped_schedule.all_kernels(alone, 90)
    assert {config["MEMBERS"] for _, config, _ in found} == {2, 4, 8, 16, 32, 64}
    choice = choosing.choose(alone, "fwd", H200, True)
    assert "sm90/fwd_grouped" in {one.name for one, _, _ in precompile._by_shape("fwd", alone, choice, 90)}
