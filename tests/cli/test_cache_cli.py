"""``fa2tune cache`` and ``fa2tune explain``."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_rows import BARE, CONFIG, FULL, KEY, row
from click.testing import CliRunner, Result
from pace import timed

from fa2tune.cli import _tables
from fa2tune.cli.cache import cache, look
from fa2tune.cli.cache.common import describe_row
from fa2tune.cli.explain import explain
from fa2tune.rows import reader, record
from fa2tune.rows.lookup import Toolchain
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.spec.problem import BUCKETS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the user's file, none yet; and no other layer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reader, "shipped_paths", list)
    return reader.user_path()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cache, list(map(str, arguments)), terminal_width=200)


def test_path(user: Path) -> None:
    assert run("path").output.strip() == str(user)


def test_list(user: Path, tmp_path: Path) -> None:
    assert "No cache file" in run("list").output
    Store(user).put([FULL, row({"bucket": 512}), row({"mask": "full"}, implementation="descriptor")])
    Store(tmp_path / "x.sqlite").put([BARE])
    listed = run("list").output.splitlines()
    assert listed[1].split() == ["user", "3", record.digest(reader.read(user)), str(user)]
    assert f"h200, 132 SMs, measured, 3 rows, user layer, {user.name}" in listed
    table = [line.split() for line in listed]
    assert ["fwd", "bf16", "128", "causal", "512", "4096"] in table and ["fwd", "bf16", "128", "full", "4096"] in table
    assert "a100-sxm-80gb" in run("list", "--cache", tmp_path / "x.sqlite").output
    assert "full" not in run("list", "--causal").output
    assert run("list", "--headdim", 40).output.endswith("\nno row matches\n")


def test_show(user: Path) -> None:
    Store(user).put([FULL, BARE])
    shown = run("show", "--gpu", "h200").output
    assert "BLOCK_M 128" in shown
    assert "NVIDIA H200" in shown
    assert "a100" not in shown
    twin = json.loads(run("show", "--json", "--gpu", "a100").output)
    assert [entry["gpu"] for entry in twin["rows"]] == ["a100-sxm-80gb"], "a100 is an alias"
    assert run("show", "--headdim", 64).exit_code == 1
    assert run("show", "--headdim", "64,128").output.count("key       ") == 2
    assert run("show", "--headdim", 64, "--headdim", 128).exit_code == 0
    for given, said in (("64,100", "got 100, allowed are 16 to 256"), ("64;128", "numbers with commas between")):
        refused = run("show", "--headdim", given)
        assert refused.exit_code == 2 and said in refused.output
    unknown = run("show", "--gpu", "h900")
    assert unknown.exit_code == 2
    assert "; close to it are h" in unknown.output and "no row is filed under" in unknown.output


def test_export(user: Path, tmp_path: Path) -> None:
    Store(user).put([FULL, BARE])
    out = tmp_path / "a100.sqlite"
    done = run("export", out, "--gpu", "a100", "--twin")
    assert done.exit_code == 0, done.output
    assert reader.read(out) == [BARE]
    assert out.with_suffix(".json").read_text() == record.to_json([BARE])
    assert run("export", tmp_path / "all.json", "--cache", out).exit_code == 0
    assert (tmp_path / "all.json").read_text() == record.to_json([BARE])
    printed = run("export", "--format", "json", "--cache", out)
    assert printed.output == record.to_json([BARE])
    assert run("export", tmp_path / "plain", "--format", "json", "--cache", out).exit_code == 0
    assert (tmp_path / "plain").read_text() == printed.output
    for arguments, said in (
        ([tmp_path / "x.yaml"], ".sqlite or .json"),
        (["--cache", out], "OUT is missing"),
        ([user], "export from"),
        ([tmp_path / "x.sqlite", "--headdim", 16], "nothing written"),
        ([tmp_path / "x.sqlite", "--cache", tmp_path / "none.sqlite"], "no such file"),
        ([tmp_path / "nowhere" / "x.sqlite"], "is not a folder"),
    ):
        refused = run("export", *arguments)
        assert refused.exit_code != 0
        assert said in refused.output
    assert not (tmp_path / "x.sqlite").exists() and not (tmp_path / "nowhere").exists()


def test_merge(user: Path, tmp_path: Path) -> None:
    node, broken = tmp_path / "node.sqlite", tmp_path / "broken.sqlite"
    Store(node).put([FULL, BARE])
    Store(user).put([replace(FULL, created="2020-01-01T00:00:00Z")])
    broken.write_text("x")
    refused = run("merge", node, broken)
    assert refused.exit_code == 2
    assert str(broken) in refused.output
    assert len(reader.read(user)) == 1, "all or nothing"
    assert "1 row added, 1 replaced, 0 left" in run("merge", node).output
    assert reader.read(user) == [BARE, FULL]
    assert run("merge", node, "--cache", tmp_path / "new.sqlite").exit_code == 0
    assert (tmp_path / "new.sqlite").read_bytes() == node.read_bytes()


def test_merge_shows_what_did_not_say_the_same(user: Path, tmp_path: Path) -> None:
    node = tmp_path / "node.sqlite"
    Store(node).put([replace(FULL, time_us=700.0, created="2026-02-01T00:00:00Z"), row({"bucket": 512})])
    Store(user).put([FULL, row({"bucket": 512})])
    before = user.read_bytes()
    planned = run("merge", node, "--dry-run")
    assert "0 rows would be added, 1 would be replaced, 1 left" in planned.output
    assert user.read_bytes() == before
    [line] = [line for line in planned.output.splitlines() if "700 us" in line]
    assert "812.2 us, 2026-01-31T12:00:00Z" in line
    assert "times, created" in line
    assert run("merge", node).exit_code == 0
    assert run("merge", node).output.count("us,") == 0, "nothing left to tell"


def test_merge_and_diff_show_what_a_slot_holds(user: Path, tmp_path: Path) -> None:
    node = tmp_path / "node.sqlite"
    several = [
        replace(FULL, config=CONFIG | {"BLOCK_N": size}, time_us=time) for size, time in ((64, 800.0), (32, 700.0))
    ]
    Store(node).put([replace(each, created="2026-02-01T00:00:00Z") for each in several])
    Store(user).put([FULL, BARE])
    compared = run("diff", user, node)
    assert (
        "1 row only in A (-), 0 only in B (+), 1 in both but different (~), 1 of them in the config" in compared.output
    )
    assert "BLOCK_N 64 -> 32; times, created, configs 1 -> 2" in " ".join(compared.output.split()), compared.output
    merged = run("merge", node)
    assert "700 us, 2026-02-01T00:00:00Z, 2 configs" in merged.output, merged.output
    assert "0 rows added, 2 replaced, 0 left" in merged.output
    assert [each.time_us for each in reader.read(user) if each.key == FULL.key] == [
        each.time_us for each in reader.read(node)
    ]


def test_a_twin_is_compared_as_its_file_is(user: Path, tmp_path: Path) -> None:
    Store(user).put([FULL, BARE])
    assert run("export", tmp_path / "c.json").exit_code == 0
    same = run("diff", user, tmp_path / "c.json")
    assert same.exit_code == 0 and "2 the same" in same.output


def test_diff(user: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    Store(a).put([FULL, row({"bucket": 512}), row({"bucket": 1024})])
    Store(b).put([replace(FULL, time_us=406.125, config={**CONFIG, "BLOCK_M": 64}), row({"bucket": 512}), BARE])
    done = run("diff", a, b)
    assert done.exit_code == 1
    assert done.output.splitlines()[0] == (
        "1 row only in A (-), 1 only in B (+), 1 in both but different (~), 1 of them in the config; 1 the same"
    )
    [line] = [line for line in done.output.splitlines() if line.startswith("~")]
    assert "0.500" in line
    assert "BLOCK_M 128 -> 64; times" in line
    assert [line[0] for line in done.output.splitlines() if line[:1] in {*"-+~"}] == ["-", "~", "+"]
    assert "h200, measured:" in done.output and "a100-sxm-80gb, predicted:" in done.output
    assert len(run("diff", a, b, "--brief").output.splitlines()) == 1
    assert run("diff", a, b, "--bucket", 512).exit_code == 0
    assert run("diff", a, a).exit_code == 0
    assert run("diff", a, tmp_path / "none.sqlite").exit_code == 2, "a typo is no difference"
    assert run("diff", a, b, "--brief", "--all").exit_code == 2


def test_diff_of_files_with_little_in_common_is_short(user: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    keys = [{"head_dim": dim, "head_dim_v": dim} for dim in range(16, 257, 16)]
    Store(a).put([row(key) for key in keys])
    Store(b).put([row({**key, "gpu": "h100-sxm"}) for key in keys[:12]])
    signs = [line[0] for line in run("diff", a, b).output.splitlines() if line[:1] in {*"-+~"}]
    assert (signs.count("-"), signs.count("+")) == (10, 10)
    assert run("diff", a, b).output.splitlines()[-1] == "10 rows of each kind are listed at most; --all lists every row"
    done = run("diff", a, b, "--all").output
    signs = [line[0] for line in done.splitlines() if line[:1] in {*"-+~"}]
    assert (signs.count("-"), signs.count("+")) == (16, 12)
    assert "--all" not in done


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"], ["list", "--cache", "h200.sqlite"], ["diff", "h200-triton3.9.sqlite", "h200.sqlite"],
        ["diff", "h200.sqlite", "h100.sqlite", "--kernel", "bwd"], ["show", "--cache", "h200.sqlite", "--bucket", "512"],
        ["merge", "h200.sqlite", "--cache", "merged.sqlite", "--dry-run"], ["verify", "--help"], ["--help"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_screens_fit_80_columns(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(ROOT / "cache", folder)
    changed = [replace(one, time_us=1.0, created="2020-01-01T00:00:00Z") for one in reader.read(folder / "h200.sqlite")]
    Store(folder / "merged.sqlite").put(changed[::50])
    monkeypatch.chdir(folder)
    monkeypatch.setattr(reader, "shipped_paths", lambda: [Path("a100.sqlite"), Path("h200.sqlite")])
    monkeypatch.setattr(_tables, "width", lambda: 80)
    done = CliRunner().invoke(cache, arguments, terminal_width=80)
    assert done.exit_code in (0, 1), done.output
    wide = [line for line in done.output.splitlines() if len(line) > 80]
    assert not wide, wide[:3]
    said = done.output.replace("[ARGS]...", "").replace("N,...", "N")
    assert len(said.splitlines()) > 5 and "..." not in said and "\u2026" not in said


def test_the_list_stands_for_exactly_the_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of the values in a line is a row, and every row is in a line."""
    path = ROOT / "cache" / "h200.sqlite"
    held = [one for number, one in enumerate(reader.read(path)) if number % 7]
    found = []
    for kernel, dtypes, dims, masks, lengths in look._combined(held):
        buckets = [
            bucket for span in lengths.split() for first, _, last in [span.partition("-")]
            for bucket in BUCKETS if int(first) <= bucket <= int(last or first)
        ]  # fmt: skip
        found += itertools.product([kernel], dtypes.split(), dims.split(), masks.split(), buckets)
    assert len(found) == len(set(found))
    assert set(found) == {(*look._cells(one), one.key.bucket) for one in held}


def test_reading_commands_are_quick_and_import_nothing_heavy(user: Path) -> None:
    Store(user).put([row({"bucket": bucket}) for bucket in range(1, 300)])
    code = "import sys; from fa2tune.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    heavy = {"sqlalchemy", "torch", "triton", "optuna", "numpy", "matplotlib"}

    def seconds(command: str) -> float:
        environment = {**os.environ, "XDG_CACHE_HOME": str(user.parent.parent)}
        done, taken = timed([sys.executable, "-c", code, "cache", command], cwd=ROOT, env=environment)
        assert not heavy & set(done.stdout.splitlines()[-1].split())
        return taken

    for command in ("list", "show"):  # 0.8 s: 5,600 rows are checked, and printed or in a digest
        assert any(seconds(command) < 1.5 for _ in range(3))


# --- explain


def explained(*arguments: object) -> Result:
    return CliRunner().invoke(explain, ["-v", *map(str, arguments)], terminal_width=200)


def served(implementation: str, **key: object) -> Row:
    loads = {"LOADS": implementation}
    time_us = 1.0 if implementation == "descriptor" else 2.0
    return row(dict(key), implementation=implementation, config=CONFIG | loads, time_us=time_us)


def test_explain_names_row_step_layer_staleness_and_differences(user: Path) -> None:
    Store(user).put([served("pointer", bucket=2048)])
    done = explained("--gpu", "h100", "--headdim", 120, "--causal", "--pass", "fwd", "--seqlen", 4000)
    assert done.exit_code == 0, done.output
    for part in (
        "fwd: problem nearest bucket, GPU same silicon, measured, stale, user layer",
        f"file      {user}",
        "differs   gpu: asked h100-sxm, the row has h200",
        "differs   head_dim: asked 120, the row has 128",
        "differs   bucket: asked 4096, the row has 2048",
        "stale     kernel source 0123456789abcdef, now ",
        "BLOCK_M 128",
    ):
        assert part in done.output


def test_explain_tells_what_was_refused(user: Path) -> None:
    Store(user).put([served("pointer"), served("descriptor")])
    aligned = explained("--gpu", "h200", "--causal", "--pass", "fwd").output
    assert "config    descriptor" in aligned
    assert "refused" not in aligned
    unaligned = explained("--gpu", "h200", "--causal", "--pass", "fwd", "--unaligned").output
    assert "config    pointer" in unaligned
    assert "refused   descriptor, problem exact, GPU exact" in unaligned


def test_explain_shows_the_strategy_of_the_backward(user: Path) -> None:
    Store(user).put(
        [
            row({"kernel": "bwd"}, strategy="fused", implementation="portable", config={}),
            row({"kernel": "bwd_fused"}, config={"X": 1}),
        ]
    )
    done = explained("--gpu", "h200", "--causal", "--pass", "bwd")
    assert "bwd: problem exact" in done.output
    assert "bwd_fused: no row serves" in done.output, "its config names no dimension of the kernel"
    assert "refused   pointer" in done.output
    steady = explained("--gpu", "h200", "--causal", "--pass", "bwd", "--deterministic").output
    assert "split is the deterministic strategy" in steady
    assert "refused   fused portable, problem exact" in steady
    assert "bwd_dkdv: no row serves" in steady
    assert "bwd_dq: no row serves" in steady


def test_explain_says_that_a_deterministic_backward_by_defaults_is_not_tuned(user: Path) -> None:
    said = explained("--gpu", "gb10", "--pass", "bwd", "--deterministic").output
    assert "Not tuned: no row serves bwd, bwd_fused" in said and "Next: fa2tune tune --gpu gb10" in said


def test_explain_tells_what_suits_these_lengths_better(user: Path) -> None:
    from fa2tune.compiling.registry import variant_named

    key = {"mask": "full", "bucket": 16384}
    spec = replace(KEY, **key).specialization()
    config = {**variant_named("sm90/fwd").space.default(spec, 90), "RESCALE": "never"}
    Store(user).put([row(key, implementation="warp_specialized", config=config)])
    said = "changed   RESCALE never to lazy, which suits this call better"
    square = explained("--gpu", "h200", "--full", "--pass", "fwd", "--seqlen", 16384).output
    assert "RESCALE never" in square and "changed" not in square
    assert said in explained("--gpu", "h200", "--full", "--pass", "fwd", "--seqlen", 1, "--seqlen-k", 16384).output


def test_explain_a_miss_field_by_field(user: Path) -> None:
    Store(user).put([served("pointer", mask="full")])
    done = explained("--gpu", "h200", "--causal", "--pass", "fwd")
    assert "fwd: no row serves" in done.output
    assert "default   {'BLOCK_M'" in done.output
    assert "nearest   user layer: mask asked causal, has full" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h900"], "`fa2tune gpus` lists them"),
        (["--gpu", "h100", "--headdim", 100], "in steps of 8"),
        (["--gpu", "h100", "--heads", 8, "--heads-kv", 3], "must divide"),
        (["--gpu", "h100", "--precision", "tf32"], "ieee only"),
        (["--gpu", "h100", "--seqlen", 0], "'--seqlen': got 0, allowed are 1 to 2147483647"),
        (["--gpu", "h100", "--batch", 2**31], "'--batch': got 2147483648, allowed are 1 to 2147483647"),
        (["--gpu", "h100", "--cache", "/nowhere.sqlite"], "no such file"),
    ],
)
def test_explain_refuses(arguments: list[object], said: str) -> None:
    done = explained(*arguments)
    assert done.exit_code == 2
    assert said in done.output


def short(*arguments: object) -> str:
    done = CliRunner().invoke(explain, list(map(str, arguments)), terminal_width=200)
    assert done.exit_code == 0, done.output
    assert len(done.output.splitlines()) <= 14
    return done.output


def fresh(**changes: Any) -> Row:
    from fa2tune.compiling import fingerprint

    made = {"triton": fingerprint.triton_version(), "driver": fingerprint.driver_version()}
    hashed = fingerprint.kernel_hashes()["fwd causal"]
    return replace(served("descriptor"), kernel_hash=hashed, **(made | changes))


@pytest.mark.parametrize(
    ("rows", "arguments", "verdict", "command"),
    [
        ([{}], [], "Tuned: every kernel of this call has a row measured on h200, fresh for Triton", "nothing to do"),
        ([{"triton": "3.5.0"}], [], "Tuned, but stale: fwd runs a row measured on h200 with triton 3.5.0, now",
         "on a machine with h200: fa2tune cache verify --stale --repair"),
        ([{}], ["--gpu", "h100"], "Tuned on another GPU: fwd runs a row measured on NVIDIA H200.",
         "on a machine with h100-sxm: fa2tune tune --headdim 128 --dtype bf16 --causal --seqlen 4096 --pass fwd"),
        ([{}], ["--seqlen", 600], "Not tuned for exactly this problem: fwd runs a row of another one (nearest bucket).",
         "on a machine with h200: fa2tune tune --headdim 128 --dtype bf16 --causal --seqlen 1024 --pass fwd"),
        ([{"obtained": "predicted"}], [], "Not tuned: no row serves fwd, so the default config does.",
         "on a machine with h200: fa2tune tune --headdim 128 --dtype bf16 --causal --seqlen 4096 --pass fwd"),
        ([{"obtained": "predicted", "key": KEY.with_(head_dim=32, head_dim_v=32)}], ["--headdim", 32],
         "Predicted, not measured: fwd runs a row that the analytic model chose.",
         "on a machine with h200: fa2tune tune --headdim 32 --dtype bf16 --causal --seqlen 4096 --pass fwd"),
        ([], [], "Not tuned: no row serves fwd, so the default config does.",
         "on a machine with h200: fa2tune tune --headdim 128 --dtype bf16 --causal --seqlen 4096 --pass fwd"),
        ([], ["--gpu", "a100"], "Not tuned: no row serves fwd, so the default config does.",
         "fa2tune tune --gpu a100-sxm-80gb --headdim 128 --dtype bf16 --causal --seqlen 4096 --pass fwd"),
        ([], ["--headdim-v", 64], "Not tuned: no row serves fwd",
         "on a machine with h200: fa2tune tune --headdim 128 --headdim-v 64 --dtype bf16 --causal --seqlen 4096 --pass fwd"),
    ],
    ids=["tuned", "stale", "other GPU", "near", "not predicted", "predicted", "default", "portable default", "two head dims"],
)  # fmt: skip
def test_explain_begins_with_a_verdict_and_names_the_next_command(
    user: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], arguments: list[object], verdict: str,
    command: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("fa2tune.cli.explain.is_here", lambda gpu: False)
    if rows:
        Store(user).put([fresh(**changes) for changes in rows])
    asked = ["--causal", "--pass", "fwd", *(arguments if "--gpu" in arguments else ["--gpu", "h200", *arguments])]
    lines = short(*asked).splitlines()
    assert lines[0].startswith(verdict)
    assert f"Next: {command}" in lines
    assert any(str(user) in line for line in lines) == (bool(rows) and "no row serves" not in verdict)


def test_explain_says_for_which_bucket_and_size_a_row_was_measured_and_what_runs_for_few_queries(user: Path) -> None:
    Store(user).put([fresh()])
    split = "few tiles, so fwd_split runs instead"
    said = short("--gpu", "h200", "--causal", "--pass", "fwd", "--seqlen", 3000)
    assert "measured on h200 for the bucket of 4096 (16k tokens, heads x head dim 2048), fresh" in said
    assert "x port. default: speed relative to the portable default config." in said and split not in said
    said = short("--gpu", "h200", "--causal", "--pass", "fwd", "--seqlen", 1, "--seqlen-k", 9000)
    assert split in said and "keys are split into" in said and "otherwise descriptor, measured on h200 for" in said
    assert said.startswith("Estimated: fwd runs fwd_split, fwd_combine")
    ladder = explained("--gpu", "h200", "--causal", "--pass", "fwd", "--seqlen", 1, "--seqlen-k", 9000).output
    first, rest = ladder.split("\nfwd: schedule model, keys split\n")[1].split("\notherwise: ")
    assert first.startswith("  runs      fwd_split: BLOCK_M 16, ")
    assert "  runs      fwd_combine: " in first and first.count("  loads     ") == 2 and "loads" not in rest
    assert "problem nearest bucket, GPU exact" in rest and "  config    descriptor: " in rest


def test_stale_shipped_rows_are_copied_before_they_are_renewed(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "h200.sqlite"
    Store(shipped).put([fresh(triton="3.5.0")])
    monkeypatch.setattr(reader, "shipped_paths", lambda: [shipped])
    said = short("--gpu", "h200", "--causal", "--pass", "fwd")
    assert f"fa2tune cache merge {shipped} && fa2tune cache verify --stale --repair" in said


def test_another_driver_is_a_fact_about_a_row_and_no_fault(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa2tune.calling import choosing
    from fa2tune.compiling import fingerprint

    monkeypatch.setattr(fingerprint, "driver_version", lambda: "590.1")
    today = replace(choosing.toolchain(), driver="590.1")
    monkeypatch.setattr(choosing, "toolchain", lambda: today)
    Store(user).put([fresh(driver="580.1")])
    found = explained("--gpu", "h200", "--causal", "--pass", "fwd").output
    assert found.startswith("Tuned: ") and "Next: nothing to do" in found and "stale" not in found
    fact = "  driver    timed under driver 580.1, here 590.1\n"
    assert fact in found and fact in run("show").output
    Store(user).put([fresh(driver="590.1")])
    assert "timed under" not in run("show").output


def test_explain_as_json_holds_what_the_ladder_shows(user: Path) -> None:
    Store(user).put(
        [fresh(), replace(fresh(), implementation="pointer", config=CONFIG | {"LOADS": "pointer"}, time_us=2.0)]
    )
    done = CliRunner().invoke(explain, ["--gpu", "h200", "--causal", "--pass", "fwd", "--unaligned", "--json"])
    found = json.loads(done.output)
    assert found["status"] == "tuned" and found["problem"]["tma"] is False and found["next"] == "nothing to do"
    (kernel,) = found["kernels"]
    assert (kernel["kernel"], kernel["implementation"], kernel["file"]) == ("fwd", "pointer", str(user))
    (refused,) = kernel["refused"]
    assert refused["implementation"] == "descriptor" and "multiples of 16 bytes" in refused["why"]


def test_explain_asks_a_named_file_first(user: Path, tmp_path: Path) -> None:
    Store(user).put([served("pointer")])
    Store(tmp_path / "named.sqlite").put([served("pointer")])
    done = explained("--gpu", "h200", "--causal", "--pass", "fwd", "--cache", tmp_path / "named.sqlite")
    assert "named layer" in done.output


def test_a_row_says_that_it_holds_no_errors() -> None:
    here = Toolchain()
    assert "errors    none on record" in list(describe_row(BARE, here))
    assert any(line.startswith("errors    o: max ") for line in describe_row(FULL, here))
    assert not any(line.startswith("errors") for line in describe_row(row({"kernel": "bwd"}, errors={}), here))


def test_the_help_of_explain_names_the_mask_it_takes_by_default() -> None:
    said = CliRunner().invoke(explain, ["--help"]).output
    assert re.search(r"--causal +The causal mask\.\n +--full +No mask\.  \[default\]", said), said
    assert "mask only" not in said


def test_evidence_in_explain_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "shipped_paths", lambda: [ROOT / "cache" / "h200.sqlite"])
    monkeypatch.setattr(_tables, "width", lambda: 80)
    lines = explained("--gpu", "h200", "--causal").output.splitlines()
    searched = [line for line in lines if line.startswith("  search    ")]
    assert len(searched) == 3 and searched[1] == "  search    none on record", (
        "a whole backward has no search of its own"
    )
    assert max(len(line) for line in lines if line.startswith("  ")) <= 80
