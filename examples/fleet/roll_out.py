"""The life of a fleet's cache file, in two minutes: tune on three workers, merge, lock, ship, check, upgrade, verify, repair.

    python examples/fleet/roll_out.py [folder]

Everything happens in one folder, with the commands that a fleet would run; docs/fleet.md explains them. No GPU is needed: the
workers tune two trials for an absent A100, whose times are predicted and whose results are checked in Triton's interpreter.
With GPUs, leave out ``--gpu`` and ``--trials`` and add ``--devices all``. Two workers share a storage; here it is an SQLite
file, and they are two processes of one host. Several hosts use a PostgreSQL database, whose rows ``fa2tune cache export``
reads. The upgrade is simulated: the shipped file is changed as if an older Triton had made it, with one row whose time no
longer holds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fa2tune.rows import reader
from fa2tune.rows.store import Store

HERE = Path(__file__).parent
GPU, NODES = "a100", ("node-1", "node-2")
LITTLE = f"tune --gpu {GPU} --headdim 64 --dtype bf16 --pass fwd --trials 2 --workers 1".split()
#: Two workers share a search, both masks at one length. The third tunes alone; one of its lengths is theirs, too.
SHARING = ["--storage", "sqlite:///shared/studies.sqlite", "--cache", "shared/cache.sqlite", "--seqlen", "512"]
ELSEWHERE = ["--cache", "elsewhere/cache.sqlite", "--causal", "--seqlen", "512", "--seqlen", "1024", "--seed", "1"]
FILES = ["shared/cache.sqlite", "elsewhere/cache.sqlite"]


def start(folder: Path, *arguments: str, home: str = "home", fleet: str = "") -> subprocess.Popen[str]:
    """A ``fa2tune`` command in ``folder``, as on a machine of its own: its user's cache lies in ``home``, and ``fleet`` is the
    file that FA2TUNE_CACHE names."""
    print(f"$ {f'FA2TUNE_CACHE={fleet} ' if fleet else ''}fa2tune {' '.join(arguments)}", flush=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / home), "FA2TUNE_CACHE": fleet}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "fa2tune", *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def end(process: subprocess.Popen[str], expect: int = 0) -> str:
    said, _ = process.communicate()
    print(said, flush=True)
    if process.returncode != expect:
        sys.exit(f"exit status {process.returncode} instead of {expect}")
    return said


def fa2tune(folder: Path, *arguments: str, expect: int = 0, home: str = "home", fleet: str = "") -> str:
    return end(start(folder, *arguments, home=home, fleet=fleet), expect)


def tune(folder: Path) -> None:
    """The two workers with one storage take a lease on each job, so that no key is tuned twice; both end with all rows. The
    third worker does not see them."""
    for path in FILES:
        (folder / path).parent.mkdir(exist_ok=True)
    sharing = [start(folder, *LITTLE, *SHARING, home=name) for name in ("worker-1", "worker-2")]
    tables = [end(process) for process in sharing]
    if any(", 4 rows, " not in said for said in tables):  # two masks, of each a portable row and one of sm80
        sys.exit("both workers should show all four rows")
    fa2tune(folder, "leases", "--storage", "sqlite:///shared/studies.sqlite")
    fa2tune(folder, *LITTLE, *ELSEWHERE, home="worker-3")


def ship(folder: Path) -> None:
    """Copy the file and its lock file to every node, read-only, and rename them into place."""
    for node in NODES:
        (folder / node).mkdir(exist_ok=True)
        for name in ("fleet.sqlite", "fleet.lock.json"):
            arriving = folder / node / f".{name}.arriving"
            shutil.copy(folder / name, arriving)
            arriving.chmod(0o444)
            arriving.replace(folder / node / name)


def check(folder: Path) -> None:
    """What each node runs before a job starts. The ranks of a job can compare ``fa2tune.manifest().hash``."""
    hashes = set()
    for node in NODES:
        said = fa2tune(folder, "cache", "check", f"{node}/fleet.lock.json", home=node, fleet=f"{node}/fleet.sqlite")
        hashes.add(said.splitlines()[-1])
    if len(hashes) != 1:
        sys.exit(f"the nodes do not serve the same rows: {hashes}")


def pretend_upgrade(folder: Path) -> None:
    """Change the file as if Triton 3.5.1 had made it, with a time 10 % lower at the longest length."""
    print("# Triton is upgraded (simulated: the file is changed as if an older version had made it)\n")
    path = folder / "fleet.sqlite"
    rows = reader.read(path)
    longest = max(row.key.bucket for row in rows)
    then = {"triton": "3.5.1", "created": "2026-01-01T00:00:00Z"}
    Store(path).put(
        replace(row, **then, time_us=(row.time_us or 0.0) * (0.9 if row.key.bucket == longest else 1.0))  # type: ignore[arg-type]
        for row in rows
    )


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="fa2tune-fleet-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tune(folder)
    fa2tune(folder, "cache", "merge", *FILES, "--cache", "fleet.sqlite")
    if find_spec("transformers") is None:
        print("# left out: fa2tune cache coverage, which needs pip install 'fa2tune[models]'\n")
    else:
        fa2tune(
            folder, "cache", "coverage", "--model", str(HERE), "--gpu", GPU, "--pass", "fwd", "--cache", "fleet.sqlite"
        )
    fa2tune(folder, "cache", "lock", "fleet.sqlite")
    ship(folder)
    check(folder)

    pretend_upgrade(folder)
    # the nodes still have the locked file; this one differs from it
    fa2tune(folder, "cache", "check", "fleet.lock.json", expect=1, fleet="fleet.sqlite")
    fa2tune(folder, "cache", "verify", "--cache", "fleet.sqlite", "--stale", expect=1)
    fa2tune(
        folder, "cache", "verify", "--cache", "fleet.sqlite", "--stale", "--repair", "--trials", "2", "--workers", "2"
    )
    fa2tune(folder, "cache", "verify", "--cache", "fleet.sqlite", "--stale")
    fa2tune(folder, "cache", "diff", f"{NODES[0]}/fleet.sqlite", "fleet.sqlite", expect=1)
    fa2tune(folder, "cache", "lock", "fleet.sqlite")
    ship(folder)
    check(folder)
    print(f"rolled out, twice: {folder}")


if __name__ == "__main__":
    main()
