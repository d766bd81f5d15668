"""Packed sequences in the portable kernels: as many calls of ``attention``, gradients included, and nothing beyond a
sequence."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fa2tune
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.defaults import default_config
from fa2tune.compiling import limits, support
from fa2tune.compiling.registry import portable_of, variant_named, variant_of, variants_of
from fa2tune.gpus import named
from fa2tune.launching import passes
from fa2tune.measuring import reference
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import Mask, mask_of
from fa2tune.spec.problem import FUSED, Problem, Specialization
from fa2tune.spec.score import score_of
from fa2tune.spec.variant import DESCRIPTOR

#: Of queries and of keys: with several tiles, empty on either side or on both, more queries than keys.
LENGTHS = ((5, 9), (0, 4), (70, 40), (33, 0), (1, 70))


pytestmark = pytest.mark.usefixtures("no_rows")


def offsets(lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def packed(dtype=torch.float32, lengths=LENGTHS, heads=(2, 1), dims=(24, 16), spare=(3, 5)):
    """q, k, v and both offsets; ``spare``: rows behind the last sequence."""
    torch.manual_seed(0)
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    q = torch.randn(queries + spare[0], heads[0], dims[0], dtype=dtype)
    k = torch.randn(keys + spare[1], heads[1], dims[0], dtype=dtype)
    v = torch.randn(keys + spare[1], heads[1], dims[1], dtype=dtype)
    return [t.requires_grad_() for t in (q, k, v)], [offsets(side) for side in zip(*lengths, strict=True)]


def expected(tensors, starts, mask, softcap=None):
    """o (total_q, heads, dim_v) and lse (heads, total_q), a sequence at a time; differentiable."""
    q, k, v = tensors
    outs, lses = [], []
    of_q, of_k = (itertools.pairwise(side.tolist()) for side in starts)
    for (first, last), (begin, end) in zip(of_q, of_k, strict=True):
        one = (t.transpose(0, 1)[None] for t in (q[first:last], k[begin:end], v[begin:end]))
        o, lse = reference.attention(*one, mask=mask, score=score_of(softcap))
        outs.append(o[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def check(dtype, options, **sizes):
    tensors, starts = packed(dtype, **sizes)
    o, lse = fa2tune.attention_varlen(*tensors, *starts, return_lse=True, **options)
    doubled = [t.detach().double().requires_grad_() for t in tensors]
    mask = mask_of(options.get("causal", False), options.get("window"), options.get("mask"))
    right, right_lse = expected(doubled, starts, mask, options.get("softcap"))
    rows = len(right)
    assert not o[rows:].any() and (lse[:, rows:] == -torch.inf).all(), "rows behind the last sequence"
    seen = right_lse.isfinite()
    assert torch.equal(lse[:, :rows].isfinite(), seen)
    into, into_lse = torch.randn(right.shape), torch.randn(right_lse.shape)
    loss = (o[:rows].float() * into).sum() + (lse[:, :rows] * into_lse)[seen].sum()
    wanted = torch.autograd.grad((right * into).sum() + (right_lse * into_lse)[seen].sum(), doubled)
    found = torch.autograd.grad(loss, tensors)
    near = {"atol": 4e-3, "rtol": 4e-3} if dtype is torch.float16 else {"atol": 5e-6, "rtol": 5e-6}
    torch.testing.assert_close(o[:rows].double(), right, **near)
    torch.testing.assert_close(lse[:, :rows][seen].double(), right_lse[seen], **near)
    for gradient, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), one, **near)
    return found


CASES = ({}, {"causal": True}, {"window": (16, 4)}, {"causal": True, "softcap": 5.0}, {"mask": Mask("chunked", 16)})


@pytest.mark.parametrize("options", CASES, ids=str)
def test_every_sequence_is_a_call_of_its_own(options):
    check(torch.float16, options)


def test_float32_and_the_fused_backward(monkeypatch):
    monkeypatch.setattr(choosing.Chooser, "strategy", lambda *asked: (FUSED, {}))
    short = ((5, 9), (40, 33), (0, 3))
    check(torch.float32, {"causal": True}, lengths=short, heads=(4, 2))


def test_more_sequences_than_a_program_reads_at_once():
    lengths = ((1, 2), (0, 1), (2, 1)) * 43 + ((0, 0),) * 10
    with torch.no_grad():
        tensors, starts = packed(torch.float16, lengths=lengths, heads=(1, 1), dims=(16, 16))
        o = fa2tune.attention_varlen(*tensors, *starts, causal=True)
        right, _ = expected([t.double() for t in tensors], starts, mask_of(True))
    torch.testing.assert_close(o[: len(right)].double(), right, atol=4e-3, rtol=4e-3)


def test_what_lies_in_other_sequences_reaches_nothing():
    (q, k, v), (starts_q, starts_k) = packed(torch.float16, lengths=((20, 20), (20, 20), (20, 20)))
    with torch.no_grad():
        for t, first in ((q, 20), (k, 20), (v, 20)):
            t[first : first + 20] = float("nan")
            t[60:] = float("nan")
    o = fa2tune.attention_varlen(q, k, v, starts_q, starts_k)
    poison = torch.ones_like(o)
    poison[20:40] = poison[60:] = float("nan")
    gradients = torch.autograd.grad(o, (q, k, v), poison)
    for t in (o, *gradients):
        assert not t[:20].isnan().any() and not t[40:60].isnan().any() and not t[60:].any()


def test_offsets_that_change_between_calls_need_no_other_plan():
    (q, k, v), (starts, _) = packed(torch.float16, lengths=((20, 20), (10, 10)), heads=(2, 2), spare=(0, 0))
    with torch.no_grad():
        fa2tune.attention_varlen(q, k, v, starts)
        plans = len(dispatch.FORWARD_PLANS)
        starts.copy_(torch.tensor([0, 3, 29], dtype=torch.int32))
        o, lse = fa2tune.attention_varlen(q, k, v, starts, return_lse=True)
        right, _ = expected((q.float(), k.float(), v.float()), (starts, starts), mask_of(False))
    assert len(dispatch.FORWARD_PLANS) == plans
    torch.testing.assert_close(o[:29].float(), right, atol=2e-3, rtol=2e-3)
    assert not o[29:].any() and (lse[:, 29:] == -torch.inf).all()


def test_wrong_offsets_address_nothing_outside():
    """They cannot be checked without waiting for the GPU; rows that two sequences claim hold either's result."""
    (q, k, v), _ = packed(torch.float16, lengths=((20, 20),), heads=(1, 1), spare=(0, 0))
    for wrong in ([-5, 10, 4000], [7, 3, 20], [0, 2**31 - 1, 5]):
        o = fa2tune.attention_varlen(q, k, v, torch.tensor(wrong, dtype=torch.int32))
        assert o.shape == q.shape[:2] + v.shape[2:]


def test_no_sequences_and_no_tokens():
    (q, k, v), _ = packed(lengths=((4, 4),), spare=(0, 0))
    o, lse = fa2tune.attention_varlen(q, k, v, torch.zeros(1, dtype=torch.int32), return_lse=True)
    assert not o.any() and (lse == -torch.inf).all() and lse.shape == (2, 4)
    nothing = fa2tune.attention_varlen(q[:0], k[:0], v[:0], torch.zeros(3, dtype=torch.int32))
    assert nothing.shape == (0, 2, 16)


def test_max_seqlen_is_a_number_a_tensor_or_absent():
    (q, k, v), (starts, _) = packed(torch.float16, lengths=((9, 9), (7, 7)), heads=(1, 1), spare=(0, 0))
    with torch.no_grad():
        o = fa2tune.attention_varlen(q, k, v, starts)
        for longest in (9, torch.tensor(9), torch.tensor(9, device="meta")):  # what is not read may be anywhere
            assert torch.equal(o, fa2tune.attention_varlen(q, k, v, starts, starts, longest, longest))
    for wrong in ("9", 9.0, True):
        with pytest.raises(TypeError, match="max_seqlen_k: got"):
            fa2tune.attention_varlen(q, k, v, starts, None, 9, wrong)


def test_torch_compile_and_opcheck():
    (q, k, v), (starts, _) = packed(torch.float16, lengths=((9, 9), (7, 7)), heads=(1, 1), dims=(16, 16), spare=(0, 0))
    run = torch.compile(fa2tune.attention_varlen, fullgraph=True, backend="aot_eager")
    o = run(q, k, v, starts, causal=True)
    alone = fa2tune.attention_varlen(q, k, v, starts, causal=True)
    assert torch.equal(o, alone)
    pairs = zip(*(torch.autograd.grad(one.float().square().sum(), (q, k, v)) for one in (o, alone)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    views = [t.detach().transpose(0, 1)[None].requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(
        torch.ops.fa2tune.attention_varlen, (*views, starts, starts, -1, 0, 0.25, True, "band", 0.0, 0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


def test_checkpoints():
    (q, k, v), (starts, _) = packed(lengths=((9, 9), (7, 7)), heads=(1, 1), dims=(16, 16), spare=(0, 0))
    run = functools.partial(fa2tune.attention_varlen, causal=True)
    pairs = [
        torch.autograd.grad(one.square().sum(), (q, k, v))
        for one in (run(q, k, v, starts), checkpoint(run, q, k, v, starts, use_reentrant=False))
    ]
    assert all(torch.equal(*pair) for pair in zip(*pairs, strict=True))


def test_wrong_arguments_are_named():
    (q, k, v), (starts, _) = packed(lengths=((9, 9),), heads=(4, 2), spare=(0, 0))
    call = fa2tune.attention_varlen
    for error, match, arguments, options in (
        (TypeError, "cu_seqlens_q: got dtype torch.int64, must be torch.int32", (q, k, v, starts.long()), {}),
        (TypeError, "cu_seqlens_k: got list", (q, k, v, starts, [0, 9]), {}),
        (ValueError, r"cu_seqlens_q: got shape \(1, 2\)", (q, k, v, starts[None]), {}),
        (ValueError, "cu_seqlens_k: got 1 entries, cu_seqlens_q has 2", (q, k, v, starts, starts[:1]), {}),
        (ValueError, r"q: got shape \(1, 9, 4, 24\), must have 3 dimensions", (q[None], k, v, starts), {}),
        (ValueError, "q: got head dim 7, must be a multiple of 8", (q[..., :7], k[..., :7], v, starts), {}),
        (TypeError, "cu_seqlens_q are missing|cu_seqlens_q is missing", (q, k, v), {}),
        (TypeError, "attention_varlen: got dropout_p=, which is not supported", (q, k, v, starts), {"dropout_p": 0.1}),
        (TypeError, "tensors are .total, heads, head_dim.", (q, k, v, starts), {"layout": "bshd"}),
        (TypeError, "takes 7", (q, k, v, starts, starts, 9, 9, 0.0), {}),
        (TypeError, "window: got", (q, k, v, starts), {"window": [4, 0]}),
    ):
        with pytest.raises(error, match=match):
            call(*arguments, **options)
    with pytest.raises(TypeError, match=r"use fa2tune\.attention_varlen, for packed sequences, instead"):
        fa2tune.attention(q[None], k[None], v[None], cu_seqlens_q=starts)
    with pytest.raises(NotImplementedError, match="differentiating twice"):
        o = call(q, k, v, starts)
        (once,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        once.sum().backward()


def test_which_kernels_serve_it(monkeypatch):
    monkeypatch.setattr(support, "interpreted", lambda: False)  # which has none of Gluon's kernels
    spec, gpu = Specialization("bf16", 128, 128, "causal", extent=RAGGED), named("h200")
    serve = {"sm90/fwd", "sm90/bwd_fused", "sm90/bwd_dq", "sm90/bwd_dkdv"}
    for kernel in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_fused"):
        portable = portable_of(kernel)
        config = {**portable.space.default(spec, 90), "LOADS": DESCRIPTOR}
        assert "into the next one" in limits.before_compile(portable, spec, config, gpu).why
        for other in set(variants_of(kernel)) - {portable}:
            refused = limits.before_compile(other, spec, other.space.default(spec, 90), gpu)
            if other.short_name in serve:
                assert refused is None
            elif other.short_name.startswith("sm80/"):  # which compute them, on GPUs without wgmma
                assert refused.name == "without_wgmma"
            else:
                assert refused.name == "extent" and "packed" in refused.why
    problem = Problem("bf16", 1, 4, 4, 4096, 4096, 128, 128, mask_of(True), extent=Extent(RAGGED, 4))
    hopper = variant_named("sm90/fwd")
    assert limits.before_compile(hopper, spec, hopper.space.default(spec, 90), gpu) is None
    assert variant_of("fwd", default_config("fwd", problem, gpu)) is hopper


def test_explain_says_that_rows_are_of_dense_calls():
    (q, k, v), (starts, _) = packed(torch.float16, lengths=((300, 300), (212, 212)), spare=(0, 0))
    found = fa2tune.explain(q, k, v, cu_seqlens_q=starts, max_seqlen_q=300, causal=True, backward=True)
    assert found.problem.extent == Extent(RAGGED, 2, 512) and found.problem.unmeasured == "packed sequences"
    assert found.problem.bucket == 512 and found.as_dict()["problem"]["extent"] == "2 packed sequences"
    assert fa2tune.is_supported(q, k, v, cu_seqlens_q=starts)
    assert not fa2tune.is_supported(q, k, v, cu_seqlens_q=starts.long())
    with pytest.raises(TypeError, match="cu_seqlens_q: got dtype"):
        fa2tune.explain(q, k, v, cu_seqlens_q=starts.long())


def test_tiles_suffice_for_every_way_to_divide_the_rows():
    for lengths in ([1] * 7, [0, 64, 0, 65], [63, 64, 1], [128], [0]):
        total, block = sum(lengths) + 3, 64
        extent = Extent(RAGGED, len(lengths))
        starts = [sum(lengths[:n]) // block + n for n in range(len(lengths) + 1)]
        ends = [*starts[1:], extent.tiles(1, total, block)]
        needed = [-(-rows // block) for rows in (*lengths, 3)]
        assert all(end - start >= tiles for start, end, tiles in zip(starts, ends, needed, strict=True))


def test_strides_are_those_of_the_caller():
    """Packed q, k and v are views of one tensor; nothing is copied."""
    torch.manual_seed(0)
    qkv = torch.randn(30, 3, 2, 16, dtype=torch.float16, requires_grad=True)
    starts = offsets((13, 17))
    o = fa2tune.attention_varlen(*qkv.unbind(1), starts)
    alone = fa2tune.attention_varlen(*(t.contiguous() for t in qkv.unbind(1)), starts)
    assert torch.equal(o, alone)
    (gradient,) = torch.autograd.grad(o.float().sum(), qkv)
    assert gradient.shape == qkv.shape and gradient.isfinite().all()


def test_the_problem_of_a_packed_call():
    (q, k, v), _ = packed(torch.float16, lengths=((100, 200),), spare=(0, 0))
    views = [t.transpose(0, 1)[None] for t in (q, k, v)]
    found = passes.describe(*views, mask_of(True), 1.0, extent=Extent(RAGGED, 3))
    assert isinstance(found, Problem) and found.specialization.extent == RAGGED
    assert (found.query_tiles(64), found.key_tiles(64)) == (100 // 64 + 4, 200 // 64 + 4)


@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize(
    ("unpack", "error", "words"),
    [
        (torch.Tensor.long, TypeError, "of dtype torch.int64, the forward had torch.int32"),
        (lambda t: t.to("meta"), ValueError, "on meta, q is on cpu"),
        (lambda t: t[:-1], ValueError, r"of shape \(2,\), the forward had \(3,\)"),
        (lambda t: t.repeat_interleave(2)[::2], ValueError, r"with strides \(2,\), must be contiguous"),
    ],
    ids=["dtype", "device", "shape", "strides"],
)
def test_offsets_that_hooks_have_changed_are_refused(unpack, error, words, which):
    """The kernels would read memory that is not theirs. There is a plan of unchanged ones."""
    tensors, starts = packed(lengths=((5, 9), (3, 4)))
    fa2tune.attention_varlen(*tensors, *starts).sum().backward()
    seen = itertools.count()

    def changed(tensor):
        return unpack(tensor) if tensor.dim() == 1 and next(seen) == which else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, changed):
        o = fa2tune.attention_varlen(*tensors, *starts)
    with pytest.raises(error, match=rf"attention_varlen's backward: got cu_seqlens_{'qk'[which]} {words}"):
        o.sum().backward()
