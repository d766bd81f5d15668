"""Both kernels of a split Hopper backward at a time, on the GPU: the bits of one after the other, eagerly, on another stream,
in a CUDA graph, by two threads, and with memory that is given out again at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches_on_gpu import check_memory_given_out_again, check_stream_and_graph, same

import fa2tune
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.schedules import group_parts_schedule, split_backward_schedule
from fa2tune.launching import overlapped, passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import SPLIT
from fa2tune.spec.score import NONE

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
#: (batch, query heads, key heads, queries, keys, head dim, head dim of V, mask)
CALLS: list[tuple[Any, ...]] = [
    (2, 2, 2, 484, 484, 256, 256, FULL),
    (1, 14, 14, 285, 827, 160, 160, FULL),
    (4, 10, 10, 127, 96, 200, 200, CAUSAL),  # rows that see no key
    (4, 3, 3, 721, 1949, 184, 184, CAUSAL),
    (3, 5, 5, 196, 196, 136, 232, FULL),
    (2, 12, 2, 300, 200, 192, 192, CAUSAL),
    (1, 1, 1, 1, 300, 144, 144, CAUSAL),
]
#: Next to the stand-in of compile_ahead threads cannot run; others launch the same.
threaded = pytest.mark.skipif(not __debug__, reason="threads need a GPU")


def named(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


every = pytest.mark.parametrize("call", CALLS, ids=named)


class Posed:
    """A backward's tensors, (batch, heads, seqlen, dim) views of the memory order (b, s, h, d), and its choice."""

    def __init__(self, call: tuple[Any, ...], with_dlse: bool = False) -> None:
        batch, heads_q, heads_kv, queries, keys, dim, dim_v, self.mask = call

        def new(heads: int, rows: int, columns: int) -> torch.Tensor:
            return torch.randn(batch, rows, heads, columns, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

        self.q, self.k, self.v = new(heads_q, queries, dim), new(heads_kv, keys, dim), new(heads_kv, keys, dim_v)
        self.do, self.scale = new(heads_q, queries, dim_v), dim**-0.5
        self.dlse = torch.randn(batch, heads_q, queries, device="cuda") if with_dlse else None
        self.o, self.lse = dispatch.forward(self.q, self.k, self.v, self.mask, self.scale, NONE)
        gpu = dispatch.gpu_of(0)
        self.problem = passes.describe(self.q, self.k, self.v, self.mask, self.scale, o=self.o, do=self.do)
        _, self.choices = choosing.choose_backward(choosing.Chooser(self.problem, gpu), False)
        self.parts = group_parts_schedule.parts(self.problem, self.choices, gpu)
        assert split_backward_schedule.covers(self.problem, self.choices)

    def plan(self, order: str) -> passes.BackwardPlan:
        return passes.BackwardPlan(
            self.problem, self.do, self.dlse, self.q, self.k, self.v, self.o, self.scale, SPLIT, self.choices, self.parts,
            order,
        )  # fmt: skip

    def run(self, plan: passes.BackwardPlan) -> tuple[torch.Tensor, ...]:
        return plan(self.do, self.dlse, self.q, self.k, self.v, self.o, self.lse)


@pytest.mark.parametrize("order", overlapped.ORDERS)
@pytest.mark.parametrize(("dim", "mask"), [(256, CAUSAL), (192, FULL)], ids=str)
def test_bits_of_packed_sequences_are_those_of_one_kernel_after_the_other(order: str, dim: int, mask: Mask) -> None:
    sides = ((40, 0, 134, 1, 70, 5, 300), (278, 30, 1900, 1, 64, 0, 300))
    starts = [torch.tensor([0, *side]).cumsum(0).to("cuda", torch.int32) for side in sides]
    q, do = (torch.randn(sum(sides[0]) + 9, 4, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(sum(sides[1]) + 9, 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    views, extent, gpu, scale = [*map(passes.in_one_batch, (q, k, v))], Extent(RAGGED, 7), dispatch.gpu_of(0), dim**-0.5
    problem = passes.describe(*views, mask, scale, extent=extent)
    forward = passes.ForwardPlan(problem, *views, scale, choosing.choose(problem, "fwd", gpu))
    o, lse = forward(*views, *starts)
    whole, gradient = passes.in_one_batch(o), passes.in_one_batch(do)
    posed = passes.describe(*views, mask, scale, extent=extent, o=whole, do=gradient)
    choices = choosing.choose_backward(choosing.Chooser(posed, gpu), True)[1]
    assert set(choices) == {overlapped.DQ, overlapped.DKDV}

    def run(plan: passes.BackwardPlan) -> tuple[torch.Tensor, ...]:
        return plan(gradient, None, *views, whole, lse, *starts)

    given = posed, gradient, None, *views, whole, scale, SPLIT, choices
    after, plan = run(passes.BackwardPlan(*given)), passes.BackwardPlan(*given, order=order)
    for _ in range(20):
        assert same(run(plan), after)


@every
@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("order", overlapped.ORDERS)
def test_bits_are_those_of_one_kernel_after_the_other(call: tuple[Any, ...], with_dlse: bool, order: str) -> None:
    posed = Posed(call, with_dlse)
    after, plan = posed.run(posed.plan("")), posed.plan(order)
    for _ in range(20):  # from the memo, too
        assert same(posed.run(plan), after)


@pytest.mark.parametrize("order", overlapped.ORDERS)
def test_on_another_stream_and_in_a_graph(order: str) -> None:
    posed = Posed(CALLS[0])
    after, plan = posed.run(posed.plan("")), posed.plan(order)
    check_stream_and_graph(lambda: posed.run(plan), after)  # the graph's stream has no side yet
    assert same(posed.run(plan), after), "the side is free again"


@threaded
def test_a_graph_is_captured_while_another_thread_launches() -> None:
    posed = Posed(CALLS[1])
    after, plan = posed.run(posed.plan("")), posed.plan(overlapped.DQ_FIRST)
    stop, right = threading.Event(), list[bool]()

    def launch() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                right.append(same(posed.run(plan), after))
            right.append(True)  # no error

    thread = threading.Thread(target=launch)
    torch.cuda.synchronize()
    thread.start()
    try:
        for _ in range(5):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found = posed.run(plan)
            graph.replay()
            torch.cuda.current_stream().synchronize()
            assert same(found, after)
    finally:
        stop.set()
        thread.join()
    assert len(right) > 1 and all(right)


@threaded
@pytest.mark.parametrize("shared", [False, True], ids=["streams of their own", "one stream"])
def test_two_threads(shared: bool) -> None:
    cases = [Posed(CALLS[0]), Posed(CALLS[3])]
    after = [one.run(one.plan("")) for one in cases]
    plans = [one.plan(overlapped.DQ_AT_ONCE) for one in cases]
    streams = [torch.cuda.Stream()] * 2 if shared else [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    right: list[bool] = []

    def launch(place: int) -> None:
        with torch.cuda.stream(streams[place]):
            for _ in range(200):
                right.append(same(cases[place].run(plans[place]), after[place]))

    threads = [threading.Thread(target=launch, args=(place,)) for place in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(right) == 400 and all(right)


@pytest.mark.parametrize("order", overlapped.ORDERS)
def test_memory_that_is_given_out_again_at_once(order: str) -> None:
    posed = Posed(CALLS[3])
    after, plan = posed.run(posed.plan("")), posed.plan(order)
    check_memory_given_out_again(posed, plan, after, plan.kernels.size // 2)


@every
@pytest.mark.parametrize("order", overlapped.ORDERS)
def test_nan_in_fresh_memory_goes_nowhere(call: tuple[Any, ...], order: str) -> None:
    """Results and workspaces are filled with NaN on the stream, right before the kernels on both begin."""
    posed = Posed(call, with_dlse=True)
    after, plan = posed.run(posed.plan("")), posed.plan(order)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert all(same(posed.run(plan), after) for _ in range(10))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(one.isfinite().all() for one in after)


def gradients(posed: Posed, call: Callable[..., Any], device: str = "cuda:0") -> tuple[torch.Tensor, ...]:
    q, k, v, do = (one.to(device) for one in (posed.q, posed.k, posed.v, posed.do))
    q, k, v = (one.detach().requires_grad_() for one in (q, k, v))
    return torch.autograd.grad(call(q, k, v), (q, k, v), do)


@pytest.mark.parametrize("deterministic", [False, True])
def test_through_the_public_call(deterministic: bool) -> None:
    dispatch.reload()  # plans of other tests
    posed = Posed(CALLS[0])
    if not (order := split_backward_schedule.order_of(posed.problem, posed.choices, posed.parts, dispatch.gpu_of(0))):
        pytest.skip("not expected to be faster on this GPU")
    causal = posed.mask == CAUSAL

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return fa2tune.attention(q, k, v, causal=causal, deterministic=deterministic)

    found = gradients(posed, attention)
    assert any(
        isinstance(plan, passes.BackwardPlan) and plan.order == order for plan in dispatch.BACKWARD_PLANS.values()
    )
    assert same(found, posed.run(posed.plan("")))
    assert same(gradients(posed, torch.compile(attention)), found)
    given = reference.Inputs(posed.q, posed.k, posed.v, posed.do)
    right = reference.oracle_and_reference(given, mask=posed.mask)
    verify.compare(dict(zip(("dq", "dk", "dv"), found, strict=True)), *right)


def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    posed = Posed(CALLS[0])
    after, plan = posed.run(posed.plan("")), posed.plan(overlapped.DQ_FIRST)
    monkeypatch.setattr(overlapped, "KEPT", len(overlapped.SIDES))
    fresh = torch.cuda.Stream(priority=-1)
    known = (0, fresh.cuda_stream) in overlapped.SIDES
    with torch.cuda.stream(fresh):
        assert same(posed.run(plan), after)
    assert known or (0, fresh.cuda_stream) not in overlapped.SIDES


def test_every_gpu_has_sides_of_its_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    posed = Posed(CALLS[0])
    after = gradients(posed, fa2tune.attention)
    found = gradients(posed, fa2tune.attention, "cuda:1")  # the current device is the first
    assert same(tuple(one.to("cuda:0") for one in found), after)
