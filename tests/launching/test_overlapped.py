"""Both kernels of a split Hopper backward at a time: what goes to which stream in which order, and that the bits are those
of one kernel after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_in_python import PythonGpu
from test_computed_in_python import PACKING, SCALE, Call, compare, gradient_of_lse, inputs, offsets, unset, wanted

from fa2tune import logs
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.registry import variant_named
from fa2tune.launching import cuda, overlapped, passes
from fa2tune.launching.cuda import Chain, CudaError
from fa2tune.launching.launch import Workspace
from fa2tune.spec.extent import RAGGED, WHOLE, Extent
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import Problem

STREAM = 0xCAFE
KERNELS = {"bwd_dq": "sm90/bwd_dq", "bwd_dkdv": "sm90/bwd_dkdv"}


class Driver:
    """Numbers streams and events from 1 on, and writes down what is done to them. ``codes``: of the next launches;
    ``events``: for which memory is left."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.made: list[tuple[str, int]] = []
        self.destroyed: list[tuple[str, int]] = []
        self.codes: list[int] = []
        self.priority, self.events, self.interrupted = -3, 1000, False

    def _number(self, kind: str, flags: int) -> int:
        self.made.append((kind, flags))
        return len(self.made)

    def cuCtxGetCurrent(self, found: Any) -> int:
        found._obj.value = 77
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"no luck"
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        return 0

    def cuStreamGetPriority(self, stream: Any, found: Any) -> int:
        found._obj.value = self.priority
        return 0

    def cuStreamCreateWithPriority(self, found: Any, flags: int, priority: Any) -> int:
        assert priority.value == self.priority
        found._obj.value = self._number("stream", flags)
        return 0

    def cuEventCreate(self, found: Any, flags: int) -> int:
        if self.events == 0:
            return cuda.OUT_OF_MEMORY
        self.events -= 1
        found._obj.value = self._number("event", flags)
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        self.destroyed.append(("stream", stream.value))
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:
        self.destroyed.append(("event", event.value))
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self.done.append(("record", event.value, stream.value))
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:
        self.done.append(("wait", event.value, stream.value))
        return 0

    def cuLaunchKernelEx(self, config: Any, handle: Any, arguments: Any, extra: Any) -> int:
        self.done.append(("launch", handle, config._obj.stream))
        if self.interrupted:
            raise KeyboardInterrupt
        return self.codes.pop(0) if self.codes else 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """With it launches are packed for a stream; ``PythonGpu`` binds them."""
    gpu, found = PythonGpu(monkeypatch), Driver()
    for name in dir(found):
        if name.startswith("cu"):
            setattr(cuda.library(), name, getattr(found, name))
    loaded: dict[str, int] = {}

    def load(variant: Any, *given: Any) -> Any:
        made = gpu._load(variant, *given)
        made.handle = loaded.setdefault(variant.name, len(loaded))
        return made

    monkeypatch.setattr("fa2tune.launching.launch.load", load)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(cuda, "_address", lambda tensor: 1 << 32)
    monkeypatch.setattr(Chain, "MEMO", {})
    monkeypatch.setattr(Chain, "SEEN", set())
    monkeypatch.setattr(overlapped, "SIDES", {})
    yield found


def plan(order: str, heads: tuple[int, int] = (4, 4), parts: int = 1) -> tuple[passes.Kernels, list[torch.Tensor]]:
    asked = Problem("bf16", 2, *heads, 300, 500, 192, 192, CAUSAL)
    queries, keys = (2, heads[0], 300, 192), (2, heads[1], 500, 192)
    shapes = {"q": queries, "k": keys, "v": keys, "o": queries, "do": queries, "lse": queries[:3]}
    shapes |= {"dq": queries, "dk": keys, "dv": keys}
    tensors = {name: torch.empty(sizes, device="meta", dtype=torch.bfloat16) for name, sizes in shapes.items()}
    configs = {}
    for kernel, name in KERNELS.items():
        variant = variant_named(name)
        configs[kernel] = Choice(variant, variant.space.default(asked.specialization, 90))
    made = passes.Kernels(configs, asked, tensors, 0.1, 0, {"delta": (queries[:3], "fp32")}, {"bwd_dkdv": parts}, order)
    return made, [*tensors.values(), *made.block()]


#: Order -> what is done: kernels (0: dQ's, 1: dK/dV's), on the stream or beside it (stream 1, whose events are 2 and 3).
FORK, JOIN = [("record", 2, STREAM), ("wait", 2, 1)], [("record", 3, 1), ("wait", 3, STREAM)]
DONE = {
    "dQ first": [("launch", 0, STREAM), *FORK, ("launch", 0, STREAM), ("launch", 1, 1), *JOIN],
    "dK and dV first": [("launch", 0, STREAM), *FORK, ("launch", 1, STREAM), ("launch", 0, 1), *JOIN],
    "dQ at once": [*FORK, ("launch", 0, 1), ("launch", 0, STREAM), ("launch", 1, STREAM), *JOIN],
    "": [("launch", 0, STREAM), ("launch", 1, STREAM)],
}


@pytest.mark.parametrize("order", DONE, ids=lambda order: order or "one after the other")
def test_launches_events_and_streams(driver: Driver, order: str) -> None:
    made, tensors = plan(order)
    for _ in range(3):  # the third from the memo
        driver.done.clear()
        made(tuple(tensors))
        assert driver.done == DONE[order]
    assert driver.made == ([("stream", 1), ("event", 2), ("event", 2)] if order else [])


def test_parts_of_groups_go_with_the_kernel_of_dk_and_dv(driver: Driver) -> None:
    made, tensors = plan("dQ first", (8, 2), 2)
    made(tuple(tensors))
    assert [step[2] for step in driver.done if step[0] == "launch"] == [STREAM, STREAM, 1, 1, 1]


def test_delta_is_made_by_the_kernel_of_dq_over_no_keys(driver: Driver) -> None:
    made, _ = plan("dQ first")
    (delta, its), (dq, own), (dkdv, other) = made.chain.launches  # type: ignore[union-attr]
    assert delta.function.image is not dkdv.function.image and delta.config.grid_x == dq.config.grid_x
    names = list(KERNELS)
    at = [variant_named(KERNELS[name]).parameters for name in names]
    assert "delta" in at[0] and "delta" in at[1]
    workspaces = {where for where in (*its, *own, *other) if where[0] == -1}
    shared = set(its) & set(other) & workspaces
    assert len(shared) == 1, "dK/dV's kernel reads the delta that was made before"
    assert not shared & set(own), "dQ's kernel proper writes another"
    lengths = [[value for value in one.values if value == 500] for one in (delta, dq)]
    assert len(lengths[1]) == len(lengths[0]) + 1, "the scalar is 0, descriptors have the keys"
    assert 6 in {where for where, _ in own} and 6 not in {where for where, _ in its}, "dq itself"


def test_a_stream_keeps_its_side_and_another_has_another(driver: Driver) -> None:
    found = [overlapped.side_of(0, stream) for stream in (0, 5, 0)]
    assert found[0] is found[2] is not found[1] and overlapped.side_of(1, 0) is not found[0]
    assert {id(one.begun) for one in found if one} != {id(one.ended) for one in found if one}


def test_threads_make_one_side(driver: Driver) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(overlapped.side_of(0, 9))) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len({id(one) for one in found}) == 1 and len(driver.made) == 3


@pytest.mark.parametrize("order", overlapped.ORDERS)
def test_where_streams_are_too_many_launches_go_one_after_the_other(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(overlapped, "KEPT", 1)
    overlapped.side_of(0, 5)
    made, tensors = plan(order)
    made(tuple(tensors))
    assert {step[::2] for step in driver.done} == {("launch", STREAM)} and len(driver.done) == 3
    assert driver.done[-1] == ("launch", 0 if order == overlapped.DKDV_FIRST else 1, STREAM)


def test_a_name_that_stands_for_a_stream_of_each_thread_gets_no_side(driver: Driver) -> None:
    assert overlapped.side_of(0, 2) is None and not driver.made


def test_the_side_is_waited_for_where_a_launch_after_it_fails(driver: Driver) -> None:
    made, tensors = plan("dQ at once")
    driver.codes = [0, 0, 700]
    with pytest.raises(CudaError, match="no luck"):
        made(tuple(tensors))
    assert driver.done[-2:] == JOIN


def test_the_side_is_waited_for_after_ctrl_c(driver: Driver) -> None:
    made, tensors = plan("dQ at once")
    driver.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        made(tuple(tensors))
    assert driver.done[-3:] == [("launch", 0, 1), *JOIN]


def test_a_side_that_has_not_begun_is_not_waited_for(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a capture may be under way, of which it is no part."""
    made, tensors = plan("dQ first")
    made(tuple(tensors))  # which makes the side
    driver.done.clear()
    driver.codes = [700]
    with pytest.raises(CudaError, match="no luck"):
        made(tuple(tensors))
    assert driver.done == [("launch", 0, STREAM)]
    monkeypatch.setattr(cuda, "_address", lambda tensor: 0)
    with pytest.raises(cuda.NoAddressError):
        made(tuple(tensors))
    assert driver.done == [("launch", 0, STREAM)]


def test_other_failures_to_make_a_stream_are_errors(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.library(), "cuStreamCreateWithPriority", lambda *_: 700)
    made, tensors = plan("dQ first")
    with pytest.raises(CudaError, match="no luck"):
        made(tuple(tensors))
    assert not driver.done


@pytest.mark.parametrize("events", [0, 1])
def test_where_no_memory_is_left_for_a_stream_launches_go_one_after_the_other(
    driver: Driver, events: int, caplog: pytest.LogCaptureFixture
) -> None:
    logs.warn_once.cache_clear()
    driver.events = events
    made, tensors = plan("dQ first")
    made(tuple(tensors))
    assert driver.done == [("launch", 0, STREAM), ("launch", 0, STREAM), ("launch", 1, STREAM)]
    assert driver.destroyed == ([("event", 2), ("stream", 1)] if events else [("stream", 1)])
    assert "one after the other" in caplog.text and "no luck" in caplog.text


@pytest.mark.parametrize(
    ("order", "name"), [("dv first", "sm90/bwd_dq"), ("dQ first", "portable/bwd_dq")], ids=["no order", "other kernels"]
)
def test_other_orders_and_kernels_are_errors(driver: Driver, order: str, name: str) -> None:
    asked = Problem("bf16", 1, 1, 1, 64, 64, 128, 128, CAUSAL)
    variants = {"bwd_dq": variant_named(name), "bwd_dkdv": variant_named("sm90/bwd_dkdv")}
    with pytest.raises(ValueError, match="order: got"):
        overlapped.check_order(order, asked, variants)


# ---- values


@pytest.mark.parametrize(
    "call",
    [
        Call(((140, 200),), (2, 2), (136, 136), CAUSAL),
        Call(((70, 130),), (2, 1), (192, 160), FULL, batch=2),
        Call(((130, 70),), (1, 1), (64, 256), CAUSAL),  # rows that see no key
        Call(PACKING, (2, 1), (192, 192), CAUSAL, packed=True),
        Call(PACKING, (2, 2), (256, 256), FULL, packed=True),
        Call(PACKING, (1, 1), (136, 136), band(40, 10), packed=True),
    ],
    ids=lambda call: f"{call}{', packed' if call.packed else ''}",
)
@pytest.mark.parametrize("through_lse", [False, True], ids=["", "dlse"])
def test_bits_are_those_of_one_kernel_after_the_other(
    monkeypatch: pytest.MonkeyPatch, call: Call, through_lse: bool
) -> None:
    extent = Extent(RAGGED, len(call.lengths)) if call.packed else WHOLE
    given = inputs(call, 0)
    dlse = gradient_of_lse(call) if through_lse else None
    right = wanted(call, given, dlse)
    q, k, v, do = (given[name] for name in ("q", "k", "v", "do"))
    o = unset(q, call.dims[1]).copy_(right["o"])
    found = []
    for order in ("", "dQ first"):
        with monkeypatch.context() as patched:
            gpu = PythonGpu(patched, values=True)
            tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": right["lse"].float()}
            gradients = {"dq": unset(q, call.dims[0]), "dk": unset(k, call.dims[0]), "dv": unset(v, call.dims[1])}
            tensors |= gradients | ({} if dlse is None else {"dlse": dlse}) | offsets(call)
            problem = passes.describe(q, k, v, call.mask, SCALE, extent=extent, o=o, do=do)
            configs = {}
            for kernel, name in KERNELS.items():
                variant = variant_named(name)
                configs[kernel] = Choice(variant, variant.space.default(problem.specialization, 90))
            shared = {"delta": (tuple(q.shape[:3]), "fp32")}
            made = passes.Kernels(configs, problem, tensors, SCALE, 0, shared, order=order)
            addresses = [gpu.place_values(name, tensor) for name, tensor in tensors.items()]
            block = gpu.place_workspaces()
            gpu.run(made, [*addresses, block])
        compare(gradients, right)
        found.append(gradients)
        nothing = [one for given in gpu.placed for name, one in given.items() if name == overlapped.NO_DQ]
        assert len(nothing) == (order != ""), "the only memory that dQ of no keys falls on"
        assert all(isinstance(one, Workspace) for one in nothing)
    assert all(torch.equal(found[0][name].view(torch.int16), found[1][name].view(torch.int16)) for name in found[0])
