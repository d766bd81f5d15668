"""A schedule of packed calls: what it refuses, and its way through torch.compile, checkpointing and autograd."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fa2tune
from fa2tune.calling import varlen_schedules
from fa2tune.calling.varlen_schedules import VarlenSchedule

pytestmark = pytest.mark.usefixtures("no_rows")
LENGTHS = (5, 0, 40, 3)


def offsets(lengths=LENGTHS):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def tensors(rows=48):
    torch.manual_seed(0)
    return [torch.randn(rows, 2, 16, requires_grad=True) for _ in range(3)]


def results(q, k, v, *call, attend=fa2tune.attention_varlen, **options):
    o = attend(q, k, v, *call, causal=True, **options)
    return o, *torch.autograd.grad(o.square().sum(), (q, k, v))


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_it_changes_no_bit_and_serves_many_calls():
    starts, used = offsets(), torch.tensor([2, 0, 40, 1], dtype=torch.int32)
    for options in ({}, {"seqused_q": used, "seqused_k": used}):
        schedule = fa2tune.varlen_schedule(starts, total_q=48, **options)
        expected = results(*tensors(), starts, **options)
        assert all(same(results(*tensors(), starts, schedule=schedule, **options), expected) for _ in range(2))
        again = results(*tensors(), starts.detach(), starts, schedule=schedule, **options)
        assert same(again, expected), "the same memory, as a checkpoint hands it on"


def test_what_does_not_fit_is_refused_by_name():
    starts = offsets()
    schedule = fa2tune.varlen_schedule(starts, total_q=48)
    q, k, v = tensors()

    def call(*cu_seqlens, rows=48, **options):
        return fa2tune.attention_varlen(q[:rows], k[:rows], v[:rows], *cu_seqlens, **{"schedule": schedule, **options})

    with pytest.raises(TypeError, match="schedule: got int, must be what"):
        call(starts, schedule=3)
    with pytest.raises(ValueError, match="schedule: got one of 48 rows of q, which has 47"):
        call(starts, rows=47)
    with pytest.raises(ValueError, match="one of another tensor than cu_seqlens_q"):
        call(starts.clone())
    with pytest.raises(ValueError, match="one of another tensor than cu_seqlens_k"):
        call(starts, starts.clone())
    with pytest.raises(ValueError, match="one of another tensor than seqused_k"):
        call(starts, seqused_k=torch.ones(4, dtype=torch.int32))
    starts[1] = 4
    with pytest.raises(ValueError, match="offsets were changed in place since"):
        call(starts)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"total_q": 4.0}, TypeError, "total_q: got 4.0, must be an integer"),
        ({"total_q": -1}, ValueError, "total_q: got -1, must be from 0"),
        ({"total_q": 4, "total_k": True}, TypeError, "total_k: got True"),
        ({"total_q": 4, "cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, ValueError, "cu_seqlens_k: got 3 entries"),
        ({"total_q": 4, "cu_seqlens_k": torch.zeros(5)}, TypeError, "cu_seqlens_k: got dtype torch.float32"),
        ({"total_q": 4, "cu_seqlens_k": 5}, TypeError, "cu_seqlens_k: got int, must be a torch.Tensor"),
    ],
)
def test_wrong_arguments(options, error, said):
    with pytest.raises(error, match=said):
        fa2tune.varlen_schedule(offsets(), **options)


def test_an_order_of_other_rows_never_reaches_a_kernel():
    """Where a hook on saved tensors, or a caller of the operator, has changed it."""
    starts = offsets()
    q, k, v = (t.detach().transpose(0, 1)[None] for t in tensors())
    schedule = fa2tune.varlen_schedule(starts, total_q=48)
    call = (q, k, v, starts, starts, -1, 0, 0.25, False, "band", 0.0, 0)
    for wrong in (schedule.order[:-1], schedule.order[:, :4], schedule.order.T.contiguous().T):
        with pytest.raises(ValueError, match="order: got shape"):
            torch.ops.fa2tune.attention_varlen(*call, order=wrong)
    with pytest.raises(TypeError, match="order: got"):
        torch.ops.fa2tune.attention_varlen(*call, order=schedule.order.long())
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t[:-1] if t.dtype == torch.int32 and t.dim() == 2 else t
        ),
        pytest.raises(ValueError, match="order: got shape"),
    ):
        results(*tensors(), starts, schedule=schedule)


def test_compiled_it_is_one_graph_for_all_lengths():
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counted)
    def layers(q, k, v, starts):
        schedule = fa2tune.varlen_schedule(starts, total_q=q.shape[0])
        o = fa2tune.attention_varlen(q, k, v, starts, causal=True, schedule=schedule)
        return fa2tune.attention_varlen(o, k, v, starts, causal=True, schedule=schedule)

    def eager(q, k, v, starts):
        o = fa2tune.attention_varlen(q, k, v, starts, causal=True)
        return fa2tune.attention_varlen(o, k, v, starts, causal=True)

    for lengths in (LENGTHS, (9, 30, 2), (1, 1, 1, 1, 20)):
        inputs, starts = tensors(sum(lengths)), offsets(lengths)
        found, expected = (
            (o, *torch.autograd.grad(o.sum(), inputs)) for o in (run(*inputs, starts) for run in (layers, eager))
        )
        assert same(found, expected)
    assert counted.frame_count == 1
    (graph,) = counted.graphs
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name.split(".")[1] for name in names if "varlen" in name] == ["varlen_schedule", *["attention_varlen"] * 2]


def test_compiled_it_may_come_from_outside():
    starts = offsets()
    schedule = fa2tune.varlen_schedule(starts, total_q=48)
    compiled = torch.compile(fa2tune.attention_varlen, fullgraph=True, backend="aot_eager")
    assert same(
        results(*tensors(), starts, schedule=schedule, attend=compiled), results(*tensors(), starts, schedule=schedule)
    )
    with pytest.raises(Exception, match="one of another tensor than cu_seqlens_q"):
        compiled(*tensors(), starts.clone(), schedule=schedule)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_with_it(reentrant):
    starts = offsets()
    schedule = fa2tune.varlen_schedule(starts, total_q=48)

    def attend(*given, **options):
        return checkpoint(
            lambda q, k, v, cu: fa2tune.attention_varlen(q, k, v, cu, schedule=schedule, **options), *given,
            use_reentrant=reentrant,
        )  # fmt: skip

    if reentrant:  # torch.autograd.grad is not for these
        q, k, v = tensors()
        attend(q, k, v, starts, causal=True).square().sum().backward()
        assert same((q.grad, k.grad, v.grad), results(*tensors(), starts)[1:])
    else:
        assert same(results(*tensors(), starts, attend=attend), results(*tensors(), starts))


def test_opcheck():
    starts = offsets()
    torch.library.opcheck(
        torch.ops.fa2tune.varlen_schedule.default, (starts, starts, 48, 48),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),  # entries of no tile are not written
    )  # fmt: skip
    order = fa2tune.varlen_schedule(starts, total_q=48).order
    q, k, v = (t.detach().transpose(0, 1)[None].requires_grad_() for t in tensors())
    call = (q, k, v, starts, starts, -1, 0, 0.25, False, "band", 0.0, 0)
    torch.library.opcheck(torch.ops.fa2tune.attention_varlen.default, call, {"order": order})


def test_inference_tensors_have_no_versions():
    with torch.inference_mode():
        starts = offsets()
        schedule = fa2tune.varlen_schedule(starts, total_q=48)
        assert isinstance(schedule, VarlenSchedule) and schedule.versions == ()
        fa2tune.attention_varlen(*tensors(), starts, schedule=schedule)


def test_its_memo_is_bounded(monkeypatch):
    monkeypatch.setattr(varlen_schedules, "KEPT", 2)
    for rows in range(40, 45):
        fa2tune.varlen_schedule(offsets(), total_q=rows)
    assert len(varlen_schedules._MADE) <= 2
