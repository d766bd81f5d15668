"""What a warm call runs on the host, counted: frames of Python, not microseconds, which depend on what else the host does."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from benchmark_scripts import script
from click.testing import CliRunner

import fa2tune
import fa2tune.kernels
import fa2tune.search_spaces
from fa2tune.calling import dispatch
from fa2tune.launching import passes

host_path = script("host_path")
#: Folders of the package: a wheel has the last two below the first, a checkout beside it.
PACKAGE = tuple(path for module in (fa2tune, fa2tune.kernels, fa2tune.search_spaces) for path in module.__path__)


class SameAddresses:
    """Allocates like a GPU's caching allocator: a call that comes again gets the memory that it got before. What malloc returns
    depends on what else the process did, and a launch's arguments are packed anew for addresses not seen before."""

    def __init__(self) -> None:
        self.memory: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        self.taken: Counter[tuple[Any, ...]] = Counter()

    def __call__(self, *layout: Any) -> torch.Tensor:
        sizes, strides, dtype = layout
        made, index = self.memory[layout], self.taken[layout]
        self.taken[layout] += 1
        if index == len(made):
            made.append(torch.empty_strided(sizes, strides, dtype=dtype))
        return made[index].detach()  # autograd writes upon a tensor where it comes from


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with host_path.null_gpu():
        monkeypatch.setattr(passes, "ALLOCATE", SameAddresses())
        yield


def frames(call: Callable[[], object]) -> int:
    """Python functions of fa2tune that a call enters."""
    seen = 0
    passes.ALLOCATE.taken.clear()  # the call before has ended: its memory is free

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


#: Kind of call -> frames, a few more than there are.
MOST = {
    "MHA, forward": 9, "GQA, forward": 9, "decode": 17, "varlen, forward": 18, "MHA, forward + backward": 28,
    "GQA, forward + backward": 30, "window, forward + backward": 20, "varlen, forward + backward": 35, "layout bshd": 9,
    "flash_attn_func": 19, "flash_attn_varlen_func": 27, "FlashAttention-4's": 18, "Transformers": 20,
    "Transformers, packed": 44,
}  # fmt: skip


def test_a_warm_call_makes_no_plan_and_enters_few_functions() -> None:
    calls = host_path.calls()
    assert {name for name in MOST if not name.startswith("Transformers")} <= set(calls) <= set(MOST)
    for name, call in calls.items():
        for _ in range(3):  # arguments are packed once for addresses, which come again and again
            frames(call)
        plans = len(dispatch.FORWARD_PLANS), len(dispatch.BACKWARD_PLANS)
        found = min(frames(call) for _ in range(30))
        assert 4 < found <= MOST[name], name
        assert (len(dispatch.FORWARD_PLANS), len(dispatch.BACKWARD_PLANS)) == plans


def test_a_new_length_costs_less_than_a_new_kind_of_call() -> None:
    """The bound is on what a length changes: schedules, splits, and the arguments of launches."""
    for name, make in host_path.lengths().items():
        first, *rest = (frames(make(length)) for length in (1200, 1201, 1202, 1203))
        assert max(rest) < 1300 and max(rest) < 0.8 * first, name


def test_the_script_prints_a_line_for_each() -> None:
    done = CliRunner().invoke(host_path.main, ["--only", "decode"], catch_exceptions=False)
    assert [line.split()[0] for line in done.output.splitlines()] == ["warm", "new"]
