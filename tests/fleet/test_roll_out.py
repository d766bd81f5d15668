"""examples/fleet: the whole life of a cache file, with the real commands."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fa2tune.rows import reader

pytestmark = pytest.mark.usefixtures("quick_starts")

ROOT = Path(__file__).parents[2]


def test_a_fleet_rolls_out_upgrades_and_repairs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "fleet" / "roll_out.py"), str(tmp_path / "fleet")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for said in (
        "covered: 16 of 16 attention layers" if find_spec("transformers") else "left out: fa2tune cache coverage",
        "holds other rows here",
        "2 hold, 1 lost, 3 not timed",  # no interpreter runs the kernels of sm80
        "repaired: 2 rows updated, 1 tuned again, 0 not repaired, 0 withdrawn",
        "no worker on shared/ledger.sqlite",
        "3 of 6 rows, 3 stale",
    ):
        assert said in done.stdout, said
    files = [tmp_path / "fleet" / node / "fleet.sqlite" for node in ("node-1", "node-2")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted(row.key.bucket for row in reader.read(files[0])) == [512, 512, 512, 512, 1024, 1024]
    shared = reader.read(tmp_path / "fleet" / "shared" / "cache.sqlite")
    assert sorted((row.key.mask, row.implementation) for row in shared) == [
        (mask, kind) for mask in ("causal", "full") for kind in ("pointer", "sm80")
    ]
