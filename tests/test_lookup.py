"""The lookup ladder: which row serves, in which order, and what never serves."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pace
import pytest
from cache_rows import FULL, KEY, row

from fa2tune.problem import TuningKey
from fa2tune.rows import lookup, reader
from fa2tune.rows.lookup import Toolchain
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import MEASURED, OBTAINED, PREDICTED, SIBLING, Row

NOW = Toolchain(FULL.triton, FULL.driver, {"fwd": FULL.kernel_hash})
H100 = {"gpu": "h100-sxm"}
PCIE = {"gpu": "h100-pcie", "sm_count": 114}
#: An unlisted Hopper: its silicon is not known.
UNLISTED = {"gpu": "NVIDIA H999", "sm_count": 132}


def anything(row: Row) -> None:
    return None


def layer(*rows: Row, name: str = "shipped") -> Layer:
    return Layer(name, Path(f"{name}.sqlite"), rows)


def find(
    *rows: Row, key: TuningKey = KEY, silicon: str = "gh100", acceptable: Any = anything, toolchain: Toolchain = NOW
) -> lookup.Answer | None:
    return lookup.find(key, silicon, [layer(*rows)], acceptable, toolchain)


def best_first(*rows: Row, key: TuningKey = KEY, silicon: str = "gh100") -> None:
    """Each row is served before those after it, in whatever order they are stored."""
    shuffled = list(rows)
    random.Random(0).shuffle(shuffled)
    found = [c.row for c in lookup.candidates(key, silicon, [layer(*shuffled)], NOW)]
    assert found == list(rows)


def test_problem_rungs_in_order() -> None:
    rows = [
        row(),
        row({"head_dim": 120}),
        row({"head_dim": 72, "head_dim_v": 80}),
        row({"bucket": 8192}),
        row({"bucket": 2048}),
        row({"bucket": 2048, "head_dim": 96}),
        row({"bucket": 512}),
        row({"dtype": "fp16"}),
        row({"dtype": "fp16", "bucket": 1024}),
    ]
    best_first(*rows)
    rungs = [lookup.PROBLEM_RUNGS[n] for n in (0, 1, 1, 2, 2, 2, 2, 3, 3)]
    assert [find(r).problem_rung for r in rows] == rungs  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "other",
    [{"causal": False}, {"kernel": "bwd_dq"}, {"arch": 80}, {"head_dim": 64, "head_dim_v": 64}, {"head_dim_v": 64},
     {"dtype": "fp32"}, {"precision": "tf32"}],
    ids=str,
)  # fmt: skip
def test_what_never_matches(other: dict[str, Any]) -> None:
    assert find(row(other)) is None


def test_float32_precisions_never_mix() -> None:
    tf32 = KEY.with_(dtype="fp32", precision="tf32")
    assert find(row({"dtype": "fp32"}), key=tf32) is None
    assert find(row({"dtype": "fp32", "precision": "tf32"}), key=tf32) is not None


def test_gpu_and_evidence_in_order() -> None:
    best_first(
        row(obtained=MEASURED),
        row(obtained=SIBLING),
        row(H100, obtained=MEASURED),  # as many SMs
        row(PCIE, obtained=MEASURED),
        row(H100, obtained=SIBLING),
        row(obtained=PREDICTED),
        row(H100, obtained=PREDICTED),
        row(UNLISTED, obtained=MEASURED),
        row(UNLISTED, obtained=PREDICTED),
    )


def test_a_better_problem_match_stands_before_a_better_gpu() -> None:
    best_first(row(H100), row({"bucket": 2048}), row({**H100, "dtype": "fp16"}))


def test_a_laptops_prediction_never_shadows_a_fleets_measurement() -> None:
    predicted, fresh = row(obtained=PREDICTED, time_us=1.0), {"triton": "3.9.0"}
    for measured in (row(), row(obtained=SIBLING), row(H100), row(**fresh), row(H100, **fresh)):
        layers = [layer(predicted, name="user"), layer(measured, name="fleet")]
        answer = lookup.find(KEY, "gh100", layers, anything, NOW)
        assert answer is not None
        assert answer.row is measured
        assert answer.layer.name == "fleet"


def test_an_unlisted_gpu_takes_its_own_rows_or_the_architecture_rung() -> None:
    key = KEY.with_(**UNLISTED)
    for others in (row(), row({"gpu": "NVIDIA H998"})):
        answer = find(others, key=key, silicon="sm_90")
        assert answer is not None
        assert answer.gpu_rung == lookup.ARCHITECTURE
    best_first(row(UNLISTED), row({**UNLISTED, "sm_count": 66}), row(), key=key, silicon="sm_90")
    own = find(row(UNLISTED), key=key, silicon="sm_90")
    assert own is not None
    assert own.gpu_rung == lookup.EXACT


def test_a_row_that_calls_another_chip_by_a_catalogue_name_is_not_that_chip() -> None:
    key = KEY.with_(gpu="a100-sxm-40gb", sm_count=108, arch=80)
    impostor = find(row({"gpu": "h200", "arch": 80}), key=key, silicon="gh100")
    assert impostor is not None
    assert impostor.gpu_rung == lookup.ARCHITECTURE


def test_a_slice_is_the_same_silicon() -> None:
    answer = find(row({"gpu": "h200@66sm", "sm_count": 66}))
    assert answer is not None
    assert answer.gpu_rung == lookup.SILICON


def test_fresh_before_layer_before_time() -> None:
    stale, slow, fast = row(triton="3.5.0", time_us=1.0), row(time_us=9.0), row(variant="descriptor", time_us=2.0)
    layers = [layer(stale, name="named"), layer(slow, name="user"), layer(fast, name="shipped")]
    served = [c.row for c in lookup.candidates(KEY, "gh100", layers, NOW)]
    assert served == [slow, fast, stale]
    best_first(fast, slow, row(variant="fused", time_us=None))


def test_of_stale_rows_the_one_made_with_the_nearest_serves() -> None:
    """Another driver costs little, another Triton up to half the speed, and another kernel may be another one altogether."""
    order = [
        row(triton="3.6.1", time_us=9.0), row(driver="555.42.02", time_us=8.0), row(triton="3.7.0", time_us=7.0),
        row(triton="3.7.0", driver="555.42.02", time_us=6.0), row(triton="3.4.0", time_us=5.0),
        row(triton="2.6.0", time_us=4.0), row(kernel_hash="beef", time_us=3.0),
        row(kernel_hash="beef", triton="3.7.0", time_us=2.0),
    ]  # fmt: skip
    layers = [layer(one, name=str(place)) for place, one in enumerate(reversed(order))]
    assert [c.row for c in lookup.candidates(KEY, "gh100", layers, NOW)] == order
    unknown = row(triton="", time_us=1.0)
    assert [c.row for c in lookup.candidates(KEY, "gh100", [layer(unknown, order[4])], NOW)] == [order[4], unknown]


@pytest.mark.parametrize(
    ("triton", "file"), [("3.6.0", "h200"), ("3.9.0", "h200-triton3.9"), ("3.10.1", "h200-triton3.9")]
)
def test_each_triton_is_served_what_was_tuned_with_it(triton: str, file: str) -> None:
    """Whatever the driver: rows of the other one are the slower ones there, though they name shorter times."""
    layers = [Layer("shipped", path, reader.read(path)) for path in reader.shipped_paths()]
    key = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, True, 16384)
    served = lookup.find(key, "gh100", layers, anything, Toolchain(triton, "600.1"))
    assert served is not None and served.layer.path.stem == file


def test_stale_rows_serve_and_say_why() -> None:
    answer = find(row(triton="3.5.0", driver="", kernel_hash="beef"))
    assert answer is not None
    assert answer.stale == (
        "triton 3.5.0, now 3.6.0",
        f"driver unknown, now {FULL.driver}",
        f"kernel source beef, now {FULL.kernel_hash}",
    )
    assert "stale" in answer.rung
    assert NOW.stale(row(obtained=PREDICTED, driver="")) == (), "a prediction involves no driver"
    assert Toolchain().stale(row()) == (), "what is not known is not compared"


def test_what_is_refused_is_passed_over_and_told() -> None:
    pointer, descriptor = row(time_us=9.0), row(variant="descriptor", time_us=1.0)
    answer = find(
        pointer, descriptor, acceptable=lambda r: "base is not aligned" if r.variant == "descriptor" else None
    )
    assert answer is not None
    assert answer.row is pointer
    assert [(refused.candidate.row, refused.why) for refused in answer.refused] == [(descriptor, "base is not aligned")]
    assert find(pointer, descriptor, acceptable=lambda r: "no") is None
    found = list(lookup.candidates(KEY, "gh100", [layer(pointer, descriptor)], NOW))
    assert [refused.candidate for refused in lookup.choose(found, lambda r: "no")[1]] == found


def test_rung_for_counting() -> None:
    answer = find(row({**H100, "bucket": 512}, obtained=SIBLING))
    assert answer is not None
    assert answer.rung == "problem nearest bucket, GPU same silicon, sibling, fresh, shipped layer"


def test_a_miss_is_explained_field_by_field() -> None:
    rows = [row({"causal": False, "bucket": bucket}) for bucket in (512, 1024)]
    far = row({"causal": False, "dtype": "fp32", "gpu": "a100-sxm-80gb", "arch": 80})
    misses = lookup.near_misses(KEY, [layer(far, *rows)])
    assert [difference for difference, _ in misses] == [
        {"causal": (True, False)},
        {"gpu": ("h200", "a100-sxm-80gb"), "arch": (90, 80), "dtype": ("bf16", "fp32"), "causal": (True, False)},
    ]
    assert lookup.differences(KEY, KEY.with_(bucket=512)) == {"bucket": (4096, 512)}


def test_no_rows_no_answer() -> None:
    assert find() is None
    assert lookup.find(KEY, "gh100", [], anything, NOW) is None


def test_a_look_up_among_a_thousand_rows_takes_under_a_millisecond() -> None:
    dims, buckets, kernels = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), ("fwd", "bwd_dq", "bwd_dkdv")
    rows = [
        row({"head_dim": d, "head_dim_v": d, "bucket": b, "kernel": k, "causal": c, "dtype": t}, obtained=o)
        for d, b, k, c, t, o in itertools.product(dims, buckets, kernels, (True, False), ("bf16", "fp16"), OBTAINED)
    ]
    layers = [layer(*rows), layer(*rows, name="user")]
    taken = []
    for _ in range(20):
        started = time.perf_counter()
        assert lookup.find(KEY, "gh100", layers, anything, NOW) is not None
        taken.append(time.perf_counter() - started)
    assert min(taken) / pace.slowness() < 1e-3


def test_pointer_loads_and_the_fused_road_must_be_clearly_faster() -> None:
    described, as_fast = row(variant="descriptor", time_us=1000.0), row(variant="pointer", time_us=997.0)
    best_first(described, as_fast)
    best_first(row(variant="pointer", time_us=990.0), described)
    split = row({"kernel": "bwd"}, variant="split", time_us=1000.0)
    best_first(split, row({"kernel": "bwd"}, variant="fused", time_us=997.0), key=replace(KEY, kernel="bwd"))
