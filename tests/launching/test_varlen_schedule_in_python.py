"""Packed calls that share a schedule, each kernel run by Python: the same bits with fewer launches, on one counter a stream."""

from __future__ import annotations

import threading

import kernels_in_python
import pytest
import torch
from public_gpu import PublicGpu

import fa2tune
from fa2tune.calling.schedules import packed_grouped_schedule
from fa2tune.launching import counters

ORDER, ORDERS = "portable/packed_order", "portable/packed_orders"
LENGTHS = (70, 0, 130, 5)


pytestmark = pytest.mark.usefixtures("poison")  # of integers: what no order has


def made(heads: tuple[int, int], dim: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    rows = sum(LENGTHS)
    return [torch.randn(rows, one, dim, dtype=torch.bfloat16, requires_grad=True) for one in (heads[0], *heads[1:] * 2)]


OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def results(gpu: PublicGpu, heads: tuple[int, int], dim: int, schedule: object = None, **options: object):
    """What a call and its backward give, and what ran."""
    before, (q, k, v) = len(gpu.ran), made(heads, dim)
    o, lse = fa2tune.attention_varlen(q, k, v, OFFSETS, causal=True, return_lse=True, schedule=schedule, **options)  # type: ignore[call-overload]
    gradients = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), torch.ones_like(lse)))
    return (o, lse, *gradients), gpu.ran[before:]


def of_counters() -> list[int]:
    """What every counter that was ever taken holds."""
    return [one[1].item() for one in counters._BY_STREAM.values()]


@pytest.mark.parametrize(
    ("heads", "dim", "deterministic", "orders", "kept_orders"),
    [
        ((2, 2), 64, False, 1, 0),
        ((4, 2), 128, True, 2, 0),  # dQ's is another table
        # dQ's and dK/dV's kernels at a time: delta is made by dQ's over no keys, which an order says
        ((2, 2), 256, False, 3, 1),
    ],
)
def test_calls_share_it(
    gpu: PublicGpu, heads: tuple[int, int], dim: int, deterministic: bool, orders: int, kept_orders: int
) -> None:
    schedule = fa2tune.varlen_schedule(OFFSETS, total_q=sum(LENGTHS))
    assert gpu.ran == [ORDERS]
    expected, ran = results(gpu, heads, dim, deterministic=deterministic)
    assert ran.count(ORDER) == orders
    without = [name for name in ran if name != ORDER]
    kept = schedule.order.clone()
    for _ in range(2):
        found, ran = results(gpu, heads, dim, schedule, deterministic=deterministic)
        assert ran.count(ORDER) == kept_orders and [name for name in ran if name != ORDER] == without
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert of_counters() == [0], "the next launch takes tiles from the first one on"
    assert torch.equal(schedule.order, kept), "no call writes to it"


@pytest.mark.parametrize("dim", [128, 256])
def test_kernels_load_what_they_load_without(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """Also what makes delta, where dQ's kernel and dK/dV's run at a time: it has no keys."""
    loads, load = list[object](), kernels_in_python._NAMES["tma_load"]
    counted = {**kernels_in_python._NAMES, "tma_load": lambda *given: loads.append(given[1]) or load(*given)}
    monkeypatch.setattr(kernels_in_python, "_NAMES", counted)
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    found = []
    for schedule in (None, fa2tune.varlen_schedule(OFFSETS, total_q=sum(LENGTHS))):
        loads.clear()
        results(gpu, (2, 2), dim, schedule, deterministic=dim != 256)
        found.append(len(loads))
    assert found[0] == found[1] > 0


def test_tiles_of_several_heads(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for margin in ("MARGIN", "SHARING_MARGIN"):
        monkeypatch.setattr(packed_grouped_schedule, margin, -float("inf"))
    schedule = fa2tune.varlen_schedule(OFFSETS, total_q=sum(LENGTHS))
    expected, plain = results(gpu, (4, 2), 128)
    assert plain[:2] == [ORDER, "sm90/fwd_grouped"]
    for _ in range(2):
        found, ran = results(gpu, (4, 2), 128, schedule)
        assert ran == [name for name in plain if name != ORDER] and of_counters() == [0]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_tiles_that_no_table_has_are_ordered_by_the_call(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa2tune.launching import passes

    monkeypatch.setattr(passes.packed_order, "table_at", lambda *asked: None)
    schedule = fa2tune.varlen_schedule(OFFSETS, total_q=sum(LENGTHS))
    expected, plain = results(gpu, (2, 2), 128, deterministic=True)
    found, ran = results(gpu, (2, 2), 128, schedule, deterministic=True)
    assert ran == plain and plain.count(ORDER) == 2
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_the_operators_share_it(gpu: PublicGpu) -> None:
    """As compiled code calls them."""
    schedule = fa2tune.varlen_schedule(OFFSETS, total_q=sum(LENGTHS))
    expected, _ = results(gpu, (4, 2), 128, deterministic=True)
    gpu.ran.clear()
    views = [t.detach().transpose(0, 1)[None].requires_grad_() for t in made((4, 2), 128)]
    call = (*views, OFFSETS, OFFSETS, -1, 0, 128**-0.5, True, "band", 0.0, 0)
    o, lse = torch.ops.fa2tune.attention_varlen(*call, order=schedule.order)
    gradients = torch.autograd.grad((o, lse), views, (torch.ones_like(o), torch.ones_like(lse)))
    assert ORDER not in gpu.ran and of_counters() == [0]
    found = [one[0].transpose(0, 1) for one in (o, *gradients)]
    assert all(torch.equal(*pair) for pair in zip(found, (expected[0], *expected[2:]), strict=True))


def test_launches_that_may_run_at_a_time_have_counters_of_their_own(gpu: PublicGpu) -> None:
    order = torch.zeros(8, dtype=torch.int32)

    def taken(stream: int, capturing: bool = False) -> int | None:
        gpu.stream, gpu.capturing = stream, capturing
        found = counters.counter_for(order)
        return None if found is None else found.data_ptr()

    assert taken(7, capturing=True) is None, "none are made in a capture"
    first = taken(0)
    assert taken(0) == first and taken(5) not in (None, first) and taken(5) == taken(5)
    captured = [taken(stream, capturing=True) for stream in (0, 0, 5)]
    assert len({first, taken(5), *captured}) == 5, "a replay may run beside anything"
    assert taken(counters.PER_THREAD) is None, "a name for many streams"


def test_they_lie_in_no_memory_of_the_callers_thread() -> None:
    """Which may be a graph's: torch.compile's mode "reduce-overhead" counts what is left in it, and gives it out again."""

    class Order:
        is_cuda = False

        def new_zeros(self, *shape: int) -> torch.Tensor:
            asked.append(threading.get_ident())
            return torch.zeros(*shape, dtype=torch.int32)

    asked, spare = list[int](), list[torch.Tensor]()
    counters._make(Order(), spare)  # type: ignore[arg-type]
    assert len(spare) == counters.MADE_AT_ONCE and len(asked) == 1 and asked[0] != threading.get_ident()


def test_a_capture_that_takes_them_all_orders_tiles_itself(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "MADE_AT_ONCE", 2)
    monkeypatch.setattr(counters, "LEAST", 1)
    schedule = fa2tune.varlen_schedule(OFFSETS, total_q=sum(LENGTHS))
    expected, plain = results(gpu, (2, 2), 64, schedule)
    gpu.capturing = True
    for left in (True, False):
        found, ran = results(gpu, (2, 2), 64, schedule)
        assert ran == plain if left else ran == [ORDER, *plain]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    gpu.capturing = False
    assert results(gpu, (2, 2), 64, schedule)[1] == plain, "there are more again"
