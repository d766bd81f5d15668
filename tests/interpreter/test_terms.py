"""What the fused Hopper backward finds in place of lse and delta: numbers that a product adds up."""

import math

import pytest
import torch

from fa2tune.compiling import registry
from fa2tune.kernels.masks import causal as causal_mask
from fa2tune.kernels.masks import full
from fa2tune.kernels.sm90.bwd_finish import bwd_finish_hopper_kernel
from fa2tune.kernels.sm90.bwd_prepare import bwd_prepare_hopper_kernel
from fa2tune.search_spaces.sm90.bwd_fused import TERMS

LOG2E = math.log2(math.e)
HEADS, ROWS, PADDED, DIM = 3, 70, 128, 64


def prepared(
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    seqlen_k: int = ROWS,
    causal: bool = False,
    used: int = DIM,
    counter: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(terms of lse, terms of delta, delta) of two batch entries. Uninitialised memory holds NaN. ``counter``: that and turns,
    which are cleared."""
    batch = lse.shape[0]
    o, do = (torch.randn(batch, HEADS, ROWS, DIM, dtype=torch.float16) for _ in range(2))
    terms = torch.full((2 * batch, HEADS, PADDED, TERMS), math.nan, dtype=torch.bfloat16)
    words = torch.full((batch, HEADS, PADDED, DIM), math.nan)
    block = registry.variant_named("sm90/bwd_prepare").space.dimensions["BLOCK_R"][0]
    bwd_prepare_hopper_kernel[(batch * HEADS * PADDED // block,)](
        o, do, lse, lse if dlse is None else dlse, terms, words, *o.stride()[:3], *do.stride()[:3], *lse.stride(), batch, HEADS,
        ROWS, seqlen_k, PADDED, int(dlse is not None), torch.ones(1, dtype=torch.int32) if counter is None else counter,
        0 if counter is None else len(counter), softmax_scale * LOG2E, 0, 0, 0, 0, 0, 0,
        HEAD_DIM_V=DIM, BLOCK_DV=DIM, SEES=(causal_mask if causal else full).sees, LEFT_BOUNDED=False, RIGHT_BOUNDED=causal,
        RAGGED=False, BLOCK_R=block, SUM_COLUMNS=DIM, USED_COLUMNS=used, EARLY_START=False,
        IN_ORDER=counter is not None, LONGER_FIRST=False,
    )  # fmt: skip
    of_columns = words.reshape(-1, DIM, 64)  # the words of 64 rows, column by column
    assert not of_columns[:, :used].any() and of_columns[:, used:].isnan().all()
    delta = (o.double() * do.double()).sum(-1) - (0.0 if dlse is None else dlse.double())
    return terms[:batch].double(), terms[batch:].double(), delta


def test_turns_are_cleared() -> None:
    """A number for each 64 rows, behind the counter, and nothing behind them."""
    memory = torch.full((1 + 2 * HEADS * PADDED // 64 + 1,), 7, dtype=torch.int32)
    prepared(torch.zeros(2, HEADS, ROWS), None, 0.5, counter=memory[:-1])
    assert not memory[:-1].any() and memory[-1] == 7


@pytest.mark.parametrize(("used", "columns"), [(48, 64), (48, 32), (DIM, 64)])
def test_sums_of_columns_that_no_part_has_are_neither_zeroed_nor_read(used: int, columns: int) -> None:
    """In register order those of each 64 rows lie behind the others, in pieces of any width."""
    torch.manual_seed(0)
    prepared(torch.zeros(1, HEADS, ROWS), None, 0.5, used=used)
    head_dim = used - 8
    sums = torch.randn(HEADS, PADDED, DIM)
    sums[..., used:] = math.nan
    # (64 rows as row / 16, row / 8 % 2, row % 8), (piece, column / 8, column % 8 / 2, column % 2)
    parts = sums.reshape(HEADS, PADDED // 64, 4, 2, 8, DIM // columns, columns // 8, 4, 2)
    words = parts.permute(0, 1, 5, 6, 2, 4, 7, 3, 8).reshape(1, HEADS, PADDED, DIM).contiguous()
    dq = torch.full((1, HEADS, ROWS, head_dim), math.nan, dtype=torch.float16)
    bwd_finish_hopper_kernel[(2 * HEADS,)](
        words, dq, 0.5, *dq.stride()[:3], HEADS, ROWS, PADDED, words, 1, ROWS, 0, 0, 0, 0, HEAD_DIM=head_dim, SUM_COLUMNS=DIM,
        RAGGED=False, BLOCK_R=64, PERMUTED_COLUMNS=columns, FINISH_BESIDE=False, EARLY_START=False, USED_COLUMNS=used,
    )  # fmt: skip
    torch.testing.assert_close(dq[0], (sums[:, :ROWS, :head_dim] * 0.5).half())


@pytest.mark.parametrize("softmax_scale", [0.125, -3.0, 1e-30])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_terms_add_up(softmax_scale: float, with_dlse: bool) -> None:
    """To float32, in the rows that there are; past the end delta is 0, and p is: exp2(-inf)."""
    torch.manual_seed(0)
    lse = torch.randn(2, HEADS, ROWS) * 30
    of_lse, of_delta, delta = prepared(lse, torch.randn(2, HEADS, ROWS) if with_dlse else None, softmax_scale)
    inside = slice(0, ROWS)
    torch.testing.assert_close(of_lse[..., inside, :].sum(-1), -lse.double() / softmax_scale, rtol=3e-7, atol=0)
    torch.testing.assert_close(of_delta[..., inside, :].sum(-1), -delta, rtol=3e-7, atol=2e-5)
    assert not of_delta[..., ROWS:, :].any()
    assert (of_lse[..., ROWS:, :].sum(-1) * softmax_scale == -math.inf).all()
    for terms in (of_lse, of_delta):
        assert not terms[..., 3:].any()


def test_rows_that_see_no_key() -> None:
    of_lse, of_delta, _ = prepared(torch.zeros(2, HEADS, ROWS), None, 0.5, seqlen_k=ROWS - 5, causal=True)
    assert (of_lse[..., :5, :].sum(-1) == -math.inf).all()
    assert not of_lse[..., 5:ROWS, :].any() and of_delta[..., :ROWS, :].isfinite().all()


def test_infinities_and_nan_stay_what_they_are() -> None:
    lse = torch.zeros(2, HEADS, ROWS)
    lse[0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    dlse = torch.zeros(2, HEADS, ROWS)
    dlse[1, 2, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    of_lse, of_delta, _ = prepared(lse, dlse, 0.5)
    assert of_lse[0, 0, :2].sum(-1).tolist() == [-math.inf, math.inf] and of_lse[0, 0, 2].sum().isnan()
    assert of_delta[1, 2, :2].sum(-1).tolist() == [math.inf, -math.inf] and of_delta[1, 2, 2].sum().isnan()
    assert of_lse.sum(-1).isfinite().logical_not().sum() == 3 + 2 * HEADS * (PADDED - ROWS)
    assert of_delta.sum(-1).isfinite().logical_not().sum() == 3
