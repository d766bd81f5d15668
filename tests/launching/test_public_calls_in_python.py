"""Public calls with gradients, chosen for as on an H200, each kernel run by Python (tests/public_gpu.py): what is served on
each case, and its results by the error rule beside float64. Uninitialised memory holds NaN, lse has a gradient."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from public_gpu import PublicGpu, public_gpu

import fa2tune
from fa2tune import logs
from fa2tune.calling import copies, dispatch, merging, unseen
from fa2tune.calling.schedules import (
    few_keys_schedule,
    grouped_schedule,
    multistage_schedule,
    one_tile_schedule,
    packed_grouped_schedule,
    packed_splits_schedule,
    query_tiles_schedule,
    stored_ds_schedule,
)
from fa2tune.gpus import Gpu
from fa2tune.launching import passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Config, Problem

FUSED = ("sm90/bwd_prepare", "sm90/bwd_fused", "sm90/bwd_finish")
#: Prepared, and perhaps finished, beside the tiles.
BESIDE = ("sm90/bwd_prepare_overlapped", *FUSED[1:])
SPLIT = ("sm90/bwd_dq", "sm90/bwd_dkdv")
#: With delta made before by dQ's kernel.
AT_A_TIME = ("sm90/bwd_dq", *SPLIT)
SPREAD, GATHER = "portable/bwd_spread", "portable/bwd_gather"
GROUPED, KEYS_SPLIT = "sm90/fwd_grouped", "sm90/fwd_split"
FEW, COMBINE = "portable/fwd_split", "portable/fwd_combine"
ORDER = "portable/packed_order"
ONE_TILE, QUERY_TILES, DQ_COMBINE = "sm90/bwd_one_tile", "sm90/bwd_query_tiles", "portable/bwd_dq_combine"
STORED = ("portable/bwd_delta", "sm90/bwd_dkdv_ds", "sm90/bwd_dq_ds")

pytestmark = pytest.mark.usefixtures("poison")


class Case(NamedTuple):
    """A call, and the kernels that serve it, in the order of launches."""

    lengths: tuple[int, int]
    dims: tuple[int, int]
    mask: Mask
    runs: tuple[str, ...]
    heads: tuple[int, int] = (2, 2)
    deterministic: bool = False
    dtype: str = "bf16"
    scale: float | None = None

    def __str__(self) -> str:
        return f"{self.dims[0]}-{self.mask}-{self.dtype}"


@pytest.fixture(autouse=True)
def several_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of few keys, or of few queries, have the kernels of those of many."""
    monkeypatch.setattr(few_keys_schedule, "MARGIN", 1.0)
    monkeypatch.setattr(multistage_schedule, "MARGIN", 1.0)
    monkeypatch.setattr(one_tile_schedule, "ONE_KEY_TILE", False)
    monkeypatch.setattr(query_tiles_schedule, "QUERY_TILES", False)


def inputs(case: Case, batch: int = 1) -> reference.Inputs:
    asked = Problem(case.dtype, batch, *case.heads, *case.lengths, *case.dims, FULL)
    return reference.make_inputs(asked, "cpu", with_dlse=True)


def laid(given: reference.Inputs, layout: str) -> reference.Inputs:
    """The same values, in the memory order of a layout."""
    if layout == "bhsd":
        return given
    q, k, v, do = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (given.q, given.k, given.v, given.do))
    return reference.Inputs(q, k, v, do, given.dlse)


def results(case: Case, given: reference.Inputs) -> dict[str, torch.Tensor]:
    """What the public call gives. The inputs' strides are the call's."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in (given.q, given.k, given.v))
    options = {"mask": case.mask, "softmax_scale": case.scale, "deterministic": case.deterministic}
    o, lse = fa2tune.attention(q, k, v, return_lse=True, **options)
    gradients = torch.autograd.grad((o, lse), (q, k, v), (given.do, given.dlse))
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def check(case: Case, given: reference.Inputs) -> None:
    found = results(case, given)
    verify.compare(found, *reference.oracle_and_reference(given, mask=case.mask, softmax_scale=case.scale))


CASES = [
    Case((53, 203), (64, 64), CAUSAL, (FEW, *FUSED), (4, 2)),
    Case((113, 203), (64, 64), CAUSAL, ("sm90/fwd", "portable/bwd_dq", "sm90/bwd_dkdv"), (4, 2), True),
    Case((113, 203), (32, 32), CAUSAL, ("sm90/fwd", *FUSED), (4, 2)),
    Case((700, 317), (32, 32), CAUSAL, ("sm90/fwd", *FUSED, GATHER)),  # few tiles: query blocks in parts
    Case((113, 203), (16, 16), FULL, (FEW, *FUSED), dtype="fp16"),
    Case((113, 203), (72, 72), FULL, ("sm90/fwd", *SPLIT), deterministic=True),
    Case((385, 329), (72, 72), CAUSAL, ("sm90/fwd", *FUSED, GATHER)),
    Case((577, 129), (128, 128), FULL, ("sm90/fwd", *FUSED, GATHER)),
    Case((113, 203), (96, 96), CAUSAL, ("sm90/fwd", *FUSED), dtype="fp16"),
    Case((133, 144), (192, 128), CAUSAL, ("sm90/fwd", *AT_A_TIME)),
    Case((133, 144), (40, 96), CAUSAL, ("sm90/fwd", SPREAD, *FUSED, GATHER), (8, 2)),
    Case((133, 144), (80, 80), CAUSAL, ("sm90/fwd", *FUSED, GATHER), (4, 1)),
    Case((1, 600), (128, 128), CAUSAL, (FEW, COMBINE, *SPLIT), (4, 2), True),
    Case((3, 1), (128, 128), CAUSAL, (FEW, *SPLIT), (2, 1), True),
    Case((100, 150), (64, 64), band(40, 10), (FEW, *BESIDE)),
    Case((150, 144), (64, 64), CAUSAL, ("sm90/fwd", *FUSED), scale=-0.3),
    Case((150, 144), (64, 64), CAUSAL, ("sm90/fwd", *FUSED), scale=0.0),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls(gpu: PublicGpu, case: Case) -> None:
    check(case, inputs(case))
    assert tuple(gpu.ran) == case.runs


class Little:
    """Memory: a call's gradients and workspaces have so many bytes at most. ``refused``: how often they had more."""

    def __init__(self, patch: pytest.MonkeyPatch, most: int) -> None:
        self.refused, made = 0, passes.Fresh.__call__

        def fresh(own: passes.Fresh) -> list[torch.Tensor]:
            if sum(math.prod(sizes) * dtype.itemsize for sizes, _, dtype in own.layouts) > most:
                self.refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return made(own)

        patch.setattr(passes.Fresh, "__call__", fresh)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_where_ds_finds_no_memory_split_kernels_serve(
    gpu: PublicGpu, deterministic: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Right, said once, not tried again; other lengths have it still. Where these find none either, that is the error."""
    monkeypatch.setattr(stored_ds_schedule, "MARGIN", -100.0)
    logs.warn_once.cache_clear()
    case = Case((513, 400), (144, 144), FULL, (), deterministic=deterministic)
    given = inputs(case)
    check(case, given)
    assert tuple(gpu.ran[-3:]) == STORED
    dispatch.reload()
    little = Little(monkeypatch, 1_500_000)
    for _ in range(2):
        gpu.ran.clear()
        check(case, given)
        assert gpu.ran[-1] in SPLIT and not {*STORED} & {*gpu.ran[1:]}
    assert little.refused == 1 and caplog.text.count("no memory for dS") == 1
    short = case._replace(lengths=(65, 130))
    check(short, inputs(short))
    assert tuple(gpu.ran[-3:]) == STORED
    o = fa2tune.attention(given.q.requires_grad_(), given.k, given.v)
    little = Little(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        o.sum().backward()


def test_a_side_stream_may_be_early_or_late() -> None:
    """Both kernels of a split backward at a time: dQ's before the other's launches, or behind all of them."""
    case = Case((133, 144), (192, 192), CAUSAL, ())
    given, found = inputs(case), []
    for late in (False, True):
        with public_gpu(late=late) as gpu:
            found.append(results(case, given))
            dq, dkdv = SPLIT
            assert gpu.ran[-3:] == ([dq, dkdv, dq] if late else list(AT_A_TIME))
    verify.compare(found[0], *reference.oracle_and_reference(given, mask=CAUSAL))
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def test_keys_split_by_the_warp_specialised_kernel(gpu: PublicGpu) -> None:
    case = Case((256, 1500), (256, 256), FULL, ("sm90/fwd_split", COMBINE), (2, 1))
    given = inputs(case)
    o, lse = fa2tune.attention(given.q, given.k, given.v, return_lse=True)
    verify.compare({"o": o, "lse": lse}, *reference.oracle_and_reference(given, gradients=False))
    assert tuple(gpu.ran) == case.runs


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "case",
    [
        Case((40, 70), (64, 64), CAUSAL, (ONE_TILE, GATHER), (6, 2)),
        Case((150, 70), (56, 56), FULL, (ONE_TILE, GATHER), (5, 1), dtype="fp16"),
        Case((50, 41), (80, 80), CAUSAL, (ONE_TILE, GATHER), (4, 2)),  # queries that see no key
        Case((40, 70), (192, 128), CAUSAL, (ONE_TILE, GATHER), (4, 2), deterministic=True),
    ],
    ids=str,
)
def test_a_backward_of_one_kernel(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, case: Case, order: str) -> None:
    """lse has a gradient."""
    monkeypatch.setattr(one_tile_schedule, "ONE_KEY_TILE", True)
    given = laid(inputs(case, batch=2), order)
    check(case, given)
    assert tuple(gpu.ran[-len(case.runs) :]) == case.runs


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "case",
    [
        Case((150, 144), (64, 64), CAUSAL, (QUERY_TILES, GATHER)),
        Case((150, 170), (56, 56), FULL, (QUERY_TILES, GATHER), (5, 1), dtype="fp16"),
        Case((100, 330), (192, 192), CAUSAL, (QUERY_TILES, DQ_COMBINE), deterministic=True),
        Case((100, 330), (128, 128), CAUSAL, (QUERY_TILES, DQ_COMBINE, GATHER), (2, 1)),
    ],
    ids=str,
)
def test_a_backward_by_tiles_of_queries(
    gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, case: Case, order: str
) -> None:
    """lse has a gradient."""
    monkeypatch.setattr(query_tiles_schedule, "QUERY_TILES", True)
    given = laid(inputs(case), order)
    check(case, given)
    assert tuple(gpu.ran[-len(case.runs) :]) == case.runs


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of several heads are expected to pay wherever they can be had, and one head of more queries nowhere."""
    monkeypatch.setattr(merging, "pays", lambda *asked: False)
    monkeypatch.setattr(grouped_schedule, "_margin", lambda problem: -math.inf)


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "case",
    [
        Case((40, 70), (64, 64), CAUSAL, (GROUPED, *FUSED), (6, 2)),
        Case((40, 70), (56, 56), FULL, (GROUPED, *FUSED, GATHER), (5, 1), dtype="fp16"),
        Case((50, 41), (80, 80), CAUSAL, (GROUPED, *FUSED), (4, 2)),  # queries that see no key
        Case((40, 70), (192, 128), CAUSAL, (GROUPED, *AT_A_TIME), (4, 2)),
        Case((40, 70), (64, 64), band(20, 3), (GROUPED, *BESIDE), (4, 1), scale=-0.3),
    ],
    ids=str,
)
def test_tiles_of_several_heads(gpu: PublicGpu, grouped: None, case: Case, order: str) -> None:
    """lse goes to the backward, and has a gradient."""
    given = laid(inputs(case, batch=2), order)
    check(case, given)
    assert tuple(gpu.ran) == case.runs


def test_tensors_of_grouped_heads_that_tma_cannot_address(gpu: PublicGpu, grouped: None) -> None:
    case = Case((40, 70), (64, 64), CAUSAL, (), (4, 2))
    given = inputs(case)
    k = torch.full((1, 2, 70, 65), torch.nan, dtype=given.k.dtype)[..., :64].copy_(given.k)
    check(case, reference.Inputs(given.q, k, given.v, given.do, given.dlse))
    assert GROUPED not in gpu.ran


@pytest.mark.parametrize("deterministic", [True, False])
def test_tensors_that_tma_cannot_address_are_copied(
    gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Where that is expected to pay, as it is said to be here."""
    monkeypatch.setattr(copies, "pays", lambda *asked: True)
    case = Case((113, 203), (96, 96), CAUSAL, ("sm90/fwd", *(SPLIT if deterministic else FUSED)), (2, 2), deterministic)
    given = inputs(case)
    wide = torch.full((1, 2, 113, 97), torch.nan, dtype=given.q.dtype)
    q, do = wide[..., 1:].copy_(given.q), torch.ones(1, 1, 1, 96, dtype=given.do.dtype).expand(1, 2, 113, 96)
    check(case, reference.Inputs(q, given.k, given.v, do, given.dlse))
    assert tuple(gpu.ran) == case.runs


def test_tensors_that_tma_cannot_address_are_read_by_pointer(gpu: PublicGpu) -> None:
    case = Case((70, 90), (64, 64), CAUSAL, ("portable/fwd", "portable/bwd_dq", "portable/bwd_dkdv"), (2, 1))
    given = inputs(case)
    k = torch.full((1, 1, 90, 65), torch.nan, dtype=given.k.dtype)[..., :64].copy_(given.k)
    check(case, reference.Inputs(given.q, k, given.v, given.do, given.dlse))
    assert tuple(gpu.ran) == case.runs


@pytest.fixture
def blind_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that see no key are filled in wherever there are any."""
    monkeypatch.setattr(unseen, "filled_in", lambda problem, gpu, pass_: unseen.count(problem))


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "case",
    [
        Case((150, 61), (64, 64), CAUSAL, (FEW, *FUSED), (2, 1)),
        Case((150, 61), (72, 72), band(40, 3), (FEW, *BESIDE, GATHER), (2, 1), dtype="fp16"),
        Case((150, 61), (192, 192), CAUSAL, (FEW, *AT_A_TIME), (2, 1)),
        Case((450, 333), (64, 64), CAUSAL, ("sm90/fwd", *FUSED, GATHER)),
        Case((333, 220), (128, 64), CAUSAL, ("sm90/fwd", *SPLIT), deterministic=True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("blind_filled_in")
def test_queries_that_see_no_key_are_filled_in(gpu: PublicGpu, case: Case, order: str) -> None:
    """Kernels write behind their rows, in one tensor."""
    check(case, laid(inputs(case, batch=2), order))
    assert tuple(gpu.ran) == case.runs
    assert any(isinstance(plan, unseen.Backward) for plan in dispatch.BACKWARD_PLANS.values())


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "case",
    [
        Case((150, 70), (56, 56), CAUSAL, (ONE_TILE, GATHER), (4, 1)),
        Case((350, 144), (64, 64), CAUSAL, (QUERY_TILES, GATHER)),
        Case((450, 333), (144, 144), CAUSAL, STORED),
    ],
    ids=str,
)
@pytest.mark.usefixtures("blind_filled_in")
def test_they_are_by_kernels_that_make_all_of_a_backward(
    gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, case: Case, order: str
) -> None:
    monkeypatch.setattr(one_tile_schedule, "ONE_KEY_TILE", ONE_TILE in case.runs)
    monkeypatch.setattr(query_tiles_schedule, "QUERY_TILES", QUERY_TILES in case.runs)
    monkeypatch.setattr(stored_ds_schedule, "MARGIN", -100.0)
    given = laid(inputs(case), order)
    check(case, given)
    assert tuple(gpu.ran[-len(case.runs) :]) == case.runs
    if case.runs == STORED:
        dispatch.reload()
        Little(monkeypatch, 1_000_000)
        gpu.ran.clear()
        check(case, given)
        assert gpu.ran[-1] in SPLIT


@pytest.mark.usefixtures("blind_filled_in")
def test_they_are_in_front_of_query_heads_as_one(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "pays", lambda *asked: True)
    leads = list[int]()
    for name in ("giving_forward", "giving_backward"):
        made = getattr(merging, name)
        monkeypatch.setattr(merging, name, lambda *given, made=made: leads.append(given[-1]) or made(*given))
    case = Case((150, 61), (64, 64), CAUSAL, (), (4, 1))
    check(case, laid(inputs(case, batch=2), "bshd"))
    assert leads == [89, 89]


@pytest.mark.usefixtures("blind_filled_in")
def test_heads_one_after_the_other_are_not_one_behind_them(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one key the queries behind see all there is. Rows of their heads lie at one stride where heads of q overlap."""
    monkeypatch.setattr(merging, "pays", lambda *asked: True)
    case = Case((60, 1), (64, 64), band(None, 40), (), (4, 2))
    given = inputs(case)
    strides = (given.q.stride(0), 41 * 64, 64, 1)
    q = torch.randn(given.q.numel(), dtype=given.q.dtype).as_strided(given.q.shape, strides)
    o, lse = fa2tune.attention(q, given.k, given.v, mask=case.mask, return_lse=True)
    given = reference.Inputs(q.contiguous(), given.k, given.v, given.do, given.dlse)
    verify.compare({"o": o, "lse": lse}, *reference.oracle_and_reference(given, mask=case.mask, gradients=False))


@pytest.mark.usefixtures("blind_filled_in")
def test_they_are_in_front_of_parts_put_together(gpu: PublicGpu) -> None:
    case = Case((420, 400), (256, 256), CAUSAL, ("sm90/fwd_split", COMBINE), (1, 1))
    given = inputs(case)
    o, lse = fa2tune.attention(given.q, given.k, given.v, causal=True, return_lse=True)
    verify.compare({"o": o, "lse": lse}, *reference.oracle_and_reference(given, mask=CAUSAL, gradients=False))
    assert tuple(gpu.ran) == case.runs


def test_heads_that_are_views_of_one_tensor(gpu: PublicGpu) -> None:
    """(batch, seqlen, 3, heads, dim), as a projection gives them."""
    case = Case((150, 150), (128, 128), CAUSAL, ("sm90/fwd", *FUSED))
    given = inputs(case)
    whole = torch.stack([one.transpose(1, 2) for one in (given.q, given.k, given.v)], 2)
    q, k, v = (one.transpose(1, 2) for one in whole.unbind(2))
    check(case, reference.Inputs(q, k, v, given.do, given.dlse))
    assert tuple(gpu.ran) == case.runs


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_goes_where_it_has_to(gpu: PublicGpu, where: str) -> None:
    given = inputs(Case((70, 300), (64, 64), FULL, ()))
    getattr(given, where)[0, 0, 7, 3] = torch.nan
    o = fa2tune.attention(given.q, given.k, given.v)
    expected, _ = reference.attention(given.q.double(), given.k.double(), given.v.double())
    assert torch.equal(o.isnan(), expected.isnan())


# ---- packed sequences

PACKING = ((1, 1), (0, 0), (130, 130), (70, 0), (0, 30), (64, 140), (5, 3))
SPARE = 9  #: rows behind the last sequence
PACKED = [
    Case((0, 0), (80, 80), CAUSAL, (ORDER, "sm90/fwd", *FUSED, GATHER), (4, 1)),
    Case((0, 0), (64, 64), band(40, 10), (ORDER, "sm90/fwd", *FUSED)),
    Case((0, 0), (80, 80), CAUSAL, (ORDER, "sm90/fwd", ORDER, *SPLIT), deterministic=True),
    Case((0, 0), (32, 32), FULL, (ORDER, "sm90/fwd", *FUSED)),
]


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences(gpu: PublicGpu, case: Case) -> None:
    check_packed(gpu, case)


@pytest.mark.parametrize(
    "case",
    [
        Case((0, 0), (80, 80), CAUSAL, (ORDER, GROUPED, *FUSED, GATHER), (4, 1)),
        Case((0, 0), (64, 64), band(7, 0), (ORDER, GROUPED, *FUSED), (4, 2), dtype="fp16"),
        Case((0, 0), (192, 128), FULL, (ORDER, GROUPED, ORDER, SPLIT[0], ORDER, *SPLIT, GATHER), (3, 1)),
    ],
    ids=str,
)
def test_packed_tiles_of_several_heads(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Where they serve, and are expected to pay wherever they can be had."""
    monkeypatch.setattr(packed_grouped_schedule, "SERVES", True)
    for margin in ("MARGIN", "SHARING_MARGIN"):
        monkeypatch.setattr(packed_grouped_schedule, margin, -math.inf)
    check_packed(gpu, case)


@pytest.mark.parametrize(
    "case",
    [
        Case((0, 0), (80, 80), CAUSAL, (ORDER, KEYS_SPLIT, COMBINE, *FUSED, GATHER), (4, 1)),
        Case((0, 0), (64, 64), band(40, 10), (ORDER, KEYS_SPLIT, COMBINE, *FUSED), dtype="fp16"),
        Case((0, 0), (128, 128), FULL, (ORDER, KEYS_SPLIT, COMBINE, *FUSED)),
    ],
    ids=str,
)
def test_packed_keys_split(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Where they are, and that is expected to pay."""

    def best(problem: Problem, _config: Config, found: Gpu, _row: Any) -> Config | None:
        best = packed_splits_schedule.best(problem, found)
        return best[1] if best else None

    monkeypatch.setattr(packed_splits_schedule, "config_of", best)
    monkeypatch.setattr(packed_grouped_schedule, "SERVES", False)
    check_packed(gpu, case)


def check_packed(gpu: PublicGpu, case: Case) -> None:
    """Both passes, and what ran."""
    ends = [list(itertools.accumulate(side)) for side in zip(*PACKING, strict=True)]
    given = inputs(case._replace(lengths=(ends[0][-1] + SPARE, ends[1][-1] + SPARE)))
    offsets = [torch.tensor([0, *side], dtype=torch.int32) for side in ends]
    q, k, v = (t[0].transpose(0, 1).contiguous().requires_grad_() for t in (given.q, given.k, given.v))
    options: dict[str, Any] = {"mask": case.mask, "deterministic": case.deterministic, "return_lse": True}
    o, lse = fa2tune.attention_varlen(q, k, v, *offsets, **options)
    gradients = torch.autograd.grad((o, lse), (q, k, v), (given.do[0].transpose(0, 1), given.dlse[0]))
    names = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=True))
    assert not any(one[ends[name in ("dk", "dv")][-1] :].any() for name, one in names.items())
    found = {name: one.transpose(0, 1)[None] for name, one in names.items()} | {"lse": lse.detach()[None]}
    right: list[dict[str, list[torch.Tensor]]] = [{name: [] for name in found} for _ in "12"]
    for (rows, keys), *last in zip(PACKING, *ends, strict=True):
        of_q, of_k = (slice(end - count, end) for end, count in zip(last, (rows, keys), strict=True))
        assert given.dlse is not None
        one = reference.Inputs(
            given.q[:, :, of_q], given.k[:, :, of_k], given.v[:, :, of_k], given.do[:, :, of_q], given.dlse[:, :, of_q]
        )
        for parts, answer in zip(right, reference.oracle_and_reference(one, mask=case.mask), strict=True):
            for name, part in answer.items():
                parts[name].append(part)
    found = {name: one[:, :, : ends[name in ("dk", "dv")][-1]] for name, one in found.items()}
    verify.compare(found, *({name: torch.cat(parts, 2) for name, parts in side.items()} for side in right))
    assert tuple(gpu.ran) == case.runs


def test_packed_calls_without_queries_have_gradients_each_time(gpu: PublicGpu) -> None:
    """The second time from the memo."""
    starts, ends = (torch.tensor([0, count], dtype=torch.int32) for count in (0, 5))
    for _ in range(2):
        q, k = (torch.randn(count, 4, 64, dtype=torch.bfloat16, requires_grad=True) for count in (0, 5))
        o = fa2tune.attention_varlen(q, k, k, cu_seqlens_q=starts, cu_seqlens_k=ends, max_seqlen_q=0, max_seqlen_k=5)
        dq, dk = torch.autograd.grad(o, (q, k), torch.zeros_like(o))
        assert dq.shape == q.shape and dk.shape == k.shape and not dk.any()
    assert not gpu.ran
