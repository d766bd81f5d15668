"""The drop-ins for flash-attn 2, FlashAttention-4 and torch's varlen_attn: arguments, results and edges of each."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

import fa2tune
from fa2tune.compat import flash_attn, flash_attn_4, terms, torch_varlen
from fa2tune.measuring import reference
from fa2tune.spec.combinations import LACKING
from fa2tune.spec.mask import mask_of


def tensors(queries=9, keys=12, heads=(2, 1), dim=16, batch=1):
    torch.manual_seed(0)
    shapes = ((batch, queries, heads[0], dim), (batch, keys, heads[1], dim), (batch, keys, heads[1], dim))
    return [torch.randn(shape, dtype=torch.float16) for shape in shapes]


def expected(q, k, v, causal=False, window=None, scale=None):
    """o (batch, seqlen, heads, dim) and lse, in float64."""
    double = (t.double().transpose(1, 2) for t in (q, k, v))
    o, lse = reference.attention(*double, mask=mask_of(causal, window), softmax_scale=scale)
    return o.transpose(1, 2), lse


def close(found, right):
    torch.testing.assert_close(found.double(), right, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dim", [1, 7, 24, 59])
def test_any_head_dim_with_the_scale_of_its_own(dim):
    q, k, v = (t.requires_grad_() for t in tensors(dim=dim))
    o = flash_attn.flash_attn_func(q, k, v, causal=True)
    doubled = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right, _ = expected(*doubled, causal=True, scale=1 / math.sqrt(dim))
    assert o.shape == q.shape
    close(o, right)
    gradients = torch.autograd.grad(o.float().square().sum(), (q, k, v))
    for found, one in zip(gradients, torch.autograd.grad(right.square().sum(), doubled), strict=True):
        torch.testing.assert_close(found.double(), one, atol=2e-2, rtol=2e-2)


def test_windows_as_flash_attn_writes_them():
    q, k, v = tensors(9, 12)
    for window, same in (
        ((-1, -1), None), ((3, 2), (3, 2)), ((-1, 0), (None, 0)), ((4, -7), (4, None)), ((12, 2), (None, 2)),
        (torch.tensor([3, 2]), (3, 2)), ([3, 2], (3, 2)),
    ):  # fmt: skip
        close(flash_attn.flash_attn_func(q, k, v, window_size=window), expected(q, k, v, window=same)[0])
    close(flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 5)), expected(q, k, v, True, (3, 5))[0])
    q, k, v = tensors(9, 3)  # a right side of seqlen_k is unbounded there where the left is, though it would hide keys
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (9, 3)]
    for window, same in (((-1, 3), None), ((3, 4), None), ((1, 3), (1, 3)), ((2, 5), (2, 5)), ((2, -1), (2, None))):
        right = expected(q, k, v, window=same)[0]
        close(flash_attn.flash_attn_func(q, k, v, window_size=window), right)
        packed = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *starts, 9, 3, window_size=window)
        close(packed, right[0])
    for wrong in ((1,), 3, (1.0, 2), (True, 1), "ab"):
        with pytest.raises(TypeError, match="flash_attn_func: window_size: got"):
            flash_attn.flash_attn_func(q, k, v, window_size=wrong)
    with pytest.raises(ValueError, match=r"window_size: got a tensor of shape \(3,\)"):
        flash_attn.flash_attn_func(q, k, v, window_size=torch.tensor([1, 2, 3]))


LONGEST = (None, 2, 3, 4, 12, torch.tensor(3))


@pytest.mark.parametrize("window", [(-1, 3), (-1, 2), (3, 5), (1, 5), (2, 2), (-1, 20)], ids=str)
def test_a_right_side_of_packed_sequences_counts_their_own_keys(window):
    """Whatever max_seqlen_k says: of 9 queries with 3 keys a right side of 3 hides no key, as in flash_attn_func."""
    q, k, v = tensors(9, 3)
    right, right_lse, _ = flash_attn.flash_attn_func(q, k, v, window_size=window, return_attn_probs=True)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (9, 3)]
    for longest in LONGEST:
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], *starts, 9, longest, window_size=window, return_attn_probs=True
        )
        close(out, right[0].double())
        close(lse, right_lse[0].double())
        options = {"window_size": window, "enable_gqa": True}
        close(torch_varlen.varlen_attn(q[0], k[0], v[0], *starts, 9, longest, **options), right[0].double())
        more = [F.pad(t[0], (0, 0, 0, 0, 0, 2)) for t in (k, v)]  # two keys that are not used
        used = {"seqused_k": torch.tensor([3], dtype=torch.int32)}
        behind = starts[0], torch.tensor([0, 5], dtype=torch.int32)
        close(torch_varlen.varlen_attn(q[0], *more, *behind, 9, longest, **options, **used), right[0].double())


def test_lengths_of_packed_sequences_are_read_where_a_side_may_depend_on_them(monkeypatch):
    reads = []
    monkeypatch.setattr(terms, "_longest", lambda *given: reads.append(given))
    q, k, v = (t[0] for t in tensors(9, 12))
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (9, 12)]
    call = flash_attn.flash_attn_varlen_func
    for window in ((-1, -1), (3, 0), (3, -1), (-1, 8)):
        call(q, k, v, *starts, 9, 12, window_size=window)
    call(q, k, v, *starts, 9, 12, causal=True, window_size=(3, 3))
    call(q, k[:9], v[:9], starts[0], starts[0], 9, 9, window_size=(3, 3))
    assert not reads
    call(q, k, v, *starts, 9, 12, window_size=(3, 3))
    assert len(reads) == 1
    monkeypatch.undo()
    assert terms.packed_sides("call", (9, 9), False, q, starts[0], starts[0], 9) is None  # it hides nothing
    read = torch.Tensor.__int__
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: reads.append(tensor) or read(tensor))
    for _ in range(2):
        assert terms.packed_sides("call", (3, 3), False, q, *starts, None) == (3, 3)
    assert len(reads) == 2  # once for all layers


def test_a_soft_cap_of_0_or_less_is_none():
    q, k, v = tensors()
    starts = [torch.tensor([0, len(t[0])], dtype=torch.int32) for t in (q, k)]
    packed = q[0], k[0], v[0], *starts, 9, 12
    for cap in (0, -1.0, -50):
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, softcap=cap), flash_attn.flash_attn_func(q, k, v))
        found = flash_attn.flash_attn_varlen_func(*packed, softcap=cap)
        assert torch.equal(found, flash_attn.flash_attn_varlen_func(*packed))
    for wrong, error in (("x", TypeError), (math.nan, ValueError)):
        with pytest.raises(error, match="softcap: got"):
            flash_attn.flash_attn_func(q, k, v, softcap=wrong)


def test_what_is_returned_with_attn_probs():
    q, k, v = tensors(9, 4)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, 0.0, None, True, return_attn_probs=True)
    right, right_lse = expected(q, k, v, causal=True)
    assert probabilities.shape == (0,) and lse.shape == (1, 2, 9) and lse.dtype is torch.float32
    assert (lse[..., :5] == torch.inf).all() and not out[:, :5].any(), "rows without keys: +inf in flash-attn"
    close(lse[..., 5:], right_lse[..., 5:])
    close(out, right)


def test_packed_tensors_are_views_of_one():
    torch.manual_seed(0)
    qkv = torch.randn(1, 9, 3, 2, 16, dtype=torch.float16, requires_grad=True)
    q, k, v = qkv.unbind(2)
    alone = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), alone)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), alone)
    starts = torch.tensor([0, 9], dtype=torch.int32)
    for packed in (
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 9, 9, causal=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], starts, 9, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], qkv[0, :, 1:], starts, starts, 9, 9, causal=True),
    ):
        close(packed, alone[0].double())
    (gradient,) = torch.autograd.grad(alone.float().sum(), qkv)
    assert gradient.shape == qkv.shape
    for wrong in (qkv[0], qkv[:, :, :2]):
        with pytest.raises(ValueError, match=r"qkv: got shape .* must be \(batch, seqlen, 3, heads, head_dim\)"):
            flash_attn.flash_attn_qkvpacked_func(wrong)


def test_varlen_in_all_three_libraries():
    q, k, v = (t[0] for t in tensors(9, 12, dim=20))
    starts_q, starts_k = (torch.tensor(s, dtype=torch.int32) for s in ([0, 5, 5, 9], [0, 3, 6, 12]))
    right = torch.cat([expected(q[None, a:b], k[None, c:d], v[None, c:d], True)[0][0]
                       for (a, b), (c, d) in (((0, 5), (0, 3)), ((5, 9), (6, 12)))])  # fmt: skip
    common = (q, k, v, starts_q, starts_k)
    out, lse, _ = flash_attn.flash_attn_varlen_func(*common, 5, 6, causal=True, return_attn_probs=True)
    close(out, right)
    assert lse.shape == (2, 9) and (lse == torch.inf).sum() == 4
    out, lse = flash_attn_4.flash_attn_varlen_func(*common[:3], None, *common[3:], causal=True)
    close(out, right)
    assert (lse == -torch.inf).sum() == 4
    causal = {"window_size": (-1, 0), "enable_gqa": True}
    close(torch_varlen.varlen_attn(*common, 5, 6, **causal), right)
    out, lse = torch_varlen.varlen_attn(*common, 5, 6, return_aux=SimpleNamespace(lse=True), **causal)
    assert lse.shape == (2, 9) and (lse == -torch.inf).sum() == 4


def test_flash_attention_4_returns_a_pair():
    q, k, v = tensors()
    out, lse = flash_attn_4.flash_attn_func(q, k, v, causal=True, window_size=(3, None))
    right, right_lse = expected(q, k, v, True, (3, None))
    close(out, right)
    close(lse, right_lse)
    out, _ = flash_attn_4.flash_attn_varlen_func(q, k, v)  # without cu_seqlens: as flash_attn_func
    close(out, expected(q, k, v)[0])


CALLS = (
    flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn_4.flash_attn_func,
    flash_attn_4.flash_attn_varlen_func, torch_varlen.varlen_attn,
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.__module__}.{call.__name__}")
def test_what_there_is_not_is_refused_by_name(call):
    q, k, v = tensors()
    names = [name for name in inspect.signature(call).parameters if name in LACKING]
    assert names
    required = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seq_q", "cu_seq_k", "max_seqlen_q", "max_seqlen_k",
                              "max_q", "max_k"))  # fmt: skip
    required = {name: None for name in required if name in inspect.signature(call).parameters}
    for name in names:
        asked = 0.5 if name == "dropout_p" else 7 if name == "num_splits" else torch.zeros(3)
        with pytest.raises(
            NotImplementedError, match=f"{call.__name__}: {name}: got .* allowed is .* does not support"
        ):
            call(q, k, v, **required, **{name: asked})


def test_a_cache_that_a_call_appends_to_is_refused():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache: k_cache: fa2tune does not support"):
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, causal=True)


def test_wrong_tensors_are_named():
    q, k, v = tensors(dim=16)
    with pytest.raises(ValueError, match="flash_attn_func: q: got head dim 300, must be from 1 to 256"):
        flash_attn.flash_attn_func(F.pad(q, (0, 284)), k, v)
    with pytest.raises(ValueError, match=r"flash_attn_func: k: got shape .* must have 4 dimensions"):
        flash_attn.flash_attn_func(q, k[0], v)
    starts = torch.tensor([0, 9], dtype=torch.int32)
    for call in (
        flash_attn.flash_attn_func,
        lambda *t: torch_varlen.varlen_attn(*(x[0] for x in t), starts, starts, 9, 9, enable_gqa=True),
    ):
        with pytest.raises(ValueError, match=r"k(ey)?: got head dim 14, q(uery)? has 13"):  # both would be padded to 16
            call(q[..., :13], k[..., :14], v)
    with pytest.raises(TypeError, match="flash_attn_func: v: got list"):
        flash_attn.flash_attn_func(q, k, [])


def test_deterministic_asks_for_it_and_nothing_follows_torch(monkeypatch):
    asked = []
    monkeypatch.setattr(terms, "attention", lambda *_, **options: asked.append(options["deterministic"]) or _[0])
    q, k, v = tensors()
    flash_attn.flash_attn_func(q, k, v, deterministic=True)
    flash_attn.flash_attn_func(q, k, v)
    assert asked == [True, None]


def test_varlen_attn_into_a_tensor_that_is_there():
    q, k, v = (t[0].requires_grad_() for t in tensors(9, 12, heads=(2, 2)))
    starts = [torch.tensor([0, len(t)], dtype=torch.int32) for t in (q, k)]
    sequences = q, k, v, *starts, 9, 12
    aux, out = SimpleNamespace(lse=True), torch.empty(9, 2, 16, dtype=torch.float16)
    want, want_lse = torch_varlen.varlen_attn(*sequences, return_aux=aux)
    found, lse = torch_varlen.varlen_attn_out(out, *sequences, return_aux=aux)
    assert found is out and not out.requires_grad and torch.equal(out, want) and torch.equal(lse, want_lse)
    assert torch_varlen.varlen_attn_out(out, *sequences) is out
    for wrong, what in ((out[:5], "shape"), (out.float(), "dtype")):
        with pytest.raises(ValueError, match=f"varlen_attn_out: out: got {what} .* must be"):
            torch_varlen.varlen_attn_out(wrong, *sequences)
    with pytest.raises(ValueError, match="varlen_attn: cu_seq_k: got None, must be a tensor"):
        torch_varlen.varlen_attn(q, k, v, starts[0], None, 9, 12)


@pytest.mark.parametrize("asks", [True, False])
def test_varlen_attn_takes_fewer_heads_of_keys_where_it_is_told_to(monkeypatch, asks):
    """Or where torch's call has no argument to tell it, as that of 2.11."""
    theirs = inspect.signature(varlen.varlen_attn).parameters
    assert torch_varlen._ASKS is ("enable_gqa" in theirs)
    monkeypatch.setattr(torch_varlen, "_ASKS", asks)
    q, k, v = (t[0] for t in tensors(9, 12))
    starts = [torch.tensor([0, len(t)], dtype=torch.int32) for t in (q, k)]
    out = torch_varlen.varlen_attn(q, k, v, *starts, 9, 12, enable_gqa=True)
    close(out, expected(q[None], k[None], v[None])[0][0])
    into = torch.empty_like(q)
    assert torch.equal(torch_varlen.varlen_attn_out(into, q, k, v, *starts, 9, 12, enable_gqa=True), out)
    for call in (torch_varlen.varlen_attn, lambda *given: torch_varlen.varlen_attn_out(into, *given)):
        if not asks:
            assert torch.equal(call(q, k, v, *starts, 9, 12), out)
            continue
        with pytest.raises(ValueError, match="key: got 1 heads, must be the 2 of query, or fewer with enable_gqa=True"):
            call(q, k, v, *starts, 9, 12)


@pytest.mark.parametrize("dim", [16, 12])
def test_lse_is_asked_for_where_it_is_returned_and_only_padded_outputs_are_cut(monkeypatch, dim):
    asked, outputs = [], []

    def spied(call):
        def spy(*arguments, return_lse, **options):
            asked.append(return_lse)
            result = call(*arguments, return_lse=return_lse, **options)
            outputs.append(result[0] if return_lse else result)
            return result

        return spy

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(terms, name, spied(getattr(terms, name)))
    q, k, v = tensors(heads=(2, 2), dim=dim)
    starts = [torch.tensor([0, len(t[0])], dtype=torch.int32) for t in (q, k)]
    sequences = q[0], k[0], v[0], *starts, 9, 12
    aux = SimpleNamespace(lse=True)
    found = [
        flash_attn.flash_attn_func(q, k, v), flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)[0],
        flash_attn.flash_attn_varlen_func(*sequences), flash_attn_4.flash_attn_func(q, k, v)[0],
        torch_varlen.varlen_attn(*sequences), torch_varlen.varlen_attn(*sequences, return_aux=aux)[0],
    ]  # fmt: skip
    assert asked == [False, True, False, True, False, True]
    assert [out is one for out, one in zip(found, outputs, strict=True)] == [dim == 16] * 6
    assert {out.shape[-1] for out in found} == {dim}


def test_a_last_dimension_that_is_not_contiguous_is_copied():
    q, k, v = tensors()
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert turned.stride(-1) != 1
    assert torch.equal(flash_attn.flash_attn_func(turned, k, v), flash_attn.flash_attn_func(q, k, v))
    assert fa2tune.is_supported(q, k, v, layout="bshd")


def test_the_page_lists_everything_that_is_refused():
    page = (Path(__file__).parents[2] / "docs" / "drop-ins.md").read_text(encoding="utf-8")
    listed = page[page.index("## Refused") :]
    assert [name for name in LACKING if f"`{name}`" not in listed] == []
