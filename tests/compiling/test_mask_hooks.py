"""The hooks of every file of kernels/masks/, run as plain Python: Gluon has no interpreter, and Triton's is slow. What a kernel
skips, takes whole or hides is compared with what the mask says is visible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fa2tune.calling.choosing import choose
from fa2tune.gpus import named
from fa2tune.search_spaces.sm90 import fwd
from fa2tune.spec import maskfile, standins
from fa2tune.spec import problem as problems
from fa2tune.spec.extent import RAGGED, WHOLE, Extent
from fa2tune.spec.mask import Mask
from fa2tune.spec.problem import Problem
from fa2tune.spec.variant import OPTIONAL_HOOKS

ROWS, BLOCK_M, BLOCK_N = (
    4,
    8,
    8,
)  #: of a consumer group, of a tile, of a key block; hide() is made for eight columns and more
GLUON = SimpleNamespace(
    maximum=np.maximum, minimum=np.minimum, cdiv=lambda x, y: -(-x // y), where=np.where,
    arange=lambda start, end, layout: np.arange(start, end), SliceLayout=lambda dim, parent: None,
)  # fmt: skip
HOOKS_OF_GLUON = {
    "blocks_below", "first_block", "clear_blocks", "hide", "sees_a_key", "query_blocks", "hide_queries",
}  # fmt: skip
VALUES = (-1, 0, 2, 3, 8, 12, 30)  #: of every run-time integer, as far as it may have them


def sampled(name: str) -> Iterator[Mask]:
    limits = maskfile.mask_named(name).values.values()
    for values in itertools.product(*({min(max(v, least), most) for v in VALUES} for least, most in limits)):
        yield Mask(name, *values)


#: Of every file
ALL = [mask for name in maskfile.names() for mask in sampled(name)]
#: Portable kernels serve a mask that lacks a hook
MASKS = [mask for mask in ALL if maskfile.hooks_of(mask.name) >= HOOKS_OF_GLUON]
#: Whose hooks name no tile in vain, as those of another mask may
TIGHT_ONES = ("full", "causal", "causal_top_left", "causal_stacked", "band", "chunked")
TIGHT = [mask for mask in MASKS if mask.name in TIGHT_ONES]
WITH_LAST_KEY = [mask for mask in ALL if maskfile.LAST_KEY in maskfile.hooks_of(mask.name)]
LENGTHS = tuple(itertools.product((1, 8, 13, 40), repeat=2))


def hook(mask: Mask, name: str) -> Callable[..., Any]:
    """The function below its decorator, with numpy in place of Triton's language and Gluon's."""
    jitted: standins.Kernel = standins.run(f"masks.{mask.name}")[name]
    return FunctionType(jitted.fn.__code__, {"gl": GLUON, "tl": GLUON, "float": float, "max": max}, name)


def visible(mask: Mask, seqlen_q: int, seqlen_k: int, rows: int, columns: int) -> np.ndarray:
    """[rows, columns]. Keys behind the last are seen by none; rows behind the last as if there were more queries."""
    i, j = np.arange(rows)[:, None], np.arange(columns)
    seen = np.broadcast_to(mask.visible(i, j, seqlen_q, seqlen_k), (rows, columns))
    return seen & (j < seqlen_k)


def test_the_hooks_are_those_that_kernels_in_gluon_call() -> None:
    gluon = {name for name, hook in standins.run("masks.full").items()
             if isinstance(hook, standins.Kernel) and hook.is_gluon()}  # fmt: skip
    assert gluon == HOOKS_OF_GLUON
    assert not gluon & set(OPTIONAL_HOOKS.values())
    assert {mask.name for mask in MASKS} >= {*TIGHT_ONES}


@pytest.mark.parametrize("mask", ALL, ids=str)
def test_which_keys_triton_kernels_visit_and_take_whole(mask: Mask) -> None:
    range_of = hook(mask, "key_range")
    for seqlen_q, seqlen_k in LENGTHS:
        rows = -(-seqlen_q // BLOCK_M) * BLOCK_M
        seen = visible(mask, seqlen_q, seqlen_k, rows, seqlen_k)
        window, offset = mask.arguments(seqlen_q, seqlen_k), seqlen_k - seqlen_q
        for start in range(0, seqlen_q, BLOCK_M):
            found = map(int, range_of(start, BLOCK_M, offset, seqlen_k, window, BLOCK_N))
            begin, full_begin, full_end, end = check_range(found, seqlen_k, BLOCK_N)
            real, mine = seen[start : min(start + BLOCK_M, seqlen_q)], seen[start : start + BLOCK_M]
            assert not real[:, :begin].any() and not real[:, end:].any(), "what is skipped is seen by none"
            assert mine[:, full_begin:full_end].all(), "what is taken whole is seen by all"


@pytest.mark.parametrize("mask", ALL, ids=str)
def test_which_queries_triton_kernels_visit_and_take_whole(mask: Mask) -> None:
    range_of = hook(mask, "query_range")
    for seqlen_q, seqlen_k in LENGTHS:
        seen = visible(mask, seqlen_q, seqlen_k, seqlen_q, seqlen_k)
        window, offset = mask.arguments(seqlen_q, seqlen_k), seqlen_k - seqlen_q
        for start in range(0, seqlen_k, BLOCK_N):
            found = map(int, range_of(start, BLOCK_N, offset, seqlen_q, window, BLOCK_M))
            begin, full_begin, full_end, end = check_range(found, seqlen_q, BLOCK_M)
            mine = seen[:, start : start + BLOCK_N]
            assert not mine[:begin].any() and not mine[end:].any(), "what is skipped sees none"
            assert mine[full_begin:full_end].all(), "what is taken whole sees all"


def check_range(found: Iterable[int], length: int, step: int) -> tuple[int, int, int, int]:
    """(begin, full_begin, full_end, end). Its three parts are walked in whole steps, and no part walks what another does."""
    begin, full_begin, full_end, end = found
    assert begin >= 0 and begin % step == full_begin % step == 0 and end <= -(-length // step) * step
    parts = ((begin, full_begin), (full_begin, full_end), (full_end, end))
    walked = [start for low, high in parts for start in range(low, high, step)]
    assert all(start % step == 0 for start in walked) and len(walked) == len({*walked})
    assert {*walked} >= {*range(begin, end, step)}
    return begin, full_begin, full_end, end


@pytest.mark.parametrize("mask", TIGHT, ids=str)
def test_tiles_outside_of_a_mask_are_not_visited(mask: Mask) -> None:
    """Of Triton's kernels, tiles of queries and of keys; of Gluon's, tiles of queries, whose rows have one block at least."""
    hooks = [hook(mask, name) for name in ("key_range", "query_range", "blocks_below", "first_block")]
    keys_of, queries_of, below_of, first_of = hooks
    for lengths in LENGTHS:
        (seqlen_q, seqlen_k), window = lengths, mask.arguments(*lengths)
        offset, seen = seqlen_k - seqlen_q, visible(mask, *lengths, -(-seqlen_q // BLOCK_M) * BLOCK_M, seqlen_k)
        for start in range(0, seqlen_q, BLOCK_M):
            blocks = {*seen[start : start + BLOCK_M].any(0).nonzero()[0] // BLOCK_N}
            begin, *_, end = map(int, keys_of(start, BLOCK_M, offset, seqlen_k, window, BLOCK_N))
            assert {*range(begin // BLOCK_N, -(-end // BLOCK_N))} == blocks
            first, below = (
                int(first_of(start, *lengths, window, BLOCK_N)),
                int(below_of(start + BLOCK_M, *lengths, window, BLOCK_N)),
            )
            assert {*range(first, below)} == blocks or below - first == 1
        for start in range(0, seqlen_k, BLOCK_N):
            blocks = {*seen[:seqlen_q, start : start + BLOCK_N].any(1).nonzero()[0] // BLOCK_M}
            begin, *_, end = map(int, queries_of(start, BLOCK_N, offset, seqlen_q, window, BLOCK_M))
            assert {*range(begin // BLOCK_M, -(-end // BLOCK_M))} == blocks


@pytest.mark.parametrize("mask", ALL, ids=str)
def test_which_pairs_triton_kernels_keep(mask: Mask) -> None:
    keep, sees = hook(mask, "keep"), hook(mask, "sees")
    for seqlen_q, seqlen_k in LENGTHS:
        window, offset = mask.arguments(seqlen_q, seqlen_k), seqlen_k - seqlen_q
        columns = -(-seqlen_k // BLOCK_N) * BLOCK_N
        seen = visible(mask, seqlen_q, seqlen_k, seqlen_q, columns)
        rows = np.arange(seqlen_q)
        kept = keep(rows[:, None], np.arange(columns), offset, seqlen_k, window)
        assert (np.broadcast_to(kept, seen.shape) == seen).all()
        assert (sees(rows, offset, seqlen_k, window) == seen.any(1)).all()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_gluon_kernels_skip_and_take_whole(mask: Mask) -> None:
    below_of, first_of, clear_of = (hook(mask, name) for name in ("blocks_below", "first_block", "clear_blocks"))
    described = maskfile.mask_named(mask.name)
    for lengths in LENGTHS:
        seqlen_q, seqlen_k = lengths
        asked = (*lengths, mask.arguments(*lengths), BLOCK_N)
        blocks = -(-seqlen_k // BLOCK_N)
        seen = visible(mask, *lengths, -(-seqlen_q // BLOCK_M) * BLOCK_M, blocks * BLOCK_N)
        for start in range(0, seqlen_q, BLOCK_M):
            first = int(first_of(start, *asked))
            for row in range(start, start + BLOCK_M, ROWS):
                below = int(below_of(row + ROWS, *asked))
                assert 0 <= first < below <= blocks, "at least one block"
                mine = seen[row : row + ROWS].reshape(ROWS, blocks, BLOCK_N)
                real = seen[row : min(row + ROWS, seqlen_q)].reshape(-1, blocks, BLOCK_N)
                assert not real[:, :first].any() and not real[:, below:].any(), "what is skipped is seen by none"
                clear_begin, clear_end = map(int, clear_of(row, row + ROWS, *asked))
                # as the kernel has it: the last block is masked in any case
                begin = max(first, clear_begin) if described.left else first
                end = min(below - 1, clear_end) if described.right else below - 1
                assert mine[:, begin : max(begin, end)].all(), "what is taken whole is seen by all"


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_gluon_kernels_hide(mask: Mask) -> None:
    hide, sees = hook(mask, "hide"), hook(mask, "sees_a_key")
    for lengths in LENGTHS:
        seqlen_q, seqlen_k = lengths
        window, offset, columns = mask.arguments(*lengths), seqlen_k - seqlen_q, -(-seqlen_k // 16) * 16
        seen = visible(mask, *lengths, seqlen_q, columns)
        rows = np.arange(seqlen_q)
        for column in range(0, columns, 16):
            scores = hide(np.zeros((seqlen_q, 16)), rows, column, offset, seqlen_k, window, None)
            assert ((scores == 0) == seen[:, column : column + 16]).all()
        assert (sees(rows, offset, seqlen_k, window) == seen.any(1)).all()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_which_query_blocks_gluon_kernels_visit_and_take_whole(mask: Mask) -> None:
    blocks_of = hook(mask, "query_blocks")
    for lengths in LENGTHS:
        seqlen_q, seqlen_k = lengths
        blocks, columns = -(-seqlen_q // BLOCK_M), -(-seqlen_k // BLOCK_N) * BLOCK_N
        seen = visible(mask, *lengths, seqlen_q, columns)
        for key in range(0, seqlen_k, BLOCK_N):
            asked = key, key + BLOCK_N, *lengths, mask.arguments(*lengths), BLOCK_M
            first, full_begin, full_end, end = map(int, blocks_of(*asked))
            assert 0 <= first <= full_begin <= full_end <= end <= blocks
            mine = seen[:, key : min(key + BLOCK_N, seqlen_k)]  # [queries, the tile's keys]
            assert not mine[: first * BLOCK_M].any() and not mine[end * BLOCK_M :].any(), "what is skipped sees none"
            assert mine[full_begin * BLOCK_M : full_end * BLOCK_M].all(), "what is taken whole sees all"
            real = mine.any(1).nonzero()[0] // BLOCK_M
            if len(real):  # none is visited in vain at either end
                assert first == real[0] and end == real[-1] + 1


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_gluon_kernels_hide_of_transposed_weights(mask: Mask) -> None:
    hide = hook(mask, "hide_queries")
    for lengths in LENGTHS:
        seqlen_q, seqlen_k = lengths
        window, offset = mask.arguments(*lengths), seqlen_k - seqlen_q
        keys = np.arange(-(-seqlen_k // 16) * 16)
        seen = visible(mask, *lengths, seqlen_q, len(keys))
        for row in range(0, seqlen_q, 16):
            weights = hide(np.ones((len(keys), 16)), keys, row, offset, seqlen_k, window, None)
            real = min(16, seqlen_q - row)
            assert ((weights[:, :real] == 1) == seen.T[:, row : row + real]).all()


@pytest.mark.parametrize("mask", WITH_LAST_KEY, ids=str)
def test_rows_see_all_keys_up_to_the_last_one_of_a_mask_that_has_it(mask: Mask) -> None:
    last_key = hook(mask, maskfile.LAST_KEY)
    for lengths in LENGTHS:
        seqlen_q, seqlen_k = lengths
        seen = visible(mask, *lengths, seqlen_q, seqlen_k)
        rows, offset = np.arange(seqlen_q), seqlen_k - seqlen_q
        assert (seen == (np.arange(seqlen_k) <= last_key(rows, offset, seqlen_k - 1)[:, None])).all()
        for end in range(1, seqlen_q + 1):
            counted = seen[:end].any(0).sum()
            assert max(last_key(end, offset, seqlen_k), 0) == counted, "ends, of the end of rows"


def test_causal_has_a_last_key() -> None:
    assert {mask.name for mask in WITH_LAST_KEY} >= {"causal"}


@pytest.mark.parametrize("mask", [mask for mask in ALL if mask.hooks.diagonal], ids=str)
def test_a_mask_that_states_diagonal_ends_at_most_one_key_later_than_for_the_query_before(mask: Mask) -> None:
    for seqlen_q, seqlen_k in LENGTHS:
        seen = visible(mask, seqlen_q, seqlen_k, seqlen_q, seqlen_k)
        ends = np.where(seen.any(1), seqlen_k - seen[:, ::-1].argmax(1), 0)
        assert (np.diff(ends) <= 1)[seen[:-1].any(1)].all()


@pytest.mark.parametrize("extent", [WHOLE, Extent(RAGGED, 6, 900)], ids=lambda extent: extent.name)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192])
def test_without_it_no_call_has_two_q_tiles(monkeypatch: pytest.MonkeyPatch, head_dim: int, extent: Extent) -> None:
    """A group would pass by more blocks of the next tile than the ring has stages: the kernel would hang."""
    hooks = replace(maskfile.mask_named("chunked"), diagonal=False)
    read = maskfile.mask_named
    monkeypatch.setattr(maskfile, "mask_named", lambda name: hooks if name == "chunked" else read(name))
    monkeypatch.setattr(problems, "mask_named", maskfile.mask_named)
    batch = 1 if extent.ragged else 8
    shapes = [(batch, 16, seqlen) for seqlen in (300, 2048, 16384)]
    for batch, heads, seqlen in shapes:
        problem = Problem(
            "bf16", batch, heads, heads, seqlen, seqlen, head_dim, head_dim, Mask("chunked", 512), extent=extent
        )
        config = choose(problem, "fwd", named("h200")).config
        assert config.get("Q_STAGES", 1) == 1
    two = {**fwd.default(problem.specialization, 90), "Q_STAGES": 2, "BLOCK_M": 128, "STAGES": 3}
    (rule,) = (rule for rule in fwd.SPACE.constraints if rule.name == "passed_blocks_fit_ring")
    assert not rule.holds(two, problem.specialization, 90)
    assert rule.holds(two, replace(problem.specialization, mask="causal"), 90)
