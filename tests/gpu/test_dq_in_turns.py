"""The fused Hopper backward whose key tiles add to dQ in turns, on the GPU: next to float32 arithmetic, the same bits in every
run, on another stream, in a CUDA graph, and next to kernels that hold multiprocessors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launches_on_gpu import check_stream_and_graph, same

import fa2tune
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.schedules import turns_schedule
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import FUSED

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
#: (dtype, batch, query heads, key heads, queries, keys, head dim, mask)
CALLS: list[tuple[Any, ...]] = [
    ("bf16", 2, 4, 4, 484, 484, 128, CAUSAL),
    ("fp16", 1, 6, 2, 285, 1827, 64, CAUSAL),
    ("bf16", 3, 4, 1, 700, 331, 104, CAUSAL),  # rows that see no key
    ("bf16", 4, 40, 40, 1024, 1024, 128, FULL),
    ("fp16", 8, 32, 32, 1100, 1100, 64, FULL),
    ("bf16", 1, 40, 8, 5000, 5000, 128, CAUSAL),
    ("bf16", 2, 3, 3, 700, 500, 56, Mask("causal_top_left")),
    ("bf16", 1, 1, 1, 33000, 33000, 64, CAUSAL),  # more tiles than programs
]


@pytest.fixture(autouse=True)
def serves(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(turns_schedule, "SERVES", {64: 0, 128: 0})
    monkeypatch.setattr(turns_schedule, "GROUPED", 128)
    monkeypatch.setattr(turns_schedule, "LEAST_ROUNDS", 0)
    dispatch.reload()
    yield
    dispatch.reload()


def inputs(call: tuple[Any, ...]) -> reference.Inputs:
    dtype, batch, heads_q, heads_kv, queries, keys, dim, _ = call
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

    def new(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(batch, rows, heads, dim, device="cuda", dtype=kind).transpose(1, 2)

    dlse = torch.randn(batch, heads_q, queries, device="cuda")
    return reference.Inputs(
        new(heads_q, queries), new(heads_kv, keys), new(heads_kv, keys), new(heads_q, queries), dlse
    )


class Backward:
    def __init__(self, call: tuple[Any, ...]) -> None:
        self.mask, self.given = call[-1], inputs(call)
        self.leaves, self.found = self._forward()
        problem = dispatch.passes.describe(*self.leaves, self.mask, 0.1, o=self.found[0], do=self.given.do)
        strategy, choices = choosing.choose_backward(choosing.Chooser(problem, dispatch.gpu_of(0)), True)
        assert strategy == FUSED and choices["bwd_fused"].config["IN_ORDER"]

    def _forward(self) -> Any:
        """From leaves of its own, since what adds up a leaf's gradient belongs to the stream of its first forward."""
        leaves = [one.detach().requires_grad_() for one in (self.given.q, self.given.k, self.given.v)]
        return leaves, fa2tune.attention(*leaves, mask=self.mask, deterministic=True, return_lse=True)

    def _backward(self, leaves: Any, found: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(found, leaves, (self.given.do, self.given.dlse), retain_graph=True)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        return self._backward(self.leaves, self.found)

    def here(self) -> tuple[torch.Tensor, ...]:
        """On the current stream: PyTorch runs a backward on the stream of its forward."""
        return self._backward(*self._forward())


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call)))
def test_gradients_by_the_error_rule_and_the_same_bits(call: tuple[Any, ...]) -> None:
    backward = Backward(call)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated is filled with NaN
    try:
        first = backward()
        for _ in range(20):
            assert same(backward(), first)
    finally:
        torch.use_deterministic_algorithms(False)
    oracle, same_dtype = reference.oracle_and_reference(backward.given, mask=backward.mask)
    names = ("dq", "dk", "dv")
    verify.compare(
        dict(zip(names, first, strict=True)), {name: oracle[name] for name in names},
        {name: same_dtype[name] for name in names},
    )  # fmt: skip


def test_on_another_stream_and_in_a_graph() -> None:
    backward = Backward(CALLS[3])
    check_stream_and_graph(backward.here, backward())


def test_two_at_once_and_next_to_other_kernels() -> None:
    """Programs of one start late, where the other's hold multiprocessors; neither waits for one that has not started."""
    backwards = [Backward(CALLS[5]), Backward(CALLS[4])]
    right = [one() for one in backwards]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    found: list[list[Any]] = [[], []]
    for _ in range(10):
        for nth, one in enumerate(backwards):
            with torch.cuda.stream(streams[nth]):
                found[nth].append(one.here())
        with torch.cuda.stream(streams[2]):
            for _ in range(5):
                a @ a
    torch.cuda.synchronize()
    for nth, runs in enumerate(found):
        assert all(same(run, right[nth]) for run in runs)
