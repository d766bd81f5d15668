"""benchmarks/fa4_ahead.py with a stand-in for FlashAttention-4: what it is called with, and what is said of calls that fail."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmark_scripts import script
from click.testing import CliRunner

fa4_ahead = script("fa4_ahead")
SEED = "0"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A module flash_attn.cute, and what its kernels are called with: the pass, tokens, heads, head dim."""
    called: list[tuple[Any, ...]] = []

    class Function:
        apply: Any = None

        @staticmethod
        def forward(context: Any, q: Any, k: Any, v: Any) -> tuple[Any, None]:
            context.set_materialize_grads(False)
            context.save_for_backward(q, k, v)
            called.append(("forward", q.requires_grad, q.shape[:-2].numel(), *q.shape[-2:]))
            return q.new_empty(*q.shape[:-1], v.shape[-1]), None

        @staticmethod
        def backward(context: Any, do: Any, _: Any) -> None:
            q, k, v = context.saved_tensors
            assert do.shape == (*q.shape[:-1], v.shape[-1]) and k.shape[-2] == v.shape[-2]
            called.append(("backward", q.requires_grad, q.shape[:-2].numel(), *q.shape[-2:]))

    interface = SimpleNamespace(FlashAttnFunc=Function, FlashAttnVarlenFunc=type("Varlen", (Function,), {}))
    cute: Any = ModuleType("flash_attn.cute")
    cute.interface = interface
    cute.flash_attn_func = lambda q, k, v, **_: interface.FlashAttnFunc.apply(q, k, v)

    def varlen(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, **_: Any) -> Any:
        assert cu_seqlens_q.device == q.device
        return interface.FlashAttnVarlenFunc.apply(q, k, v)

    cute.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    return called


@pytest.mark.parametrize("what", ["random_calls", "workloads"])
def test_a_call_compiles_both_forwards_and_its_backward(what: str, passes: list[tuple[Any, ...]]) -> None:
    name, call = next(
        (name, call) for name, call in fa4_ahead.drawing(what, SEED).items() if call.head_dim_v <= call.head_dim
    )
    assert fa4_ahead.compile_one(name, what, SEED) is None
    shape = call.batch * call.seqlen_q, call.heads_q, call.head_dim
    assert passes == [("forward", False, *shape), ("forward", True, *shape), ("backward", True, *shape)]


def test_offsets_of_packed_sequences_lie_where_the_tensors_do(passes: list[tuple[Any, ...]]) -> None:
    name, call = next(iter(fa4_ahead.drawing("random_packings", SEED).items()))
    assert fa4_ahead.compile_one(name, "random_packings", SEED) is None
    assert [found[0] for found in passes] == ["forward", "forward", "backward"]
    assert passes[0][2:] == (sum(call.of_q), call.heads_q, call.head_dim)


def test_a_call_that_the_peer_refuses_is_named(passes: list[tuple[Any, ...]]) -> None:
    calls = fa4_ahead.drawing("random_calls", SEED)
    name = next(name for name, call in calls.items() if call.head_dim_v > call.head_dim)
    assert "V is wider" in fa4_ahead.compile_one(name, "random_calls", SEED)
    assert passes == []


def test_a_drawing_needs_its_seed() -> None:
    found = CliRunner().invoke(fa4_ahead.main, ["out", "random_calls"])
    assert found.exit_code == 2 and "--seed" in found.output
