"""dQ of a split Hopper backward with its keys in parts, on the GPU: the error rule, the same bits on every run, streams, CUDA
graphs, memory that is given out again, and the public call."""

from __future__ import annotations

import pytest
import torch
from launches_on_gpu import check_memory_given_out_again, check_stream_and_graph, poison_fresh_memory, same

import fa2tune
from fa2tune.calling import dispatch
from fa2tune.calling.schedules import group_parts_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.registry import variant_named
from fa2tune.launching import overlapped, passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import SPLIT, Problem

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
WINDOW = Mask("band", 300, 2)
TOP_LEFT = Mask("causal_top_left")
MASKS = [FULL, CAUSAL, WINDOW, Mask("chunked", 192), TOP_LEFT]
#: (batch, query heads, key heads), (queries, keys)
LENGTHS = [((1, 1, 1), (70, 500)), ((2, 4, 2), (130, 1000)), ((1, 6, 1), (300, 257)), ((1, 2, 2), (1, 2000)),
           ((1, 3, 3), (129, 65))]  # fmt: skip
#: Without one query under the last mask, which sees one key: dP - delta and so dQ are 0, and the error rule has no scale.
CASES = [(*one, mask) for one in LENGTHS for mask in MASKS if mask != TOP_LEFT or one[1][0] > 1]


class Posed:
    """A backward's tensors, and its choice."""

    def __init__(self, asked: Problem, order: str = "bhsd") -> None:
        self.asked, self.scale = asked, asked.head_dim**-0.5
        inputs = reference.make_inputs(asked, "cuda", on_device=True)
        self.oracle, self.same = reference.oracle_and_reference(inputs, mask=asked.mask)
        self.q, self.k, self.v, self.do = inputs.q, inputs.k, inputs.v, inputs.do
        if order == "bshd":
            self.q, self.k, self.v, self.do = (
                t.transpose(1, 2).contiguous().transpose(1, 2) for t in (self.q, self.k, self.v, self.do)
            )
        self.o, self.lse = dispatch.forward(self.q, self.k, self.v, asked.mask, self.scale, asked.score)
        self.problem = passes.describe(self.q, self.k, self.v, asked.mask, self.scale, o=self.o, do=self.do)
        self.choices = {}
        for kernel in ("bwd_dq", "bwd_dkdv"):
            variant = variant_named(f"sm90/{kernel}")
            self.choices[kernel] = Choice(variant, variant.space.default(self.problem.specialization, 90))
        self.groups = group_parts_schedule.parts(self.problem, self.choices, dispatch.gpu_of(0))

    def plan(self, parts: int, order: str = "") -> passes.BackwardPlan:
        return passes.BackwardPlan(
            self.problem, self.do, None, self.q, self.k, self.v, self.o, self.scale, SPLIT, self.choices,
            {**self.groups, "bwd_dq": parts}, order,
        )  # fmt: skip

    def run(self, plan: passes.BackwardPlan) -> tuple[torch.Tensor, ...]:
        return plan(self.do, None, self.q, self.k, self.v, self.o, self.lse)

    def check(self, found: tuple[torch.Tensor, ...]) -> None:
        verify.compare(dict(zip(("dq", "dk", "dv"), found, strict=True)), self.oracle, self.same)


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_fresh_memory(monkeypatch)


@pytest.mark.parametrize(("heads", "lengths", "mask"), CASES, ids=str)
def test_masks_groups_and_lengths(heads: tuple[int, int, int], lengths: tuple[int, int], mask: Mask) -> None:
    posed = Posed(Problem("bf16", *heads, *lengths, 192, 192, mask))
    for parts in (2, 3, 9, 40):  # more than blocks, too
        posed.check(posed.run(posed.plan(parts)))


@pytest.mark.parametrize(
    ("dtype", "dims", "mask"),
    [("bf16", (136, 136), FULL), ("bf16", (144, 64), CAUSAL), ("bf16", (64, 160), WINDOW), ("bf16", (160, 160), CAUSAL),
     ("bf16", (184, 184), FULL), ("bf16", (192, 128), CAUSAL), ("bf16", (216, 216), CAUSAL), ("bf16", (256, 256), FULL),
     ("bf16", (256, 256), WINDOW), ("fp16", (192, 128), FULL), ("fp16", (256, 256), CAUSAL)],
    ids=str,
)  # fmt: skip
def test_head_dims(dtype: str, dims: tuple[int, int], mask: Mask) -> None:
    for order in ("bhsd", "bshd"):
        posed = Posed(Problem(dtype, 2, 4, 2, 137, 900, *dims, mask), order)
        for parts in (2, 7):
            posed.check(posed.run(posed.plan(parts)))


@pytest.mark.parametrize("order", ["", *overlapped.ORDERS])
def test_bits_are_those_of_every_run_and_order(order: str) -> None:
    """Streams, a CUDA graph, and both kernels at a time."""
    posed = Posed(Problem("bf16", 3, 4, 2, 296, 3000, 216, 216, FULL))
    after, plan = posed.run(posed.plan(7)), posed.plan(7, order)
    posed.check(after)
    for _ in range(20):
        assert same(posed.run(plan), after)
    check_stream_and_graph(lambda: posed.run(plan), after)


def test_memory_that_is_given_out_again_at_once() -> None:
    posed = Posed(Problem("bf16", 3, 1, 1, 296, 5000, 256, 256, CAUSAL))
    after, plan = posed.run(posed.plan(11)), posed.plan(11, overlapped.DQ_AT_ONCE)
    check_memory_given_out_again(posed, plan, after, plan.kernels.size // 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_through_the_public_call(deterministic: bool) -> None:
    posed = Posed(Problem("bf16", 3, 1, 1, 296, 22766, 216, 216, FULL))
    q, k, v = (t.detach().requires_grad_() for t in (posed.q, posed.k, posed.v))
    explained = fa2tune.explain(q, k, v, deterministic=deterministic)
    if "sm90/bwd_dq_split" not in {name for one in explained.kernels for name in one.runs or ()}:
        pytest.skip("not expected to be faster on this GPU")
    o, lse = fa2tune.attention(q, k, v, deterministic=deterministic, return_lse=True)
    first = torch.autograd.grad((o, lse), (q, k, v), (posed.do, torch.zeros_like(lse)), retain_graph=True)
    posed.check(first)
    assert same(torch.autograd.grad((o, lse), (q, k, v), (posed.do, torch.zeros_like(lse))), first)
