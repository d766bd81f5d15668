"""Sliding windows in the portable kernels: correct by the error rule, gradients included, whatever side bounds them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from test_kernels import check_options, problem

import fa2tune
from fa2tune.launching import passes
from fa2tune.measuring import reference
from fa2tune.spec.mask import CAUSAL, FULL, band, mask_of

#: With one query tile and several, one key tile and several, and rows that see no key.
CASES = (
    (70, 90, (16, 0)), (70, 90, (None, 7)), (90, 70, (5, 40)), (90, 70, (20, None)), (130, 130, (64, 64)), (33, 200, (-1, 3)),
    (33, 200, (16, 0)), (130, 130, (20, None)),
)  # fmt: skip
STARTS = torch.tensor([0, 64], dtype=torch.int32)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "window"), CASES)
def test_windows(seqlen_q, seqlen_k, window):
    check_options(problem("fp16", seqlen_q, seqlen_k, heads=(4, 2)), mask_of(False, window), window=window)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_causal_window(dtype):
    """With causal=True the right side is 0, whatever the window says, as in flash-attn."""
    check_options(problem(dtype, 100, 130, 64), band(24, 0), causal=True, window=(24, 50))


def test_a_remembered_window_does_not_let_a_wrong_one_pass():
    q, k, v = (torch.randn(1, 1, 16, 32, dtype=torch.float16) for _ in range(3))
    fa2tune.attention(q, k, v, window=(1, 0))
    for wrong in ((True, False), (1.0, 0.0), [1, 0], (torch.tensor(1), 0)):
        with pytest.raises(TypeError, match="window: got"):
            fa2tune.attention(q, k, v, window=wrong)


def test_a_window_that_bounds_nothing_is_no_window():
    inputs = reference.make_inputs(problem("fp16", 50, 60), "cpu")
    for mask, same in ((band(59, 49), FULL), (band(100, 0), CAUSAL), (FULL, FULL), (band(58, None), band(58, None))):
        assert passes.describe(inputs.q, inputs.k, inputs.v, mask, 1.0).mask == same, mask


def test_blocks_outside_the_window_are_not_visited():
    """NaN in keys that no query sees reaches nothing, not even through a product with 0."""
    q, k, v = (torch.randn(1, 1, 256, 32, dtype=torch.float16) for _ in range(3))
    k[:, :, :64] = float("nan")
    v[:, :, :64] = float("nan")
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    o = fa2tune.attention(q[:, :, 128:], k, v, window=(8, 0))
    dq, dk, dv = torch.autograd.grad(o.float().sum(), (q, k, v))
    assert not o.isnan().any()
    assert not dq.isnan().any()
    assert not dk[:, :, 64:].isnan().any()
    assert not dv[:, :, 64:].isnan().any()


def test_windows_go_through_torch_compile():
    q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.float16) for _ in range(3))
    compiled = torch.compile(
        lambda q, k, v: fa2tune.attention(q, k, v, window=(16, 4)), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(q, k, v), fa2tune.attention(q, k, v, window=(16, 4)))


@pytest.mark.parametrize(
    ("window", "error"),
    [((1,), TypeError), ([4, 0], TypeError), (4, TypeError), ((4, -2), ValueError), ((True, 0), TypeError),
     (("4", 0), TypeError), ((1.0, 0), TypeError), ((2**63, 0), ValueError), ((4, 2**63), ValueError)],
)  # fmt: skip
def test_a_wrong_window_is_named(window, error):
    q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.float16) for _ in range(3))
    with pytest.raises(error, match=r"window: got .*\(left, right\)"):
        fa2tune.attention(q, k, v, window=window)
    with pytest.raises(error, match=r"window: got .*\(left, right\)"):
        fa2tune.attention_varlen(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), STARTS, window=window
        )
    assert not fa2tune.is_supported(q, k, v, window=window)


@pytest.mark.parametrize("window", [(0, None), (None, 0), (-1, -1), (2**63 - 1, 0), (3, 2**62)])
def test_the_smallest_and_the_largest_windows(window):
    check_options(problem("fp32", 33, 40), mask_of(False, window), window=window)


def test_a_window_of_the_diagonal_alone():
    q, k, v = (torch.randn(1, 2, seqlen, 32, dtype=torch.float16, requires_grad=True) for seqlen in (33, 40, 40))
    o, lse = fa2tune.attention(q, k, v, softmax_scale=1.0, window=(0, 0), return_lse=True)
    assert torch.equal(o, v[:, :, 7:])  # aligned at the bottom right
    torch.testing.assert_close(lse, (q.float() * k[:, :, 7:].float()).sum(-1), atol=1e-4, rtol=1e-4)
    (dv,) = torch.autograd.grad(o.float().sum(), (v,))
    assert torch.equal(dv[:, :, :7], torch.zeros_like(dv[:, :, :7])) and torch.equal(dv[:, :, 7:], torch.ones_like(o))


def test_rows_that_see_no_key_warn_of_nothing():
    """NumPy, in which the interpreter computes, warns of 0 / 0 and of the logarithm of 0; its settings stay as they were."""
    before = np.geterr()
    q, k, v = (torch.randn(1, 2, seqlen, 32, dtype=torch.float16, requires_grad=True) for seqlen in (96, 70, 70))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for window in ((16, 0), (5, 8), (20, None)):
            o, lse = fa2tune.attention(q, k, v, window=window, return_lse=True)
            assert (lse == -torch.inf).any() == (window[1] is not None) and o.isfinite().all()
            o.float().sum().backward()
    assert np.geterr() == before
