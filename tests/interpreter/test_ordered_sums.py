"""Sums of dQ in a fixed order: what sets them to zero, and what adds them up, in Triton's interpreter."""

from __future__ import annotations

import torch

from fa2tune.compiling.registry import variant_named
from fa2tune.launching.launch import Workspace, bind, strides_of
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Problem

BUFFERS, ROWS = 3, 128
ASKED = Problem("fp16", 2, 3, 3, 101, 90, 40, 40, FULL)


def launched(name, **tensors):
    variant, spec = variant_named(name), ASKED.specialization
    strides = {name: strides_of(tensor) for name, tensor in tensors.items() if name != "sums"}
    scalars = {"rows_padded": ROWS, "DQ_BUFFERS": BUFFERS}
    places = {"sums": Workspace(tuple(tensors["sums"].shape), torch.float32, 0)}
    bound = bind(variant, ASKED, variant.space.default(spec, 80), strides, 0.25, tuple(tensors), -1, places, scalars)
    bound(*tensors.values())


def test_all_but_the_first_are_set_to_zero():
    sums = torch.full((BUFFERS, 2, 3, ROWS, 64), float("nan"))
    sums[0] = 1.0
    launched("sm80/bwd_ordered_zero", sums=sums)
    assert (sums[0] == 1.0).all() and (sums[1:] == 0.0).all()


def test_they_are_added_up_from_first_to_last_and_put_back_in_place():
    torch.manual_seed(0)
    dq = torch.randn(BUFFERS, 2, 3, ROWS, 64) * torch.tensor([1.0, 1e-3, 1e3]).view(3, 1, 1, 1, 1)
    # row / 8, row % 8, column / 8, column % 8 / 2, column % 2 -> as the kernel adds them
    tiles = dq.view(BUFFERS, 2, 3, ROWS // 8, 8, 8, 4, 2)
    sums = tiles.permute(0, 1, 2, 3, 5, 7, 4, 6).reshape(dq.shape).contiguous()
    found = torch.full((2, 3, 101, 40), float("nan"), dtype=torch.float16)
    launched("sm80/bwd_ordered_finish", sums=sums, dq=found)
    expected = ((dq[0] + dq[1]) + dq[2]) * 0.25
    assert torch.equal(found, expected[:, :, :101, :40].half())
