"""A kernel with a role that is taken out, with the file of its search space: calls take what else there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hopper_builds import TESTED

ROOT = Path(__file__).parent.parent
#: Call (batch, heads of queries and of keys, lengths, head dims, pass; causal, or not) -> the roles whose kernels it runs.
CALLS: dict[str, tuple[Any, ...]] = {
    "few queries": (1, (32, 8), (1, 8192), 128, "fwd"),
    "a chunk of a prompt": (1, (32, 8), (256, 32768), 128, "fwd"),
    "grouped heads": (8, (128, 16), (64, 998), 256, "fwd"),
    "few keys": (2, (20, 20), (1024, 77), 64, "bwd", False),
    "few keys, forward": (1, (32, 8), (100, 100), 64, "fwd"),
    "short, forward": (1, (6, 6), (665, 665), 192, "fwd", False),
    "few key heads": (1, (32, 2), (1024, 1024), 128, "bwd"),
    "wide, without a mask": (2, (8, 8), (4096, 4096), 248, "fwd", False),
    "tiles for half of a round": (6, (1, 1), (3369, 3369), 256, "fwd", False),
    "wide": (1, (16, 16), (2048, 2048), 256, "bwd"),
    "wide, of few tiles": (1, (1, 1), (300, 16384), 256, "bwd"),
    "few queries, backward": (9, (2, 2), (86, 894), 192, "bwd"),
}
#: Prints call -> kernels that run for it on an H200.
SERVED = """
import json, sys
import fa2tune.calling.ops
from fa2tune import gpus
from fa2tune.calling.schedules import grouped_schedule, one_tile_schedule
from fa2tune.calling.serving import explain_problem
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem
h200, found = gpus.named("h200"), {}
for name, (batch, heads, lengths, dim, asked, *causal) in json.loads(sys.argv[1]).items():
    problem = Problem("bf16", batch, *heads, *lengths, dim, dim, CAUSAL if all(causal) else FULL)
    kernels = explain_problem(problem, h200, [asked]).kernels
    found[name] = sorted({one for served in kernels for one in served.runs or {}})
print(json.dumps(found))
"""
#: Kernel with a role -> the call that runs it where it is there. Not bwd_delta: rows of fused backwards are hashed with it.
REMOVED = {
    "portable/fwd_split": "few queries",
    "portable/fwd_combine": "few queries",
    "sm90/fwd_split": "a chunk of a prompt",
    "sm90/fwd_grouped": "grouped heads",
    "sm90/fwd_one_tile": "few keys, forward",
    "sm90/fwd_multistage": "short, forward",
    "sm90/fwd_80_keys": "wide, without a mask",
    "sm90/fwd_shares": "tiles for half of a round",
    "sm90/bwd_one_tile": "few keys",
    "sm90/bwd_query_tiles": "few queries, backward",
    "portable/bwd_gather": "few key heads",
    "portable/bwd_spread": "few key heads",
    "sm90/bwd_dkdv_ds": "wide",
    "sm90/bwd_dq_split": "wide, of few tiles",
    "portable/bwd_dq_combine": "wide, of few tiles",
}


def served(tree: Path, home: Path) -> dict[str, list[str]]:
    env = {**os.environ, "PYTHONPATH": str(tree), "HOME": str(home), "FA2TUNE_KERNELS": "off"}
    done = subprocess.run(
        [sys.executable, "-c", SERVED, json.dumps(CALLS)], cwd=tree, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return served(ROOT, tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("kernel", REMOVED)
def test_a_call_takes_what_else_there_is(kernel: str, whole: dict[str, list[str]], tmp_path: Path) -> None:
    if kernel == "sm90/fwd_80_keys" and not TESTED:
        pytest.skip("this Triton does not compile it")
    tree = tmp_path / "tree"
    for name in ("fa2tune", "kernels", "search_spaces", "cache"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("kernels", "search_spaces"):
        (tree / folder / f"{kernel}.py").unlink()
    found, short = served(tree, tmp_path), kernel.removeprefix("portable/")
    assert not any(short in runs for runs in found.values())
    if call := REMOVED[kernel]:
        assert short in whole[call] and found[call] != whole[call]
    others = {
        call: (whole[call], found[call]) for call in CALLS if found[call] != whole[call] and short not in whole[call]
    }
    assert not others, "other calls are served as before"
