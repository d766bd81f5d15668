"""DTensors: each rank computes its heads and batches, gradients included; other placements are refused by name. Two ranks of a
process group that sends nothing: the results are this rank's part."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fa2tune
from fa2tune.compat import documents, flash_attn, flash_attn_4, remembered, torch_varlen
from fa2tune.compat import transformers as drop_in


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def tensors(*lead, heads=(4, 2), dim=16):
    """(*lead, heads, dim)"""
    torch.manual_seed(0)
    return [torch.randn(*lead, count, dim) for count in (heads[0], heads[1], heads[1])]


def half(tensor, place):
    return tensor if place.is_replicate() else tensor.chunk(2, place.dim)[0]


def spread(tensor, mesh, place):
    here = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(half(tensor, place).clone(), mesh, [place], run_check=False, **here)


def placed(given, mesh, place):
    return [spread(tensor, mesh, place).requires_grad_() for tensor in given]


def loss(o, lse):
    return o.square().sum() + lse[lse.isfinite()].sum()


def compared(call, given, mesh, place, lse_place):
    inputs = placed(given, mesh, place)
    local = [half(tensor, place).detach().requires_grad_() for tensor in given]
    (o, lse), (want, want_lse) = call(*inputs), call(*local)
    assert isinstance(o, DTensor) and o.placements == (place,) and lse.placements == (lse_place,)
    torch.testing.assert_close(o.to_local(), want)
    torch.testing.assert_close(lse.to_local(), want_lse)
    assert o.shape[:-1] == given[0].shape[:-1]
    gradients = torch.autograd.grad(loss(o.to_local(), lse.to_local()), inputs)
    for ours, theirs in zip(gradients, torch.autograd.grad(loss(want, want_lse), local), strict=True):
        assert ours.placements == (place,)
        torch.testing.assert_close(ours.to_local(), theirs)


@pytest.mark.parametrize(("place", "of_lse"), [(Shard(2), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Replicate())])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention(mesh, place, of_lse, compiled):
    def call(q, k, v):
        return fa2tune.attention(q, k, v, causal=True, layout="bshd", return_lse=True)

    torch._dynamo.reset()
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    compared(run, tensors(2, 9), mesh, place, of_lse)


@pytest.mark.parametrize("used", [False, True])
def test_packed_sequences(mesh, used):
    """Offsets are plain tensors or replicated ones."""
    starts, some = (torch.tensor(side, dtype=torch.int32) for side in ([0, 4, 9], [3, 5]))
    options = {"seqused_k": some} if used else {}
    for offsets in (starts, spread(starts, mesh, Replicate())):

        def call(q, k, v, offsets=offsets):
            return fa2tune.attention_varlen(q, k, v, offsets, causal=True, return_lse=True, **options)

        if isinstance(offsets, DTensor):
            o, _ = call(*placed(tensors(9), mesh, Shard(1)))
            whole, _ = call(*tensors(9), offsets=starts)
            torch.testing.assert_close(o.to_local(), whole[:, :2])
        else:
            compared(call, tensors(9), mesh, Shard(1), Shard(0))


def test_heads_first_drop_ins_and_explain(mesh):
    given = [tensor.transpose(1, 2).contiguous() for tensor in tensors(2, 9)]
    o = fa2tune.attention(*placed(given, mesh, Shard(1)))
    torch.testing.assert_close(o.to_local(), fa2tune.attention(*given)[:, :2])
    o = flash_attn.flash_attn_func(*placed(tensors(2, 9, dim=24), mesh, Shard(2)), causal=True)
    torch.testing.assert_close(o.to_local(), flash_attn.flash_attn_func(*tensors(2, 9, dim=24), causal=True)[:, :, :2])
    assert fa2tune.explain(*placed(given, mesh, Shard(1))).problem.heads_q == 2
    assert fa2tune.is_supported(*placed(given, mesh, Shard(1)))
    assert not fa2tune.is_supported(*placed(given, mesh, Shard(2)))


def test_what_cannot_be_divided_is_named(mesh):
    q, k, v = placed(tensors(2, 10), mesh, Shard(1))
    with pytest.raises(
        ValueError, match=r"q: got placements \(Shard\(dim=1\),\), allowed are .*\(heads\).* \.to_local\(\)"
    ):
        fa2tune.attention(q, k, v, layout="bshd")
    with pytest.raises(TypeError, match=r"k: got Tensor with a DTensor: .*\.to_local\(\)"):
        fa2tune.attention(q, torch.randn(2, 10, 2, 16), v)
    q, k, v = placed(tensors(2, 9, heads=(4, 1)), mesh, Shard(2))
    with pytest.raises(ValueError, match="k: got 1 heads on 2 ranks, must be a multiple"):
        fa2tune.attention(q, k, v, layout="bshd")
    with pytest.raises(ValueError, match=r"k: got placements \(Replicate\(\),\) on .*, q has \(Shard\(dim=2\),\)"):
        fa2tune.attention(q, *placed(tensors(2, 9)[1:], mesh, Replicate()), layout="bshd")
    packed = placed(tensors(10), mesh, Shard(0))
    starts = torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"allowed are Replicate\(\), Shard\(1\) \(heads\)"):
        fa2tune.attention_varlen(*packed, starts)
    with pytest.raises(ValueError, match=r"cu_seqlens_q: got placements .* must be Replicate\(\) or a plain tensor"):
        fa2tune.attention_varlen(*placed(tensors(10), mesh, Shard(1)), spread(starts, mesh, Shard(0)))


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


#: Argument of a call -> (what it is whole, the call with it; q, k, v are (9, heads, 16) or (2, 9, heads, 16)).
OFFSETS, WHOLE_ROWS = (0, 4, 9), (0, 9, 18)
HANDED_ON = {
    "cu_seqlens_q": (int32(*OFFSETS), lambda one, q, k, v: fa2tune.attention_varlen(q, k, v, one)),
    "cu_seqlens_k": (int32(*OFFSETS), lambda one, q, k, v: fa2tune.attention_varlen(q, k, v, int32(*OFFSETS), one)),
    "seqused_q": (
        int32(3, 5), lambda one, q, k, v: fa2tune.attention_varlen(q, k, v, int32(*OFFSETS), seqused_q=one),
    ),
    "flash_attn_varlen_func: seqused_k": (
        int32(3, 5),
        lambda one, q, k, v: flash_attn_4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=int32(*OFFSETS), cu_seqlens_k=int32(*OFFSETS), seqused_k=one, window_size=(None, -2),
        )[0],
    ),
    "flash_attn_varlen_func: cu_seqlens_k": (
        int32(*OFFSETS),
        lambda one, q, k, v: flash_attn_4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=int32(*OFFSETS), cu_seqlens_k=one, window_size=(None, -2)
        )[0],
    ),
    "varlen_attn: cu_seq_q": (
        int32(*OFFSETS),
        lambda one, q, k, v: torch_varlen.varlen_attn(q, k, v, one, int32(*OFFSETS), 5, 5, enable_gqa=True),
    ),
}  # fmt: skip
IN_BATCHES = {
    "flash_attn_func: window_size": (int32(3, 3), lambda one, q, k, v: flash_attn.flash_attn_func(q, k, v, window_size=one)),
    "fa2tune: attention_mask": (
        torch.tensor([[False] * 4 + [True] * 5] * 2),
        lambda one, *qkv: drop_in.forward(torch.nn.Module(), *(t.transpose(1, 2) for t in qkv), one)[0],
    ),
    "fa2tune: cu_seq_lens_q": (
        int32(*WHOLE_ROWS),
        lambda one, *qkv: drop_in.forward(
            torch.nn.Module(), *(t.transpose(1, 2) for t in qkv), None, cu_seq_lens_q=one, max_length_q=9, max_length_k=9
        )[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*HANDED_ON, *IN_BATCHES])
def test_what_every_rank_needs_is_replicated_or_refused_by_name(mesh, name):
    """Whether q is a DTensor or not."""
    lead = (9,) if name in HANDED_ON else (2, 9)
    one, call = (HANDED_ON | IN_BATCHES)[name]
    given = tensors(*lead)
    want = call(one, *given)
    for qkv in (given, placed(given, mesh, Shard(len(lead)))):
        with pytest.raises(
            ValueError, match=rf"^{name}: got placements \(Shard.* must be Replicate\(\) or a plain tensor"
        ):
            call(spread(one, mesh, Shard(0)), *qkv)
        o = call(spread(one, mesh, Replicate()), *qkv)
        assert isinstance(o, DTensor) == (qkv is not given)
        torch.testing.assert_close(*((want, o) if qkv is given else (half(want, Shard(len(lead))), o.to_local())))


def batches(mask, given):
    return drop_in.forward(torch.nn.Module(), *(tensor.transpose(1, 2) for tensor in given), mask)[0]


@pytest.mark.parametrize(("kind", "compiled"), [("tokens", False), ("tokens", True), ("documents", False)])
def test_a_rank_takes_its_rows_of_a_mask(mesh, kind, compiled):
    """Rows differ, so that those of another rank show."""
    ends = torch.tensor([3, 9, 7, 5])[:, None]
    mask = torch.arange(9) < ends if kind == "tokens" else (torch.arange(9) >= ends).int()
    given = tensors(4, 9)
    want = half(batches(mask, given), Shard(0))
    torch._dynamo.reset()
    call = torch.compile(batches, fullgraph=True, backend="aot_eager") if compiled else batches
    for one in (mask, spread(mask, mesh, Replicate()), spread(mask, mesh, Shard(0))):
        o = call(one, placed(given, mesh, Shard(0)))
        assert isinstance(o, DTensor) and o.placements == (Shard(0),) and o.shape == (4, 9, 4, 16)
        torch.testing.assert_close(o.to_local(), want)
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(2, 9\), must be \(4, at most 9 keys\)"):
        batches(mask[:2], placed(given, mesh, Shard(0)))
    with pytest.raises(ValueError, match=r"attention_mask: got placements \(Shard\(dim=1\),\), must be"):
        batches(spread(torch.ones(4, 8, dtype=torch.bool), mesh, Shard(1)), placed(given, mesh, Shard(0)))


@pytest.mark.parametrize("place", [Shard(0), Shard(2), None], ids=str)
def test_documents_are_counted_once_for_all_layers(mesh, place, monkeypatch):
    """Counting waits for the GPU. A mask that changed is counted again, and one that is gone is not kept."""
    counted, count = [], documents.cu_seqlens
    monkeypatch.setattr(documents, "cu_seqlens", lambda **given: counted.append(1) or count(**given))
    numbers = (torch.arange(9) > torch.tensor([3, 5])[:, None]).int()
    given = tensors(2, 9)
    qkv = placed(given, mesh, place) if place else given
    kept = len(remembered.KNOWN)
    for mask in (numbers, spread(numbers, mesh, Replicate())):
        counted.clear()
        for _ in range(3):
            batches(mask, qkv)
        assert len(counted) == 1
        mask.zero_()
        o = batches(mask, qkv)
        assert len(counted) == 2
        want = batches(torch.zeros(2, 9, dtype=torch.int32), given)
        torch.testing.assert_close(o.to_local() if place else o, half(want, place) if place else want)
    del mask, numbers
    gc.collect()
    assert len(remembered.KNOWN) <= kept


def test_lengths_of_the_longest_and_offsets_of_documents(mesh):
    q, k, v = tensors(9)
    longest = spread(torch.tensor(5), mesh, Replicate())
    want = fa2tune.attention_varlen(q, k, v, int32(*OFFSETS))
    torch.testing.assert_close(fa2tune.attention_varlen(q, k, v, int32(*OFFSETS), None, longest, longest), want)
    numbers = torch.tensor([0] * 4 + [1] * 5)
    assert fa2tune.cu_seqlens(document_ids=spread(numbers, mesh, Replicate())).tolist() == [*OFFSETS]
    with pytest.raises(ValueError, match=r"^document_ids: got placements \(Shard"):
        fa2tune.cu_seqlens(document_ids=spread(numbers, mesh, Shard(0)))
    assert not fa2tune.is_supported(q, k, v, cu_seqlens_q=spread(int32(*OFFSETS), mesh, Shard(0)))
    with pytest.raises(TypeError, match="out: got DTensor, must be a Tensor as query is"):
        out = spread(q, mesh, Replicate())
        torch_varlen.varlen_attn_out(out, q, k, v, int32(*OFFSETS), int32(*OFFSETS), 5, 5, enable_gqa=True)
