"""What runs before and after the fused Hopper backward, of packed sequences: where rows lie in the workspaces, and back."""

import math

import pytest
import torch

from fa2tune.compiling import registry
from fa2tune.kernels.lib.packed_order import write_longer_first
from fa2tune.kernels.masks import causal as causal_mask
from fa2tune.kernels.masks import full
from fa2tune.kernels.sm90.bwd_finish import bwd_finish_hopper_kernel
from fa2tune.kernels.sm90.bwd_prepare import bwd_prepare_hopper_kernel
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Problem

HEADS, DIM, CHUNK = 2, 64, bwd_fused.CHUNK
TILE = bwd_fused.GROUPS * bwd_fused.KEYS
LENGTHS = ((70, 40), (0, 9), (129, 129), (1, 0), (256, 300))
SPARE = 5


def starts(side: int) -> torch.Tensor:
    return torch.tensor([0, *(pair[side] for pair in LENGTHS)]).cumsum(0).to(torch.int32)


TOTALS = tuple(int(starts(side)[-1]) + SPARE for side in (0, 1))
PROBLEM = Problem("fp16", 1, HEADS, HEADS, *TOTALS, DIM, DIM, FULL, extent=Extent(RAGGED, len(LENGTHS), 0))
PADDED = bwd_fused.padded_rows(PROBLEM)


def places() -> list[tuple[int, int, int, int]]:
    """(first row, rows, first row of the workspaces, keys) of each sequence, and of the rows behind the last."""
    found = [
        (first := int(starts(0)[number]), queries, (first // CHUNK + number) * CHUNK, keys)
        for number, (queries, keys) in enumerate(LENGTHS)
    ]
    first = int(starts(0)[-1])
    return [*found, (first, SPARE, (first // CHUNK + len(LENGTHS)) * CHUNK, 0)]


def test_whole_blocks_of_each_sequence_follow_one_another() -> None:
    ends = [first + -(-rows // CHUNK) * CHUNK for _, rows, first, _ in places()]
    assert all(end <= place[2] for end, place in zip(ends, places()[1:], strict=False)) and ends[-1] <= PADDED


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax_scale", [0.5, -0.25])
def test_terms_of_each_sequence(causal: bool, softmax_scale: float) -> None:
    torch.manual_seed(0)
    variant = registry.variant_named("sm90/bwd_prepare")
    o, do = (torch.randn(1, HEADS, TOTALS[0], DIM, dtype=torch.float16) for _ in range(2))
    lse, dlse = (torch.randn(1, HEADS, TOTALS[0]) for _ in range(2))
    terms = torch.full((2, HEADS, PADDED, bwd_fused.TERMS), math.nan, dtype=torch.bfloat16)
    words = torch.full((1, HEADS, PADDED, DIM), math.nan)
    counter = torch.ones(1, dtype=torch.int32)
    config = variant.space.default(PROBLEM.specialization, 90)
    bwd_prepare_hopper_kernel[(variant.programs(PROBLEM, config, 1),)](
        o, do, lse, dlse, terms, words, *o.stride()[:3], *do.stride()[:3], *dlse.stride(), len(LENGTHS), HEADS, *TOTALS, PADDED,
        1, counter, 1, softmax_scale * math.log2(math.e), 0, 0, starts(0), starts(1), 0, 0, HEAD_DIM_V=DIM, BLOCK_DV=DIM,
        SEES=(causal_mask if causal else full).sees, LEFT_BOUNDED=False, RIGHT_BOUNDED=causal, RAGGED=True,
        BLOCK_R=config["BLOCK_R"], SUM_COLUMNS=DIM, USED_COLUMNS=DIM, EARLY_START=False, IN_ORDER=False, LONGER_FIRST=False,
    )  # fmt: skip
    assert not counter.any()
    delta = (o.double() * do.double()).sum(-1) - dlse.double()
    touched = torch.zeros(PADDED, dtype=torch.bool)
    for first, rows, padded, keys in places():
        block = slice(padded, padded + -(-rows // CHUNK) * CHUNK)
        touched[block] = True
        of_lse, of_delta = terms.double().sum(-1)[:, :, block]
        blind = max(0, rows - keys) if causal else 0  # rows that see no key
        assert (of_lse[:, :blind] * softmax_scale == -math.inf).all()
        assert (of_lse[:, rows:] * softmax_scale == -math.inf).all() and not of_delta[:, rows:].any()
        right = -lse.double()[0, :, first + blind : first + rows] / softmax_scale
        torch.testing.assert_close(of_lse[:, blind:rows], right, rtol=3e-7, atol=1e-12)
        torch.testing.assert_close(of_delta[:, :rows], -delta[0, :, first : first + rows], rtol=3e-7, atol=2e-5)
        assert not words[0, :, block].any()
    assert terms[:, :, ~touched].isnan().all() and words[:, :, ~touched].isnan().all()


@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, ((1, 1),), (), tuple((1 + 7 * n % 40, 1 + 11 * n % 300) for n in range(150)), ((5, 9),) * 130],
    ids=["mixed", "one", "none", "more than are read at once", "alike"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_the_order_of_key_tiles(lengths: tuple[tuple[int, int], ...], causal: bool) -> None:
    """Every tile once: of sequences of more queries first, then as they lie, and those of no sequence last."""
    cu_seqlens = [torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0).to(torch.int32) for side in (0, 1)]
    totals = [int(side[-1]) + SPARE for side in cu_seqlens]
    problem = Problem("fp16", 1, 1, 1, *totals, 16, 16, FULL, extent=Extent(RAGGED, len(lengths), 0))
    count, behind = totals[1] // TILE + len(lengths) + 1, 7
    written = torch.full((1 + count + behind,), -1, dtype=torch.int32)
    variant = registry.variant_named("sm90/bwd_prepare")
    assert variant.programs(problem, variant.space.default(problem.specialization, 90), 1) > len(lengths)
    for own in range(len(lengths) + 1):
        write_longer_first[(1,)](*cu_seqlens, written[1:], own, len(lengths), *totals, TILE, causal)
    sequences = []  # (queries that see the most seen tile, number)
    for number, (queries, keys) in enumerate(lengths):
        sequences.append((-(min(queries, keys) if causal else queries), number))
    ends = [*(int(start) // TILE + n for n, start in enumerate(cu_seqlens[1])), count]
    expected = [tile for _, n in sorted(sequences) for tile in range(ends[n], ends[n + 1])]
    assert written[1 : 1 + count].tolist() == [*expected, *range(ends[-2], count)]
    assert (written[1 + count :] == -1).all() and written[0] == -1


@pytest.mark.parametrize("columns", [DIM // 2, DIM])
def test_sums_come_back_to_their_rows(columns: int) -> None:
    """In register order: of 64 rows a piece of so many columns after the other (kernels/lib/hopper_dq_accumulation.py)."""
    torch.manual_seed(0)
    sums = torch.full((HEADS, PADDED, DIM), math.nan)
    for _, rows, padded, _ in places():
        sums[:, padded : padded + rows] = torch.randn(HEADS, rows, DIM)
    # (64 rows as row / 16, row / 8 % 2, row % 8), (piece, column / 8, column % 8 / 2, column % 2)
    parts = sums.reshape(HEADS, PADDED // 64, 4, 2, 8, DIM // columns, columns // 8, 4, 2)
    words = parts.permute(0, 1, 5, 6, 2, 4, 7, 3, 8).reshape(1, HEADS, PADDED, DIM).contiguous()
    dq = torch.full((1, HEADS, TOTALS[0], DIM), math.nan, dtype=torch.float16)
    variant = registry.variant_named("sm90/bwd_finish")
    config = variant.space.default(PROBLEM.specialization, 90)
    bwd_finish_hopper_kernel[(variant.programs(PROBLEM, config, 1),)](
        words, dq, 0.5, *dq.stride()[:3], HEADS, TOTALS[0], PADDED, words, len(LENGTHS), TOTALS[1], starts(0), starts(1), 0, 0,
        HEAD_DIM=DIM, RAGGED=True, SUM_COLUMNS=DIM, USED_COLUMNS=DIM, BLOCK_R=config["BLOCK_R"], PERMUTED_COLUMNS=columns,
        FINISH_BESIDE=False, EARLY_START=False,
    )  # fmt: skip
    for first, rows, padded, _ in places():
        torch.testing.assert_close(dq[0, :, first : first + rows], (sums[:, padded : padded + rows] * 0.5).half())
