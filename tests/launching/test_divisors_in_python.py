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

from fa2tune.kernels.lib import division, hopper_forward
from fa2tune.search_spaces.sm90 import fwd
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

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


@pytest.mark.parametrize("number", [0, -1, 2**31])
def test_what_no_kernel_divides_by(number: int) -> None:
    with pytest.raises(ValueError, match=f"number must be from 1 to 2147483647 but is {number}"):
        division.divisor(number)


@pytest.mark.parametrize(("tiles", "band", "heads"), [(3, 4, 10), (5, 1, 7), (2, 16, 6), (1, 3, 3), (7, 22, 50)])
def test_tiles_in_bands(tiles: int, band: int, heads: int) -> None:
    """Every tile of every head once, bands of heads one after the other, inside a band the heads fastest."""
    given = division.of_bands(tiles, band, 1, heads, 1)
    by = division.Divisors(*((Int(given[name], True),) for name in division.BY))
    banded = kernels_in_python.in_python(division.banded)
    found = [
        tuple(int(one) for one in banded(Int(index), Int(tiles), Int(heads), Int(band), by)[:2])
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
    """HEADS_PER_WAVE 0: the host sends it."""
    check_forward(gpu, Call(((130, 200),), heads, (64, 64), mask, batch=2), {"HEADS_PER_WAVE": 0, **DIVISORS})


@pytest.mark.parametrize("mask", [CAUSAL, FULL, TOP_LEFT, band(100, 0), band(100, 100)], ids=str)
@pytest.mark.parametrize("columns", [64, 320, 512])
def test_the_host_sends_the_band_that_the_kernel_works_out(mask: Mask, columns: int) -> None:
    hooks, found = mask.hooks, set()
    in_band = kernels_in_python.in_python(hopper_forward.heads_in_band)
    for keys in (1, 200, 1023, 1024, 1025, 8191, 16384, 100_000, 1 << 20):
        sent = fwd.heads_in_band(Problem("bf16", 1, 2, 2, 100, keys, 64, 64, mask), columns)
        assert sent == int(in_band(Int(keys), columns, hooks.right and not hooks.left))
        found.add(sent)
    assert (1 in found) and (len(found) > 3) == (mask.name in (CAUSAL.name, TOP_LEFT.name))


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
