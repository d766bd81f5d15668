"""Packings drawn at random from fixed seeds: output, lse and gradients beside a float64 reference of each sequence. What no
sequence uses is NaN, in the inputs and in the gradient of the output: it may reach nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch

import fa2tune
from fa2tune.measuring import reference
from fa2tune.spec.mask import Mask, band, mask_of
from fa2tune.spec.score import score_of

SEEDS = range(16)
NEAR = {torch.float32: 1e-5, torch.float16: 6e-3}


pytestmark = pytest.mark.usefixtures("no_rows")


@dataclass(frozen=True)
class Side:
    """Rows of queries or of keys: of each sequence how many there are and how many are used, and how many lie behind."""

    lengths: list[int]
    used: list[int]
    spare: int

    @property
    def total(self):
        return sum(self.lengths) + self.spare

    @property
    def places(self):
        """(first, behind the last) used row of each sequence."""
        starts = accumulate(self.lengths, initial=0)
        return [(start, start + some) for (start, _), some in zip(pairwise(starts), self.used, strict=True)]

    @property
    def here(self):
        found = torch.zeros(self.total, dtype=torch.bool)
        for first, end in self.places:
            found[first:end] = True
        return found

    def starts(self, absent):
        """Offsets; those of ``absent`` sequences repeat the last."""
        ends = [*accumulate(self.lengths, initial=0)]
        return torch.tensor([*ends, *[ends[-1]] * absent], dtype=torch.int32)

    def seqused(self, absent):
        return torch.tensor([*self.used, *[0] * absent], dtype=torch.int32)


@dataclass(frozen=True)
class Drawn:
    queries: Side
    keys: Side
    absent: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    options: dict
    partly: bool  #: used lengths are given


def drawn(seed):
    source = random.Random(seed)
    count, partly = source.randint(1, 4), source.random() < 0.4

    def side(like=None):
        lengths = like or [source.choice((0, source.randint(1, 9), source.randint(10, 30))) for _ in range(count)]
        used = [source.randint(0, length) if partly else length for length in lengths]
        return Side(lengths, used, source.choice((0, source.randint(1, 9))))

    queries = side()
    keys = side(queries.lengths) if source.random() < 0.4 else side()
    options = source.choice((
        {}, {"causal": True}, {"causal": True, "window": (source.randint(0, 12), 0)},
        {"window": (source.choice((None, source.randint(0, 9))), source.randint(0, 9))},
        {"mask": Mask("chunked", source.randint(1, 16))}, {"mask": band(source.randint(0, 9), None)},
    ))  # fmt: skip
    if source.random() < 0.2:
        options["softcap"] = 3.0
    if source.random() < 0.3:
        options["max_seqlen_q"] = options["max_seqlen_k"] = max(queries.lengths + keys.lengths)
    dtype = torch.float16 if source.random() < 0.3 else torch.float32
    heads, dim = source.choice(((1, 1), (2, 1), (2, 2))), source.choice((16, 24, 32))
    dims = dim, source.choice((dim, 16))
    return Drawn(queries, keys, source.choice((0, 0, 2)), heads, dims, dtype, options, partly)


def wanted(case, q, k, v, do):
    """o, lse, dq, dk, dv in float64, 0 (lse: -inf) where no sequence is."""
    options = case.options
    mask = mask_of(options.get("causal", False), options.get("window"), options.get("mask"))
    o, lse = torch.zeros_like(do), torch.full((q.shape[1], len(q)), -torch.inf, dtype=torch.float64)
    gradients = [torch.zeros_like(t) for t in (q, k, v)]
    for (first, end), (begin, last) in zip(case.queries.places, case.keys.places, strict=True):
        if first == end:
            continue
        leaves = [t.clone().requires_grad_() for t in (q[first:end], k[begin:last], v[begin:last])]
        one, one_lse = reference.attention(
            *(t.transpose(0, 1)[None] for t in leaves), mask=mask, score=score_of(options.get("softcap"))
        )
        o[first:end], lse[:, first:end] = one[0].transpose(0, 1).detach(), one_lse[0].detach()
        seen = one_lse.isfinite()
        loss = (one[0].transpose(0, 1) * do[first:end]).sum() + one_lse[seen].sum()
        found = torch.autograd.grad(loss, leaves)
        for whole, part, (here, behind) in zip(gradients, found, ((first, end), *[(begin, last)] * 2), strict=True):
            whole[here:behind] = part
    return o, lse, *gradients


@pytest.mark.parametrize("seed", SEEDS)
def test_a_packing(seed):
    case = drawn(seed)
    generator = torch.Generator().manual_seed(seed)
    (heads, heads_kv), (dim, dim_v) = case.heads, case.dims
    shapes = (case.queries.total, heads, dim), (case.keys.total, heads_kv, dim), (case.keys.total, heads_kv, dim_v)
    q, k, v = (torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes)
    do = torch.randn(case.queries.total, heads, dim_v, generator=generator).to(case.dtype)
    right = wanted(case, *(t.double() for t in (q, k, v, do)))
    for tensor, side in ((q, case.queries), (do, case.queries), (k, case.keys), (v, case.keys)):
        tensor[~side.here] = torch.nan
    used = {"seqused_q": case.queries.seqused(case.absent), "seqused_k": case.keys.seqused(case.absent)}
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    o, lse = fa2tune.attention_varlen(
        *leaves, case.queries.starts(case.absent), case.keys.starts(case.absent), return_lse=True,
        **case.options, **(used if case.partly else {}),
    )  # fmt: skip
    seen = right[1].isfinite()
    assert torch.equal(lse.isfinite(), seen)
    gradients = torch.autograd.grad((o, lse), leaves, (do, seen.float()))
    near = NEAR[case.dtype]
    for name, found, expected in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients), right, strict=True):
        assert not found.isnan().any(), name
        torch.testing.assert_close(found.double(), expected, atol=near, rtol=near, msg=lambda said: f"{case}: {said}")


def test_the_seeds_draw_every_kind():
    cases = [drawn(seed) for seed in SEEDS]
    for kind in (
        lambda c: 0 in c.queries.lengths, lambda c: 0 in c.keys.lengths, lambda c: c.partly, lambda c: c.absent,
        lambda c: c.queries.spare, lambda c: c.queries.lengths != c.keys.lengths, lambda c: c.dtype == torch.float16,
        lambda c: c.heads == (2, 1), lambda c: c.dims[0] != c.dims[1], lambda c: "softcap" in c.options,
        lambda c: "window" in c.options, lambda c: "mask" in c.options, lambda c: c.options.get("causal"),
    ):  # fmt: skip
        assert any(map(kind, cases)) and not all(map(kind, cases))
