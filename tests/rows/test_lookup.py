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

from fa2tune.rows import lookup, reader, record
from fa2tune.rows.lookup import Toolchain
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import MEASURED, OBTAINED, PORTED, PREDICTED, SIBLING, Row
from fa2tune.rows.store import Store
from fa2tune.spec.key import TuningKey
from fa2tune.spec.variant import WARP_SPECIALIZED

NOW = Toolchain(FULL.triton, FULL.driver, {"fwd causal": FULL.kernel_hash})
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


def test_problem_steps_in_order() -> None:
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
    steps = [lookup.PROBLEM_STEPS[n] for n in (0, 1, 2, 3, 3, 3, 3, 4, 4)]
    assert [find(r).problem_step for r in rows] == steps  # type: ignore[union-attr]


def test_a_head_dim_between_powers_of_two_takes_its_own_columns_first() -> None:
    """96 = 64 + 32: the row of 88 has the same columns; that of 128, whose tiles are larger, stands before those of 80 and 72,
    which have fewer."""
    of = {dim: row({"head_dim": dim, "head_dim_v": dim}) for dim in (72, 80, 88, 96, 128)}
    key = KEY.with_(head_dim=96, head_dim_v=96)
    best_first(of[96], of[88], of[128], of[80], of[72], key=key)
    assert find(of[88], key=key).problem_step == "same columns"  # type: ignore[union-attr]
    assert find(of[128], of[80], key=key).row is of[128]  # type: ignore[union-attr]
    for dim in (104, 120, 128):  # which have 128 columns
        assert find(of[128], of[96], key=KEY.with_(head_dim=dim, head_dim_v=dim)).row is of[128]  # type: ignore[union-attr]
    apart = row({"head_dim": 96, "head_dim_v": 128})
    best_first(of[96], of[128], apart, key=key)


@pytest.mark.parametrize(("dims", "wider"), [((32, 32), 64), ((16, 64), 64), ((128, 32), 128), ((72, 256), 256)])
def test_wider_head_dims_come_last_and_warp_specialised(dims: tuple[int, int], wider: int) -> None:
    key = KEY.with_(head_dim=dims[0], head_dim_v=dims[1])
    own = row({"head_dim": dims[0], "head_dim_v": dims[1], "dtype": "fp16", "bucket": 16384})
    near, far = (
        row({"head_dim": wider, "head_dim_v": wider, "bucket": bucket}, implementation=WARP_SPECIALIZED)
        for bucket in (KEY.bucket, 8192)
    )
    portable = row({"head_dim": wider, "head_dim_v": wider})
    best_first(own, near, far, key=key)
    assert find(far, portable, key=key).problem_step == lookup.WIDER  # type: ignore[union-attr]
    assert find(portable, key=key) is None
    assert find(near, key=KEY.with_(head_dim=2 * wider, head_dim_v=dims[1])) is None


@pytest.mark.parametrize(("dims", "wider"), [((192, 128), 256), ((128, 64), 128), ((32, 64), 64)])
def test_for_a_v_apart_wider_rows_of_kernels_that_name_themselves_serve(dims: tuple[int, int], wider: int) -> None:
    a100 = {"gpu": "a100-sxm-80gb", "sm_count": 108, "arch": 80}
    key = KEY.with_(**a100, head_dim=dims[0], head_dim_v=dims[1])
    both = {**a100, "head_dim": wider, "head_dim_v": wider}
    for own in (
        row(both, implementation="sm80"),
        row({**both, "kernel": "bwd"}, strategy="fused", implementation="portable", config={"bwd_fused": "sm80"}),
    ):
        answer = find(own, key=key.with_(kernel=own.key.kernel), silicon="ga100")
        assert answer is not None and answer.row is own and answer.problem_step == lookup.WIDER
        assert find(own, key=key.with_(kernel=own.key.kernel, head_dim=32, head_dim_v=32), silicon="ga100") is None


@pytest.mark.parametrize(
    "other",
    [{"mask": "full"}, {"family": "decode"}, {"kernel": "bwd_dq"}, {"arch": 80}, {"head_dim": 64, "head_dim_v": 64},
     {"head_dim_v": 64}, {"dtype": "fp32"}, {"precision": "tf32"}],
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
        row(obtained=PORTED),
        row(H100, obtained=PORTED),
        row(obtained=PREDICTED),
        row(H100, obtained=PREDICTED),
        row(UNLISTED, obtained=MEASURED),
        row(UNLISTED, obtained=SIBLING),
        row(UNLISTED, obtained=PORTED),
        row(UNLISTED, obtained=PREDICTED),
    )


def test_a_fused_backward_may_be_ported_but_not_only_predicted() -> None:
    """Its sums of dQ have no fixed order, and only a measurement makes up for that."""
    for obtained in OBTAINED:
        fused = row({"kernel": "bwd"}, strategy="fused", implementation="portable", obtained=obtained)
        assert bool(fused.barred) == (obtained == PREDICTED)


def test_the_configs_of_a_slot_follow_their_times() -> None:
    best_first(*(row(config={"BLOCK_M": size}, time_us=time) for size, time in ((128, 7.0), (64, 8.0), (256, 9.0))))


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


def test_an_unlisted_gpu_takes_its_own_rows_or_the_architecture_step() -> None:
    key = KEY.with_(**UNLISTED)
    for others in (row(), row({"gpu": "NVIDIA H998"})):
        answer = find(others, key=key, silicon="sm_90")
        assert answer is not None
        assert answer.gpu_step == lookup.ARCHITECTURE
    best_first(row(UNLISTED), row({**UNLISTED, "sm_count": 66}), row(), key=key, silicon="sm_90")
    own = find(row(UNLISTED), key=key, silicon="sm_90")
    assert own is not None
    assert own.gpu_step == lookup.EXACT


def test_a_row_filed_under_the_drivers_name_serves_the_gpu_that_the_catalogue_lists_now() -> None:
    ada = {"gpu": "rtx-4080", "sm_count": 76, "arch": 89}
    before = row({**ada, "gpu": "NVIDIA GeForce RTX 4080"})
    answer = find(before, row({**ada, "gpu": "rtx-4090", "sm_count": 128}), key=KEY.with_(**ada), silicon="ad103")
    assert answer is not None
    assert (answer.row, answer.gpu_step) == (before, lookup.EXACT)
    other = find(row({**ada, "gpu": "NVIDIA GeForce RTX 4080 SUPER", "sm_count": 80}), key=KEY.with_(**ada))
    assert other is not None
    assert other.gpu_step != lookup.EXACT


def test_a_row_that_calls_another_chip_by_a_catalogue_name_is_not_that_chip() -> None:
    key = KEY.with_(gpu="a100-sxm-40gb", sm_count=108, arch=80)
    impostor = find(row({"gpu": "h200", "arch": 80}), key=key, silicon="gh100")
    assert impostor is not None
    assert impostor.gpu_step == lookup.ARCHITECTURE


def test_a_slice_is_the_same_silicon() -> None:
    answer = find(row({"gpu": "h200@66sm", "sm_count": 66}))
    assert answer is not None
    assert answer.gpu_step == lookup.SILICON


def test_fresh_before_layer_before_time() -> None:
    stale, slow, fast = (
        row(triton="3.5.0", time_us=1.0),
        row(time_us=9.0),
        row(implementation="descriptor", time_us=2.0),
    )
    layers = [layer(stale, name="named"), layer(slow, name="user"), layer(fast, name="shipped")]
    served = [c.row for c in lookup.candidates(KEY, "gh100", layers, NOW)]
    assert served == [slow, fast, stale]
    best_first(fast, slow, row(strategy="fused", implementation="portable", time_us=None))


def test_of_stale_rows_the_one_made_with_the_nearest_serves() -> None:
    """Another Triton costs up to half the speed, and another kernel may be another one altogether. A driver is neither."""
    order = [
        row(driver="555.42.02", time_us=9.0), row(triton="3.6.1", time_us=8.0),
        row(triton="3.7.0", driver="555.42.02", time_us=7.0), row(triton="3.4.0", time_us=5.0),
        row(triton="2.6.0", time_us=4.0), row(kernel_hash="beef", time_us=3.0),
        row(kernel_hash="beef", triton="3.7.0", time_us=2.0),
    ]  # fmt: skip
    layers = [layer(one, name=str(place)) for place, one in enumerate(reversed(order))]
    assert [c.row for c in lookup.candidates(KEY, "gh100", layers, NOW)] == order
    unknown = row(triton="", time_us=1.0)
    assert [c.row for c in lookup.candidates(KEY, "gh100", [layer(unknown, order[3])], NOW)] == [order[3], unknown]


@pytest.mark.parametrize(
    ("triton", "file"), [("3.6.0", "h200"), ("3.9.0", "h200-triton3.9"), ("3.10.1", "h200-triton3.9")]
)
def test_each_triton_is_served_what_was_tuned_with_it(triton: str, file: str) -> None:
    """Whatever the driver: rows of the other one are the slower ones there, though they name shorter times."""
    layers = [Layer("shipped", path, reader.read(path)) for path in reader.shipped_paths()]
    key = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "causal", 16384)
    served = lookup.find(key, "gh100", layers, anything, Toolchain(triton, "600.1"))
    assert served is not None and served.layer.path.stem == file


def test_of_rows_of_several_tritons_the_one_whose_machine_code_is_here_serves() -> None:
    """Under the newer Triton both are fresh: the faster would have to be compiled, the other is what was measured."""
    shipped, newer = (
        row(triton="3.6.0", time_us=100.0),
        row(triton="3.9.0", time_us=90.0, config={**FULL.config, "num_warps": 8}),
    )
    node = Toolchain("3.9.0", FULL.driver, {"fwd causal": FULL.kernel_hash}, lambda one: one.triton == "3.6.0")
    assert find(newer, shipped, toolchain=node).row is shipped  # type: ignore[union-attr]
    assert find(newer, shipped, toolchain=replace(node, held=lambda one: True)).row is newer  # type: ignore[union-attr]
    assert find(newer, shipped, toolchain=replace(node, held=lambda one: False)).row is newer  # type: ignore[union-attr]
    own = lookup.find(KEY, "gh100", [layer(newer, name="user"), layer(shipped)], anything, node)
    assert own is not None and own.row is newer, "the user's own row stands before a shipped one"


def test_what_a_triton_tuned_competes_by_time_whether_its_machine_code_is_here() -> None:
    slower, faster = row(time_us=100.0), row(time_us=90.0, config={**FULL.config, "num_warps": 8})
    node = replace(NOW, held=lambda one: one is slower)
    assert find(slower, faster, toolchain=node).row is faster  # type: ignore[union-attr]


def test_a_shipped_file_is_checked_no_further_than_a_key_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking a row takes 0.1 ms, which a first call waits for."""
    keys = [{"bucket": bucket, "head_dim": dim} for bucket in (1024, 4096) for dim in (80, 128)]
    rows = [row(key) for key in keys]
    Store(path := tmp_path / "shipped.sqlite").put(rows)
    monkeypatch.setattr(reader, "shipped_paths", lambda: [path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoded = list[object]()
    real = record.decode
    monkeypatch.setattr(record, "decode", lambda one: decoded.append(one) or real(one))
    for one in rows:
        (found,) = reader.layers()
        served = lookup.find(one.key, "gh100", [found], anything, NOW)
        assert served is not None and served.row == one and len(decoded) == 1
        decoded.clear()
    (found,) = reader.layers()
    everything = lookup.candidates(KEY.with_(head_dim=96), "gh100", [found], NOW)
    assert {one.row.key.head_dim for one in everything} == {80, 128} and len(decoded) == 4


def test_a_ladder_works_out_what_is_asked_for_once() -> None:
    made = list[int]()

    def candidates() -> Any:
        for number in range(4):
            made.append(number)
            yield number

    ladder = lookup.Ladder(candidates())
    assert next(iter(ladder)) == 0 and made == [0]  # type: ignore[comparison-overlap]
    assert [*itertools.islice(ladder, 2)] == [0, 1] and made == [0, 1]  # type: ignore[comparison-overlap]
    assert [*ladder] == [*ladder] == made == [0, 1, 2, 3]  # type: ignore[comparison-overlap]


def test_stale_rows_serve_and_say_why() -> None:
    answer = find(row(triton="3.5.0", driver="", kernel_hash="beef"))
    assert answer is not None
    assert answer.stale == ("triton 3.5.0, now 3.6.0", f"kernel source beef, now {FULL.kernel_hash}")
    assert "stale" in answer.step
    assert Toolchain().stale(row()) == (), "what is not known is not compared"


def test_a_row_of_another_driver_is_fresh_and_stands_behind_one_of_this_driver() -> None:
    """ptxas comes with Triton: under another driver runs the same machine code."""
    other = row(driver="555.42.02", time_us=8.0)
    answer = find(other)
    assert answer is not None
    assert (answer.row, answer.stale) == (other, ()) and "fresh" in answer.step
    best_first(row(implementation="descriptor", time_us=8.0), other, row(triton="3.7.0", time_us=1.0))
    best_first(row(implementation="descriptor", time_us=9.0), other)  # the times are of different drivers
    layers = [layer(other, name="user"), layer(row(), name="shipped")]
    assert [c.layer.name for c in lookup.candidates(KEY, "gh100", layers, NOW)] == ["user", "shipped"]
    assert [c.row for c in lookup.candidates(KEY, "gh100", layers, replace(NOW, driver=""))] == [other, row()]


def test_that_a_row_was_timed_under_another_driver_is_told() -> None:
    assert NOW.other_driver(row(driver="555.42.02")) == f"timed under driver 555.42.02, here {FULL.driver}"
    assert NOW.other_driver(row(driver="")) == f"timed under driver unknown, here {FULL.driver}"
    assert NOW.other_driver(row()) == "" == Toolchain().other_driver(row())
    assert NOW.other_driver(row(obtained=PREDICTED, driver="")) == "", "a prediction involves no driver"


def test_the_driver_decides_only_between_rows_that_nothing_else_tells_apart() -> None:
    here, other = row(), row(implementation="descriptor", driver="555.42.02")
    assert lookup.driver_decides([here, other])
    apart = [{"bucket": 512}, {"dtype": "fp16"}, {"gpu": "h100-sxm"}, {"mask": "full"}, {"kernel": "bwd_dq"}]
    assert not lookup.driver_decides([here, *(replace(row(key), driver="555.42.02") for key in apart)])
    assert not lookup.driver_decides([here, replace(other, obtained=PREDICTED, driver="")])
    assert not lookup.driver_decides([])


def test_what_is_refused_is_passed_over_and_told() -> None:
    pointer, descriptor = row(time_us=9.0), row(implementation="descriptor", time_us=1.0)
    answer = find(
        pointer, descriptor, acceptable=lambda r: "base is not aligned" if r.implementation == "descriptor" else None
    )
    assert answer is not None
    assert answer.row is pointer
    assert [(refused.candidate.row, refused.why) for refused in answer.refused] == [(descriptor, "base is not aligned")]
    assert find(pointer, descriptor, acceptable=lambda r: "no") is None
    found = list(lookup.candidates(KEY, "gh100", [layer(pointer, descriptor)], NOW))
    assert [refused.candidate for refused in lookup.choose(found, lambda r: "no")[1]] == found


def test_step_for_counting() -> None:
    answer = find(row({**H100, "bucket": 512}, obtained=SIBLING))
    assert answer is not None
    assert answer.step == "problem nearest bucket, GPU same silicon, sibling, fresh, shipped layer"


def test_a_miss_is_explained_field_by_field() -> None:
    rows = [row({"mask": "full", "bucket": bucket}) for bucket in (512, 1024)]
    far = row({"mask": "full", "dtype": "fp32", "gpu": "a100-sxm-80gb", "arch": 80})
    misses = lookup.near_misses(KEY, [layer(far, *rows)])
    assert [difference for difference, _ in misses] == [
        {"mask": ("causal", "full")},
        {"gpu": ("h200", "a100-sxm-80gb"), "arch": (90, 80), "dtype": ("bf16", "fp32"), "mask": ("causal", "full")},
    ]
    assert lookup.differences(KEY, KEY.with_(bucket=512)) == {"bucket": (4096, 512)}


def test_no_rows_no_answer() -> None:
    assert find() is None
    assert lookup.find(KEY, "gh100", [], anything, NOW) is None


def test_a_look_up_among_a_thousand_rows_takes_under_a_millisecond() -> None:
    dims, buckets, kernels = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), ("fwd", "bwd_dq", "bwd_dkdv")
    rows = [
        row({"head_dim": d, "head_dim_v": d, "bucket": b, "kernel": k, "mask": m, "dtype": t}, obtained=o)
        for d, b, k, m, t, o in itertools.product(
            dims, buckets, kernels, ("causal", "full"), ("bf16", "fp16"), OBTAINED
        )
    ]
    layers = [layer(*rows), layer(*rows, name="user")]
    taken = []
    for _ in range(20):
        started = time.perf_counter()
        assert lookup.find(KEY, "gh100", layers, anything, NOW) is not None
        taken.append(time.perf_counter() - started)
    assert min(taken) / pace.slowness() < 1e-3


def test_pointer_loads_and_the_fused_strategy_must_be_clearly_faster() -> None:
    described, as_fast = row(implementation="descriptor", time_us=1000.0), row(implementation="pointer", time_us=997.0)
    best_first(described, as_fast)
    best_first(row(implementation="pointer", time_us=990.0), described)
    split = row({"kernel": "bwd"}, strategy="split", implementation="portable", time_us=1000.0)
    best_first(
        split,
        row({"kernel": "bwd"}, strategy="fused", implementation="portable", time_us=997.0),
        key=replace(KEY, kernel="bwd"),
    )
