"""Files of binaries: what is in them comes back, what was tampered with does not, and who is trusted."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fa2tune.compiling import binaries
from fa2tune.compiling.binaries import MAGIC, BinariesError, File, New
from fa2tune.rows import reader

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes of POSIX")

KEYS = [hashlib.sha256(bytes([n])).hexdigest() for n in range(3)]
ENTRIES = {
    key: New(key, {"kernel": f"k{n}", "triton": "3.6.0"}, {"name": f"k{n}", "shared": n}, os.urandom(64) * (n + 1))
    for n, key in enumerate(KEYS)
}
SOURCES = {"digest": {"fwd": "0123456789abcdef"}}
STRANGER = 54321  #: a user who is nobody here


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "some.kernels"
    binaries.save(found, binaries.file_bytes(ENTRIES, SOURCES))
    return found


def rewritten(path: Path, change: Callable[[dict[str, Any]], object], body: bytes | None = None) -> None:
    """The file with a changed header, whose hash is right."""
    content = path.read_bytes()
    length = int.from_bytes(content[len(MAGIC) :][:8], "little")
    start = len(MAGIC) + 40
    held = json.loads(content[start:][:length])
    change(held)
    header = json.dumps(held).encode()
    parts = [MAGIC, len(header).to_bytes(8, "little"), hashlib.sha256(header).digest(), header]
    path.write_bytes(b"".join(parts) + (content[start + length :] if body is None else body))


def test_what_is_saved_comes_back(path: Path) -> None:
    file = File(path)
    assert file.sources == SOURCES and set(file.entries) == set(KEYS)
    for key, new in ENTRIES.items():
        entry = file.entries[key]
        assert (entry.about, entry.launch, file.cubin(entry)) == (new.about, new.launch, new.cubin)


def test_the_same_binaries_are_the_same_bytes_that_their_owner_alone_can_write(path: Path) -> None:
    assert path.read_bytes() == binaries.file_bytes(dict(reversed(ENTRIES.items())), SOURCES)
    assert path.stat().st_mode & 0o777 == 0o644
    os.chmod(path, 0o666)
    binaries.save(path, path.read_bytes())
    assert path.stat().st_mode & 0o777 == 0o644 and [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_error_that_quotes_the_file_is_escaped(path: Path) -> None:
    assert str(BinariesError("is damaged: \x1b[2J")) == "is damaged: \\x1b[2J"


def test_a_changed_byte_anywhere_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    assert File(path).damaged() == []
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            file = File(path)
        except BinariesError:
            continue
        found = [entry.key for entry in file.damaged()]
        damaged = 0
        for key, entry in file.entries.items():
            try:
                assert file.cubin(entry) == ENTRIES[key].cubin
            except BinariesError:
                damaged += 1
                assert found == [key]
        assert damaged == 1, place


def test_a_truncated_file_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(
            BinariesError, match=r"is not a file of binaries|ends too early|length of its header is impossible"
        ):
            File(path)


def test_what_is_written_over_after_the_check_is_noticed(path: Path) -> None:
    file = File(path)
    content = path.read_bytes()
    with path.open("r+b") as other:
        other.write(bytes(len(content)))
    for entry in file.entries.values():
        with pytest.raises(BinariesError, match="hash is wrong"):
            file.cubin(entry)


def test_a_file_that_is_replaced_stays_what_it_was_where_it_is_open(path: Path) -> None:
    file = File(path)
    binaries.save(path, binaries.file_bytes({}, {}))
    assert {key: file.cubin(entry) for key, entry in file.entries.items()} == {k: n.cubin for k, n in ENTRIES.items()}
    assert not File(path).entries


def bomb(held: dict[str, Any]) -> None:
    """A megabyte of zeros that says it is 16 bytes."""
    stored = zlib.compress(bytes(1 << 20))
    entry = held["entries"][KEYS[0]]
    entry |= {"offset": 0, "size": len(stored), "length": 16, "sha256": hashlib.sha256(stored).hexdigest()}
    held["entries"] = {KEYS[0]: entry}


def test_no_more_is_unpacked_than_an_entry_says(path: Path) -> None:
    rewritten(path, bomb, zlib.compress(bytes(1 << 20)))
    file = File(path)
    with pytest.raises(BinariesError, match="another length"):
        file.cubin(file.entries[KEYS[0]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.update(format=1), "is of format 1, and this fa2tune reads 2"),
        (lambda held: held.update(entries=[]), "lacks entries"),
        (lambda held: held.pop("sources"), "lacks entries or sources"),
        (lambda held: held["sources"].update(x=3), "must be text"),
        (lambda held: held["entries"].update({"../x": held["entries"][KEYS[0]]}), "lacks a part"),
        (lambda held: held["entries"][KEYS[0]].pop("launch"), "lacks a part"),
        (lambda held: held["entries"][KEYS[0]].update(about=None), "no description"),
        (lambda held: held["entries"][KEYS[0]].update(sha256="x"), "has no hash"),
        (lambda held: held["entries"][KEYS[0]].update(offset=1 << 40), "truncated"),
        (lambda held: held["entries"][KEYS[0]].update(size=1 << 40), "truncated"),
        (lambda held: held["entries"][KEYS[0]].update(offset=-1), "truncated"),
        (lambda held: held["entries"][KEYS[0]].update(offset=True), "truncated"),
        (lambda held: held["entries"][KEYS[0]].update(length=1 << 40), "more than 64 MiB"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(path: Path, change: Callable[..., object], said: str) -> None:
    rewritten(path, change)
    with pytest.raises(BinariesError, match=said):
        File(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.kernels")  # whose reader would wait for a writer
    (tmp_path / "loop.kernels").symlink_to("loop.kernels")
    for name, said in (
        ("pipe", "not a regular file"),
        ("", "directory"),
        ("loop", "symbolic"),
        ("none", "No such file"),
    ):
        with pytest.raises(BinariesError, match=said):
            File(tmp_path / f"{name}.kernels" if name else tmp_path)


# ---- trust


@pytest.mark.parametrize(("mode", "writers"), [(0o664, "its group"), (0o646, "all users"), (0o666, "all users")])
def test_what_others_can_write_is_not_trusted(path: Path, mode: int, writers: str) -> None:
    path.chmod(mode)
    if mode & 0o002 == 0:
        File(path)  # a private group, which has its owner's number, as umask 002 goes with
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another group")
        os.chown(path, -1, STRANGER)
        path.chmod(mode)
    with pytest.raises(BinariesError, match=f"not trusted: it can be written by {writers}"):
        File(path)


def test_nor_what_lies_in_a_folder_that_others_can_write(path: Path) -> None:
    inner = path.parent / "a" / "b"
    inner.mkdir(parents=True)
    path.rename(inner / path.name)
    (path.parent / "a").chmod(0o777)
    with pytest.raises(BinariesError, match=r"not trusted: .*/a can be written by all users"):
        File(inner / path.name)
    (path.parent / "a").chmod(0o1777)  # where nobody can rename what is another's
    assert File(inner / path.name).entries


def belongs_to_a_stranger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        monkeypatch.setattr(binaries, "_code_owner", lambda: STRANGER)


def test_nor_what_belongs_to_somebody_else_unless_its_hash_was_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = File(path).digest
    belongs_to_a_stranger(path, monkeypatch)
    with pytest.raises(BinariesError, match=r"not trusted: .*belongs to user"):
        File(path)
    assert File(path, pin=digest).entries
    with pytest.raises(BinariesError, match="FA2TUNE_KERNELS asks for sha256"):
        File(path, pin="0" * 64)


def test_trusted_are_the_users_the_named_and_the_shipped_and_no_layers_companion(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shipped, user = tmp_path / "shipped" / "gpu.sqlite", binaries.companion(reader.user_path())
    monkeypatch.setattr(reader, "shipped_paths", lambda: [shipped])
    for place in (binaries.companion(shipped), user, tmp_path / "fleet.kernels"):
        binaries.save(place, path.read_bytes())
    monkeypatch.setenv("FA2TUNE_CACHE", str(tmp_path / "fleet.sqlite"))
    monkeypatch.delenv("FA2TUNE_KERNELS")
    (tmp_path / "fleet.sqlite").touch()
    assert [(p.layer, p.path.name) for p, _ in binaries.trusted().files] == [
        ("user", "cache.kernels"), ("shipped", "gpu.kernels"),
    ]  # fmt: skip
    pinned = f"{path}@{File(path).digest}"
    monkeypatch.setenv(
        "FA2TUNE_KERNELS", os.pathsep.join([str(tmp_path / "fleet.kernels"), pinned, str(tmp_path / "gone")])
    )
    held = binaries.trusted()
    assert [(p.layer, p.path.name) for p, _ in held.files] == [
        ("user", "cache.kernels"), ("named", "fleet.kernels"), ("named", "some.kernels"), ("shipped", "gpu.kernels"),
    ]  # fmt: skip
    assert [(p.path.name, why) for p, why in held.refused] == [("gone", "No such file or directory")]
    assert f"named kernels skipped: {tmp_path / 'gone'}: No such file or directory" in caplog.text
    monkeypatch.setenv("FA2TUNE_KERNELS", "off")
    assert not binaries.trusted().files


def test_files_are_read_once_per_process_until_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))
    first = binaries.trusted()
    binaries.save(path, binaries.file_bytes({}, {}))
    assert binaries.trusted() is first
    binaries.forget()
    assert not binaries.trusted().files[0][1].entries
