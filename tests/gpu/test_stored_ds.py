"""Backwards through dS in memory, whole and in slices, on the GPU: next to float32 arithmetic, the same bits in every run, on
another stream, in a CUDA graph, with memory that is given out again, and as public calls are served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launches_on_gpu import check_memory_given_out_again, check_stream_and_graph, same

import fa2tune
from fa2tune.calling import backward_plans, choosing, dispatch
from fa2tune.calling.schedules import stored_ds_schedule
from fa2tune.launching import passes, stored_ds
from fa2tune.launching.overlapped import DKDV
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.roles import BWD_STORED_DS
from fa2tune.spec.score import NONE

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
#: (dtype, batch, query heads, key heads, queries, keys, head dim, head dim of V, mask)
CALLS: list[tuple[Any, ...]] = [
    ("bf16", 2, 4, 4, 484, 484, 256, 256, FULL),
    ("fp16", 1, 6, 2, 285, 827, 160, 160, CAUSAL),
    ("bf16", 3, 4, 1, 200, 131, 200, 200, CAUSAL),  # rows that see no key
    ("bf16", 2, 3, 3, 721, 1949, 184, 184, FULL),
    ("fp16", 1, 4, 4, 513, 513, 192, 128, CAUSAL),
    ("bf16", 4, 2, 2, 65, 300, 136, 232, FULL),
    ("bf16", 6, 4, 4, 170, 700, 136, 136, CAUSAL),  # more tiles than multiprocessors
    ("fp16", 5, 8, 4, 333, 600, 192, 192, CAUSAL),
    ("bf16", 9, 8, 4, 333, 600, 160, 160, FULL),
]
every = pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call)))


class Posed:
    """A backward's tensors, (batch, heads, seqlen, dim) views of the memory order (b, s, h, d), and its plans."""

    def __init__(self, call: tuple[Any, ...], with_dlse: bool = False) -> None:
        dtype, batch, heads_q, heads_kv, queries, keys, dim, dim_v, self.mask = call
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

        def new(heads: int, rows: int, columns: int) -> torch.Tensor:
            return torch.randn(batch, rows, heads, columns, device="cuda", dtype=kind).transpose(1, 2)

        self.q, self.k, self.v = new(heads_q, queries, dim), new(heads_kv, keys, dim), new(heads_kv, keys, dim_v)
        self.do, self.scale = new(heads_q, queries, dim_v), dim**-0.5
        self.dlse = torch.randn(batch, heads_q, queries, device="cuda") if with_dlse else None
        self.o, self.lse = dispatch.forward(self.q, self.k, self.v, self.mask, self.scale, NONE)
        self.problem = passes.describe(self.q, self.k, self.v, self.mask, self.scale, o=self.o, do=self.do)
        chosen = choosing.choose_backward(choosing.Chooser(self.problem, dispatch.gpu_of(0)), False)[1]
        self.configs = stored_ds_schedule.configs(self.problem, dict(chosen[DKDV].of_row.config))

    def plan(self, slices: int = 1, groups: int = 0, splits: int = 1) -> stored_ds.StoredDsPlan:
        config = {**self.configs[groups % len(self.configs)], "SLICES": slices, "DQ_SPLITS": splits}
        return stored_ds.StoredDsPlan(
            self.problem, self.do, self.dlse, self.q, self.k, self.v, self.o, self.scale, config
        )

    def run(self, plan: Any) -> tuple[torch.Tensor, ...]:
        return plan(self.do, self.dlse, self.q, self.k, self.v, self.o, self.lse)

    def check(self, found: tuple[torch.Tensor, ...]) -> None:
        given = reference.Inputs(self.q, self.k, self.v, self.do, self.dlse)
        oracle, same_dtype = reference.oracle_and_reference(given, mask=self.mask, softmax_scale=self.scale)
        names = ("dq", "dk", "dv")
        verify.compare(
            dict(zip(names, found, strict=True)), {name: oracle[name] for name in names},
            {name: same_dtype[name] for name in names},
        )  # fmt: skip


@every
@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
def test_gradients_by_the_error_rule_and_the_same_bits_in_slices(call: tuple[Any, ...], with_dlse: bool) -> None:
    posed = Posed(call, with_dlse)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated is filled with NaN
    try:
        for groups in range(len(posed.configs)):
            whole = posed.run(posed.plan(1, groups))
            posed.check(whole)
            for slices in (1, 2, 3):
                plan = posed.plan(slices, groups)
                for _ in range(4):
                    assert same(posed.run(plan), whole), f"{slices} slices, {groups}"
    finally:
        torch.use_deterministic_algorithms(False)


@every
def test_keys_of_dq_in_parts(call: tuple[Any, ...]) -> None:
    posed = Posed(call, with_dlse=True)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated is filled with NaN
    try:
        for groups in range(len(posed.configs)):
            for splits in (2, 3, 7):
                plan = posed.plan(1, groups, splits)
                first = posed.run(plan)
                posed.check(first)
                for _ in range(4):
                    assert same(posed.run(plan), first), f"{splits} parts, {groups}"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("slices", "splits"), [(1, 1), (2, 1), (1, 3)])
def test_on_another_stream_and_in_a_graph(slices: int, splits: int) -> None:
    posed = Posed(CALLS[0])
    plan = posed.plan(slices, splits=splits)
    check_stream_and_graph(lambda: posed.run(plan), posed.run(plan))


@pytest.mark.parametrize(("slices", "splits"), [(1, 1), (3, 1), (1, 5)])
def test_with_memory_that_is_given_out_again(slices: int, splits: int) -> None:
    posed = Posed(CALLS[3])
    plan = posed.plan(slices, splits=splits)
    check_memory_given_out_again(posed, plan, posed.run(plan))


@pytest.mark.parametrize("deterministic", [False, True])
def test_public_calls_are_served_so(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ("bf16", 2, 3, 3, 3821, 3821, 176, 176, FULL)
    posed = Posed(call)
    choices = choosing.choose_backward(choosing.Chooser(posed.problem, dispatch.gpu_of(0)), deterministic)[1]
    gpu = dispatch.gpu_of(0)
    found, _ = backward_plans.whole(posed.problem, choices, backward_plans.division(posed.problem, choices, gpu), gpu)
    assert found is not None and found.role == BWD_STORED_DS
    for limit in (stored_ds_schedule.MOST_MEMORY, stored_ds_schedule.MOST_MEMORY / 8):
        monkeypatch.setattr(stored_ds_schedule, "MOST_MEMORY", limit)
        stored_ds_schedule._best.cache_clear()
        dispatch.reload()
        q, k, v = (one.detach().requires_grad_() for one in (posed.q, posed.k, posed.v))
        o = fa2tune.attention(q, k, v, deterministic=deterministic)
        first, again = (torch.autograd.grad(o, (q, k, v), posed.do, retain_graph=True) for _ in range(2))
        posed.check(first)
        assert same(first, again)
    stored_ds_schedule._best.cache_clear()
    dispatch.reload()


def test_causal_masks_of_the_whole_square() -> None:
    posed = Posed(("bf16", 1, 4, 4, 1024, 1024, 256, 256, CAUSAL))
    for slices in (1, 4):
        posed.check(posed.run(posed.plan(slices)))
