"""Used lengths: as packed sequences of the used rows alone, gradients included; the rest is neither seen nor written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fa2tune
from fa2tune.calling import used_lengths
from fa2tune.compat import flash_attn_4, torch_varlen
from fa2tune.launching import passes

#: (queries, keys) of a sequence, and how many of each are used
LENGTHS = ((9, 12), (20, 70), (4, 5), (33, 33))
USED = ((9, 7), (11, 40), (0, 5), (20, 0))


pytestmark = pytest.mark.usefixtures("no_rows")


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def rows(lengths, used):
    """Which rows of all are used, bool."""
    return torch.cat([torch.arange(length) < some for length, some in zip(lengths, used, strict=True)])


@pytest.fixture
def call():
    torch.manual_seed(0)
    (of_q, of_k), (used_q, used_k) = zip(*LENGTHS, strict=True), zip(*USED, strict=True)
    q = torch.randn(sum(of_q), 2, 16)
    k, v = torch.randn(sum(of_k), 1, 16), torch.randn(sum(of_k), 1, 16)
    hidden = ~rows(of_k, used_k)
    k[hidden], v[hidden] = torch.nan, torch.nan
    q[~rows(of_q, used_q)] = torch.nan
    tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
    offsets = [starts(of_q), starts(of_k)]
    used = [torch.tensor(side, dtype=torch.int32) for side in (used_q, used_k)]
    return tensors, offsets, used, rows(of_q, used_q), rows(of_k, used_k)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 3)}], ids=str)
def test_as_packed_sequences_of_what_is_used(call, options):
    tensors, offsets, (used_q, used_k), here_q, here_k = call
    out, lse = fa2tune.attention_varlen(
        *tensors, *offsets, seqused_q=used_q, seqused_k=used_k, return_lse=True, **options
    )
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, do)

    few = [
        tensor.detach()[here].requires_grad_() for tensor, here in zip(tensors, (here_q, here_k, here_k), strict=True)
    ]
    want, want_lse = fa2tune.attention_varlen(
        *few, starts(used_q.tolist()), starts(used_k.tolist()), return_lse=True, **options
    )
    want_grads = torch.autograd.grad(want, few, do[here_q])

    torch.testing.assert_close(out[here_q], want)
    torch.testing.assert_close(lse[:, here_q], want_lse)
    assert not out[~here_q].any() and bool((lse[:, ~here_q] == -torch.inf).all())
    for grad, want_grad, here in zip(grads, want_grads, (here_q, here_k, here_k), strict=True):
        torch.testing.assert_close(grad[here], want_grad)
        assert not grad[~here].any()


def test_of_one_side_only_and_more_than_there_is(call):
    _, offsets, (used_q, used_k), _, _ = call
    for given in ((used_q, None), (None, used_k), (used_q * 0 + 2**31 - 1, used_k)):
        found = used_lengths.offsets(*offsets, *given)
        for side, used, made in zip(offsets, given, found, strict=True):
            lengths = side.diff() if used is None else torch.minimum(used, side.diff())
            assert torch.equal(made.diff()[::3], lengths)
            assert made[0] == 0 and made[-1] == side[-1] and bool((made.diff() >= 0).all())


def test_rows_of_the_cache_are_chosen_by_the_callers_sequences(call, monkeypatch):
    """Not by the three that each becomes: their mean is a third. The tiles of all three are launched."""
    tensors, offsets, (used_q, used_k), *_ = call
    asked = []
    made = passes.describe
    monkeypatch.setattr(passes, "describe", lambda *given, **more: asked.append(made(*given, **more)) or asked[-1])
    run = fa2tune.attention_varlen
    for one in (run, torch.compile(run, fullgraph=True, backend="eager")):
        one(*tensors, *offsets, seqused_k=used_k)
        one(*tensors, *offsets)
    explained = fa2tune.explain(*tensors, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], seqused_q=used_q).problem
    used, plain, compiled, _, _ = (one.extent for one in asked)
    assert used == compiled == explained.extent and str(used) == str(plain) == "4 packed sequences"
    assert (used.sequences, plain.sequences) == (12, 4)
    for total in (66, 4000, 70000):
        assert used.length(total) == plain.length(total) == -(-total // 4)
    assert replace(used, longest=900).length(400) == replace(plain, longest=900).length(400) == 300
    assert used.tiles(1, 66, 16) == 66 // 16 + 12 + 1


def test_the_drop_ins_take_them(call):
    (q, k, v), (of_q, of_k), (used_q, used_k), *_ = call
    want = fa2tune.attention_varlen(q, k, v, of_q, of_k, seqused_q=used_q, seqused_k=used_k, causal=True)
    out, _ = flash_attn_4.flash_attn_varlen_func(
        q, k, v, None, of_q, of_k, seqused_q=used_q, seqused_k=used_k, causal=True
    )
    torch.testing.assert_close(out, want)
    out = torch_varlen.varlen_attn(q.nan_to_num(), k, v, of_q, of_k, 33, 70, seqused_k=used_k, enable_gqa=True)
    want = fa2tune.attention_varlen(q.nan_to_num(), k, v, of_q, of_k, seqused_k=used_k)
    torch.testing.assert_close(out, want)


def test_of_a_batch_without_offsets():
    torch.manual_seed(1)
    q, k, v = (torch.randn(3, length, 2, 16) for length in (4, 20, 20))
    used = torch.tensor([20, 7, 4], dtype=torch.int32)
    out, lse = flash_attn_4.flash_attn_varlen_func(q, k, v, seqused_k=used, causal=True)
    assert out.shape == q.shape and lse.shape == (3, 2, 4)
    for row, some in enumerate(used.tolist()):
        want, want_lse = fa2tune.attention(
            q[row : row + 1], k[row : row + 1, :some], v[row : row + 1, :some], causal=True, layout="bshd", return_lse=True
        )  # fmt: skip
        torch.testing.assert_close(out[row], want[0])
        torch.testing.assert_close(lse[row], want_lse[0])


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"seqused_q": [1, 2]}, TypeError, "seqused_q: got list, must be a torch.Tensor"),
        ({"seqused_k": torch.ones(4)}, TypeError, "seqused_k: got dtype torch.float32, must be torch.int32"),
        ({"seqused_k": torch.ones(2, 2, dtype=torch.int32)}, ValueError, r"seqused_k: got shape \(2, 2\)"),
        ({"seqused_k": torch.ones(3, dtype=torch.int32)}, ValueError, "seqused_k: got 3 entries, must have one a sequence, 4"),
        ({"seqused_k": torch.ones(4, dtype=torch.int32, device="meta")}, ValueError, "seqused_k: got device meta"),
    ],
)  # fmt: skip
def test_bad_ones_are_named(call, change, error, said):
    tensors, offsets, *_ = call
    with pytest.raises(error, match=said):
        fa2tune.attention_varlen(*tensors, *offsets, **change)


@pytest.mark.parametrize(
    "shapes, said",
    [
        (((2, 6), (3, 8), (3, 8)), "k: got batch 3, q has 2"),
        (((2, 6), (2, 8), (4, 4)), r"v: got batch and length \(4, 4\), k has \(2, 8\)"),
    ],
)
def test_batches_that_differ_are_named(shapes, said):
    q, k, v = (torch.randn(*shape, 2, 16) for shape in shapes)
    used = torch.tensor([8, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=said):
        flash_attn_4.flash_attn_varlen_func(q, k, v, seqused_k=used)
