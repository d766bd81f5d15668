"""The order of packed tiles: every row of q in one tile, longer sequences first, and no row outside the tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fa2tune.compiling.compiler import around
from fa2tune.compiling.registry import variant_named
from fa2tune.launching import passes
from fa2tune.launching.launch import bind
from fa2tune.search_spaces.portable import packed_order as space
from fa2tune.search_spaces.portable.packed_order import order_shape
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Specialization

BLOCK = 64
SEQUENCE = 6  #: the word with a sequence's number
UNSET = -(2**30)


def run(kernel, problem, starts, order, more):
    variant = variant_named(kernel)
    config = {**variant.space.default(problem.specialization, 90), **more}
    given = [torch.tensor(side, dtype=torch.int32) for side in starts]
    bind(variant, problem, config, {}, 1.0, ("cu_seqlens_q", "cu_seqlens_k", "order"), -1)(*given, order)


def ordered(starts_q, starts_k, rows, keys, in_turns=space.ALL):
    """The head and the entries that it names."""
    q, k = torch.empty(1, 1, rows, 16, dtype=torch.float16), torch.empty(1, 1, keys, 16, dtype=torch.float16)
    problem = passes.describe(q, k, k, CAUSAL, 1.0, extent=Extent(RAGGED, len(starts_q) - 1))
    order = torch.full(order_shape(problem, BLOCK), UNSET, dtype=torch.int32)
    run("portable/packed_order", problem, (starts_q, starts_k), order, {"BLOCK_Q": BLOCK, "IN_TURNS": in_turns})
    tiles, counter, longest = order[0, :3].tolist()
    assert counter == 0 and tiles < len(order)
    return longest, order[1 : 1 + tiles, [*range(5), SEQUENCE]].tolist()


@pytest.mark.parametrize(
    ("starts_q", "starts_k"),
    [
        ((0, 63, 63, 127, 192, 320), (0, 63, 70, 134, 134, 400)),
        ((0, 100, 170, 300), (0, 90, 180, 270)),
        ((0, 300), (0, 1)),
        ((0, *range(1, 300, 2), 320), (0, *range(2, 301, 2), 400)),
        ((0,), (0,)),
    ],
    ids=["mixed", "alike", "one", "more than are read at once", "none"],
)
@pytest.mark.parametrize("in_turns", [1, 3, space.ALL])
def test_every_row_is_in_one_tile_and_the_longest_come_first(starts_q, starts_k, in_turns):
    rows, keys = 330, 410
    found, entries = ordered(starts_q, starts_k, rows, keys, in_turns)
    sequences = []  # (keys, tiles, first row, row behind it, key behind it)
    for number, ((first, end), behind, seen) in enumerate(zip(
        pairwise((*starts_q, rows)), (*starts_k[1:], starts_k[-1]),
        (*(b - a for a, b in pairwise(starts_k)), 0), strict=True,
    )):  # fmt: skip
        if end > first:
            sequences.append((seen, -(-(end - first) // BLOCK), first, end, behind, number))
    expected = []
    for kind in sorted({one[:2] for one in sequences}, reverse=True):
        alike = [one for one in sequences if one[:2] == kind]
        alone = max(0, len(alike) - -(-in_turns // kind[1]))
        for some in (*([one] for one in alike[:alone]), alike[alone:]):
            for tile in reversed(range(kind[1])):
                expected += [
                    [tile * BLOCK, end, end - first, behind, kind[0], number] for *_, first, end, behind, number in some
                ]
    assert entries == expected
    assert found == sum(one[0] for one in sequences if one[:2] == max(sequences)[:2])


@pytest.mark.parametrize("wrong", [(-5, 100, 40000), (300, 20, 330), (0, 2**31 - 1, 5), (0, 330, 0, 330, 0)])
def test_wrong_offsets_name_no_row_outside(wrong):
    rows, keys = 330, 410
    _, entries = ordered(wrong, wrong, rows, keys)
    for tile, end, length, end_k, seen, number in entries:
        assert 0 <= tile < length <= end <= rows and 0 <= seen <= end_k <= keys and 0 <= number < len(wrong)


@pytest.mark.parametrize("starts", [(0, 63, 63, 127, 192, 320), (0,), (0, *range(1, 300, 2), 320)])
def test_all_tables_at_once_are_each_as_by_itself(starts):
    keys = tuple(at + number for number, at in enumerate(starts))
    q, k = torch.empty(1, 1, 330, 16, dtype=torch.float16), torch.empty(1, 1, 500, 16, dtype=torch.float16)
    problem = passes.describe(q, k, k, CAUSAL, 1.0, extent=Extent(RAGGED, len(starts) - 1))
    together = torch.full(space.tables_shape(problem), UNSET, dtype=torch.int32)
    run("portable/packed_orders", problem, (starts, keys), together, {})
    ends = 0
    for block, in_turns in space.TABLES:
        alone = torch.full(order_shape(problem, block), UNSET, dtype=torch.int32)
        run("portable/packed_order", problem, (starts, keys), alone, {"BLOCK_Q": block, "IN_TURNS": in_turns})
        first, odd = divmod(space.table_at(problem, block, in_turns), 4 * space.WORDS)
        assert (first, odd) == (ends, 0)
        ends += len(alone)
        assert torch.equal(together[first:ends], alone)
    assert ends == len(together)


def test_kernels_take_tiles_of_these_tables():
    """Of the tuned ones all do; of tiles of several heads those of at most eight."""
    assert space.table_at(passes.describe(*[torch.empty(1, 1, 9, 16)] * 3, CAUSAL, 1.0), 4, space.ALL) is None
    spec = Specialization("bf16", 128, 128, "causal", extent=RAGGED)
    for kernel, dimension, values in (("sm90/fwd", "BLOCK_M", (64, 128, 192)), ("sm90/bwd_dq", "GROUPS", (2, 3))):
        variant = variant_named(kernel)
        assert set(variant.space.dimensions[dimension]) == set(values)
        for value in values:
            config = {**variant.space.default(spec, 90), dimension: value}
            ((_, its),) = [one for one in around(variant, spec, config, 90)[0] if one[0].short_name == "packed_order"]
            assert (its["BLOCK_Q"], its["IN_TURNS"]) in space.TABLES
