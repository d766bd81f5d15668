"""Gradients of head dims up to 32 that the fused Hopper backward computes in tiles of 32 columns (NARROW), by the error rule,
with NaN in what was not written. All binaries are compiled first, on all cores."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hopper_cases import (
    BOUNDED,
    VIEWS,
    _compile,
    as_they_are,
    binaries_of,
    check,
    compilers,
    config_for,
    run,
    specialized,
)

import fa2tune
from fa2tune.calling import dispatch
from fa2tune.compiling import compiler
from fa2tune.measuring import reference
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem
from fa2tune.spec.variant import Variant

#: Of a GPU that has one.
FOUND: list[Variant] = list(specialized(("bwd_fused",))) if torch.cuda.is_available() else []
pytestmark = pytest.mark.skipif(not FOUND, reason="no warp-specialised fused backward for this GPU")

DIMS = ((32, 32), (24, 24), (16, 16), (16, 32))
VECTOR = {"REDUCE": "vector", "BLOCK_M": 128, "num_warps": 4, "EXPONENTIALS_FIRST": False}
CONCATENATED = {"REDUCE": "vector", "BLOCK_M": 64, "num_warps": 8, "ORDER": "together", "EXPONENTIALS_FIRST": False}
BESIDE = {"BESIDE": True, "DYNAMIC": True, "PERSISTENT": True, "PAIRS": False}
FORMS: tuple[dict[str, Any], ...] = (
    {}, {**VECTOR, "ORDER": "behind"}, {**VECTOR, "ORDER": "behind", "EXPONENTIALS_FIRST": True},
    {**VECTOR, "ORDER": "together"}, {**VECTOR, "ORDER": "together", "REDUCE": "tma"},
    {**VECTOR, "ORDER": "behind", "REDUCE": "tma"}, CONCATENATED, {"STAGES": 3}, {**VECTOR, "ORDER": "behind", "STAGES": 3},
    {**BESIDE, "FINISH_BESIDE": True}, {**VECTOR, **BESIDE, "ORDER": "behind"},
    {**VECTOR, **BESIDE, "ORDER": "together", "REDUCE": "tma", "FINISH_BESIDE": True},
    {**CONCATENATED, **BESIDE, "FINISH_BESIDE": True}, {"DYNAMIC": False, "PAIRS": True},
    {"DYNAMIC": False, "PERSISTENT": False},
)  # fmt: skip
#: Odd lengths, fewer queries than keys and the other way round, and more tiles than programs.
LENGTHS = ((113, 203), (1003, 517), (1, 300), (128, 128))
WINDOWS = tuple(Mask("band", left, right) for left, right in ((127, 0), (65, 300), (16, 0)))


class Case(NamedTuple):
    dims: tuple[int, int]
    mask: Mask
    dtype: str = "bf16"
    changes: tuple[tuple[str, Any], ...] = ()

    def posed(self, *lengths: int, heads: tuple[int, int] = (4, 2), batch: int = 2) -> Problem:
        return Problem(self.dtype, batch, *heads, *lengths, *self.dims, self.mask.fitted(*lengths))

    def config(self, asked: Problem) -> dict[str, Any]:
        return {**config_for(FOUND[0], asked), "NARROW": True, **dict(self.changes)}


CASES = [
    *(Case(dims, mask, dtype) for dims, mask, dtype in product(DIMS, (FULL, CAUSAL), ("bf16", "fp16"))),
    *(
        Case(dims, mask, "bf16", tuple(form.items()))
        for form, dims, mask in product(FORMS[1:], ((32, 32), (24, 24)), (FULL, CAUSAL))
        if not (form.get("PAIRS") and mask == FULL) and (mask == CAUSAL or dims == (32, 32))
    ),
]
WINDOWED = [
    Case(dims, mask, "bf16", tuple(form.items()))
    for dims, mask, form in product(((32, 32), (16, 16)), WINDOWS, (FORMS[0], FORMS[1], CONCATENATED))
]


def named(case: Case) -> str:
    return f"{case.dims} {case.mask} {case.dtype} {dict(case.changes)}"


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """The binaries of all cases that are to run, into Triton's cache."""
    selected = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    arch, jobs = dispatch.gpu_of(0).arch, []
    for case in [one for one in (*CASES, *WINDOWED) if one in selected]:
        asked = case.posed(300, 300)
        for variant, config in binaries_of(FOUND[0], case.config(asked), asked, portable=False):
            one = variant.name, asked.specialization, compiler.binary_config(variant, config), arch
            jobs += [] if one in jobs else [one]
    with compilers() as pool:
        done = [pool.submit(_compile, *job) for job in jobs]
        assert [why for one in done if (why := one.result())] == []


def checked(case: Case, *problems: Problem, **more: Any) -> None:
    for asked in problems:
        check(FOUND[0], case.config(asked), asked, portable=False, **more)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_gradients(case: Case) -> None:
    checked(case, *(case.posed(*lengths) for lengths in LENGTHS))


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "bf16"], ids=named)
def test_more_tiles_than_programs(case: Case) -> None:
    """Several times: what is wrong there may depend on what shares a multiprocessor."""
    for _ in range(3):
        checked(case, case.posed(150, 277, heads=(134, 67)))


@pytest.mark.parametrize("case", WINDOWED, ids=named)
def test_windows(case: Case) -> None:
    lengths = [lengths for mask, _, lengths in BOUNDED if mask == case.mask]
    assert lengths
    checked(case, *(case.posed(*one) for one in lengths))


@pytest.mark.parametrize("view", [view for view in VIEWS if view is not as_they_are], ids=lambda view: view.__name__)
def test_views(view: Any) -> None:
    for case in (Case((32, 32), CAUSAL), Case((24, 24), CAUSAL, "bf16", tuple(CONCATENATED.items()))):
        checked(case, case.posed(300, 333), view=view)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    for case in (Case((32, 32), CAUSAL), Case((16, 16), CAUSAL, "bf16", tuple(CONCATENATED.items()))):
        checked(case, case.posed(333, 444, heads=heads))


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "bf16" and case.mask == CAUSAL], ids=named)
def test_runs_agree_to_the_bit(case: Case) -> None:
    """An error that moves is a race. The sums of dQ alone are in no fixed order. dK and dV are those of 64 columns, too: the
    same products in the same order, to which zeros add nothing."""
    asked = case.posed(1500, 1300)
    made = reference.make_inputs(asked, "cuda")
    tensors = {name: getattr(made, name) for name in ("q", "k", "v", "do")}
    config = case.config(asked)
    first = run(FOUND[0], config, asked, tensors, portable=False)
    for _ in range(10):
        again = run(FOUND[0], config, asked, tensors, portable=False)
        assert torch.equal(first["dk"], again["dk"]) and torch.equal(first["dv"], again["dv"])
    padded = {**config, "NARROW": False, "STAGES": 2, "REDUCE": "vector"}  # dQ by TMA may have no room
    wide = run(FOUND[0], padded, asked, tensors, portable=False)
    for name, gradient in wide.items():
        torch.testing.assert_close(first[name], gradient, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (12, 1)], ids=str)
def test_the_public_call_has_right_gradients(dims: tuple[int, int], causal: bool, heads: tuple[int, int]) -> None:
    """Whatever row serves it, in whatever form and parts. float32 autograd through materialised scores is the reference."""
    torch.manual_seed(1)
    d, dv = dims
    for rows in (75, 500, 2100):
        q, k, v, do = (
            torch.randn(2, count, rows, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for count, dim in ((heads[0], d), (heads[1], d), (heads[1], dv), (heads[0], dv))
        )  # [B, H, S, D]
        got = torch.autograd.grad(fa2tune.attention(q, k, v, causal=causal), (q, k, v), do)
        ours = [one.detach().float().requires_grad_() for one in (q, k, v)]
        keys, values = (one.repeat_interleave(heads[0] // heads[1], 1) for one in ours[1:])
        scores = ours[0] @ keys.mT * d**-0.5  # [B, H, S, S]
        if causal:
            seen = torch.ones(rows, rows, device="cuda", dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        wanted = torch.autograd.grad(scores.softmax(-1) @ values, ours, do.float())
        for name, one, other in zip(("dq", "dk", "dv"), got, wanted, strict=True):
            assert torch.isfinite(one).all(), name
            assert (one.float() - other).norm() < 0.01 * other.norm(), name
