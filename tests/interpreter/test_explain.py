"""``fa2tune.explain`` and ``fa2tune.is_supported`` on tensors that a call takes; many threads in the interpreter."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

import fa2tune
from fa2tune.calling import arguments, dispatch, explanation
from fa2tune.spec.mask import CAUSAL

pytestmark = pytest.mark.usefixtures("no_rows")


def test_explain_describes_the_call_that_attention_would_make() -> None:
    q, k = torch.zeros(2, 24, 4, 32), torch.zeros(2, 40, 2, 32)
    found = fa2tune.explain(q, k, k, causal=True, layout="bshd")
    p = found.problem
    assert (p.heads_q, p.heads_kv, p.seqlen_q, p.seqlen_k, p.mask, p.dtype) == (4, 2, 24, 40, CAUSAL, "fp32")
    assert [served.kernel for served in found.kernels] == ["fwd"], "no gradient is asked for"
    assert found.status == explanation.DEFAULT and "no row serves fwd" in found.verdict
    assert str(found).splitlines()[0] == found.verdict and found.next in str(found)
    assert "default" in repr(found) and "\n" not in repr(found)
    assert not dispatch.FORWARD_PLANS, "nothing was launched"


def test_explain_shows_the_backward_where_there_is_a_gradient_or_it_is_asked_for() -> None:
    q = torch.zeros(1, 2, 16, 32)
    kernels = ["fwd", "bwd", "bwd_dq", "bwd_dkdv"]
    needs = q.clone().requires_grad_()
    assert [served.kernel for served in fa2tune.explain(q, q, needs).kernels] == kernels
    assert [served.kernel for served in fa2tune.explain(q, q, q, backward=True).kernels] == kernels
    assert [served.kernel for served in fa2tune.explain(q, q, needs, backward=False).kernels] == ["fwd"]


def test_explain_raises_what_attention_raises() -> None:
    q = torch.zeros(1, 2, 16, 32)
    for bad, error in (({"layout": "BSHD"}, ValueError), ({"causal": 7}, TypeError)):
        with pytest.raises(error) as ours:
            fa2tune.explain(q, q, q, **bad)
        with pytest.raises(error) as theirs:
            fa2tune.attention(q, q, q, **bad)
        assert str(ours.value) == str(theirs.value)


def test_is_supported_agrees_with_attention() -> None:
    q, k = torch.zeros(1, 4, 16, 32), torch.zeros(1, 2, 16, 32)
    assert fa2tune.is_supported(q, k, k) and fa2tune.is_supported(q, k, k, causal=True, return_lse=True)
    assert not fa2tune.is_supported(k, q, q), "2 heads over 4"
    assert not fa2tune.is_supported(q, k.half(), k)
    assert not fa2tune.is_supported(q, k, k, window=(128, -5))
    refused = []
    torch.vmap(lambda one: refused.append(fa2tune.is_supported(one, k, k)) or one)(q[None])
    assert refused == [False]


def test_a_warning_on_the_layout_names_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_doubted", False)
    monkeypatch.setattr(dispatch, "forward_plan", lambda *arguments: lambda q, k, v: (q, None))
    q = torch.zeros(1, 256, 2, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fa2tune.attention(q, q, q)
        fa2tune.attention(q, q, q)
    assert [(one.filename, 'layout="bshd"' in str(one.message)) for one in caught] == [(__file__, True)]


def test_threads_take_turns_in_the_interpreter() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 16, 16) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    start, failures = threading.Barrier(32), []

    def call() -> None:
        try:
            start.wait()
            mine = q.clone().requires_grad_()
            o = fa2tune.attention(mine, k, v)
            torch.testing.assert_close(o, expected, atol=1e-4, rtol=1e-4)
            o.sum().backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:3]
