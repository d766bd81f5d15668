"""benchmarks/sm80_rows.py with a pretended GPU: slices that resume, leaders by class, and the rows that are filed."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import click
import pytest
from benchmark_scripts import script
from click.testing import CliRunner

from fa2tune.launching import ported
from fa2tune.measuring.samples import Race
from fa2tune.rows import reader
from fa2tune.rows.row import PORTED
from fa2tune.spec.problem import BACKWARD, Specialization
from fa2tune.spec.variant import implementation_of

sm80_rows = script("sm80_rows")
SPEC = Specialization("bf16", 128, 128, "causal")
ERRORS = {"o": {"max": 0.01, "max_allowed": 0.02, "rms": 0.001, "rms_allowed": 0.002}}


def _factor(contender: dict[str, Any]) -> float:
    """Of a config's time; larger tiles and the new kernels are faster here."""
    if "configs" in contender:
        return sum(map(_factor, contender["configs"].values()))
    new = implementation_of(contender) == "sm80"
    return (0.5 if new else 1.0) - 1e-4 * (contender["BLOCK_M"] + contender["BLOCK_N"])


def _race(key: Any, contenders: Any, effort: str) -> Race:
    rounds = 22 if effort == "proof" else 6
    base = 100.0 * key.bucket / 512
    return Race([[base * _factor(one) * (1 + 0.001 * n) for n in range(rounds)] for one in contenders], clock_mhz=1700)


class _Now:
    """A pool that compiles nothing."""

    def submit(self, function: Any, kernel: str, spec: Specialization, config: Any) -> Future[Any]:
        done: Future[Any] = Future()
        variant = sm80_rows.registry.variant_of(kernel, config)
        able = sm80_rows.fits(variant, spec, config)
        done.set_result({"registers": 128, "spills": 0, "shared_bytes": 1, "binary_hash": "0" * 64, "able": [*able]})
        return done


@pytest.fixture
def raced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ported, "begin", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("fa2tune.measuring.measure.race", _race)
    monkeypatch.setattr("fa2tune.measuring.verify.check", lambda *asked: ERRORS)
    monkeypatch.setattr("fa2tune.measuring.verify.check_backward", lambda *asked: ERRORS)
    journal = sm80_rows.Journal(tmp_path)
    assert sm80_rows._slice(sm80_rows.Slice(journal, -1.0, _Now()), "bf16", [SPEC], [512, 4096], []) == 10
    assert sm80_rows._slice(sm80_rows.Slice(journal, 60.0, _Now()), "bf16", [SPEC], [512, 4096], []) == 0
    again = sm80_rows.Journal(tmp_path)
    assert sm80_rows._slice(sm80_rows.Slice(again, 60.0, _Now()), "bf16", [SPEC], [512, 4096], []) == 0
    return tmp_path


def test_rows_of_each_class_keep_its_limits_and_say_that_they_are_ported(raced: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(sm80_rows.main, ["file", str(raced), str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for name, arch, other in (("a100", 80, False), ("rtx-4090", 89, True)):
        rows = list(reader.read(tmp_path / "out" / f"{name}.sqlite"))
        assert {(row.obtained, row.proof, row.obtained_on) for row in rows} == {(PORTED, "sibling", "NVIDIA H200")}
        assert {row.key.arch for row in rows} == {arch}
        assert {row.key.bucket for row in rows} == {512, 4096}
        fused = next(row for row in rows if row.key.kernel == "bwd_fused" and row.implementation == "sm80")
        variant = sm80_rows.registry.variant_named("sm80/bwd_fused")
        broken = variant.space.broken(fused.config, SPEC, 86)
        assert (broken is None) or not other
        wholes = [row for row in rows if row.key.kernel == BACKWARD]
        assert {(row.strategy, tuple(row.config.values())) for row in wholes} >= {("fused", ("sm80",))}
        assert all(row.gain and row.gain > 1 and row.samples == 22 for row in rows if row.implementation == "sm80")
        assert not any(row.barred for row in rows)


def test_fp16_races_what_won_in_bf16(raced: Path) -> None:
    journal = sm80_rows.Journal(raced)
    spec = Specialization("fp16", 128, 128, "causal")
    assert sm80_rows._slice(sm80_rows.Slice(journal, 60.0, _Now()), "fp16", [spec], [4096], []) == 0
    race = journal.entries["race", "fwd", "fp16", 128, "causal", 4096]
    bf16 = journal.entries["race", "fwd", "bf16", 128, "causal", 4096]
    configs = [one["config"] for one in race["entries"]]
    assert configs[0] == bf16["entries"][0]["config"]
    assert all(config in [one["config"] for one in bf16["entries"]] for config in configs)


def test_races_of_other_sources_count_as_not_run(raced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm80_rows, "sources", lambda kernel, mask: {"sm80/fwd": "another"})
    done = CliRunner().invoke(sm80_rows.main, ["file", str(raced), str(raced / "out")])
    assert done.exit_code and "no race of these kernel sources" in done.output
    assert {about[0] for about in sm80_rows.Journal(raced).entries} == {"begun"}


def test_what_ended_the_process_twice_is_given_up(raced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = sm80_rows.Journal(raced)
    del journal.entries["race", "fwd", "bf16", 128, "causal", 512]
    for _ in range(2):
        journal.begun("fwd", "bf16", 128, "causal", 512)
    work = sm80_rows.Slice(journal, 60.0, _Now())
    assert sm80_rows._slice(work, "bf16", [SPEC], [512, 4096], []) == 0
    assert "given up" in capsys.readouterr().out


def test_a_wrong_config_is_passed_over(raced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa2tune.measuring import verify

    journal = sm80_rows.Journal(raced)
    best = sm80_rows.leader(journal.entries["race", "fwd", "bf16", 128, "causal", 512], "163 KiB")["config"]
    journal.entries = {}

    def check(kernel: str, config: Any, *asked: Any) -> Any:
        if config == best:
            raise verify.WrongResult("o: NaN")
        return ERRORS

    monkeypatch.setattr("fa2tune.measuring.verify.check", check)
    work = sm80_rows.Slice(journal, 60.0, _Now())
    work.compile("fwd", SPEC, sm80_rows.candidates("fwd", SPEC, []))
    work.kernel("fwd", SPEC, 512)
    found = [one["config"] for one in journal.entries["race", "fwd", "bf16", 128, "causal", 512]["entries"]]
    assert best not in found and any(implementation_of(config) == "sm80" for config in found)


def test_race_needs_a_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa2tune.gpus.present", lambda: None)
    with pytest.raises(click.ClickException, match=r"capability 9\.0"):
        sm80_rows.race.callback(tmp_path, 1.0, "bf16", [64], ["full"], [512], 1)


def test_the_small_class_takes_the_large_ones_leader_where_it_fits() -> None:
    default = {"config": {"LOADS": "pointer"}, "facts": {"able": ["163 KiB", "99 KiB"]}, "times": [10.0] * 22}
    wide = {"config": {"IMPLEMENTATION": "sm80"}, "facts": {"able": ["163 KiB"]}, "times": [4.0] * 22}
    narrow = {
        "config": {"IMPLEMENTATION": "sm80", "n": 1},
        "facts": {"able": ["163 KiB", "99 KiB"]},
        "times": [5.0] * 22,
    }
    race = {"entries": [default, wide, narrow], "tainted": 0}
    assert sm80_rows.leader(race, "163 KiB") is wide
    assert sm80_rows.leader(race, "99 KiB") is narrow
    assert sm80_rows.leader(race, "99 KiB", "pointer") is default
