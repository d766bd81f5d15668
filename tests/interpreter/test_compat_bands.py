"""FlashAttention-4's windows, of which a negative side shifts the band, and its calls where one side alone has cu_seqlens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fa2tune.compat import bands, flash_attn_4

SIDES = (None, -9, -3, -1, 0, 2, 9)


def seen(queries, keys, window, causal):
    """(queries, keys) bool, as FlashAttention-4 describes its windows."""
    left, right = window
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    right = 0 if causal else right
    distance = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None:
        mask &= distance >= -left
    return mask if right is None else mask & (distance <= right)


def expected(q, k, v, mask):
    """out (length, heads, dim) and lse (heads, length) of one sequence; a row without keys gives 0 and -inf."""
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[2])).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(0, 1), scores.logsumexp(-1)


def tensors(queries, keys, *batch):
    return torch.randn(*batch, queries, 2, 16), torch.randn(*batch, keys, 1, 16), torch.randn(*batch, keys, 1, 16)


@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
def test_every_pair_of_sides_is_the_band_it_says(shape):
    """What is left of a band: a plain window, aligned at the last query and key that are left."""
    queries, keys = shape
    for left, right, causal in itertools.product(SIDES, SIDES, (False, True)):
        window, unseeing, unseen = bands.asked("call", (left, right), causal)
        rows, columns = max(0, queries - unseeing), max(0, keys - unseen)
        found = torch.zeros(queries, keys, dtype=torch.bool)
        plain = seen(rows, columns, window or (None, None), causal and not unseeing and not unseen)
        found[:rows, :columns] = plain
        assert torch.equal(found, seen(queries, keys, (left, right), causal)), (left, right, causal)


@pytest.mark.parametrize(
    "window, causal",
    [((-3, None), False), ((None, -2), False), ((-1, 4), False), ((-3, 2), True), ((None, -3), True), ((2, -3), True)],
)
def test_dense_calls_of_a_shifted_band(window, causal):
    torch.manual_seed(0)
    given = [t.requires_grad_() for t in tensors(7, 9, 1)]
    out, lse = flash_attn_4.flash_attn_func(*given, causal=causal, window_size=window)
    mask = seen(7, 9, window, causal)
    want, want_lse = expected(*(t[0] for t in given), mask)
    torch.testing.assert_close(out[0], want)
    torch.testing.assert_close(lse[0], want_lse)
    found, right = (torch.autograd.grad(one.sin().sum(), given) for one in (out, want))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other.nan_to_num())


@pytest.mark.parametrize("window", [(-2, None), (None, -2)])
def test_of_either_side_with_offsets_or_with_used_lengths(window):
    torch.manual_seed(0)
    lengths_q, lengths_k = torch.tensor([5, 1, 0], dtype=torch.int32), torch.tensor([3, 6, 4], dtype=torch.int32)
    q, k, v = tensors(5, 6, 3)
    packed = [torch.cat([row[:n] for row, n in zip(t, of, strict=True)])
              for t, of in ((q, lengths_q), (k, lengths_k), (v, lengths_k))]  # fmt: skip
    starts_q, starts_k = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).to(torch.int32) for n in (lengths_q, lengths_k))
    for unpad_q, unpad_k in itertools.product((True, False), repeat=2):
        sides = {"cu_seqlens_q": starts_q} if unpad_q else {"seqused_q": lengths_q}
        sides |= {"cu_seqlens_k": starts_k} if unpad_k else {"seqused_k": lengths_k}
        given = packed[0] if unpad_q else q, *(packed[1:] if unpad_k else (k, v))
        out, lse = flash_attn_4.flash_attn_varlen_func(*given, window_size=window, **sides)
        assert out.shape == given[0].shape and lse.shape == ((2, 6) if unpad_q else (3, 2, 5))
        for row, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            want, want_lse = expected(q[row, :n], k[row, :m], v[row, :m], seen(int(n), int(m), window, False))
            at = slice(starts_q[row], starts_q[row + 1])
            torch.testing.assert_close(out[at] if unpad_q else out[row, :n], want)
            torch.testing.assert_close(lse[:, at] if unpad_q else lse[row, :, :n], want_lse)


@pytest.mark.parametrize("window", [(-(2**31) - 20, None), (None, -(2**31) - 20), (-(2**40), 2**41)])
def test_a_shift_beyond_int32_leaves_no_pair(window):
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    for used in ({"seqused_q": lengths}, {"seqused_k": lengths}):
        out, lse = flash_attn_4.flash_attn_varlen_func(*tensors(8, 8, 2), window_size=window, **used)
        assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("wrong", [(1,), 3, (1.0, 2), (True, None), "ab"])
def test_what_is_no_window_is_named(wrong):
    with pytest.raises(TypeError, match=r"flash_attn_func: window_size: got .* must be two, each an integer or None"):
        flash_attn_4.flash_attn_func(*tensors(4, 4, 1), window_size=wrong)


def test_a_side_with_offsets_has_no_batch_dimension():
    starts = torch.tensor([0, 4], dtype=torch.int32)
    q, k, v = tensors(4, 4, 1)
    with pytest.raises(ValueError, match=r"q: got shape .* must have 3 dimensions"):
        flash_attn_4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=starts)
    with pytest.raises(ValueError, match=r"k: got shape .* must have 4 dimensions"):
        flash_attn_4.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens_q=starts)


def test_keys_and_values_of_unlike_lengths_are_refused_in_a_shifted_band():
    q, k, v = tensors(4, 8, 1)
    longer = torch.cat([v, v[:, :2]], 1)
    with pytest.raises(ValueError, match="v: got sequence length 10, k has 8"):
        flash_attn_4.flash_attn_func(q, k, longer, window_size=(None, -1))


def test_used_lengths_beyond_a_sequence_count_as_all_of_it():
    q, k, v = tensors(8, 8, 1)
    one, other = (
        flash_attn_4.flash_attn_varlen_func(
            q, k, v, seqused_k=torch.tensor([used], dtype=torch.int32), window_size=(None, -3)
        )[0]
        for used in (8, 20)
    )
    assert torch.equal(one, other)
    with pytest.raises(TypeError, match=r"q: got list, must be a torch\.Tensor"):
        flash_attn_4.flash_attn_varlen_func([1.0], k, v, seqused_k=None, window_size=(None, -3))
