"""``fa2tune cache`` and ``fa2tune explain``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cache_rows import BARE, CONFIG, FULL, KEY, row
from click.testing import CliRunner, Result
from pace import timed

from fa2tune.cli.cache import cache
from fa2tune.cli.cache.common import describe
from fa2tune.cli.explain import explain
from fa2tune.rows import reader, record
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store

ROOT = Path(__file__).parent.parent


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
    Store(user).put([FULL, row({"bucket": 512}), row({"causal": False}, variant="descriptor")])
    Store(tmp_path / "x.sqlite").put([BARE])
    listed = run("list").output.splitlines()
    assert listed[1].split() == ["user", "3", record.digest(reader.read(user)), str(user)]
    assert ["h200", "132", "fwd", "bf16", "128", "causal", "measured", "user", "2", "512", "4096"] in [
        line.split() for line in listed
    ]
    assert "a100-sxm-80gb" in run("list", "--cache", tmp_path / "x.sqlite").output
    assert "full" not in run("list", "--causal").output


def test_show(user: Path) -> None:
    Store(user).put([FULL, BARE])
    shown = run("show", "--gpu", "h200").output
    assert "BLOCK_M 128" in shown
    assert "NVIDIA H200" in shown
    assert "a100" not in shown
    twin = json.loads(run("show", "--json", "--gpu", "a100").output)
    assert [entry["gpu"] for entry in twin["rows"]] == ["a100-sxm-80gb"], "a100 is an alias"
    assert run("show", "--headdim", 64).exit_code == 1
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
        ([tmp_path / "nowhere" / "x.sqlite"], "is no folder"),
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
    assert "1 rows added, 1 replaced, 0 left" in run("merge", node).output
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
    assert "time_us, created" in line
    assert run("merge", node).exit_code == 0
    assert run("merge", node).output.count("us,") == 0, "nothing left to tell"


def test_diff(user: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    Store(a).put([FULL, row({"bucket": 512}), row({"bucket": 1024})])
    Store(b).put([replace(FULL, time_us=406.125, config={**CONFIG, "BLOCK_M": 64}), row({"bucket": 512}), BARE])
    done = run("diff", a, b)
    assert done.exit_code == 1
    assert (
        "1 rows only in A (-), 1 only in B (+), 1 in both but different (~), 1 of them in their config; 1 the same"
        in (done.output)
    )
    [line] = [line for line in done.output.splitlines() if line.startswith("~")]
    assert "0.500" in line
    assert "BLOCK_M 128 -> 64; time_us" in line
    assert [line[0] for line in done.output.splitlines()[1:4]] == ["-", "+", "~"]
    assert len(run("diff", a, b, "--brief").output.splitlines()) == 1
    assert run("diff", a, b, "--bucket", 512).exit_code == 0
    assert run("diff", a, a).exit_code == 0
    assert run("diff", a, tmp_path / "none.sqlite").exit_code == 2, "a typo is no difference"


def test_reading_commands_are_quick_and_import_nothing_heavy(user: Path) -> None:
    Store(user).put([row({"bucket": bucket}) for bucket in range(1, 300)])
    code = "import sys; from fa2tune.cli.cache import cache\ntry: cache(sys.argv[1:])\nfinally: print(*sys.modules)"
    for command in ("list", "show"):
        environment = {**os.environ, "XDG_CACHE_HOME": str(user.parent.parent)}
        taken = []
        for _ in range(3):
            done, seconds = timed([sys.executable, "-c", code, command], cwd=ROOT, env=environment)
            taken.append(seconds)
        assert not {"sqlalchemy", "torch", "triton", "optuna"} & set(done.stdout.splitlines()[-1].split())
        assert min(taken) < 1


# --- explain


def explained(*arguments: object) -> Result:
    return CliRunner().invoke(explain, list(map(str, arguments)), terminal_width=200)


def served(variant: str, **key: object) -> Row:
    loads = {"LOADS": variant}
    return row(dict(key), variant=variant, config=CONFIG | loads, time_us=1.0 if variant == "descriptor" else 2.0)


def test_explain_names_row_rung_layer_staleness_and_differences(user: Path) -> None:
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
    assert "variant   descriptor" in aligned
    assert "refused" not in aligned
    unaligned = explained("--gpu", "h200", "--causal", "--pass", "fwd", "--unaligned").output
    assert "variant   pointer" in unaligned
    assert "refused   descriptor, problem exact, GPU exact" in unaligned


def test_explain_shows_the_road_of_the_backward(user: Path) -> None:
    Store(user).put([row({"kernel": "bwd"}, variant="fused", config={}), row({"kernel": "bwd_fused"}, config={"X": 1})])
    done = explained("--gpu", "h200", "--causal", "--pass", "bwd")
    assert "bwd: problem exact" in done.output
    assert "bwd_fused: no row serves" in done.output, "its config names no dimension of the kernel"
    assert "refused   pointer" in done.output
    steady = explained("--gpu", "h200", "--causal", "--pass", "bwd", "--deterministic").output
    assert "split is the deterministic road" in steady
    assert "refused   fused, problem exact" in steady
    assert "bwd_dkdv: no row serves" in steady
    assert "bwd_dq: no row serves" in steady


def test_explain_tells_what_suits_these_lengths_better(user: Path) -> None:
    from fa2tune.compiling.compiler import variant_named

    key = {"causal": False, "bucket": 16384}
    spec = replace(KEY, **key).specialization()
    config = {**variant_named("fwd_hopper").space.default(spec, 90), "RESCALE": "never"}
    Store(user).put([row(key, variant="warp_specialized", config=config)])
    said = "changed   RESCALE never to lazy, which suits these lengths and heads better"
    square = explained("--gpu", "h200", "--full", "--pass", "fwd", "--seqlen", 16384).output
    assert "RESCALE never" in square and "changed" not in square
    assert said in explained("--gpu", "h200", "--full", "--pass", "fwd", "--seqlen", 1, "--seqlen-k", 16384).output


def test_explain_a_miss_field_by_field(user: Path) -> None:
    Store(user).put([served("pointer", causal=False)])
    done = explained("--gpu", "h200", "--causal", "--pass", "fwd")
    assert "fwd: no row serves" in done.output
    assert "default   {'BLOCK_M'" in done.output
    assert "nearest   user layer: causal asked True, has False" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h900"], "`fa2tune gpus` lists them"),
        (["--gpu", "h100", "--headdim", 100], "in steps of 8"),
        (["--gpu", "h100", "--heads", 8, "--heads-kv", 3], "must divide"),
        (["--gpu", "h100", "--precision", "tf32"], "ieee only"),
        (["--gpu", "h100", "--cache", "/nowhere.sqlite"], "no such file"),
    ],
)
def test_explain_refuses(arguments: list[object], said: str) -> None:
    done = explained(*arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_explain_asks_a_named_file_first(user: Path, tmp_path: Path) -> None:
    Store(user).put([served("pointer")])
    Store(tmp_path / "named.sqlite").put([served("pointer")])
    done = explained("--gpu", "h200", "--causal", "--pass", "fwd", "--cache", tmp_path / "named.sqlite")
    assert "named layer" in done.output


def test_a_row_says_that_it_holds_no_errors() -> None:
    assert "errors    none on record" in list(describe(BARE))
    assert any(line.startswith("errors    o: max ") for line in describe(FULL))
    assert not any(line.startswith("errors") for line in describe(row({"kernel": "bwd"}, errors={})))
