"""What tiles visit, counted on the host by the functions that kernels ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa2tune.spec import maskfile, visits
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band

MASKS = (
    FULL, CAUSAL, Mask("causal_top_left"), Mask("causal_stacked", 3), band(20, 0), band(7, 30), Mask("chunked", 32),
)  # fmt: skip


def test_which_masks_have_their_longest_tiles_last() -> None:
    """Those for which the kernels turn the order of tiles around: RIGHT_BOUNDED and not LEFT_BOUNDED."""
    assert [visits.longest_last(mask) for mask in MASKS] == [False, True, True, True, False, False, False]
    assert [visits.bounded(mask) for mask in MASKS] == [False, *[True] * 6]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_key_blocks_are_those_with_a_visible_pair(mask: Mask) -> None:
    for seqlen_q, seqlen_k, rows, keys in ((130, 130, 32, 16), (70, 200, 16, 32), (200, 70, 64, 64), (1, 33, 16, 16)):
        tiles, blocks = -(-seqlen_q // rows), -(-seqlen_k // keys)
        i, j = np.arange(tiles * rows)[:, None], np.arange(blocks * keys)
        seen = np.broadcast_to(mask.visible(i, j, seqlen_q, seqlen_k), (len(i), len(j))) & (j < seqlen_k)
        some = seen.reshape(tiles, rows, blocks, keys).any((1, 3))
        first, end = visits.key_blocks(mask, seqlen_q, seqlen_k, rows, keys)
        for tile in range(tiles):
            visited = [*some[tile].nonzero()[0]]
            assert visited == [*range(first[tile], end[tile])] or (not visited and end[tile] - first[tile] == 1)


def test_a_mask_that_branches_is_asked_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel asks it; without a branch all tiles are asked at once."""
    asked: list[Any] = []

    def key_range(start: Any, size: int, offset: int, seqlen_k: int, window: Any, step: int) -> Any:
        asked.append(start)
        if start + offset > 20:
            return 0, 0, 0, seqlen_k
        return 0, 0, 0, 16

    expected = visits.keys_of_tiles(FULL, 64, 64, 16, 16)
    assert [found.tolist() for found in expected] == [[0] * 4, [0] * 4, [64] * 4, [64] * 4]
    monkeypatch.setattr(visits, "_hook", lambda name, function: key_range)
    found = visits.keys_of_tiles(FULL, 64, 64, 16, 16)
    assert found.end.tolist() == [16, 16, 64, 64]
    assert asked[1:] == [0, 16, 32, 48]
    plain, masked = found.trips(16)
    assert (plain.tolist(), masked.tolist()) == ([0] * 4, [1, 1, 4, 4])


def test_a_function_that_a_mask_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    visits._hook.cache_clear()
    monkeypatch.setattr(maskfile, "hooks_of", lambda name: frozenset({"key_range"}))
    with pytest.raises(ValueError, match=r"kernels/masks/chunked.py: blocks_below is missing, which kernels ask"):
        visits.key_blocks(Mask("chunked", 8), 16, 16, 16, 16)
    visits._hook.cache_clear()
