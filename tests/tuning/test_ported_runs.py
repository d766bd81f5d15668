"""Tuning for GPUs without wgmma: on a Hopper GPU, which runs their code, and without any, where the model has to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cache_rows import row
from test_tuner import A100, H200, Bench
from tuner_fakes import ERRORS

from fa2tune import gpus
from fa2tune.compiling import registry
from fa2tune.compiling.fingerprint import backward_hash
from fa2tune.compiling.registry import portable_of, variant_named
from fa2tune.rows import reader
from fa2tune.rows.describe import described_row
from fa2tune.rows.row import PORTED, PREDICTED, Row
from fa2tune.rows.store import Store
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target, TuneRequest, resolve_target
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.request.watcher import PORTED_FUNCTIONS, WorkerFunctions
from fa2tune.tuning.run import tuner
from fa2tune.tuning.search.candidates import point
from fa2tune.tuning.search.proven import proven
from fa2tune.tuning.search.study import TrialOutcome
from fa2tune.tuning.select.predicted import MARGIN, Predicted, with_margin

pytestmark = pytest.mark.usefixtures("quick_starts")

SPEC = Specialization("bf16", 128, 128, "causal")
FORWARD = variant_named("sm80/fwd")
DEFAULT = dict(FORWARD.space.default(SPEC, 80))
SM80_FAKES = WorkerFunctions(*(f"sm80_fakes:{name}" for name in ("compile_check", "race", "check", "check_backward")))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the forward the portable kernel and that of kernels/sm80."""
    monkeypatch.setattr("test_tuner.FAKES", SM80_FAKES)
    monkeypatch.setattr(registry, "variants_of", lambda kernel: (portable_of(kernel), FORWARD))


def of_another_gpu(config: dict[str, Any], **changes: Any) -> Row:
    key = row().key.with_(gpu="a10", sm_count=72, arch=86, head_dim=128, head_dim_v=128, mask="causal", bucket=4096)
    made = replace(row(), key=key.with_(**changes.pop("key", {})), implementation="sm80", config=config, errors=ERRORS)
    return replace(made, obtained=PORTED, proof="sibling", obtained_on="NVIDIA H200", **changes)


# ---- where another GPU runs the code


@pytest.mark.parametrize(
    ("name", "obtained"),
    [
        ("a100", PORTED),
        ("a10", PORTED),
        ("l40s", PORTED),
        ("rtx-5090", PORTED),
        ("b200", PREDICTED),
        ("h100", "sibling"),
    ],
)
def test_what_a_hopper_gpu_can_stand_for(name: str, obtained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "present", lambda: H200)
    assert resolve_target(name) == Target(gpus.named(name), obtained, H200)


@pytest.mark.usefixtures("portable_kernels")
def test_rows_say_that_they_are_ported(bench: Bench) -> None:
    report = bench.tune(Target(A100, PORTED, H200), trials=3, buckets=(512,))
    assert {(r.key.gpu, r.key.arch, r.obtained, r.proof, r.obtained_on) for r in report.rows} == {
        ("a100-sxm-80gb", 80, "ported", "sibling", "NVIDIA H200")
    }
    assert all(r.samples and r.gain for r in report.rows)
    assert any("TFLOP/s ported on NVIDIA H200" in line for line in bench.lines)


@pytest.mark.usefixtures("both_kernels")
def test_they_race_the_kernels_of_their_own(bench: Bench) -> None:
    report = bench.tune(Target(A100, PORTED, H200), trials=6, buckets=(512,))
    assert {r.filed_as for r in report.rows} == {"pointer", "sm80"}
    best = min(report.rows, key=lambda r: r.rank_us)
    assert best.filed_as == "sm80" and best.obtained == PORTED


def test_such_a_run_launches_ported_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = []

    class Run:
        def __init__(self, plan: Any, watcher: Any, functions: WorkerFunctions) -> None:
            given.append(functions)

        def go(self) -> None:
            """Nothing."""

    monkeypatch.setattr(tuner, "Run", Run)
    for target in (Target(A100, PORTED, H200), Target(A100, PREDICTED, None)):
        monkeypatch.setattr(plan, "resolve_target", lambda name, target=target: target)
        tuner.tune(TuneRequest(cache=tmp_path / "cache.sqlite"))
    assert given == [PORTED_FUNCTIONS, WorkerFunctions()]


# ---- where none does


@pytest.mark.usefixtures("both_kernels")
def test_without_a_gpu_their_default_is_predicted_first_of_all(bench: Bench) -> None:
    report = bench.tune(Target(A100, PREDICTED, None), trials=4, dtypes=("bf16", "fp16"))
    found = [r for r in report.rows if r.implementation == "sm80"]
    assert {(r.key.dtype, r.key.bucket) for r in found} == {(d, b) for d in ("bf16", "fp16") for b in (512, 4096)}
    assert all(r.config == DEFAULT and r.obtained == PREDICTED and r.proof == "sibling" for r in found)
    tried = [c for *_, c in bench.did("compile") if "IMPLEMENTATION" in c]
    assert tried == [DEFAULT, DEFAULT]  # one a dtype: nothing else was ever run


@pytest.mark.usefixtures("both_kernels")
def test_configs_that_a_gpu_has_proved_compete_by_the_model(bench: Bench) -> None:
    slightly = {**DEFAULT, "HEADS_PER_WAVE": 1}  # 1 % faster
    shipped = bench.folder / "shipped.sqlite"
    Store(shipped).put([of_another_gpu(slightly)])
    bench.monkeypatch.setattr(reader, "shipped_paths", lambda: [shipped])
    report = bench.tune(Target(A100, PREDICTED, None), trials=4)
    found = [r for r in report.rows if r.implementation == "sm80"]
    assert found and all(r.config == DEFAULT for r in found)  # within the margin the default stays
    assert {point(c) for *_, c in bench.did("compile") if "IMPLEMENTATION" in c} == {point(DEFAULT), point(slightly)}


def test_a_predicted_whole_backward_names_its_kernels() -> None:
    """`tune` showed the time of the sm80 kernel as "fused portable"."""
    a100 = {"gpu": "a100-sxm-80gb", "sm_count": 108, "arch": 80}
    best = {
        "bwd_dq": ("pointer", 900.0), "bwd_dkdv": ("pointer", 1200.0), "bwd_fused": ("sm80", 700.0)
    }  # fmt: skip
    put: list[Row] = []

    def task(kernel: str) -> Any:
        implementation, time_us = best[kernel]
        found = row({**a100, "kernel": kernel}, implementation=implementation, time_us=time_us, errors={})
        return SimpleNamespace(kernel=kernel, keys=[found.key], short="128 causal", best_row=lambda *_: found)

    log = SimpleNamespace(
        plan=SimpleNamespace(target=Target(A100, PREDICTED, None), workers=1), provenance=Provenance(PREDICTED),
        report=SimpleNamespace(rows=[]), put=lambda key, rows, *rest: put.extend(rows),
    )  # fmt: skip
    predicted = object.__new__(Predicted)
    predicted.log = cast(Any, log)
    list(predicted.whole([task(kernel) for kernel in best]))
    assert {one.filed_as: dict(one.config) for one in put} == {
        "split portable": {"bwd_dq": "pointer", "bwd_dkdv": "pointer"}, "fused sm80": {"bwd_fused": "sm80"},
    }  # fmt: skip
    (fused,) = (one for one in put if one.strategy == "fused")
    assert described_row(fused) == "fused: bwd_fused sm80" and fused.barred
    assert fused.kernel_hash == backward_hash("fused", "portable", "causal", ("sm80",))


def test_margin() -> None:
    def outcome(heads: int, time_us: float) -> TrialOutcome:
        return TrialOutcome({**DEFAULT, "HEADS_PER_WAVE": heads}, time_us)

    default, near, far = outcome(DEFAULT["HEADS_PER_WAVE"], 100.0), outcome(1, 98.0), outcome(4, 90.0)
    assert with_margin([near, default], DEFAULT) == [default, near]
    assert with_margin([far, near, default], DEFAULT) == [far, default, near]
    assert with_margin([near], DEFAULT) == [near]
    assert with_margin([far, near], DEFAULT, 100.0) == [far], "a default of another implementation serves"


def test_shipped_predictions_keep_the_margin() -> None:
    """Of kernels: another config than the default is predicted to be faster by as much."""
    cache = Path(__file__).parent.parent.parent / "cache"
    found = [row for path in cache.glob("*.sqlite") for row in reader.read(path)]
    kernels = [row for row in found if row.obtained == PREDICTED and row.key.kernel != "bwd"]
    assert kernels
    for one in kernels:
        space = portable_of(one.key.kernel).space
        default = space.default(one.key.specialization(), one.key.arch)
        assert (one.gain or 0.0) >= 1 + MARGIN or space.completed(one.config) == default, described_row(one)


def test_what_counts_as_proved() -> None:
    other = {**DEFAULT, "BLOCK_M": 64}
    assert proven(portable_of("fwd"), SPEC, 80, []) is None

    def found(one: Row, spec: Specialization = SPEC) -> bool:
        known = proven(FORWARD, spec, 80, [one])
        assert known is not None and next(iter(known)) == point(FORWARD.space.default(spec, 80))
        return point(other) in known

    assert found(of_another_gpu(other))
    assert found(of_another_gpu(other), replace(SPEC, head_dim=96, head_dim_v=96))  # padded alike
    assert not found(of_another_gpu(other), replace(SPEC, head_dim=64, head_dim_v=64))
    assert not found(of_another_gpu(other), replace(SPEC, mask="full"))
    assert not found(of_another_gpu(other), replace(SPEC, dtype="fp16"))
    assert not found(of_another_gpu(other, errors={}))
    assert not found(replace(of_another_gpu(other), obtained=PREDICTED))
