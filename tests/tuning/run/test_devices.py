"""A run on several GPUs."""

from __future__ import annotations

import json

import pytest
from tuner_fakes import true_time
from tuner_runs import FAKES, HERE, asked

from fa2tune.measuring.worker import Crew, Job
from fa2tune.rows import reader
from fa2tune.tuning.request.watcher import Watcher
from fa2tune.tuning.run import open_jobs
from fa2tune.tuning.run.open_jobs import OpenJob
from fa2tune.tuning.run.tuner import Run
from fa2tune.tuning.select.gpu_jobs import GpuLost

pytestmark = pytest.mark.usefixtures("portable_kernels", "quick_starts")


def evidence(rows: list) -> dict:
    """What a row says beside times, which are each process's own."""
    return {(r.key, r.implementation): (r.config, r.tried, r.obtained, r.obtained_on, r.samples) for r in rows}


def test_every_gpu_takes_part_and_the_table_is_one(bench, used, monkeypatch):
    monkeypatch.setenv("FA2TUNE_FAKE_TOGETHER", "0 1 2")
    report = bench.tune(HERE, devices="all", trials=20, masks=("full", "causal"), buckets=(512, 1024, 4096))
    heats, finals = bench.did("on"), bench.did("proof")
    assert {device for device, *_ in heats} == {"0", "1", "2"} and used == [0]
    keys = {(mask, bucket) for mask in ("full", "causal") for bucket in (512, 1024, 4096)}
    rows = reader.read(bench.folder / "cache.sqlite")
    assert {(row.key.mask, row.key.bucket) for row in rows} == keys and len(rows) == 2 * len(keys) == len(report.rows)
    assert len(finals) == len(keys), "each length has one proof, on one GPU"
    for row in rows:
        tried = bench.tried_of(row.key.mask)
        runnable = [c for c in tried if c["num_stages"] != 4 and c["LOADS"] == row.implementation]
        assert true_time(row.config, row.key.bucket) == min(true_time(c, row.key.bucket) for c in runnable)
    assert len(report.launching) == 3 and all(0 < share <= 1 for share in report.launching)
    bench.forget()
    monkeypatch.delenv("FA2TUNE_FAKE_TOGETHER")
    again = bench.tune(HERE, devices=(2,), trials=20, masks=("full", "causal"), buckets=(512, 1024, 4096))
    assert not bench.did("screen") and evidence(again.rows) == evidence(rows) and used == [0, 2]


def test_the_anchor_has_a_time_before_a_second_gpu_races_against_it(bench, used, monkeypatch):
    """Every process of these fakes has clocks of its own: times of different anchors would not compare."""
    monkeypatch.setenv("FA2TUNE_FAKE_TOGETHER", "0 1 2")
    bench.tune(HERE, devices="all", trials=24, buckets=(512,), record=bench.folder / "record")
    entries = [json.loads(line) for line in (bench.folder / "record").read_text().splitlines()]
    timed = {json.dumps(e["config"], sort_keys=True): e["time_us"] for e in entries if e["stage"] == "screen"}
    ratios = [time_us / true_time(json.loads(config), 512) for config, time_us in timed.items() if time_us]
    assert {device for device, *_ in bench.did("on")} == {"0", "1", "2"}
    assert len(ratios) > 20 and max(ratios) / min(ratios) < 1.02


def test_a_gpu_that_is_lost_leaves_its_work_to_the_others(bench, used, monkeypatch):
    monkeypatch.setenv("FA2TUNE_FAKE_LOST", "1")
    monkeypatch.setenv("FA2TUNE_FAKE_TOGETHER", "0 2")
    report = bench.tune(HERE, devices="all", trials=20, buckets=(512, 1024))
    assert any("GPU 1 is given up" in line and "2 GPUs go on" in line for line in bench.lines)
    assert {row.key.bucket for row in report.rows} == {512, 1024} and "failed" not in report.statuses
    assert {device for device, *_ in bench.did("on")} == {"0", "2"}


def test_no_gpu_waits_for_an_import_or_for_a_job_to_be_opened(tmp_path, used, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    run, did = Run(asked(monkeypatch, tmp_path, (0, 1)), Watcher(), FAKES), []
    monkeypatch.setattr(Crew, "prepare", lambda crew: did.append(("prepare", crew)))
    monkeypatch.setattr(open_jobs, "opened", lambda job, *rest: did.append("open") or OpenJob(job, []))
    compiles = [Job("f", (), 1.0)]
    monkeypatch.setattr(run.compiles, "propose", lambda: run.compiles.crew.queue.extend(compiles))
    monkeypatch.setattr(OpenJob, "settled", False)
    tasks = [(job for job in ()), (job for job in ())]
    monkeypatch.setattr(
        run.launches,
        "_next",
        lambda: did.append("task") or (next(iter(run.held.open.values())), tasks.pop()) if tasks else None,
    )
    run._busy()
    assert did[:3] == ["open", *(("prepare", crew) for crew in run.method.crews)]
    assert [what for what in did if isinstance(what, str)] == ["open", "task", "task", "open"]
    did.clear(), compiles.clear(), run.compiles.crew.queue.clear()
    run._hand_out()
    assert not did, "nothing is compiled, so nothing will be launched"


def test_a_gpu_that_does_no_more_has_no_part_in_anything(tmp_path, used, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    run = Run(asked(monkeypatch, tmp_path, "all"), Watcher(), FAKES)
    assert run.leases.gpus == 3
    run.launches.retire(run.method.crews[1], Job("f", (), 1.0, failure="gone"))
    assert run.leases.gpus == 2

    class Waiting:
        default, ready = {}, [({"n": number}, None) for number in range(8)]

    task = Waiting()
    run.method.heats.anchors[task] = {}
    run.method.search([task])
    assert len(task.ready) == 4, "half of them for each that works"
    assert len(run.method.crews) == 3, "all are closed at the end"


def test_the_last_gpu_lost_ends_the_run_and_blames_no_config(bench, used, monkeypatch):
    monkeypatch.setenv("FA2TUNE_FAKE_LOST", "0 1 2")
    with pytest.raises(GpuLost, match="no CUDA-capable device"):
        bench.tune(HERE, devices="all", trials=4, buckets=(512,))
    assert sum("is given up" in line for line in bench.lines) == 2
    monkeypatch.setenv("FA2TUNE_FAKE_LOST", "")
    assert bench.tune(HERE, devices="all", trials=4, buckets=(512,)).rows
