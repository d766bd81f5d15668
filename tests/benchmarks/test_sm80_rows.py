"""benchmarks/sm80_rows.py with a pretended GPU: slices that resume, leaders, and the rows that are filed."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import pytest
from benchmark_scripts import script
from click.testing import CliRunner

from fa2tune import gpus
from fa2tune.compiling import limits
from fa2tune.launching import launch, ported
from fa2tune.launching.image import Image
from fa2tune.measuring import verify
from fa2tune.measuring.samples import Race, ratios
from fa2tune.rows import reader
from fa2tune.rows.row import PORTED
from fa2tune.spec.problem import BACKWARD, BUCKETS, FUSED, Specialization
from fa2tune.spec.variant import implementation_of

ROOT = Path(__file__).parents[2]
sm80_rows, sm80_candidates = script("sm80_rows"), script("sm80_candidates")
A100, L4 = gpus.named("a100"), gpus.named("l4")
SPEC = Specialization("bf16", 128, 128, "causal")
ERRORS = {"o": {"max": 0.01, "max_allowed": 0.02, "rms": 0.001, "rms_allowed": 0.002}}
FACTS = {"registers": 128, "spills": 0, "shared_bytes": 1, "binary_hash": "0" * 64, "num_warps": 4, "stack_bytes": 0}


def _factor(contender: dict[str, Any]) -> float:
    """Of a config's time: larger tiles and the new kernels are faster here."""
    if "configs" in contender:
        return sum(map(_factor, contender["configs"].values()))
    new = implementation_of(contender) == "sm80"
    return (0.5 if new else 1.0) - 1e-3 * (contender["BLOCK_M"] + contender["BLOCK_N"])


def _race(key: Any, contenders: Any, effort: str) -> Race:
    base = 100.0 * key.bucket / 512
    return Race([[base * _factor(one) * (1 + 0.0001 * n) for n in range(12)] for one in contenders], clock_mhz=1700)


class _Compiled(dict):  # type: ignore[type-arg]
    """Every kernel is there."""

    def __missing__(self, asked: Any) -> Any:
        return Image("kernel", b"", 1, 4, 1, False, False, ()), FACTS


@pytest.fixture
def racing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """(GPU) -> races of it; a new one has read the journal anew."""
    monkeypatch.setattr(ported, "begin", lambda gpu: None)
    monkeypatch.setattr(launch, "load", launch.load)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("fa2tune.measuring.measure.race", _race)
    monkeypatch.setattr("fa2tune.measuring.verify.check", lambda *asked: ERRORS)

    def make(gpu: gpus.Gpu = A100) -> Any:
        images = sm80_rows.Images(tmp_path)
        images.known = _Compiled()
        return sm80_rows.Racing(sm80_rows.Journal(tmp_path), images, gpu)

    yield make


def _plan(racing: Any, dtype: str = "bf16") -> Any:
    return sm80_rows.planned(racing.journal, dtype, [128], ["causal"], racing.gpu)


def _carry_out(racing: Any, dtype: str = "bf16", ends: float = math.inf) -> int:
    return sm80_rows.carried_out(racing, _plan(racing, dtype), [512, 4096], ends)


def _filed(folder: Path, name: str) -> list[Any]:
    done = CliRunner().invoke(
        sm80_rows.main, ["file", str(folder), str(folder / "out"), "--gpu", name], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return list(reader.read(folder / "out" / f"{gpus.named(name).name}.sqlite"))


def test_a_slice_ends_in_time_and_the_next_goes_on(racing: Any, tmp_path: Path) -> None:
    assert _carry_out(racing(), ends=0.0) == 4
    assert _carry_out(racing()) == 0
    monkey = len((tmp_path / "races.jsonl").read_text().splitlines())
    assert _carry_out(racing()) == 0
    assert len((tmp_path / "races.jsonl").read_text().splitlines()) == monkey  # nothing was run again


@pytest.mark.parametrize("gpu", [A100, L4], ids=["a100", "l4"])
def test_rows_say_that_they_are_ported_and_keep_the_limits(racing: Any, tmp_path: Path, gpu: gpus.Gpu) -> None:
    assert _carry_out(racing(gpu)) == 0
    rows = _filed(tmp_path, gpu.name)
    assert {(row.obtained, row.proof, row.obtained_on, row.key.arch) for row in rows} == {
        (PORTED, "sibling", "NVIDIA H200", gpu.arch)
    }
    assert {(row.key.kernel, row.filed_as) for row in rows} == {
        ("fwd", "sm80"), ("bwd_fused", "sm80"), (BACKWARD, "fused sm80")
    }  # fmt: skip
    assert {row.key.bucket for row in rows} == {512, 4096} and len(rows) == 6
    for row in rows:
        assert not row.barred and row.samples == 12 and row.errors == ERRORS
        if row.key.kernel == BACKWARD:
            assert row.strategy == FUSED and row.config == {"bwd_fused": "sm80"} and row.gain and row.gain > 1
            continue
        variant = sm80_rows.registry.variant_of(row.key.kernel, row.config)
        assert limits.before_compile(variant, SPEC, row.config, gpu) is None
        assert row.binary_hash == FACTS["binary_hash"]


def test_a_race_is_filed_for_gpus_of_the_same_limits(racing: Any, tmp_path: Path) -> None:
    _carry_out(racing(L4))
    out = tmp_path / "out"

    def filed(also: str) -> Any:
        return CliRunner().invoke(sm80_rows.main, ["file", str(tmp_path), str(out), "--gpu", "l4", "--also", also])

    refused = filed("a10,a100")
    assert refused.exit_code == 1 and "--also: got a100-sxm-80gb, whose shared_per_block" in refused.output
    assert not out.exists()
    assert filed("a10,rtx-5090").exit_code == 0
    of_l4, of_a10, of_5090 = (list(reader.read(out / f"{name}.sqlite")) for name in ("l4", "a10", "rtx-5090"))
    assert [(row.key.gpu, row.key.arch, row.key.sm_count) for row in of_a10] == [("a10", 86, 72)] * 6
    assert {row.key.arch for row in of_5090} == {120}
    assert [row.config for row in of_a10] == [row.config for row in of_l4] == [row.config for row in of_5090]


def test_fp16_races_what_won_in_bf16(racing: Any) -> None:
    _carry_out(racing())
    again = racing()
    assert _carry_out(again, "fp16") == 0
    for kernel in sm80_rows.KERNELS:
        bf16, fp16 = (
            again.journal.entries["race", kernel, d, 128, "causal", 4096, A100.name] for d in ("bf16", "fp16")
        )
        raced = [one["config"] for one in fp16["entries"]]
        assert raced[0] == bf16["entries"][0]["config"] and len(raced) <= 2
        assert all(config in [one["config"] for one in bf16["entries"]] for config in raced)


def test_fp16_races_what_the_shipped_rows_of_bf16_have_where_nothing_was_raced(racing: Any) -> None:
    rows = [row for row in reader.read(ROOT / "cache" / "a100.sqlite") if row.obtained == PORTED]
    for (kernel, spec), configs in _plan(racing(), "fp16").items():
        tuned, dims = "fwd" if kernel == "fwd" else "bwd_fused", ("bf16", 128, spec.mask)
        like = [
            row for row in rows if (row.key.kernel, row.key.dtype, row.key.head_dim, row.key.mask) == (tuned, *dims)
        ]
        assert len(like) == 6 and all(row.config in configs for row in like)
        assert all(config in [row.config for row in like] for config in configs[1:])  # behind the default


def test_races_of_other_sources_count_as_not_run(racing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _carry_out(racing())
    monkeypatch.setattr(sm80_rows, "sources", lambda kernel, mask: {"sm80/fwd": "another"})
    done = CliRunner().invoke(sm80_rows.main, ["file", str(tmp_path), str(tmp_path / "out")])
    assert done.exit_code and "no race for a100-sxm-80gb of these kernel sources" in done.output


def test_a_wrong_config_is_passed_over(racing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = racing()
    default = sm80_candidates.candidates("fwd", SPEC, A100)[0]
    configs = [default, {**default, "BLOCK_M": 64}]
    first.race("fwd", SPEC, 512, configs)
    about = "race", "fwd", "bf16", 128, "causal", 512, A100.name
    wrong = sm80_rows.leader(first.journal.entries[about]["entries"], 0)["config"]
    first.journal.entries.clear()

    def check(kernel: str, config: Any, *asked: Any) -> Any:
        if config == wrong:
            raise verify.WrongResult("o: NaN")
        return ERRORS

    monkeypatch.setattr("fa2tune.measuring.verify.check", check)
    first.verify.check = check
    first.race("fwd", SPEC, 512, configs)
    entry = first.journal.entries[about]
    assert sm80_rows.leader(entry["entries"], 0)["config"] != wrong
    assert all(row.config != wrong for row in sm80_rows.rows_of(entry, A100))


def test_the_default_stays_unless_another_is_clearly_faster() -> None:
    def entry(*times: float) -> dict[str, Any]:
        return {"config": {}, "times": list(times)}

    default = entry(*[10.0, 10.2] * 6)
    near, far, dead = entry(*[10.1, 10.0] * 6), entry(*[9.0, 9.1] * 6), entry()
    assert sm80_rows.leader([default, near], 0) is default
    assert sm80_rows.leader([default, near, far], 0) is far
    assert sm80_rows.leader([default, far], 3) is default  # a throttled GPU proves nothing
    assert sm80_rows.leader([dead, near, far], 0) is far
    assert sm80_rows.leader([dead], 0) is None


@pytest.mark.parametrize("gpu", [A100, L4], ids=["a100", "l4"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kernel", ["fwd", "bwd_fused"])
def test_candidates_are_few_and_legal(kernel: str, dim: int, gpu: gpus.Gpu) -> None:
    spec = Specialization("bf16", dim, dim, "full")
    found = sm80_candidates.candidates(kernel, spec, gpu)
    variant = sm80_rows.registry.variant_named(f"sm80/{kernel}")
    assert found[0] == dict(variant.space.default(spec, gpu.arch)) and len(found) <= 10
    assert all(limits.before_compile(variant, spec, config, gpu) is None for config in found)


def test_what_is_built_is_all_that_a_race_takes(racing: Any) -> None:
    names = {name for name, *_ in sm80_rows.wanted(_plan(racing()))}
    assert names == {
        "portable/fwd", "sm80/fwd", "portable/bwd_dq", "portable/bwd_dkdv", "sm80/bwd_prepare", "sm80/bwd_fused",
        "sm80/bwd_finish",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("record", "of", "races"),
    [
        ("sm80_rows", "", 96),
        ("sm80_rows_l4", "L4, ", 34),
        ("sm80_rows_2", "A100 again, ", 48),
        ("sm80_rows_l4_2", "L4 again, ", 48),
    ],
)
def test_the_page_has_what_was_recorded(record: str, of: str, races: int) -> None:
    """docs/experiments/ported.md, of benchmarks/calls, whatever the sources are now."""
    root = Path(__file__).parents[2]
    page = (root / "docs/experiments/ported.md").read_text(encoding="utf-8")
    entries = map(json.loads, gzip.decompress((root / f"benchmarks/calls/{record}.jsonl.gz").read_bytes()).splitlines())
    found: dict[str, dict[int, float]] = {}
    for entry in (one for one in entries if one["what"] == "race"):
        best = sm80_rows.leader(entry["entries"], entry["tainted"])
        kernel, _, dim, mask, length, _ = entry["about"]
        name = f"{of}{'forward' if kernel == 'fwd' else 'backward'}, {dim}, {mask}"
        found.setdefault(name, {})[length] = median(ratios(entry["default"]["times"], best["times"]))
    assert sum(map(len, found.values())) == races
    for name, cells in found.items():
        told = (f"{cells[length]:.2f}" if length in cells else "-" for length in BUCKETS)
        assert f"| {name} | {' | '.join(told)} |" in page
    for word in ("forward", "backward"):
        mean = geometric_mean(x for name, cells in found.items() if word in name for x in cells.values())
        assert f"{of}{word} {mean:.2f}" in page


def test_race_needs_a_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa2tune.gpus.present", lambda: None)
    with pytest.raises(click.ClickException, match=r"capability 9\.0"):
        sm80_rows.race.callback(tmp_path, 1.0, "a100", [64], ["full"], "bf16", [512], ["fwd"], 1)


def test_some_kernels_alone_are_planned(tmp_path: Path) -> None:
    journal = sm80_rows.Journal(tmp_path)
    plan = sm80_rows.planned(journal, "bf16", [96], ["full"], A100, ["fwd"])
    assert [kernel for kernel, _ in plan] == ["fwd"]
    with pytest.raises(click.BadParameter, match=r"--kernel: got dq, allowed are fwd, bwd"):
        sm80_rows.planned(journal, "bf16", [96], ["full"], A100, ["dq"])
