"""Files of compiled kernels (``h200.kernels`` beside ``h200.sqlite``): their format, and which of them may be loaded.

Binaries are not in the cache file, because machine code has to be trusted and rows do not. Rows are data: each process reads
and checks all of them. Binaries are megabytes of which a call needs a few.

A binary runs under every version of torch and Triton, or without Triton: the driver loads it. Which Triton compiled it matters
to a row, whose times hold for the machine code that was measured.

Format: ``MAGIC``, the header's length (8 bytes, little-endian) and sha256 (32 bytes), the header (JSON), then the cubins,
each compressed with zlib. An entry of the header holds the offset, length and sha256 of its cubin, so the header's hash
covers the whole file, and only the header and the cubins asked for are read. Nothing is decompressed or given to the driver
before its hash is checked. ``save`` gives the same bytes for the same entries.

Trusted are the user's own file, those that came with fa2tune, and those that FA2TUNE_KERNELS names, but not
a file beside a cache file of FA2TUNE_CACHE. A file that other users can write is not trusted, see ``_Opened.check_owners``.

Pure: no torch, no Triton.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fa2tune.rows import reader, whole
from fa2tune.text import plain

MAGIC = b"fa2tune kernels\n"
FORMAT = 2  #: 1 found a binary by its compiler's build, too
SUFFIX = ".kernels"
logger = logging.getLogger("fa2tune")

#: Environment variable that names trusted files, separated as PATH is, each as PATH or PATH@SHA256 of its header; "off": no
#: binaries at all, not even the user's own.
VARIABLE = "FA2TUNE_KERNELS"
OFF = "off"
MAX_FILE, MAX_HEADER, MAX_CUBIN = 1 << 31, 32 << 20, 64 << 20  #: bytes
_PREFIX = len(MAGIC) + 8 + 32
_SHA256 = re.compile(r"[0-9a-f]{64}")


class BinariesError(ValueError):
    """A file of binaries, or one binary in it, that must not be used. The message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(plain(reason))  # it may quote the file


@dataclass(frozen=True)
class Entry:
    """One binary of a file. ``about``: what it was made from and by which Triton, for explaining and for rows; ``launch``:
    what its launch must know."""

    key: str  #: of the binary: ``code`` and the Triton that compiled it
    code: str  #: sha256 of all that it was compiled from
    about: Mapping[str, Any]
    launch: Mapping[str, Any]
    offset: int  #: of its compressed cubin, behind the header
    size: int  #: bytes of that
    length: int  #: bytes of the cubin
    sha256: str  #: of what is stored

    def compiled_by(self, version: str) -> bool:
        """Whether a Triton of this version compiled it: any of its builds, since a row knows no more than the version."""
        builds = str(self.about.get("triton")).split(" or ")
        return any(re.fullmatch(rf"{re.escape(version)}(\.(post|dev)\d+)?(\+.*)?", build) for build in builds)


def _for_reading(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # otherwise a pipe would block


class _Opened:
    """A file held open, so that the file that was checked is the one that is read, also if the path is replaced."""

    def __init__(self, path: Path) -> None:
        if not hasattr(os, "pread"):
            raise BinariesError("files of binaries are not read on this platform")
        try:
            self.file = open(path, "rb", buffering=0, opener=_for_reading)  # noqa: SIM115  # as long as this object lives
        except OSError as error:
            raise BinariesError(error.strerror or str(error)) from error
        self.path = path
        self.state = os.fstat(self.file.fileno())

    def read(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0:
            try:
                part = os.pread(self.file.fileno(), size, offset)
            except OSError as error:
                raise BinariesError(error.strerror or str(error)) from error
            if not part:
                raise BinariesError("ends too early: it was truncated")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def check_owners(self) -> None:
        """BinariesError: another user could have written this file. It and every folder above it must belong to this user, to
        root or to the owner of fa2tune's code, and be writable by the owner only. Allowed are also the owner's private group,
        which has the same number, and folders with the sticky bit, where users cannot rename files of others."""
        trusted = {0, os.geteuid(), _code_owner()}
        above = Path(os.path.realpath(self.path)).parents
        for what, state in (("it", self.state), *((str(folder), folder.stat()) for folder in above)):
            if state.st_uid not in trusted:
                raise BinariesError(f"not trusted: {what} belongs to user {state.st_uid}")
            sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
            others = stat.S_IWOTH | (0 if state.st_gid == state.st_uid else stat.S_IWGRP)
            if state.st_mode & others and not sticky:
                others_are = "all users" if state.st_mode & stat.S_IWOTH else "its group"
                raise BinariesError(f"not trusted: {what} can be written by {others_are} (chmod go-w)")


@cache
def _code_owner() -> int:
    return os.stat(__file__).st_uid


class File:
    """The entries of one file, its header checked; cubins are read when asked for."""

    def __init__(self, path: Path, pin: str = "", believed: bool = False) -> None:
        """``pin``: the header's expected sha256, with which any owner is accepted. ``believed``: the owner is not checked, for
        binaries that are not run. BinariesError."""
        self.path = path
        self._opened = opened = _Opened(path)
        if not stat.S_ISREG(opened.state.st_mode):
            raise BinariesError("is not a regular file")
        if not believed and not pin and sys.platform != "win32":
            opened.check_owners()
        if opened.state.st_size > MAX_FILE:
            raise BinariesError(f"is larger than {MAX_FILE >> 20} MiB")
        start = opened.read(0, min(_PREFIX, opened.state.st_size))
        if len(start) < _PREFIX or not start.startswith(MAGIC):
            raise BinariesError("is not a file of binaries")
        length, self.digest = int.from_bytes(start[len(MAGIC) :][:8], "little"), start[-32:].hex()
        if not 0 < length <= min(MAX_HEADER, opened.state.st_size):
            raise BinariesError("is damaged: the length of its header is impossible")
        header = opened.read(_PREFIX, length)
        if hashlib.sha256(header).hexdigest() != self.digest:
            raise BinariesError("is damaged: its header's hash is wrong")
        if pin and pin != self.digest:
            raise BinariesError(f"not trusted: {VARIABLE} asks for sha256 {pin[:16]}..., it has {self.digest[:16]}...")
        self._body = _PREFIX + length
        self.entries, self.sources = _parsed(header, opened.state.st_size - self._body)
        self.by_code: dict[str, list[Entry]] = {}  #: the same code compiled by several Tritons
        for entry in self.entries.values():
            self.by_code.setdefault(entry.code, []).append(entry)

    def cubin(self, entry: Entry) -> bytes:
        """The binary of an entry. BinariesError: it is not what the header says."""
        stored = self._stored(entry)
        try:
            unpacker = zlib.decompressobj()
            cubin = unpacker.decompress(stored, entry.length)
        except zlib.error as error:
            raise BinariesError(f"is damaged: {error}") from error
        if len(cubin) != entry.length or unpacker.unconsumed_tail:
            raise BinariesError("is damaged: a binary has another length")
        return cubin

    def damaged(self) -> list[Entry]:
        """The entries whose binary is not what the header says. Reads the whole file and hashes it; nothing is decompressed
        and nothing is loaded."""
        found = []
        for entry in self.entries.values():
            try:
                self._stored(entry)
            except BinariesError:
                found.append(entry)
        return found

    def _stored(self, entry: Entry) -> bytes:
        stored = self._opened.read(self._body + entry.offset, entry.size)
        if hashlib.sha256(stored).hexdigest() != entry.sha256:
            raise BinariesError("is damaged: a binary's hash is wrong")
        return stored


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _parsed(header: bytes, room: int) -> tuple[dict[str, Entry], dict[str, dict[str, str]]]:
    """Entries by key, and source digest -> kernel -> hash. BinariesError."""
    try:
        held = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise BinariesError(f"is damaged: its header is not JSON: {error}") from error
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        said = plain(held.get("format")) if isinstance(held, dict) else "none"
        raise BinariesError(f"is of format {said}, and this fa2tune reads {FORMAT}: remove it, and compile again")
    entries, sources = held.get("entries"), held.get("sources")
    if not isinstance(entries, dict) or not isinstance(sources, dict):
        raise BinariesError("is damaged: its header lacks entries or sources")
    found = {}
    for key, value in entries.items():
        wanted = {"about", "code", "launch", "offset", "size", "length", "sha256"}
        if not _SHA256.fullmatch(key) or not isinstance(value, dict) or set(value) != wanted:
            raise BinariesError("is damaged: an entry lacks a part")
        if not isinstance(value["about"], dict) or not isinstance(value["launch"], dict):
            raise BinariesError("is damaged: an entry has no description")
        if not all(isinstance(value[one], str) and _SHA256.fullmatch(value[one]) for one in ("code", "sha256")):
            raise BinariesError("is damaged: an entry has no hash")
        if not (_is_count(value["offset"], room) and _is_count(value["size"], room - value["offset"])):
            raise BinariesError("ends too early: it was truncated")
        if not _is_count(value["length"], MAX_CUBIN) or not value["length"]:
            raise BinariesError(f"is damaged: a binary of no bytes, or of more than {MAX_CUBIN >> 20} MiB")
        found[key] = Entry(key, **value)
    for hashes in sources.values():
        if not isinstance(hashes, dict) or not all(isinstance(text, str) for text in hashes.values()):
            raise BinariesError("is damaged: its sources must be text")
    return found, sources


@dataclass(frozen=True)
class New:
    """A binary to save, see ``Entry``."""

    code: str
    about: Mapping[str, Any]
    launch: Mapping[str, Any]
    cubin: bytes


def file_bytes(entries: Mapping[str, New], sources: Mapping[str, Mapping[str, str]]) -> bytes:
    """The file of these binaries, by key: the same bytes for the same ones."""
    listed, blobs, offset = {}, [], 0
    for key, new in sorted(entries.items()):
        stored = zlib.compress(new.cubin, 9)
        listed[key] = {
            "about": dict(new.about), "code": new.code, "launch": dict(new.launch), "offset": offset, "size": len(stored),
            "length": len(new.cubin), "sha256": hashlib.sha256(stored).hexdigest(),
        }  # fmt: skip
        blobs.append(stored)
        offset += len(stored)
    about = {"format": FORMAT, "entries": listed, "sources": {one: dict(hashes) for one, hashes in sources.items()}}
    header = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    return b"".join([MAGIC, len(header).to_bytes(8, "little"), hashlib.sha256(header).digest(), header, *blobs])


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, private to the user whatever the umask."""
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """One writer of a file at a time, by a lock on a file beside it."""
    path = Path(os.path.realpath(path))
    try:
        _make_folder(path.parent)
        opened = open(path.with_name(f".{path.name}.lock"), "ab")  # noqa: SIM115  # closed below
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error
    with opened as lock:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def save(path: Path, content: bytes) -> str:
    """Write a file that appears whole, writable by its owner alone; returns the sha256 of its header. OSError names the file
    and leaves what was there."""
    _make_folder(Path(os.path.realpath(path)).parent)

    def fill(temporary: Path) -> None:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)

    whole.publish(path, fill, mode=0o644)
    return content[_PREFIX - 32 : _PREFIX].hex()


def companion(cache_file: Path) -> Path:
    """The file of binaries that belongs to a cache file."""
    return cache_file.with_suffix(SUFFIX)


@dataclass(frozen=True)
class FilePlace:
    """A file that may bring binaries."""

    layer: str  #: "user", "named" (by FA2TUNE_KERNELS) or "shipped"
    path: Path
    pin: str = ""


def places() -> Iterable[FilePlace]:
    """The trusted files, whether they exist or not, in lookup order."""
    named = os.environ.get(VARIABLE, "")
    if named == OFF:
        return
    with suppress(RuntimeError):  # no home, no file
        yield FilePlace("user", companion(reader.user_path()))
    for entry in named.split(os.pathsep):
        if entry:
            path, _, pin = entry.rpartition("@") if _SHA256.fullmatch(entry.rpartition("@")[2]) else (entry, "", "")
            yield FilePlace("named", Path(os.path.expanduser(path)), pin)
    yield from shipped_files()


def shipped_files() -> list[FilePlace]:
    """The files that came with fa2tune."""
    folders = dict.fromkeys(path.parent for path in reader.shipped_paths())
    return [FilePlace("shipped", path) for path in _shipped_files(tuple(folders))]


@cache
def _shipped_files(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """The files of binaries in the folders of the shipped rows, listed once until ``forget``."""
    return tuple(path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}")))


@dataclass(frozen=True)
class Trusted:
    """Files that may be loaded from, and why others may not."""

    files: tuple[tuple[FilePlace, File], ...]
    refused: tuple[tuple[FilePlace, str], ...]


def trusted() -> Trusted:
    """Each file is read once per process; after ``forget`` it is read again."""
    return _trusted(reader.shipped_paths, reader.user_path, *map(os.environ.get, (VARIABLE, *reader.HOME_VARIABLES)))


@cache
def _trusted(*where: Any) -> Trusted:
    """``where``: all that ``places`` depends on. A lookup asks for each row, and to list them takes 0.2 ms."""
    return _read(tuple(places()))


def forget() -> None:
    _shipped_files.cache_clear()
    _trusted.cache_clear()
    _read.cache_clear()


@cache
def _read(asked: tuple[FilePlace, ...]) -> Trusted:
    files, refused = [], []
    for place in asked:
        if place.layer != "named" and not os.path.lexists(place.path):
            continue  # normal
        try:
            files.append((place, File(place.path, place.pin)))
        except (BinariesError, OSError) as error:
            logger.warning("%s kernels skipped: %s: %s", place.layer, plain(place.path, None), error)
            refused.append((place, str(error)))
    return Trusted(tuple(files), tuple(refused))
