"""Backwards by tiles of queries, on the GPU: the error rule, the same bits on every run, strides, streams, CUDA graphs, memory
that is given out again, and the public call."""

from __future__ import annotations

import pytest
import torch
from launches_on_gpu import check_memory_given_out_again, check_stream_and_graph, poison_fresh_memory, same

import fa2tune
from fa2tune.calling import dispatch
from fa2tune.launching import passes, query_tiles
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
WINDOW = Mask("band", 20, 2)
MASKS = [FULL, CAUSAL, WINDOW, Mask("chunked", 48), Mask("causal_top_left")]
#: (batch, query heads, key heads), (queries, keys)
LENGTHS = [((2, 3, 3), (70, 777)), ((2, 4, 2), (300, 100)), ((1, 6, 1), (129, 128)), ((40, 9, 3), (111, 250)),
           ((1, 2, 2), (2, 64)), ((2, 2, 2), (128, 640))]  # fmt: skip


class Posed:
    """A backward's tensors. ``through_lse``: lse has a gradient, 0 where a row sees no key."""

    def __init__(self, asked: Problem, order: str = "bhsd", through_lse: bool = False) -> None:
        self.asked, self.scale = asked, asked.head_dim**-0.5
        inputs = reference.make_inputs(asked, "cuda", with_dlse=through_lse, on_device=True)
        self.oracle, self.same = reference.oracle_and_reference(inputs, mask=asked.mask)
        self.q, self.k, self.v, self.do, self.dlse = inputs.q, inputs.k, inputs.v, inputs.do, inputs.dlse
        self.o, self.lse = self.same["o"], self.oracle["lse"].float()
        if order == "bshd":
            self.q, self.k, self.v, self.do, self.o = (
                t.transpose(1, 2).contiguous().transpose(1, 2) for t in (self.q, self.k, self.v, self.do, self.o)
            )
        self.problem = passes.describe(self.q, self.k, self.v, asked.mask, self.scale, o=self.o, do=self.do)
        assert query_tiles.able(self.problem, 90)
        self.space = query_tiles.space_of(self.problem, 90)
        self.rows = self.space.rows_of(self.problem.specialization)

    def plan(self, rows: int, splits: int = 1) -> query_tiles.QueryTilesPlan:
        """``splits``: or as many as there are key blocks."""
        config = self.space.config_of(self.problem.specialization, rows, 1)
        most = query_tiles.most_splits(self.problem, config, 90)
        config = self.space.config_of(self.problem.specialization, rows, min(splits, most))
        return query_tiles.QueryTilesPlan(
            self.problem, self.do, self.dlse, self.q, self.k, self.v, self.o, self.scale, config
        )

    def run(self, plan: query_tiles.QueryTilesPlan) -> tuple[torch.Tensor, ...]:
        return plan(self.do, self.dlse, self.q, self.k, self.v, self.o, self.lse)

    def check(self, found: tuple[torch.Tensor, ...]) -> None:
        got = dict(zip(("dq", "dk", "dv"), found, strict=True))
        verify.compare(got, {name: self.oracle[name] for name in got}, {name: self.same[name] for name in got})


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_fresh_memory(monkeypatch)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("heads", "lengths"), LENGTHS, ids=str)
def test_masks_groups_and_lengths(heads: tuple[int, int, int], lengths: tuple[int, int], mask: Mask) -> None:
    posed = Posed(Problem("bf16", *heads, *lengths, 64, 64, mask), through_lse=mask == CAUSAL)
    for rows in posed.rows:
        for splits in (1, 2, 7, 64):
            posed.check(posed.run(posed.plan(rows, splits)))


@pytest.mark.parametrize(
    ("dtype", "dims", "mask"),
    [("bf16", (16, 16), FULL), ("bf16", (24, 24), CAUSAL), ("bf16", (48, 80), FULL), ("bf16", (96, 96), FULL),
     ("bf16", (128, 128), CAUSAL), ("bf16", (144, 64), WINDOW), ("bf16", (64, 160), CAUSAL), ("bf16", (192, 128), FULL),
     ("bf16", (192, 192), CAUSAL), ("bf16", (208, 208), FULL), ("bf16", (256, 256), CAUSAL), ("fp16", (64, 64), CAUSAL),
     ("fp16", (160, 160), FULL), ("fp16", (200, 200), CAUSAL)],
    ids=str,
)  # fmt: skip
def test_head_dims(dtype: str, dims: tuple[int, int], mask: Mask) -> None:
    for keys in (107, 300):
        for order in ("bhsd", "bshd"):
            posed = Posed(Problem(dtype, 2, 4, 2, 137, keys, *dims, mask), order, through_lse=order == "bshd")
            for rows in posed.rows:
                for splits in (1, 2):
                    posed.check(posed.run(posed.plan(rows, splits)))


def test_any_strides() -> None:
    """A cut cache, a gradient that is a view."""
    posed = Posed(Problem("bf16", 2, 4, 2, 130, 190, 64, 64, CAUSAL), through_lse=True)
    cache = torch.full((2, 2, 300, 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    cache[:, :, :190] = posed.k
    posed.k = cache[:, :, :190]
    posed.dlse = torch.stack([posed.dlse, posed.dlse], -1)[..., 0]  # type: ignore[list-item]
    for splits in (1, 3):
        posed.check(posed.run(posed.plan(64, splits)))


@pytest.mark.parametrize(("rows", "splits"), [(128, 1), (64, 3)])
def test_the_same_bits_on_every_run_stream_and_replay(rows: int, splits: int) -> None:
    posed = Posed(Problem("bf16", 9, 8, 4, 200, 320, 128, 128, CAUSAL))
    plan = posed.plan(rows, splits)
    first = posed.run(plan)
    posed.check(first)
    for _ in range(30):
        assert same(posed.run(plan), first)
    check_stream_and_graph(lambda: posed.run(plan), first)


@pytest.mark.parametrize(("queries", "rows", "splits"), [(200, 64, 4), (100, 128, 5), (200, 128, 1)])
def test_memory_that_is_given_out_again_at_once(queries: int, rows: int, splits: int) -> None:
    """Kernels that add up start early. Their parts' memory is overwritten behind them: of both, of dQ alone, of dK and dV."""
    posed = Posed(Problem("bf16", 3, 4, 4, queries, 600, 192, 192, CAUSAL))
    first, plan = posed.run(posed.plan(rows, splits)), posed.plan(rows, splits)
    size = passes.placed(query_tiles.workspaces(posed.problem, plan.config), torch.bfloat16, 0)[1]
    assert size
    check_memory_given_out_again(posed, plan, first, size // 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_through_the_public_call(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BACKWARD_PLANS", {})
    posed = Posed(Problem("bf16", 9, 2, 2, 86, 894, 192, 192, CAUSAL))
    q, k, v = (t.detach().requires_grad_() for t in (posed.q, posed.k, posed.v))
    explained = fa2tune.explain(q, k, v, causal=True, deterministic=deterministic)
    if "sm90/bwd_query_tiles" not in {name for one in explained.kernels for name in one.runs or ()}:
        pytest.skip("not expected to be faster on this GPU")
    o, lse = fa2tune.attention(q, k, v, causal=True, deterministic=deterministic, return_lse=True)
    first = torch.autograd.grad((o, lse), (q, k, v), (posed.do, torch.zeros_like(lse)), retain_graph=True)
    posed.check(first)
    assert same(torch.autograd.grad((o, lse), (q, k, v), (posed.do, torch.zeros_like(lse))), first)
