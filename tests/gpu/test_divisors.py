"""Hopper kernels with divisors from the host (DIVISORS), by the error rule: bands that end in the middle of the heads, and more
tiles than programs. Those of the fused backward: test_early_start.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_cases import check, specialized

from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem
from fa2tune.spec.variant import Variant

KERNELS = ("fwd", "bwd_dq", "bwd_dkdv")
#: Of a GPU that has them.
FOUND: list[Variant] = list(specialized(KERNELS)) if torch.cuda.is_available() else []
pytestmark = pytest.mark.skipif(not FOUND, reason="no warp-specialised kernels for this GPU")
LENGTHS = ((113, 203), (1003, 517), (300, 300))


@pytest.mark.parametrize("changes", [{"HEADS_PER_WAVE": 4}, {"HEADS_PER_WAVE": 64}], ids=str)
@pytest.mark.parametrize(("dim", "mask"), [(128, CAUSAL), (64, FULL), (192, CAUSAL)], ids=str)
@pytest.mark.parametrize("variant", FOUND, ids=lambda variant: variant.short_name)
def test_results(variant: Variant, dim: int, mask: Mask, changes: dict[str, Any]) -> None:
    for lengths, heads in ((LENGTHS[0], (6, 2)), (LENGTHS[1], (5, 5)), (LENGTHS[2], (134, 67))):
        asked = Problem("bf16", 2, *heads, *lengths, dim, dim, mask.fitted(*lengths))
        config = {**variant.space.default(asked.specialization, 90), **changes, "DIVISORS": True}
        check(variant, config, asked)


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_heads_in_the_band_that_suits_the_length(mask: Mask) -> None:
    variant = next(one for one in FOUND if one.serves == "fwd")
    for lengths in LENGTHS:
        asked = Problem("bf16", 3, 7, 7, *lengths, 64, 64, mask.fitted(*lengths))
        config = {**variant.space.default(asked.specialization, 90), "HEADS_PER_WAVE": 0, "DIVISORS": True}
        check(variant, config, asked)
