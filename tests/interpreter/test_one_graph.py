"""torch.compile(fullgraph=True, dynamic=True): one graph for all lengths. Packed calls' operators; autocast."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fa2tune

#: More than one sequence each: torch takes a size of 1 for a constant
PACKINGS = ((5, 7, 2), (9, 3), (3, 4, 1, 6))


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.fixture
def counted():
    torch._dynamo.reset()
    return CompileCounterWithBackend("aot_eager")


def test_lengths_batches_and_windows_of_attention(counted):
    run = torch.compile(
        lambda q, k, width: fa2tune.attention(q, k, k, window=(width, 0)), fullgraph=True, dynamic=True, backend=counted
    )
    for batch, rows in ((2, 20), (3, 33), (2, 17)):
        q, k = torch.randn(batch, 1, rows, 16), torch.randn(batch, 1, rows + 4, 16)
        torch.testing.assert_close(run(q, k, rows // 2), fa2tune.attention(q, k, k, window=(rows // 2, 0)))
    assert counted.frame_count == 1


@pytest.mark.parametrize("kind", ["longest", "used"])
def test_packed_sequences(counted, kind):
    run = torch.compile(fa2tune.attention_varlen, fullgraph=True, dynamic=True, backend=counted)
    for lengths in PACKINGS:
        offsets, more = starts(lengths), {}
        if kind == "longest":
            more = {"max_seqlen_q": max(lengths), "max_seqlen_k": 300 * len(lengths)}  # of several buckets
        if kind == "used":
            more = {"seqused_k": torch.tensor([length - 1 for length in lengths], dtype=torch.int32)}
        q = torch.randn(sum(lengths), 1, 16, requires_grad=kind == "longest")
        o, alone = (call(q, q, q, offsets, offsets, causal=True, **more) for call in (run, fa2tune.attention_varlen))
        torch.testing.assert_close(o, alone)
        if q.requires_grad:
            torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), q)[0] for one in (o, alone)))
    assert counted.frame_count == 1


def test_the_backward_operator_of_packed_sequences_and_its_parts():
    q, k, v = (torch.randn(1, 1, 16, 16) for _ in range(3))
    offsets = starts((9, 7))
    rest = (offsets, offsets, -1, 0, 0.25, True, "band", 0.0, 0, 2)
    o, lse = torch.ops.fa2tune.attention_varlen(q, k, v, *rest)
    call = (torch.randn_like(o), torch.randn_like(lse), q, k, v, o, lse, *rest)
    torch.library.opcheck(torch.ops.fa2tune.attention_varlen_backward.default, call)


@pytest.fixture
def autocast():
    """As torch.autocast("cuda") has it, which switches itself off without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)


def test_autocast_and_checkpoints(autocast):
    q = torch.randn(9, 2, 16, requires_grad=True)
    offsets = starts((4, 5))
    calls = (
        lambda q: fa2tune.attention(q[None], q[None], q[None], causal=True, layout="bshd"),
        lambda q: fa2tune.attention_varlen(q, q, q, offsets, causal=True),
    )
    for call in calls:
        o, again = call(q), checkpoint(call, q, use_reentrant=False)
        assert o.dtype == torch.float16 and torch.equal(o, again)
        first, second = (torch.autograd.grad(one.float().square().sum(), q)[0] for one in (o, again))
        assert first.dtype == torch.float32 and torch.equal(first, second) and first.any()
