"""The Hopper backward under masks that rows are not measured with, without a GPU: what its hooks compile to, and in which order
a key tile visits its query blocks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import pytest
from hopper_builds import Asked, Built, asked_of, builder, chosen
from test_mask_hooks import GLUON, MASKS, hook

from fa2tune import gpus
from fa2tune.compiling import limits, registry
from fa2tune.spec import maskfile
from fa2tune.spec.mask import Mask
from fa2tune.spec.problem import Specialization

H200 = gpus.named("h200")
#: kernel, head dim, beside the default: both forms of the fused kernel, both of dK and dV
FORMS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("sm90/bwd_fused", 128, {"ORDER": "behind", "REDUCE": "tma", "EXPONENTIALS_FIRST": True}),
    ("sm90/bwd_fused", 128, {"ORDER": "together", "REDUCE": "vector", "BESIDE": True, "FINISH_BESIDE": True, "num_warps": 8}),
    ("sm90/bwd_fused", 64, {"ORDER": "together", "REDUCE": "tma", "BESIDE": True, "FINISH_BESIDE": True}),
    ("sm90/bwd_dq", 128, {}), ("sm90/bwd_dkdv", 128, {}), ("sm90/bwd_dkdv", 256, {}),
)  # fmt: skip


def asked(name: str, dim: int, changes: dict[str, Any], mask: str) -> Asked:
    variant, spec = registry.variant_named(name), Specialization("bf16", dim, dim, mask)
    config = {**variant.space.default(spec, 90), **changes}
    assert limits.before_compile(variant, spec, config, H200) is None
    return asked_of(variant, spec, config)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[Asked], Built]]:
    forms = chosen(request, "form")
    with builder([asked(*form, mask) for form in forms for mask in ("causal", "band", "chunked")]) as found:
        yield found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_masks_compile_to(built: Callable[[Asked], Built], form: tuple[str, int, dict[str, Any]]) -> None:
    """No product is serialised, few words are spilled, and no loop is copied but that of dQ."""
    causal = built(asked(*form, "causal"))
    products = {"causal": sum(one.startswith("HGMMA") for one in causal.operations)}
    for mask in ("band", "chunked"):
        found = built(asked(*form, mask))
        assert "Compiling entry function" in found.said and not re.findall(r"C75\d\d", found.said)
        assert found.binary.spills <= causal.binary.spills + 8
        products[mask] = sum(one.startswith("HGMMA") for one in found.operations)
    whole, band, chunked = products.values()
    assert band == chunked == (whole * 3 // 2 if form[0] == "sm90/bwd_dq" else whole)


def plain(function: Any, **names: Any) -> Callable[..., Any]:
    """A device function as plain Python."""
    return FunctionType(function.fn.__code__, {"gl": GLUON, **names}, "plain")


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_query_block_is_visited_once_and_the_masked_ones_first(mask: Mask) -> None:
    from fa2tune.kernels.lib import hopper_blocks

    left, ask = maskfile.mask_named(mask.name).left, hook(mask, "query_blocks")
    blocks_of, at = plain(hopper_blocks.query_blocks), plain(hopper_blocks.block_at)
    for lengths in itertools.product((1, 16, 45, 130), repeat=2):
        window = mask.arguments(*lengths)
        for key in range(0, lengths[1], 16):
            first, full_begin, full_end, end = map(int, ask(key, key + 16, *lengths, window, 8))
            start, full, stop, rotation = map(int, blocks_of(key, *lengths, window, 8, 16, ask, left))
            visited = list(map(int, map(partial(at, first=start, end=stop, rotation=rotation, LEFT_BOUNDED=left),
                                        range(start, stop))))  # fmt: skip
            assert (start, stop) == (first, end) and sorted(visited) == list(range(first, end))
            clear = [] if key + 16 > lengths[1] else list(range(full_begin, full_end))
            assert visited[full - start :] == clear
