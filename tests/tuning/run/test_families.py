"""Rows of families of their own: tuned on windows or packed sequences (with fake functions, no GPU), and preferred by such
calls alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cache_rows import row
from click.testing import CliRunner
from tuner_runs import A100, H200, HERE

from fa2tune.calling import choosing
from fa2tune.calling.serving import explain_problem
from fa2tune.cli import main
from fa2tune.compiling import fingerprint
from fa2tune.compiling.registry import portable_of
from fa2tune.report import charts, facts
from fa2tune.rows import reader, record
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import PREDICTED
from fa2tune.rows.store import Store
from fa2tune.spec.extent import RAGGED, WHOLE, Extent
from fa2tune.spec.key import TuningKey, family_of, specialization_of, unmeasured
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import BUCKETS, Problem
from fa2tune.tuning.request import jobs
from fa2tune.tuning.request.plan import Target, TuneRequest, make_plan

PACKED = Extent(RAGGED, 7, 4096)
pytestmark = pytest.mark.usefixtures("portable_kernels", "quick_starts")


def key(family, **changes):
    return replace(row().key, family=family, **changes)


def call(extent=WHOLE, mask=CAUSAL, rows=4096):
    many = rows * (4 if extent.ragged else 1)
    return Problem("bf16", 1 if extent.ragged else 4, 16, 16, many, many, 128, 128, mask, extent=extent)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_workloads_are_of_the_bucket_and_of_their_family(bucket):
    banded, ragged = (key(family, bucket=bucket) for family in ("banded", "ragged"))
    assert banded.workload() == replace(key("dense", bucket=bucket).workload(), mask=band(bucket // 8, 0))
    lengths, problem = ragged.lengths(), ragged.workload()
    assert sum(lengths) == problem.seqlen_q == 16384 and max(lengths) == problem.extent.longest == bucket
    assert len(lengths) == problem.extent.sequences and min(lengths) > 0
    for one in (banded, ragged):
        problem = one.workload()
        assert (problem.bucket, family_of(problem)) == (bucket, one.family)
        assert problem.specialization == one.specialization()
        assert unmeasured(problem, one.family) == "" != unmeasured(problem, "dense")


@pytest.mark.parametrize(("kernel", "products"), [("fwd", 2), ("bwd", 5)])
def test_flops_are_of_what_the_calls_attend(kernel, products):
    ragged, banded, dense = (key(family, kernel=kernel, bucket=4096) for family in ("ragged", "banded", "dense"))
    squares = sum(length**2 for length in ragged.lengths())
    assert ragged.flops() == products * 2 * 16 * 128 * squares / 2 < dense.flops()
    pairs = sum(min(row + 1, 513) for row in range(4096))  # a window of 512 keys and a query's own
    assert banded.flops() == products * 2 * 4 * 16 * 128 * pairs
    assert dense.flops() == dense.workload().flops(kernel)
    one = replace(fresh("ragged"), key=ragged, tflops=400.0)
    (standing,) = facts.standings([one])
    moved = facts.least_bytes(facts.workload(one), kernel)
    assert standing.intensity == pytest.approx(ragged.flops() / moved)


def test_families_of_calls():
    asked = {
        (call(), "dense"), (call(mask=band(300, 0)), "banded"), (call(PACKED), "ragged"), (call(mask=FULL), "dense"),
        (call(PACKED, band(300, 0)), "ragged"), (call(mask=band(300, 300)), "dense"),
    }  # fmt: skip
    assert all(family_of(problem) == family for problem, family in asked)


@pytest.mark.parametrize(("family", "masks"), [("banded", ["causal"]), ("ragged", ["full", "causal"])])
def test_a_run_tunes_the_family_and_files_its_rows(bench, family, masks):
    report = bench.tune(HERE, family=family, masks=("full", "causal"), pass_="both", trials=8)
    keys = {one.key for one in report.rows}
    assert {one.family for one in keys} == {family} and sorted({one.mask for one in keys}) == sorted(masks)
    assert {one.kernel for one in keys} == {"fwd", "bwd_dq", "bwd_dkdv", "bwd_fused", "bwd"} and not report.missing
    compiled = {(kernel, mask) for kernel, _dtype, mask, _config in bench.did("compile")}
    assert {mask for _, mask in compiled} == ({"band"} if family == "banded" else {*masks})
    for one in report.rows:
        workload = one.key.workload()
        assert (one.batch, one.seqlen_q) == (workload.batch, workload.seqlen_q)
        assert one.tflops == pytest.approx(one.key.flops() / one.time_us * 1e-6)
        assert one.kernel_hash == fingerprint.kernel_hashes()[one.source]
        if family == "banded":
            assert one.source.endswith(" band")
        elif one.key.kernel != "bwd":
            assert one.implementation == "pointer", "no descriptor has packed sequences"
    assert record.of_json(record.to_json(report.rows)) == sorted(report.rows, key=record.identity)
    bench.forget()
    again = bench.tune(HERE, family=family, masks=("full", "causal"), pass_="both", trials=8)
    assert not bench.did("compile") and {one.key for one in again.rows} == keys, "nothing twice"
    bench.tune(HERE, pass_="fwd", trials=8)
    assert {one.key.family for one in Store(bench.folder / "cache.sqlite").rows()} == {"dense", family}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"family": "decode"}, "family: got 'decode', allowed are dense, banded, ragged"),
        ({"family": "banded", "masks": ("full",)}, "mask: got full for banded rows, allowed are causal"),
        ({"family": "ragged", "dtypes": ("bf16", "fp32")}, "dtype: got fp32 for ragged rows"),
    ],
)
def test_what_no_family_has_is_refused(bench, asked, said):
    with pytest.raises(ValueError, match=said):
        bench.tune(HERE, **asked)


def test_absent_gpus_have_no_prediction_of_families(bench):
    with pytest.raises(ValueError, match="family: got ragged for a100-sxm-80gb, which is not here"):
        bench.tune(Target(A100, PREDICTED, None), family="ragged")


def test_dense_jobs_are_called_as_before(bench, monkeypatch):
    monkeypatch.setattr("fa2tune.tuning.request.plan.resolve_target", lambda name: HERE)
    plan = make_plan(TuneRequest(cache=bench.folder / "cache.sqlite"))
    other = make_plan(TuneRequest(cache=bench.folder / "cache.sqlite", family="banded"))
    names = [one.name for one in jobs.tuning_jobs(plan)]
    assert "fwd 128 causal" in names and [one.name for one in jobs.tuning_jobs(other)] == [
        "bwd 128 causal banded", "fwd 128 causal banded",
    ]  # fmt: skip
    (dense,) = (one for one in jobs.tuning_jobs(plan) if one.name == "fwd 128 causal")
    assert dense.covers(key("dense")) and not dense.covers(key("banded"))
    assert jobs.request_token(plan) != jobs.request_token(other)


def fresh(family, **changes):
    """A row of now; ``changes``: ``bucket``, and fields of the row."""
    bucket = changes.pop("bucket", 4096)
    spec = specialization_of(family, "bf16", 128, 128, "causal")
    config = dict(portable_of("fwd").space.default(replace(spec, aligned=False), 90))
    made = row({"family": family, "bucket": bucket}, config=config, triton=fingerprint.triton_version(), **changes)
    return replace(made, kernel_hash=fingerprint.kernel_hashes()[made.source])


def layers(*rows):
    return [Layer("user", None, list(rows))]


def served(problem, *rows):
    return choosing.Chooser(problem, H200, layers(*rows)).find("fwd")[0]


@pytest.mark.parametrize(
    ("family", "problem"),
    [("banded", call(mask=band(512, 0))), ("ragged", call(PACKED)), ("ragged", call(PACKED, band(9, 0)))],
)
def test_such_calls_prefer_their_family_and_fall_back(family, problem):
    dense, own = fresh("dense", time_us=1.0), fresh(family)
    assert served(problem, dense, own).row is own and served(problem, dense).row is dense
    assert served(call(), dense, own).row is dense and served(call(), own) is None
    other = fresh("banded" if family == "ragged" else "ragged")
    assert served(problem, dense, other).row is dense


def test_what_a_family_s_row_needs_to_stand_first():
    dense, problem = fresh("dense"), call(PACKED)
    own = fresh("ragged")
    for weaker in (
        fresh("ragged", bucket=8192), replace(own, kernel_hash="0" * 16), replace(own, obtained=PREDICTED),
        replace(own, key=replace(own.key, gpu="l4", sm_count=58)), replace(own, key=replace(own.key, dtype="fp16")),
    ):  # fmt: skip
        assert served(problem, dense, weaker).row is dense


def test_other_lengths_are_of_the_family_and_then_dense():
    rows = [fresh(family, bucket=bucket) for family in ("ragged", "dense") for bucket in (4096, 512)]
    chooser = choosing.Chooser(call(PACKED), H200, layers(*rows))
    answer, _ = chooser.find("fwd")
    assert [(one.given.key.family, one.given.key.bucket) for one in chooser._of_all_lengths(answer)] == [
        ("ragged", 4096), ("ragged", 512), ("dense", 4096), ("dense", 512),
    ]  # fmt: skip


def test_explain_says_on_what_a_row_was_tuned():
    for family, problem, tuned in (
        ("banded", call(mask=band(512, 0)), "a causal window of an eighth of that length"),
        ("ragged", call(PACKED), "packed sequences of up to that length"),
    ):
        found = explain_problem(problem, H200, ("fwd",), False, layers(fresh(family)))
        (one,) = found.kernels
        assert tuned in one.evidence and "without" not in one.evidence and "family" not in one.differs
        assert found.as_dict()["kernels"][0]["family"] == family
    (one,) = explain_problem(call(PACKED, band(9, 0)), H200, ("fwd",), False, layers(fresh("ragged"))).kernels
    assert one.unmeasured == "a window"


def test_commands_and_report_name_the_family(tmp_path):
    path = tmp_path / "cache.sqlite"
    Store(path).put([fresh("ragged"), fresh("dense")])
    for arguments, said in (
        (("list",), "causal ragged"), (("show",), "family ragged"), (("list", "--family", "ragged"), "1 row,"),
        (("list", "--family", "banded"), "no row matches"),
    ):  # fmt: skip
        done = CliRunner().invoke(main, ["cache", *arguments, "--cache", str(path)])
        assert done.exit_code == 0 and said in done.output, done.output
    rows = [*reader.read(path)]
    assert len({charts.panel_of(one.key) for one in rows}) == len({charts.title_of(one.key) for one in rows}) == 2
    panels, columns = charts.panels_of([one.key for one in rows])
    assert panels == ["head dim 128, causal", "head dim 128, causal ragged"] and columns == 1
    assert facts.workload(fresh("ragged")).extent.ragged


def test_keys_of_older_files_are_dense():
    assert TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "causal", 4096).family == "dense"
