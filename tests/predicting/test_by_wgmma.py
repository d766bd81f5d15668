"""The model's predictions of the warp-specialised kernels."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from benchmark_scripts import script

from fa2tune import gpus
from fa2tune.compiling import registry
from fa2tune.predicting import by_wgmma, model
from fa2tune.spec.problem import KERNELS, Specialization
from fa2tune.spec.variant import WARP_SPECIALIZED, added

sm90_model = script("sm90_model")
SPEC = Specialization("bf16", 128, 128, "causal")
H200 = gpus.named("h200")


@pytest.fixture(scope="module")
def rows() -> list:
    return [one for one in sm90_model.load() if not one.race]


@pytest.mark.parametrize("kernel", KERNELS)
def test_which_kernels_it_knows(kernel: str) -> None:
    variant = registry.implementations(kernel)[WARP_SPECIALIZED]
    assert model.knows(variant) and by_wgmma.warp_specialized(variant)
    assert not by_wgmma.warp_specialized(registry.portable_of(kernel))


def test_helpers_are_none_of_them() -> None:
    assert not any(model.knows(registry.variant_named(name)) for name in ("sm90/bwd_finish", "sm90/bwd_one_tile"))


@pytest.mark.parametrize(
    ("kernel", "changes", "tile", "persistent"),
    [
        ("fwd", {"BLOCK_M": 192, "BLOCK_N": 64}, (192, 64), True),
        ("bwd_dq", {"GROUPS": 3, "BLOCK_N": 64}, (192, 64), False),
        ("bwd_dkdv", {"BLOCK_N": 128}, (64, 128), False),
        ("bwd_fused", {"BLOCK_M": 64}, (64, 128), True),
        ("bwd_fused", {"BLOCK_M": 64, "PERSISTENT": False, "DYNAMIC": False}, (64, 128), False),
    ],
)
def test_tiles_and_grids(kernel: str, changes: dict, tile: tuple[int, int], persistent: bool) -> None:
    variant = registry.implementations(kernel)[WARP_SPECIALIZED]
    config = {**variant.space.default(SPEC, 90), **changes}
    groups = max(tile[0 if kernel in ("fwd", "bwd_dq") else 1] // by_wgmma.GROUP_ROWS, 1)
    assert by_wgmma.groups_of(4 * groups + 4) == groups
    assert by_wgmma.tile(config, groups) == tile
    assert by_wgmma.persistent(variant, config) == persistent
    assert model.calibration_of(variant, config) is (model.PERSISTENT if persistent else model.WITH_PRODUCER)


def test_it_is_as_near_to_the_shipped_rows_as_the_page_says(rows: list) -> None:
    found = sm90_model.figures(rows)
    assert set(found) == set(KERNELS)
    for one in found.values():
        assert 0.95 < one["level"] < 1.05
        assert one["median"] < 0.06 and one["p90"] < 0.13 and one["most"] < 0.22


def test_what_it_would_take_in_races_is_faster_than_the_default() -> None:
    found = sm90_model.races(sm90_model.load())
    assert len(found) == 21
    assert median(one["regret_1"] for one in found) < 0.06
    ahead = [one["regret_1"] <= one["default"] for one in found if one["default"] == one["default"]]
    assert sum(ahead) >= 0.75 * len(ahead) > 0


def test_records_from_before_a_dimension_have_its_older_value(monkeypatch: pytest.MonkeyPatch) -> None:
    space = registry.variant_named("sm90/fwd").space
    space.completed({})  # what it remembers of its dimensions is there, and comes back
    monkeypatch.delitem(vars(space), "_gained")
    monkeypatch.setitem(space.dimensions, "NEW", added(0, 1, older=0))
    found = sm90_model.load()
    assert {one.binary.config.get("NEW") for one in found if one.binary.kernel == "sm90/fwd"} == {0}
    assert any(one["default"] == one["default"] for one in sm90_model.races(found))  # the default is known in races


def test_groups_share_a_multiprocessor_and_what_a_trip_streams(rows: list) -> None:
    """Twice as many groups of the same loop take longer a trip, and less than twice as long."""
    one = next(r for r in rows if r.kernel == "fwd" and r.problem.head_dim == 128 and r.problem.seqlen_q == 4096)
    variant, config = registry.variant_named(one.binary.kernel), one.binary.config
    tiling = model.side_by_side([model.tiles.tiling(True, one.problem, *by_wgmma.tile(config, 2))])

    def clocks(groups: int) -> float:
        x = model.gather([config], [4], [1], [one.loops], [groups])
        found = model.of_tiles(x, variant.serves, tiling, one.problem, H200, model.PERSISTENT)
        return float(found.trip[0])

    assert clocks(1) < clocks(2) < 2 * clocks(1)


def test_a_faster_gpu_is_predicted_to_be_faster(rows: list) -> None:
    def microseconds(gpu: gpus.Gpu) -> float:
        one = rows[0]
        return model.explain(one.binary, one.problem, gpu, loops=one.loops).seconds

    assert microseconds(replace(H200, clock_mhz=2 * H200.clock_mhz)) < microseconds(H200)
    assert microseconds(replace(H200, sm_count=H200.sm_count // 2)) > microseconds(H200)
