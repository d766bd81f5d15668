"""A fleet's year in two minutes: tune on two workers, merge, sign, ship, check, upgrade, verify, repair.

    python examples/fleet/roll_out.py [folder]

Everything happens in one folder, with the commands that a fleet would run; docs/fleet.md explains them. It runs on a machine
without a GPU: the workers tune for an absent A100 (predicted, and proved in Triton's interpreter), and very little. With GPUs,
leave out ``--gpu`` and ``--trials``. The upgrade is a fake one: the shipped file is given the look of one that an older Triton
made, in which one row promises more than it keeps today.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from fa2tune import reader
from fa2tune.store import Store

HERE = Path(__file__).parent
GPU, NODES = "a100", ("node-1", "node-2")
#: What each worker tunes. Both have the length 512, so that the merge has something to decide.
WORKERS = {"worker-1": ["--seqlen", "512"], "worker-2": ["--seqlen", "512", "--seqlen", "1024", "--seed", "1"]}


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
        sys.exit(f"exit code {process.returncode} instead of {expect}")
    return said


def fa2tune(folder: Path, *arguments: str, expect: int = 0, home: str = "home", fleet: str = "") -> str:
    return end(start(folder, *arguments, home=home, fleet=fleet), expect)


def tune(folder: Path) -> None:
    """Two workers at a time, each with a cache file of its own: they need not see each other."""
    little = ["tune", "--gpu", GPU, "--headdim", "64", "--dtype", "bf16", "--causal", "--pass", "fwd", "--trials", "2"]
    running = [
        start(folder, *little, "--workers", "1", *lengths, "--cache", f"{name}/cache.sqlite", home=name)
        for name, lengths in WORKERS.items()
    ]
    for process in running:
        end(process)


def ship(folder: Path) -> None:
    """To every node: the file and its manifest, read-only, put in place by a rename."""
    for node in NODES:
        (folder / node).mkdir(exist_ok=True)
        for name in ("fleet.sqlite", "fleet.manifest.json"):
            arriving = folder / node / f".{name}.arriving"
            shutil.copy(folder / name, arriving)
            arriving.chmod(0o444)
            arriving.replace(folder / node / name)


def check(folder: Path) -> None:
    """Every node, before a job starts. Its ranks compare ``fa2tune.manifest().hash`` in the same way."""
    hashes = set()
    for node in NODES:
        said = fa2tune(folder, "cache", "check", f"{node}/fleet.manifest.json", home=node, fleet=f"{node}/fleet.sqlite")
        hashes.add(said.splitlines()[-1])
    if len(hashes) != 1:
        sys.exit(f"nodes decide differently: {hashes}")


def pretend_upgrade(folder: Path) -> None:
    """As if Triton 3.5.1 had made the file, and the longest length had been 10 % faster under it."""
    print("# Triton is upgraded (a fake: the file is made to look older)\n")
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
    files = [f"{name}/cache.sqlite" for name in WORKERS]
    fa2tune(folder, "cache", "merge", *files, "--cache", "fleet.sqlite")
    fa2tune(folder, "cache", "coverage", "--model", str(HERE), "--gpu", GPU, "--pass", "fwd", "--cache", "fleet.sqlite")
    fa2tune(folder, "cache", "sign", "fleet.sqlite")
    ship(folder)
    check(folder)

    pretend_upgrade(folder)
    # the nodes still have what was signed; the file that is being worked on differs from it
    fa2tune(folder, "cache", "check", "fleet.manifest.json", expect=1, fleet="fleet.sqlite")
    fa2tune(folder, "cache", "verify", "--cache", "fleet.sqlite", "--stale", expect=1)
    fa2tune(
        folder, "cache", "verify", "--cache", "fleet.sqlite", "--stale", "--repair", "--trials", "2", "--workers", "2"
    )
    fa2tune(folder, "cache", "verify", "--cache", "fleet.sqlite", "--stale")
    fa2tune(folder, "cache", "diff", f"{NODES[0]}/fleet.sqlite", "fleet.sqlite", expect=1)
    fa2tune(folder, "cache", "sign", "fleet.sqlite")
    ship(folder)
    check(folder)
    print(f"rolled out, twice: {folder}")


if __name__ == "__main__":
    main()
