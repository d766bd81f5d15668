"""The Hopper backwards with each kernel started before the one before it ends (EARLY_START): by the error rule, beside the
same form without it, and over and over in CUDA graphs, with NaN in outputs and workspaces. All binaries are compiled first, on
all cores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hopper_cases import _compile, binaries_of, check, compilers, config_for, specialized

from fa2tune.calling import dispatch
from fa2tune.calling.schedules import fused_schedule
from fa2tune.compiling import compiler
from fa2tune.compiling.registry import portable_of
from fa2tune.launching import cuda, launch, overlapped, passes
from fa2tune.measuring import reference
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import FUSED, SPLIT, STRATEGIES, Config, Problem
from fa2tune.spec.variant import Variant

#: Of a GPU that has one.
FOUND: list[Variant] = list(specialized(("bwd_fused",))) if torch.cuda.is_available() else []
pytestmark = pytest.mark.skipif(not FOUND, reason="no warp-specialised fused backward for this GPU")

CONCATENATED = {"BLOCK_M": 64, "REDUCE": "vector", "ORDER": "together", "EXPONENTIALS_FIRST": False, "num_warps": 8}
BY_TMA = {"ORDER": "together", "REDUCE": "tma", "EXPONENTIALS_FIRST": False, "num_warps": 4}
PAIRS = {"DYNAMIC": False, "PAIRS": True}
ONE_TILE = {"DYNAMIC": False, "PERSISTENT": False}
#: Key tiles of a head up to which the sums of dQ are the same in any order.
IN_ANY_ORDER = 2


class Case(NamedTuple):
    dim: int
    mask: Mask
    changes: tuple[tuple[str, Any], ...] = ()

    def posed(self, *lengths: int, heads: tuple[int, int] = (4, 2), batch: int = 2) -> Problem:
        return Problem("bf16", batch, *heads, *lengths, self.dim, self.dim, self.mask.fitted(*lengths))

    def config(self, asked: Problem, early: bool = True) -> Config:
        changed = {**config_for(FOUND[0], asked), **dict(self.changes)}
        config = bwd_fused.fitted(asked.specialization, changed)
        return fused_schedule.started_early(config) if early else {**config, "EARLY_START": False}


CASES = [
    *(Case(dim, mask) for dim in (32, 64, 96, 128) for mask in (FULL, CAUSAL)),
    *(Case(dim, CAUSAL, tuple(CONCATENATED.items())) for dim in (32, 64, 128)),
    *(Case(dim, FULL, tuple(BY_TMA.items())) for dim in (64, 128)),
    Case(128, CAUSAL, tuple(PAIRS.items())), Case(64, FULL, tuple(ONE_TILE.items())),
]  # fmt: skip
LENGTHS = ((113, 203), (1003, 517), (1, 300), (128, 128), (300, 100))


def named(case: Case) -> str:
    return f"{case.dim} {case.mask} {dict(case.changes)}"


every = pytest.mark.parametrize("case", CASES, ids=named)


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """The binaries of all cases that are to run, into Triton's cache."""
    selected = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    arch, jobs = dispatch.gpu_of(0).arch, []
    for case in [one for one in CASES if one in selected]:
        asked = case.posed(300, 300)
        for early in (True, False):
            for variant, config in binaries_of(FOUND[0], case.config(asked, early), asked):
                one = variant.name, asked.specialization, compiler.binary_config(variant, config), arch
                jobs += [] if one in jobs else [one]
    with compilers() as pool:
        done = [pool.submit(_compile, *job) for job in jobs]
        assert [why for one in done if (why := one.result())] == []


@every
def test_gradients(case: Case) -> None:
    for lengths in LENGTHS:
        asked = case.posed(*lengths)
        check(FOUND[0], case.config(asked), asked)


@every
def test_more_tiles_than_programs(case: Case) -> None:
    for _ in range(3):
        asked = case.posed(150, 277, heads=(134, 67))
        check(FOUND[0], case.config(asked), asked)


def test_a_driver_that_starts_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "may_start_early", lambda: False)
    case = CASES[0]
    asked = case.posed(300, 300)
    assert not launch.starts_early(FOUND[0], asked, case.config(asked), 0)
    check(FOUND[0], case.config(asked), asked)


def split_configs(asked: Problem, early: bool) -> dict[str, Config]:
    """Of both split kernels."""
    found = {kernel: specialized((kernel,))[0].space.default(asked.specialization, 90) for kernel in STRATEGIES[SPLIT]}
    return {kernel: {**config, "EARLY_START": early} for kernel, config in found.items()}


class Backward:
    """One call's kernels, on memory that stays. Results are poisoned with NaN, as are the workspaces if it is asked to."""

    def __init__(
        self,
        case: Case,
        asked: Problem,
        early: bool,
        seed: int,
        block: torch.Tensor | None = None,
        order: str | None = None,
    ) -> None:
        """``order``: of the split kernels, as a ``BackwardPlan`` has it; None: the fused kernel."""
        made = reference.make_inputs(asked, "cuda", with_dlse=False, seed=seed)
        scale = asked.head_dim**-0.5
        forward = portable_of("fwd").space.default(asked.specialization, dispatch.gpu_of(0).arch)
        o, lse = passes.forward(made.q, made.k, made.v, mask=asked.mask, softmax_scale=scale, config=forward)
        fused = {"bwd_fused": case.config(asked, early)} if order is None else {}
        plan = passes.BackwardPlan(
            asked, made.do, None, made.q, made.k, made.v, o, scale, FUSED if fused else SPLIT,
            fused or split_configs(asked, early), order=order or "",
        )  # fmt: skip
        self.results = [torch.empty_like(one) for one in (made.q, made.k, made.v)]
        self.block = torch.empty(plan.kernels.size, dtype=torch.uint8, device="cuda") if block is None else block
        tensors = (made.q, made.k, made.v, o, made.do, lse, *self.results, self.block)
        self.launch: Callable[[], None] = lambda: plan.kernels(tensors)

    def poison(self, block: bool = True) -> None:
        for one in self.results:
            one.fill_(math.nan)
        if block:
            self.block.view(torch.float32).fill_(math.nan)

    def found(self) -> list[torch.Tensor]:
        self.poison()
        self.launch()
        return [one.clone() for one in self.results]


def far_off(found: list[torch.Tensor], right: list[torch.Tensor], exact: bool) -> torch.Tensor:
    """How many numbers differ: of dQ, if its sums have no fixed order, by more than its rounding."""
    dq, *others = (one != other for one, other in zip(found, right, strict=True))
    if not exact:
        most = right[0].abs().max() * 2.0**-6
        dq = ~((found[0].float() - right[0].float()).abs() <= most)
    return dq.sum() + sum(one.sum() for one in others)


@every
def test_as_without_it(case: Case) -> None:
    for lengths in ((220, 220), (85, 256), (647, 647)):
        asked = case.posed(*lengths)
        exact = lengths[1] <= IN_ANY_ORDER * bwd_fused.GROUPS * bwd_fused.KEYS
        right = Backward(case, asked, False, 0).found()
        for _ in range(5):
            assert int(far_off(Backward(case, asked, True, 0).found(), right, exact)) == 0, lengths


#: (queries, keys, batch): few tiles and many, fewer programs that prepare than multiprocessors and more.
RACED = ((158, 256, 2), (220, 220, 8), (341, 802, 10))


@every
@pytest.mark.parametrize("poisoned", [True, False], ids=["poisoned", "one after the other"])
def test_two_thousand_launches(case: Case, poisoned: bool) -> None:
    """In CUDA graphs; every second time beside matrix products on another stream. Without poison two calls take turns on the
    same workspaces, nothing between them: what one finds of the other's is wrong."""
    products, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for queries, keys, batch in RACED:
        asked = case.posed(queries, keys, heads=(4, 4), batch=batch)
        exact = keys <= IN_ANY_ORDER * bwd_fused.GROUPS * bwd_fused.KEYS
        first = Backward(case, asked, True, 0)
        calls = [first, Backward(case, asked, True, 1, first.block)]
        right = [Backward(case, asked, False, seed).found() for seed in (0, 1)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for call in calls:
            call.found()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                for call in calls:
                    if poisoned:
                        call.poison()
                    call.launch()
                    if poisoned:
                        wrong += far_off(call.results, right[calls.index(call)], exact)
            if not poisoned:
                for call, its in zip(calls, right, strict=True):
                    wrong += far_off(call.results, its, exact)
                    call.poison(False)
        for turn in range(34):
            if turn % 2:
                products.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(products):
                    for _ in range(8):
                        matrix @ matrix
            graph.replay()
        torch.cuda.synchronize()
        assert int(wrong) == 0, (queries, keys, batch)


@pytest.mark.parametrize("order", ["", *overlapped.ORDERS])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_split_kernels_have_the_same_bits(dim: int, mask: Mask, order: str) -> None:
    """They sum in one order. Two calls take turns on the same workspaces, which the first half of the time hold NaN."""
    case = Case(dim, mask)
    for queries, keys, batch in RACED:
        asked = case.posed(queries, keys, heads=(4, 4), batch=batch)
        first = Backward(case, asked, True, 0, order=order)
        calls = [first, Backward(case, asked, True, 1, first.block, order)]
        right = [Backward(case, asked, False, seed, order="").found() for seed in (0, 1)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for call in calls:
            call.found()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(20):
                for call, its in zip(calls, right, strict=True):
                    if turn < 10:
                        call.poison()
                    call.launch()
                    if turn < 10 or turn == 19:
                        wrong += far_off(call.results, its, True)
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        assert int(wrong) == 0, (queries, keys, batch)
