"""Products of the columns that are used, in public calls on the GPU: the error rule, and the same bits as of whole tiles."""

from __future__ import annotations

import pytest
import torch

import fa2tune
from fa2tune.calling import dispatch
from fa2tune.launching import launch
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.lib import hopper
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import Problem

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DIMS = [
    (104, 104),
    (120, 120),
    (168, 168),
    (176, 176),
    (200, 200),
    (208, 208),
    (248, 248),
    (208, 104),
    (176, 64),
    (64, 176),
    (96, 176),
]
CASES = [
    *((dims, mask) for dims in DIMS for mask in (FULL, CAUSAL)),
    ((104, 104), band(100, 0)),
    ((208, 208), band(100, 0)),
]


def of_whole_tiles(monkeypatch):
    """From now on kernels are loaded anew, and multiply whole tiles."""
    for module in (hopper, bwd_fused):
        monkeypatch.setattr(module, "trimmed", lambda *_, **__: {})
    launch.load.cache_clear()
    dispatch.reload()


@pytest.fixture(autouse=True)
def reloaded():
    yield
    launch.load.cache_clear()
    dispatch.reload()


def computed(inputs, problem, deterministic):
    q, k, v = (one.detach().requires_grad_() for one in (inputs.q, inputs.k, inputs.v))
    o, lse = fa2tune.attention(
        q, k, v, mask=problem.mask, softmax_scale=problem.head_dim**-0.5, return_lse=True, deterministic=deterministic
    )
    gradients = torch.autograd.grad((o, lse), (q, k, v), (inputs.do, inputs.dlse))
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


@pytest.mark.parametrize(("dims", "mask"), CASES, ids=str)
def test_results_are_right_and_those_of_whole_tiles(dims, mask, monkeypatch):
    """Grouped heads of few tiles, more tiles than there are programs, few queries of many keys."""
    problems = [
        Problem("bf16", 2, 6, 2, 333, 460, *dims, mask), Problem("bf16", 3, 20, 20, 1100, 1100, *dims, mask),
        Problem("bf16", 1, 2, 2, 300, 5000, *dims, mask),
    ]  # fmt: skip
    found = []
    for problem in problems:
        inputs = reference.make_inputs(problem, "cuda", on_device=True, with_dlse=True)
        expected = reference.oracle_and_reference(inputs, mask=mask, softmax_scale=problem.head_dim**-0.5)
        with verify._strict("ieee"):
            for deterministic in (False, True):
                mine = computed(inputs, problem, deterministic)
                verify.compare(mine, *expected)
        found.append((problem, inputs, mine))
    of_whole_tiles(monkeypatch)
    for problem, inputs, mine in found:
        with verify._strict("ieee"):
            whole = computed(inputs, problem, deterministic=True)
        for name, tensor in whole.items():
            assert torch.equal(mine[name], tensor), f"{problem}: {name}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [104, 176, 208, 224])
def test_packed_sequences(dim, causal, monkeypatch):
    lengths = [300, 1, 77, 900, 128]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")

    def both(q, k, v, do):
        o = fa2tune.attention_varlen(
            q, k, v, starts, starts, max(lengths), max(lengths), causal=causal, deterministic=True
        )
        return o, *torch.autograd.grad(o, (q, k, v), do)

    total = sum(lengths)
    q, do = (torch.randn(total, 6, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(total, 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tensors = [one.requires_grad_() for one in (q, k, v)]
    mine = both(*tensors, do)
    begin = 0
    for length in lengths:
        one = slice(begin, begin := begin + length)
        alone = [each.detach()[one].transpose(0, 1)[None].requires_grad_() for each in (q, k, v)]
        o = fa2tune.attention(*alone, causal=causal, deterministic=True)
        theirs = o, *torch.autograd.grad(o, alone, do[one].transpose(0, 1)[None])
        for packed, dense in zip(mine, theirs, strict=True):
            dense = dense[0].transpose(0, 1)
            assert (packed[one] - dense).abs().max() <= 0.02 * dense.abs().max() + 1e-3
    of_whole_tiles(monkeypatch)
    for trimmed, whole in zip(mine, both(*tensors, do), strict=True):
        assert torch.equal(trimmed, whole)
