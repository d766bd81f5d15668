"""Exhaustive tables: recorded by fake hands in real child processes, written, cut off, resumed, read."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from table_fakes import true_time

from fa2tune import gpus
from fa2tune.compiling.registry import portable_of
from fa2tune.tuning.search.candidates import legal, point

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H200 = gpus.named("h200")
FACTS = {"gpu": "NVIDIA H200", "driver": "1", "triton": "3", "torch": "2", "date": "2026-01-01"}


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    import record_tables

    monkeypatch.setattr(record_tables, "CHECK", "table_fakes:checked")
    monkeypatch.setattr(record_tables, "RACE", "table_fakes:race")
    monkeypatch.setattr(record_tables, "CLOSING_SECONDS", 0.0)
    return record_tables


def start(recorder, folder, text="fwd:256:causal:4096"):
    return recorder.Recording(recorder.key_named(text, H200), H200, folder, FACTS)


def test_a_recording_holds_every_legal_config_through_crashes_and_a_cut_off(recorder, tmp_path, monkeypatch):
    tables = sys.modules["tables"]
    first = start(recorder, tmp_path)
    take = first.take

    def interrupted(line):
        take(line)
        if len(first.table.binaries) >= 150 and first.table.anchors:
            raise KeyboardInterrupt

    first.take = interrupted
    with pytest.raises(KeyboardInterrupt):
        recorder.record([first], 3, 600.0)
    cut = tables.load(first.packed)
    assert not cut.complete and not first.journal.exists() and cut.times and len(cut.binaries) >= 150
    second = start(recorder, tmp_path)
    assert len(second.to_compile) == sum(second._lacks(where) for where in second.wanted)
    recorder.record([second], 3, 600.0)
    table = tables.load(second.packed)
    assert table.complete and table.header["seconds"] > cut.header["seconds"]
    configs = legal(portable_of("fwd"), table.key.specialization(), H200).configs
    assert {point(config) for config in configs} == table.times.keys() | table.statuses.keys()
    assert not table.times.keys() & table.statuses.keys()
    for config in configs:
        status = table.statuses.get(point(config))
        if config["num_stages"] == 4 and config["BLOCK_N"] == 16:
            assert status == "crash"
        elif config["maxnreg"] == 168:
            assert status == "spills"
        elif config["BLOCK_N"] == 16 and config["HEADS_PER_WAVE"] == 16 and config["num_stages"] == 1:
            assert status == "crash"
        else:
            assert table.times[point(config)] / table.anchor_us == pytest.approx(
                true_time(config) / true_time(table.default), rel=2e-3
            )
    best = min(table.times, key=table.times.__getitem__)
    run = table.built(dict(best)).runs[dict(best)["HEADS_PER_WAVE"]]
    assert [len(samples) for _, samples in run.heats] == [5, 21]
    slow = max(table.times, key=table.times.__getitem__)
    assert [len(s) for _, s in table.built(dict(slow)).runs[dict(slow)["HEADS_PER_WAVE"]].heats] == [2]

    again = start(recorder, tmp_path)  # nothing is left to do, and packing anew changes nothing
    before = again.packed.read_bytes()
    recorder.record([again], 3, 5.0)
    assert again.done and again.packed.read_bytes() == before
    tables.pack(table, tmp_path / "copy.jsonl.gz")
    assert (tmp_path / "copy.jsonl.gz").read_bytes() == before
    # a table whose loops were counted in another way is compiled again, and not measured again
    header = {**table.header, "loop_fields": table.header["loop_fields"][:3]}
    lines = [header, *({**line, "loops": [loop[:3] for loop in line["loops"]]} if "c" in line else line
                       for line in list(table.lines())[1:])]  # fmt: skip
    again.packed.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    monkeypatch.setattr(recorder, "RACE", "table_fakes:none")
    third = start(recorder, tmp_path)
    assert len(third.to_compile) == len(third.wanted)
    recorder.record([third], 3, 600.0)
    renewed = tables.load(third.packed)
    assert renewed.complete and renewed.times == table.times and renewed.binaries == table.binaries


def test_a_journal_cut_in_a_line_is_read_up_to_there(recorder, tmp_path):
    tables = sys.modules["tables"]
    recording = start(recorder, tmp_path)
    recording.open()
    where = recording.to_compile[0]
    values = [dict(where)[name] for name in recording.table.header["dimensions"]]
    recording.take({"c": values, "fate": "", "why": "", "r": 1, "s": 0, "m": 2, "w": 4, "loops": [], "compile_s": 1.0})
    of = [[values, 1, "", [120.0, 121.0]], [values, 4, "launch_error", []]]
    recording.take({"heat": 0, "anchor": [100.0, 101.0], "of": of})
    with recording.journal.open("a") as file:
        file.write('{"heat": 1, "anch')
    table = tables.load(recording.journal)
    assert table.times == {point({**dict(where), "HEADS_PER_WAVE": 1}): pytest.approx(1.199 * 100.5, rel=1e-3)}
    assert table.statuses[point({**dict(where), "HEADS_PER_WAVE": 4})] == "launch_error"
    assert start(recorder, tmp_path).to_compile == recording.to_compile[:]


def test_what_is_no_table_or_another_kernels_is_refused(recorder, tmp_path):
    tables = sys.modules["tables"]
    (tmp_path / "x.jsonl").write_text('{"poem": 1}\n')
    with pytest.raises(ValueError, match="does not begin with a table's header"):
        tables.load(tmp_path / "x.jsonl")
    recording = start(recorder, tmp_path)
    recording.table.header["kernel_hash"] = "other"
    recording.open()
    with pytest.raises(recorder.click.ClickException, match="differs in kernel_hash"):
        start(recorder, tmp_path)
    for text in ("fwd:128", "bwd_dq:128:causal:4096", "fwd:128:both:4096"):
        with pytest.raises(ValueError, match="key: got"):
            recorder.key_named(text, H200)
