"""Division by what the host sends (kernels/lib/division.py), and the Hopper kernels that have it, run by Python
(tests/kernels_in_python.py) beside float64 attention."""

from __future__ import annotations

import random
from typing import Any

import kernels_in_python
import pytest
from gpu_in_python import PythonGpu
from kernel_values import Fault, Int
from test_computed_in_python import BACKWARDS, FORWARDS, SPLIT, TOP_LEFT, Call, check_backward, check_forward

from fa2tune.kernels.lib import division
from fa2tune.spec.mask import CAUSAL, FULL

MOST = 2**31 - 1
DIVISORS = {"DIVISORS": True}
#: Bands that end in the middle of the heads, of one head, and wider than all of them.
BANDS = [{"HEADS_PER_WAVE": band, **DIVISORS} for band in (1, 4, 16)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


def divided(dividend: int, number: int) -> int:
    divide = kernels_in_python.in_python(division.divide)
    return int(divide(Int(dividend), Int(number), (Int(division.divisor(number), True),)))


def numbers() -> list[int]:
    source = random.Random(0)
    near = [power + off for exponent in range(31) for power in (1 << exponent,) for off in (-1, 0, 1)]
    return [one for one in near if 1 <= one <= MOST] + [source.randint(1, MOST) for _ in range(100)]


@pytest.mark.parametrize("number", numbers())
def test_every_quotient_is_the_one_of_a_division(number: int) -> None:
    """Dividends next to multiples, where a quotient steps, and the largest."""
    source = random.Random(number)
    steps = [number * source.randint(0, MOST // number) for _ in range(20)] + [MOST // number * number]
    for dividend in {0, MOST, *(step + off for step in steps for off in (-1, 0, 1))}:
        if 0 <= dividend <= MOST:
            assert divided(dividend, number) == dividend // number


def test_a_divisor_fits_its_argument() -> None:
    assert all(0 <= division.divisor(number) < 2**37 for number in numbers())


@pytest.mark.parametrize(("tiles", "band", "heads"), [(3, 4, 10), (5, 1, 7), (2, 16, 6), (1, 3, 3), (7, 22, 50)])
def test_tiles_in_bands(tiles: int, band: int, heads: int) -> None:
    """Every tile of every head once, bands of heads one after the other, inside a band the heads fastest."""
    given = division.of_bands(tiles, band, 1, heads, 1)
    by = division.Divisors(*((Int(given[name], True),) for name in division.BY))
    banded = kernels_in_python.in_python(division.banded)
    found = [
        tuple(int(one) for one in banded(Int(index), Int(tiles), Int(heads), Int(band), by))
        for index in range(tiles * heads)
    ]
    bands = [range(first, min(first + band, heads)) for first in range(0, heads, band)]
    assert found == [(tile, head) for together in bands for tile in range(tiles) for head in together]


@pytest.mark.parametrize("more", BANDS, ids=str)
@pytest.mark.parametrize(("call", "settings"), FORWARDS, ids=str)
def test_forward(gpu: PythonGpu, call: Call, settings: dict[str, Any], more: dict[str, Any]) -> None:
    check_forward(gpu, call, {**settings, **more})


@pytest.mark.parametrize("heads", [(6, 2), (5, 5), (3, 1)], ids=str)
@pytest.mark.parametrize("mask", [CAUSAL, FULL, TOP_LEFT], ids=str)
def test_heads_in_the_band_that_suits_the_length(gpu: PythonGpu, heads: tuple[int, int], mask: Any) -> None:
    """HEADS_PER_WAVE 0: what the kernel works out the host sends."""
    check_forward(gpu, Call(((130, 200),), heads, (64, 64), mask, batch=2), {"HEADS_PER_WAVE": 0, **DIVISORS})


@pytest.mark.parametrize("more", BANDS, ids=str)
@pytest.mark.parametrize(("call", "settings"), SPLIT, ids=str)
def test_split_backward(gpu: PythonGpu, call: Call, settings: dict[str, Any], more: dict[str, Any]) -> None:
    check_backward(gpu, call, {**settings, **more}, "sm90/bwd_dq,sm90/bwd_dkdv")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1)], ids=str)
def test_split_backward_of_groups_in_parts(gpu: PythonGpu, heads: tuple[int, int], parts: int) -> None:
    call = Call(((130, 150),), heads, (128, 128), CAUSAL, batch=2)
    check_backward(gpu, call, {"HEADS_PER_WAVE": 4, **DIVISORS}, "sm90/bwd_dq,sm90/bwd_dkdv", parts=parts)


@pytest.mark.parametrize("band", [1, 4, 16])
@pytest.mark.parametrize("form", ["concatenated", "from registers", "apart, by TMA"])
@pytest.mark.parametrize("heads", [(6, 2), (5, 5)], ids=str)
def test_fused_backward(gpu: PythonGpu, heads: tuple[int, int], form: str, band: int) -> None:
    """EARLY_START has them."""
    call = Call(((130, 150),), heads, (64, 64), CAUSAL, batch=2)
    check_backward(gpu, call, {**BACKWARDS[form], "HEADS_PER_WAVE": band, "EARLY_START": True})


def test_a_wrong_divisor_is_found(gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one head more: a tile is then computed twice, and another one not at all."""
    made = division.divisor
    monkeypatch.setattr(division, "divisor", lambda number: made(number + 1))
    with pytest.raises((Fault, AssertionError)):
        check_forward(gpu, Call(((200, 200),), (6, 2), (64, 64), FULL, batch=2), {"HEADS_PER_WAVE": 4, **DIVISORS})
