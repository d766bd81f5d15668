"""Bands of heads of the kernels of kernels/sm80: by the heads of the call, without another binary."""

from __future__ import annotations

import pytest

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.compiling import compiler
from fa2tune.search_spaces.lib.ampere import even_bands
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem

ROW = {"HEADS_PER_WAVE": 16}


def posed(batch: int, heads: int, length: int, mask: Mask = CAUSAL, heads_kv: int | None = None) -> Problem:
    return Problem("bf16", batch, heads, heads_kv or heads, length, length, 128, 128, mask)


@pytest.mark.parametrize(
    ("heads", "found"), [(1, 16), (8, 16), (16, 16), (21, 21), (31, 31), (32, 16), (56, 19), (64, 16), (84, 17), (168, 17)]
)  # fmt: skip
def test_bands_are_alike(heads: int, found: int) -> None:
    """The row's where these are whole; none is narrower than the row's, but where there are fewer heads."""
    config = even_bands(posed(1, heads, 4096), ROW, heads)
    assert config == {"HEADS_PER_WAVE": found}
    last = heads - (-(-heads // found) - 1) * found
    assert last > found // 2 or heads < 16


@pytest.mark.parametrize(("length", "found"), [(0, 672), (512, 68), (1024, 34), (2048, 17), (4096, 17)])
def test_bands_of_short_sequences_have_more_heads(length: int, found: int) -> None:
    heads = 672 * 512 // max(512, length)
    assert even_bands(posed(1, heads, length), ROW, heads, 1 << 15) == {"HEADS_PER_WAVE": found}


def test_only_tiles_of_a_causal_mask_have_an_order() -> None:
    packed = Problem("bf16", 1, 84, 84, 4096, 4096, 128, 128, CAUSAL, extent=Extent(RAGGED, 3))
    for problem in (posed(4, 21, 4096, FULL), posed(4, 21, 4096, Mask("band", 100, 0)), packed):
        assert even_bands(problem, ROW, 84) == ROW


def test_calls_have_them() -> None:
    """Query heads count for the forward, key heads for the backward."""
    gpu = gpus.named("a100")
    plain, grouped = posed(4, 16, 4096), posed(2, 28, 4096, heads_kv=4)
    for kernel, others in (("fwd", 19), ("bwd_fused", 16)):
        whole, call = (choosing.choose(problem, kernel, gpu) for problem in (plain, grouped))
        assert whole.config == {**call.config, "HEADS_PER_WAVE": 16} and call.config["HEADS_PER_WAVE"] == others
        binaries = [compiler.binary_config(choice.variant, choice.config) for choice in (whole, call)]
        assert binaries[0] == binaries[1] and whole.variant.name == f"sm80/{kernel}"
