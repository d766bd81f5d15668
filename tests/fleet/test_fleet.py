"""Manifests: what decides, its hash, and holding a node to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_rows import BARE, FULL, row
from click.testing import CliRunner, Result

from fa2tune.cli.cache import cache
from fa2tune.fleet import manifests
from fa2tune.fleet.manifests import Manifest, ManifestError, differences, of, parse
from fa2tune.rows import reader
from fa2tune.rows.lookup import Toolchain
from fa2tune.rows.reader import Layer
from fa2tune.rows.store import Store

pytestmark = pytest.mark.usefixtures("quick_starts")

ROOT = Path(__file__).parents[2]
HERE = Toolchain("3.6.0", "580.1", {"fwd": "abc"})


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(reader, "shipped_paths", list)
    return reader.user_path()


def layer(*rows: Any, name: str = "fleet", file: str = "fleet.sqlite") -> Layer:
    return Layer(name, Path("/somewhere") / file, list(rows))


def test_the_hash_is_of_what_decides_and_of_nothing_else() -> None:
    base = of([layer(FULL, BARE)], HERE)
    assert len(base.hash) == 64
    same = [
        of([layer(BARE, FULL)], HERE),
        of([Layer("fleet", Path("/elsewhere/copy.sqlite"), [FULL, BARE])], HERE),
    ]
    same.append(of([layer(FULL, BARE)], replace(HERE, driver="581.0")))  # its rows are of one driver
    assert {m.hash for m in same} == {base.hash}
    others = [
        of([layer(FULL)], HERE),
        of([layer(FULL, replace(BARE, samples=1))], HERE),
        of([layer(FULL, BARE, name="user")], HERE),
        of([layer(FULL), layer(BARE)], HERE),
        of([layer(BARE), layer(FULL)], HERE),
        of([layer(FULL, BARE)], replace(HERE, triton="3.9.0")),
        of([layer(FULL, BARE)], replace(HERE, kernel_hashes={"fwd causal": "abd"})),
        of([], HERE),
    ]
    assert len({m.hash for m in [base, *others]}) == 1 + len(others)


def test_a_manifest_comes_back_from_its_file() -> None:
    made = of([layer(FULL), layer(BARE, name="shipped", file="s.sqlite")], HERE)
    assert parse(made.to_json()) == made
    assert not differences(made, made)


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(of([layer(FULL)], HERE).to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ('{"a":' * 20000, "not JSON"),
        ("[]", "not a lock file"),
        (changed(manifest=2), "not a lock file of format 1"),
        (changed(triton=3), "must be text"),
        (changed(triton="\x1b[2J"), "must be text"),
        (changed(triton="3" * 1000), "must be text"),
        (changed(hash="0" * 64), "changed after it was written"),
        (changed(triton="3.9.0"), "changed after it was written"),
        (changed(layers=[]), "changed after it was written"),
        (changed(layers={}), "must be a list"),
        (changed(layers=[{"layer": "fleet"}]), "must have layer, file"),
        (changed(layers=[{"layer": "fleet", "file": "x", "rows": "1", "digest": "y"}]), "rows an integer"),
        (changed(kernels=["fwd"]), "must be text"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=said):
        parse(text)
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ManifestError, match=rf"m\.json: .*{said}"):
        manifests.read(tmp_path / "m.json")


def test_differences_are_named() -> None:
    locked = of([layer(FULL), layer(BARE, name="shipped", file="s.sqlite")], Toolchain("3.6.0", "", {"fwd": "abc"}))

    def found(*layers: Layer, toolchain: Toolchain = HERE) -> list[str]:
        return differences(locked, of(layers, toolchain))

    good = [layer(FULL), layer(BARE, name="shipped", file="s.sqlite")]
    assert found(*good) == []
    [line] = found(layer(replace(FULL, samples=1)), good[1])
    assert "fleet layer fleet.sqlite (1 rows" in line and "holds other rows here" in line
    [line] = found(good[1])
    assert line.endswith("is not served here")
    [line] = found(layer(row({"bucket": 512}), name="user", file="cache.sqlite"), *good)
    assert line.startswith("user layer cache.sqlite") and line.endswith("not in the lock file")
    assert found(*reversed(good)) == ["the layers are in another order"]
    assert found(*good, toolchain=Toolchain("3.9.0", "", {"fwd": "abd"})) == [
        "triton: locked with 3.6.0, here 3.9.0",
        "source of kernel fwd: locked with abc, here abd",
    ]


def test_the_driver_counts_only_where_it_decides_between_rows() -> None:
    mixed = layer(FULL, replace(FULL, implementation="descriptor", driver="590.1"))
    for held, decides in ((mixed, True), (layer(FULL, BARE), False)):
        here, there = (of([held], replace(HERE, driver=driver)) for driver in ("580.1", "590.1"))
        assert (here.hash != there.hash) == decides
        assert [line.partition(":")[0] for line in differences(here, there)] == ["driver"] * decides
        assert differences(of([held], replace(HERE, driver="")), there) == [], "locked where there is no driver"
    before = replace(of([layer(FULL)], HERE), driver="570.1")  # of a version that wrote the driver always
    assert differences(parse(before.to_json()), of([layer(FULL)], HERE)) == []


# --- the commands, and fa2tune.manifest()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cache, list(map(str, arguments)))


def test_lock_ship_check(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fleet.sqlite"
    Store(file).put([FULL, BARE])
    locked = run("lock", file)
    assert locked.exit_code == 0, locked.output
    manifest = tmp_path / "fleet.lock.json"
    assert str(manifest) in locked.output
    node = tmp_path / "node" / "renamed.sqlite"
    node.parent.mkdir()
    node.write_bytes(file.read_bytes())
    monkeypatch.setenv("FA2TUNE_CACHE", str(node))
    good = run("check", manifest)
    assert good.exit_code == 0, good.output
    assert good.output.splitlines()[-1].startswith("hash ")
    Store(user).put([FULL])
    shadowed = run("check", manifest)
    assert shadowed.exit_code == 1
    assert "user layer cache.sqlite (1 rows" in shadowed.output
    user.unlink()
    Store(node).put([replace(FULL, created="2026-05-01T00:00:00Z")])
    assert run("check", manifest).exit_code == 1
    node.write_text("spoilt")
    assert "is not served here" in run("check", manifest).output
    assert "no such file" in run("check", tmp_path / "none.json").output
    assert "no such file" in run("lock", tmp_path / "none.sqlite").output


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = run("check", tmp_path / "pipe")
    assert refused.exit_code == 2 and f"lock file {tmp_path / 'pipe'}: is not a regular file" in refused.output


def test_the_old_name_of_lock_works_and_says_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "fleet.sqlite"
    Store(file).put([FULL])
    done = run("sign", file)
    assert done.exit_code == 0 and "`fa2tune cache lock`" in done.stderr
    old = tmp_path / "fleet.manifest.json"
    assert old.exists() and run("lock", file).exit_code == 0
    assert old.read_bytes() == (tmp_path / "fleet.lock.json").read_bytes()
    assert "sign" not in run("--help").output.split()


def test_lock_of_what_serves_here(user: Path) -> None:
    Store(user).put([FULL])
    printed = run("lock")
    assert printed.exit_code == 0
    assert [part.layer for part in parse(printed.output).layers] == ["user"]


def test_a_program_asks_for_the_manifest_of_what_it_serves_from(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    Store(path).put([FULL])
    code = """
import fa2tune
from fa2tune.calling import choosing
from fa2tune.compiling import measured_code
from fa2tune.rows.store import Store
m = fa2tune.manifest()
assert measured_code.toolchain() == choosing.toolchain()
Store(r"%s").put([])
assert m == fa2tune.manifest() and type(m).__name__ == "Manifest" and "manifest" in dir(fa2tune)
print(m.hash, [part.file for part in m.layers][0])
"""
    environment = {**os.environ, "FA2TUNE_CACHE": str(path), "PYTHONPATH": str(ROOT)}
    said = {
        subprocess.run([sys.executable, "-c", code % path], capture_output=True, text=True, env=environment, check=True,
                       cwd=tmp_path).stdout
        for _ in range(2)
    }  # fmt: skip
    [line] = said
    assert line.split()[1] == "fleet.sqlite"


def test_a_manifest_is_plain_data() -> None:
    with pytest.raises(AttributeError):
        Manifest((), "", "", "").triton = "x"  # type: ignore[misc]
