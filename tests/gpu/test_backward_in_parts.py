"""Gradients of head dims that the Hopper backward computes as sums of two powers of two (IN_PARTS), by the error rule, with NaN
in what was not written. All binaries are compiled first, on all cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hopper_cases import (
    BOUNDED,
    VIEWS,
    Tensors,
    _compile,
    as_they_are,
    binaries_of,
    check,
    compilers,
    config_for,
    refusal,
    run,
    specialized,
)

import fa2tune
from fa2tune.calling import dispatch
from fa2tune.compiling import compiler
from fa2tune.measuring import reference
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem
from fa2tune.spec.variant import Variant

#: Kernel -> its Hopper variant, on a GPU that has one.
VARIANTS: Mapping[str, Variant] = (
    {one.serves: one for one in specialized(("bwd_fused", "bwd_dq", "bwd_dkdv"))} if torch.cuda.is_available() else {}
)
pytestmark = pytest.mark.skipif(not VARIANTS, reason="no warp-specialised backward for this GPU")

FUSED_DIMS = ((72, 72), (80, 80), (96, 96), (40, 40), (48, 48))
SPLIT_DIMS = ((160, 160), (192, 192), (192, 128), (144, 144), (96, 96), (40, 40), (96, 64), (64, 160))
#: With V and dO in parts of their own.
APART_DIMS = ((96, 64), (64, 96), (88, 72), (120, 16))
#: The orders of the fused kernel, and its rows prepared and finished beside its tiles.
BESIDE = {"BESIDE": True, "DYNAMIC": True, "PERSISTENT": True, "PAIRS": False}
FUSED_FORMS = (
    {}, {"ORDER": "together"}, {"ORDER": "ahead", "EXPONENTIALS_FIRST": False}, {**BESIDE, "FINISH_BESIDE": True},
    {"DYNAMIC": False, "PAIRS": True}, {"DYNAMIC": False, "PERSISTENT": False},
)  # fmt: skip
#: Odd lengths, fewer queries than keys and the other way round, and more tiles than programs.
LENGTHS = ((113, 203), (1003, 517), (1, 300))
WINDOWS = tuple(Mask("band", left, right) for left, right in ((127, 0), (65, 300), (16, 0)))


class Case(NamedTuple):
    kernel: str
    dims: tuple[int, int]
    mask: Mask
    dtype: str
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.kernel]

    def posed(self, *lengths: int, heads: tuple[int, int] = (4, 2), batch: int = 2) -> Problem:
        return Problem(self.dtype, batch, *heads, *lengths, *self.dims, self.mask.fitted(*lengths))

    def config(self, asked: Problem) -> dict[str, Any]:
        return {**config_for(self.variant, asked), "IN_PARTS": True, **dict(self.changes)}


def cases() -> list[Case]:
    """One kernel of the split strategy stands for both, which are checked together."""
    found = [
        Case(kernel, dims, mask, dtype)
        for kernel, some in (("bwd_fused", FUSED_DIMS), ("bwd_dkdv", SPLIT_DIMS))
        for dims, mask, dtype in product(some, (FULL, CAUSAL), ("bf16", "fp16"))
        if dtype == "bf16" or dims in ((96, 96), (40, 40), (192, 192), (192, 128))
    ]
    found += [
        Case("bwd_fused", dims, mask, "bf16", tuple(form.items()))
        for dims, form in product(((96, 96), (48, 48)), FUSED_FORMS) for mask in (FULL, CAUSAL)
        if form and not (form.get("PAIRS") and mask == FULL)
    ]  # fmt: skip
    found += [
        Case("bwd_fused", dims, mask, "bf16", tuple({**bwd_fused.PARTS_LOOP, "V_APART": True, "ORDER": order}.items()))
        for dims, order in product(APART_DIMS, ("together", "behind", "ahead")) for mask in (FULL, CAUSAL)
    ]  # fmt: skip
    more = {"GROUPS": 2, "BLOCK_N": 64, "K_STAGES": 2, "V_STAGES": 1}, {"STAGES": 2, "P_STAGES": 1}
    return found + [
        Case(kernel, (192, 192), CAUSAL, "bf16", tuple(change.items()))
        for kernel, change in zip(("bwd_dq", "bwd_dkdv"), more, strict=True)
    ]


CASES = cases()
WINDOWED = [
    Case(kernel, dims, mask, "bf16")
    for kernel, dims in (("bwd_fused", (96, 96)), ("bwd_fused", (80, 80)), ("bwd_dkdv", (192, 192)), ("bwd_dkdv", (192, 128)))
    for mask in WINDOWS
]  # fmt: skip


def named(case: Case) -> str:
    return f"{case.kernel} {case.dims} {case.mask} {case.dtype} {dict(case.changes)}"


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """The binaries of all cases that are to run, into Triton's cache."""
    selected = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    arch, jobs = dispatch.gpu_of(0).arch, []
    for case in [one for one in (*CASES, *WINDOWED) if one in selected]:
        asked = case.posed(300, 300)
        for variant, config in binaries_of(case.variant, case.config(asked), asked, portable=False):
            one = variant.name, asked.specialization, compiler.binary_config(variant, config), arch
            jobs += [] if one in jobs else [one]
    with compilers() as pool:
        done = [pool.submit(_compile, *job) for job in jobs]
        assert [why for one in done if (why := one.result())] == []


def tensors_of(asked: Problem) -> Tensors:
    made = reference.make_inputs(asked, "cuda")
    return {name: getattr(made, name) for name in ("q", "k", "v", "do")}


def checked(case: Case, lengths: Sequence[tuple[int, int]], **more: Any) -> None:
    for one in lengths:
        asked = case.posed(*one)
        check(case.variant, case.config(asked), asked, portable=False, **more)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_gradients(case: Case) -> None:
    checked(case, LENGTHS)


@pytest.mark.parametrize("case", [case for case in CASES if not case.changes and case.dtype == "bf16"], ids=named)
def test_more_tiles_than_programs(case: Case) -> None:
    """Several times: what is wrong there may depend on what shares a multiprocessor."""
    for _ in range(3):
        asked = case.posed(150, 277, heads=(134, 67), batch=2)
        check(case.variant, case.config(asked), asked, portable=False)


@pytest.mark.parametrize("case", WINDOWED, ids=named)
def test_windows(case: Case) -> None:
    lengths = [lengths for mask, _, lengths in BOUNDED if mask == case.mask]
    assert lengths
    checked(case, lengths)


@pytest.mark.parametrize("view", [view for view in VIEWS if view is not as_they_are], ids=lambda view: view.__name__)
@pytest.mark.parametrize("kernel", ["bwd_fused", "bwd_dkdv"])
def test_views(kernel: str, view: Any) -> None:
    for dims in ((96, 96), (80, 80)) if kernel == "bwd_fused" else ((192, 192), (192, 128), (160, 160)):
        checked(Case(kernel, dims, CAUSAL, "bf16"), [(300, 333)], view=view)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1)])
@pytest.mark.parametrize("kernel", ["bwd_fused", "bwd_dkdv"])
def test_grouped_heads(kernel: str, heads: tuple[int, int]) -> None:
    for dims in ((96, 96), (48, 48)) if kernel == "bwd_fused" else ((192, 192), (192, 128)):
        case = Case(kernel, dims, CAUSAL, "bf16")
        asked = case.posed(333, 444, heads=heads)
        check(case.variant, case.config(asked), asked, portable=False)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "bf16" and case.mask == CAUSAL], ids=named)
def test_runs_agree_to_the_bit(case: Case) -> None:
    """An error that moves is a race. The sums of the fused dQ alone are in no fixed order."""
    asked = case.posed(1500, 1300)
    tensors = tensors_of(asked)
    first = run(case.variant, case.config(asked), asked, tensors, portable=False)
    for _ in range(10):
        again = run(case.variant, case.config(asked), asked, tensors, portable=False)
        for name in again.keys() - ({"dq"} if case.kernel == "bwd_fused" else set()):
            assert torch.equal(first[name], again[name]), name


def test_padded_columns_give_the_same_gradients() -> None:
    """dK and dV are sums of the same products in the same order; zeros add nothing."""
    for kernel, dims in (("bwd_fused", (96, 96)), ("bwd_dkdv", (192, 192)), ("bwd_dkdv", (192, 128))):
        order = (("ORDER", "ahead"),) if kernel == "bwd_fused" else ()  # padded tiles leave no room for "together"
        case = Case(kernel, dims, CAUSAL, "bf16", order)
        asked = case.posed(700, 900)
        tensors = tensors_of(asked)
        config = case.config(asked)
        whole = {**config, "IN_PARTS": False}
        ours, theirs = (run(case.variant, one, asked, tensors) for one in (config, whole))
        for name in ("dk", "dv"):
            torch.testing.assert_close(ours[name], theirs[name], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dims", [(96, 96), (80, 80), (192, 192), (192, 128), (48, 48)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_public_call_has_right_gradients(dims: tuple[int, int], deterministic: bool) -> None:
    """Whatever row serves it. float32 autograd through materialised scores is the reference."""
    torch.manual_seed(1)
    d, dv = dims
    q, k, v, do = (
        torch.randn(2, heads, 500, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads, dim in ((4, d), (2, d), (2, dv), (4, dv))
    )  # [B, H, S, D]
    o = fa2tune.attention(q, k, v, causal=True, deterministic=deterministic)
    got = torch.autograd.grad(o, (q, k, v), do)
    ours = [one.detach().float().requires_grad_() for one in (q, k, v)]
    keys, values = (one.repeat_interleave(2, 1) for one in ours[1:])
    scores = ours[0] @ keys.mT * d**-0.5  # [B, H, S, S]
    seen = torch.ones(500, 500, device="cuda", dtype=torch.bool).tril()
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values
    wanted = torch.autograd.grad(out, ours, do.float())
    for name, one, other in zip(("dq", "dk", "dv"), got, wanted, strict=True):
        assert torch.isfinite(one).all(), name
        assert (one.float() - other).norm() < 0.01 * other.norm(), name


def test_what_has_no_parts_is_refused_by_name() -> None:
    for kernel, variant in VARIANTS.items():
        for dim in (64, 128):
            spec = Problem("bf16", 1, 1, 1, 64, 64, dim, dim, FULL).specialization
            broken = variant.space.broken({**variant.space.default(spec, 90), "IN_PARTS": True}, spec, 90)
            assert broken is not None and "parts" in broken.name, kernel
        assert refusal(variant, Problem("bf16", 1, 1, 1, 64, 64, 96, 96, FULL)) == ""
