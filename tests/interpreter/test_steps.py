"""Kernels that run before and after a variant's own, on workspaces that they share, under two names for one memory."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from fa2tune.compiling import registry
from fa2tune.launching import launch, passes
from fa2tune.search_spaces.portable import fwd_norms
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import SearchSpace, Variant


@triton.jit
def prepare_kernel(
    do,
    sums,
    stride_dob,
    stride_doh,
    stride_dom,
    rows_padded,
    heads_q,
    seqlen_q,
    FACTOR: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """sums [B, Hq, rows_padded, COLUMNS] = FACTOR * do, zeros past the end."""
    head, row = tl.program_id(0) // rows_padded, tl.program_id(0) % rows_padded
    d = tl.arange(0, COLUMNS)
    source = do + (head // heads_q) * stride_dob + (head % heads_q) * stride_doh + row * stride_dom
    values = tl.load(source + d, mask=(d < COLUMNS) & (tl.zeros_like(d) + row < seqlen_q), other=0.0).to(tl.float32)
    tl.store(sums + (head * rows_padded + row) * COLUMNS + d, values * FACTOR)


@triton.jit
def main_kernel(words, dk, dv, total, seqlen_k, COLUMNS: tl.constexpr):
    """Adds 1 to every word; dk and dv are zeroed, one row a program (dense, one head)."""
    d = tl.arange(0, COLUMNS)
    word = words + tl.program_id(0) * COLUMNS + d
    tl.store(word, tl.load(word, mask=d < total, other=0.0) + 1.0)
    inside = (d < COLUMNS) & (tl.zeros_like(d) + tl.program_id(0) < seqlen_k)
    tl.store(dk + tl.program_id(0) * COLUMNS + d, tl.zeros([COLUMNS], dk.dtype.element_ty), mask=inside)
    tl.store(dv + tl.program_id(0) * COLUMNS + d, tl.zeros([COLUMNS], dv.dtype.element_ty), mask=inside)


@triton.jit
def finish_kernel(words, dq, softmax_scale, rows_padded, stride_dqm, COLUMNS: tl.constexpr):
    """dq = softmax_scale * words, without the padding (one head)."""
    d = tl.arange(0, COLUMNS)
    values = tl.load(words + tl.program_id(0) * COLUMNS + d) * softmax_scale
    tl.store(dq + tl.program_id(0) * stride_dqm + d, values.to(dq.dtype.element_ty))


def fixed(name: str, **config: int) -> SearchSpace:
    return SearchSpace(name, {key: (value,) for key, value in config.items()}, (), lambda spec, arch: dict(config))


def padded(problem: Problem) -> int:
    return -(-problem.seqlen_q // 16) * 16


PREPARE = Variant(prepare_kernel, fixed("prepare", num_warps=4), {"do": "", "sums": "fp32"}, {}, name="prepare",
                  grid=lambda problem, config, _sm_count, _early: padded(problem))  # fmt: skip
FINISH = Variant(finish_kernel, fixed("finish", num_warps=4), {"words": "fp32", "dq": ""}, {}, name="finish",
                 grid=lambda problem, config, _sm_count, _early: problem.seqlen_q)  # fmt: skip
MAIN = Variant(
    main_kernel, fixed("odd", COLUMNS=16, FACTOR=3, num_warps=4),
    {"words": "fp32", "dk": "", "dv": ""}, {}, grid=lambda problem, config, _sm_count, _early: padded(problem),
    name="bwd_fused_odd", serves="bwd_fused",
    before=("prepare",), after=("finish",),
    passes_on=lambda spec, config: {"FACTOR": config["FACTOR"], "COLUMNS": spec.head_dim},
    workspaces=lambda problem, config: {
        "words": ((problem.batch, problem.heads_q, padded(problem), problem.head_dim), "fp32"), "sums": "words"},
    scalars=lambda problem, config, _early: {"rows_padded": padded(problem), "total": 1 << 20},
)  # fmt: skip


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    found = {**registry.variants(), **{variant.name: variant for variant in (PREPARE, MAIN, FINISH)}}
    found = {name: variant for name, variant in found.items() if variant.portable or variant in (PREPARE, MAIN, FINISH)}
    monkeypatch.setattr(registry, "variants", lambda: found)
    registry.implementations.cache_clear()
    yield dict(MAIN.space.default(None, 0))  # type: ignore[arg-type]
    registry.implementations.cache_clear()


def test_kernels_around_a_kernel_share_its_workspaces(config: Config) -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty fills with NaN
    try:
        q, k, v, do = (torch.randn(1, 1, 21, 16, dtype=torch.float16) for _ in range(4))
        lse = torch.zeros(1, 1, 21)
        for _ in range(2):
            dq, dk, dv = passes.backward(
                do, None, q, k, v, q, lse, mask=FULL, softmax_scale=0.5, strategy="fused", configs={"bwd_fused": config}
            )
            torch.testing.assert_close(dq, ((3 * do.float() + 1) * 0.5).to(dq.dtype))
            assert not dk.any() and not dv.any()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("length", [1, 63, 200, 2049, 5000])
def test_norms_of_keys(dtype: torch.dtype, dim: int, length: int) -> None:
    """Of each part of a head's keys, whatever the strides; keys of nothing, parts without keys, infinity and NaN among them."""
    whole = torch.full((2, length + 1, 3, dim + 8), float("nan"), dtype=dtype)
    k = whole[:, 1:, :, :dim].transpose(1, 2).copy_(torch.randn(2, 3, length, dim))
    k[0, 1] = 0.0
    k[1, 0, length // 2, 3] = float("inf")
    k[1, 2, 0, 5] = float("nan")
    q = torch.empty(2, 6, 1, dim, dtype=dtype, device="meta")
    asked = passes.describe(q, k, k, FULL, 1.0)
    norms = registry.variant_named("portable/fwd_norms")
    config = norms.space.default(asked.specialization, 90)
    found = torch.full(fwd_norms.norms_shape(asked), float("nan"))
    bound = launch.bind(norms, asked, config, {"k": launch.strides_of(k)}, 1.0, ("k", "norms"), -1)
    bound(k, found)
    squares = k.double().square().sum(-1).clamp(min=fwd_norms.SMALLEST)
    expected = squares.nan_to_num(nan=0.0, posinf=float("inf")).sqrt().amax(-1).float()
    torch.testing.assert_close(found.amax(-1), expected, rtol=1e-5, atol=1e-12)  # sums of 64 squares in float32
    parts = -(-length // fwd_norms.PARTS)
    block = config["BLOCK_R"]
    rows = -(-parts // block) * block
    for part in range(fwd_norms.PARTS):
        own = squares[..., part * rows : (part + 1) * rows].nan_to_num(nan=0.0, posinf=float("inf"))
        largest = own.sqrt().amax(-1).float() if own.shape[-1] else torch.full((2, 3), fwd_norms.SMALLEST**0.5)
        torch.testing.assert_close(found[..., part], largest, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("starts", [(0, 40, 40, 2140, 2143), (0,), (-7, 2000, 9000, 50)], ids=["", "none", "wrong"])
def test_norms_of_packed_keys(starts: tuple[int, ...]) -> None:
    """Of each sequence its own, and of none behind the last one; NaN between them, and wrong offsets read no row outside."""
    rows, heads = 2150, 2
    k = torch.randn(1, rows, heads, 24, dtype=torch.float16).transpose(1, 2)
    k[:, :, max(starts) :] = float("nan")
    q = torch.empty(1, 4, 1, 24, dtype=torch.float16, device="meta")
    asked = passes.describe(q, k, k, FULL, 1.0, extent=Extent(RAGGED, len(starts) - 1))
    norms = registry.variant_named("portable/fwd_norms")
    found = torch.full(fwd_norms.norms_shape(asked), float("nan"))
    names = ("k", "norms", "cu_seqlens_k")
    config = norms.space.default(asked.specialization, 90)
    launch.bind(norms, asked, config, {"k": launch.strides_of(k)}, 1.0, names, -1)(
        k, found, torch.tensor(starts, dtype=torch.int32)
    )
    assert found.shape[:2] == (heads, len(starts))
    largest = found.amax(-1)
    assert (largest[:, -1] == fwd_norms.SMALLEST**0.5).all()
    for number, ends in enumerate(pairwise(starts)):
        first, end = (min(max(one, 0), rows) for one in ends)
        squares = k[0, :, first:end].double().square().sum(-1).nan_to_num(nan=0.0).clamp(min=fwd_norms.SMALLEST)
        right = squares.amax(-1).sqrt().float() if end > first else torch.full((heads,), fwd_norms.SMALLEST**0.5)
        torch.testing.assert_close(largest[:, number], right, rtol=1e-5, atol=1e-12)
