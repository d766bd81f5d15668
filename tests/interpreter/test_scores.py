"""``score=``: the same as ``softcap=`` where both say it, in every call; errors; graphs. A term of one's own:
tests/test_extending.py."""

from __future__ import annotations

import pytest
import torch
from added_terms import add_terms

import fa2tune
from fa2tune import Score
from fa2tune.spec import scorefile

pytestmark = pytest.mark.usefixtures("no_rows", "no_graphs")
CAP = Score("softcap", 2.0)
STARTS = torch.tensor([0, 24, 40], dtype=torch.int32)


@pytest.fixture
def no_graphs():
    """A function keeps a few graphs, over all tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(dims=4):
    torch.manual_seed(0)
    shape = (1, 2, 40, 32) if dims == 4 else (40, 2, 32)
    return [torch.randn(shape, dtype=torch.float16, requires_grad=True) for _ in range(3)]


def dense(q, k, v, **options):
    return fa2tune.attention(q, k, v, causal=True, return_lse=True, **options)


def packed(q, k, v, **options):
    return fa2tune.attention_varlen(q, k, v, STARTS, causal=True, return_lse=True, **options)


def results(call, given, **options):
    o, lse = call(*given, **options)
    return o, lse, *torch.autograd.grad(o.double().square().sum() + lse.double().sum(), given)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("call", "dims"), [(dense, 4), (packed, 3)], ids=["dense", "packed"])
def test_it_says_what_softcap_says(call, dims, compiled):
    given = tensors(dims)
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    plain, capped = results(call, given), results(call, given, softcap=2.0)
    assert all(map(torch.equal, results(run, given, score=CAP), capped))
    assert all(map(torch.equal, results(run, given, score="none"), plain))
    assert all(map(torch.equal, results(run, given, score=CAP, softcap=0.0), capped))  # 0 asks for nothing
    assert not torch.equal(plain[0], capped[0])


def test_a_term_made_in_a_graph():
    q, k, v = tensors()
    compiled = torch.compile(
        lambda cap: fa2tune.attention(q, k, v, score=Score("softcap", cap)), fullgraph=True, backend="eager"
    )
    for cap in (0.5, 2.0, 7.5):
        assert torch.equal(compiled(cap), fa2tune.attention(q, k, v, softcap=cap))


def test_operators_are_as_torch_wants_them():
    q, k, v = tensors()
    operator = torch.ops.fa2tune.attention
    rest = (q, k, v, -1, 0, 0.2, False, "band", 0.0, "softcap", 2.0)
    torch.library.opcheck(operator.default, rest)
    older = operator(*rest[:8], 2.0)[0]  # a call from before there were names
    assert torch.equal(operator(*rest)[0], older)


WRONG = [
    ({"score": "soft"}, ValueError, "score: got 'soft', allowed are " + ", ".join(scorefile.names())),
    ({"score": "softcap"}, ValueError, r"softcap has 1 value: fa2tune.Score\('softcap', cap\)"),
    ({"score": Score("softcap", -1)}, ValueError, r"score: got Score\('softcap', -1.0\), cap must be from 0.001"),
    ({"score": 50.0}, TypeError, "score: got 50.0, must be a name or a fa2tune.Score"),
    ({"score": [1]}, TypeError, r"score: got \[1\], must be"),
    ({"score": torch.ones(2, 40)}, TypeError, r"score: got Tensor of shape \(2, 40\), must be a name or a fa2tune.Score"),
    ({"score": CAP, "softcap": 3.0}, ValueError,
     r"score: got Score\('softcap', 2.0\) and softcap=3.0, a call takes one of score= and softcap="),
    ({"score": "none", "softcap": 3.0}, ValueError, "score: got 'none' and softcap=3.0, a call takes one of"),
    ({"score": CAP, "softcap": True}, TypeError, "softcap: got True, must be None or a number"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "said"), WRONG)
def test_a_wrong_term_is_named(options, error, said):
    q, k, v = tensors()
    dense(q, k, v, score=CAP)  # what is remembered of it lets no wrong call through
    for ask in (fa2tune.attention, fa2tune.explain):
        with pytest.raises(error, match=said):
            ask(q, k, v, **options)
    assert not fa2tune.is_supported(q, k, v, **options)
    with pytest.raises(error, match=said):
        packed(*tensors(3), **options)


@pytest.mark.parametrize("score", [Score("softcap", 0), Score("softcap"), Score("softcap", 1, 2, 3), "soft", ""])
def test_a_wrong_term_is_refused_in_a_compiled_graph_too(score):
    q, k, v = tensors()
    compiled = torch.compile(lambda q, k, v, score: fa2tune.attention(q, k, v, score=score), backend="eager")
    with pytest.raises((ValueError, RuntimeError), match=r"score: got "):
        compiled(q, k, v, score)


def test_explain_and_is_supported_take_it():
    given = tensors()
    found = fa2tune.explain(*given, score=CAP)
    assert found.problem.score == CAP and found.as_dict()["problem"]["score"] == "softcap 2"
    assert found.as_dict() == fa2tune.explain(*given, softcap=2.0).as_dict()
    assert fa2tune.is_supported(*given, score=CAP) and fa2tune.is_supported(*given, score="none")
    assert fa2tune.explain(*tensors(3), cu_seqlens_q=STARTS, score=CAP).problem.score == CAP


@pytest.mark.parametrize("used", ["seqused_q", "seqused_k"])
def test_used_lengths_divide_sequences_whose_numbers_a_term_may_read(
    monkeypatch: pytest.MonkeyPatch, used: str
) -> None:
    add_terms(monkeypatch)
    q, offsets, lengths = torch.randn(32, 2, 16), torch.tensor([0, 16, 32]).int(), torch.tensor([16, 9]).int()
    for call in (fa2tune.attention_varlen, fa2tune.explain):
        with pytest.raises(ValueError, match=r"^score: got alibi with seqused_q or seqused_k"):
            call(q, q, q, cu_seqlens_q=offsets, score=Score("alibi", 2), **{used: lengths})
    fa2tune.attention_varlen(q, q, q, offsets, score=Score("softcap", 2.0), **{used: lengths})
