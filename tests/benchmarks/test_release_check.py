"""benchmarks/release_check.py and triton_grid.py: the installed layout, the faults, and what the grid says, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import torch
from benchmark_scripts import script

from fa2tune import gpus
from fa2tune.calling import serving
from fa2tune.compiling import binaries
from fa2tune.compiling.binaries import BinariesError, File, New
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

release = script("release_check")
grid = script("triton_grid")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "sm_90.kernels"
    about = {"spec": {"dtype": "bf16"}, "kernel": "fwd"}
    entries = {f"{n:064x}": New(f"{n:064x}", about, {"name": "k"}, b"\x7fELF" + os.urandom(300)) for n in range(20)}
    binaries.save(path, binaries.file_bytes(entries, {}))
    return path


def test_the_installed_copy_is_what_pip_would_lay_out(kernels: Path, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    site = release.installed(tmp_path / "site", kernels)
    where = "import fa2tune, fa2tune.kernels.lib, fa2tune.search_spaces as s; print(fa2tune.__file__, s.__path__[0])"
    env = release.environment(tmp_path, site)
    done = subprocess.run(
        [sys.executable, "-c", where], env=env, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == [str(site / "fa2tune" / name) for name in ("__init__.py", "search_spaces")]
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["fa2tune.cache"]
    wanted = {path.name for pattern in data for path in (ROOT / "cache").glob(pattern) if path.suffix != ".kernels"}
    there = {path.name for path in (site / "fa2tune" / "cache").iterdir() if not path.name.startswith("__")}
    assert there == wanted | {"sm_90.kernels"}


@pytest.mark.parametrize("kind", release.FAULTS)
def test_each_fault_is_one(kind: str, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(release.MADE_ANEW, "another architecture", lambda cubin: b"of another")
    bad = tmp_path / "bad.kernels"
    release.damage(kind, kernels, bad)
    if kind in release.MADE_ANEW:  # intact, and no driver takes it
        good, file = File(kernels, believed=True), File(bad)
        assert file.entries.keys() == good.entries.keys() and not file.damaged()
        assert all(file.cubin(entry) != good.cubin(good.entries[key]) for key, entry in file.entries.items())
        return
    with pytest.raises(BinariesError) as said:  # the file, or each binary in it
        file = File(bad)
        assert len(file.damaged()) == len(file.entries)
        file.cubin(next(iter(file.entries.values())))
    assert re.search(release.FAULTS[kind], str(said.value))


def test_a_fake_triton_has_a_version_and_does_not_import(tmp_path: Path) -> None:
    folder = release.fake_triton(tmp_path, "4.0.0rc1")
    ask = "from fa2tune.compiling.fingerprint import triton_version as version; print(version())\n"
    ask += "try:\n import triton\nexcept ImportError: print('no')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4.0.0rc1", "no"] and grid.version_of(folder) == "4.0.0rc1"


def test_a_cold_start_is_one_of_the_release_check(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = script("cold_start")
    child = {"seconds": [1.0, 0.1, 0.05, 0.08, 0.06], "programs": ["ptxas"], "said": ""}
    monkeypatch.setattr(cold, "ran", lambda what, env: child if what == "start" else {})
    assert cold.start({}) == (child["seconds"], ["ptxas"])
    child |= {"error": "RuntimeError: no NVIDIA driver", "said": "Traceback"}
    with pytest.raises(click.ClickException, match="no NVIDIA driver\nTraceback"):
        cold.start({})


def test_the_results_have_calls_whose_keys_are_split() -> None:
    child = script("release_child")
    queries, keys = child.LENGTHS[" decoding"]
    for dim, causal in child.RESULTS:
        heads = 2048 // dim
        problem = Problem("bf16", 2, heads, heads, queries, keys, dim, dim, CAUSAL if causal else FULL)
        (served,) = serving.explain_problem(problem, gpus.named("h200"), ("fwd",)).kernels
        assert served.split is not None


def test_the_reference_of_few_queries_aligns_the_mask_to_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    child, arange = script("release_child"), torch.arange
    monkeypatch.setattr(torch, "arange", lambda count, device: arange(count))
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randn(1, 2, 4, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, 2, 37, 16, generator=generator) for _ in range(2))
    q, k, v = (one.requires_grad_() for one in (q, k, v))
    seen = torch.ones(4, 37, dtype=torch.bool).tril(37 - 4)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    (o * do).sum().backward()
    assert max(child._errors(torch, q, k, v, do, o, True).values()) < 1e-5


def test_nan_is_no_right_result() -> None:
    check = release.Check()
    check.right("fine", {"o": 0.001})
    assert not check.failures
    check.right("poisoned", {"o": 0.001, "dq": float("nan")})
    check.right("wrong", {"o": 0.1})
    assert [one.partition(":")[0] for one in check.failures] == ["poisoned", "wrong"]


def test_the_grid_is_the_benchmarks_and_the_ratio_is_that_of_medians() -> None:
    assert len(set(grid.CELLS)) == 72
    assert all(grid.TOKENS % length == 0 and grid.HIDDEN % dim == 0 for dim, _, length, _ in grid.CELLS)
    assert grid.ratio({"compiled_us": [99, 100, 500], "shipped_us": [50, 50, 50]}) == 2
    loaded = {"compiled": ["compiled fwd 00"], "shipped": ["shipped fwd 00"]}
    cells = {"one": {"loaded": loaded}, "two": {"loaded": {"compiled": [], "shipped": ["shipped bwd 01"]}}}
    assert grid.code(cells, "compiled") == {"fwd 00": "compiled"}
    assert grid.code(cells, "shipped") == {"fwd 00": "shipped", "bwd 01": "shipped"}


def test_turns_go_forth_and_back() -> None:
    said = list[str]()

    class Fake:
        def __init__(self, name: str) -> None:
            self.name, self.loaded, self.asked = name, list[str](), ""

        def ask(self, what: str) -> None:
            self.asked = what

        def answer(self) -> object:
            if self.asked == "fresh":
                return ["compiled fwd 00"]
            said.append(self.name)
            return float(len(said))

    both, found = (Fake("a"), Fake("b")), (list[float](), list[float]())
    grid.turns(both, 2, found)
    once = ["a", "b", "b", "a"] * (grid.BURSTS // 2)
    assert said == 2 * once and found[0][:4] == [1.0, 4.0, 5.0, 8.0] and found[1][:4] == [2.0, 3.0, 6.0, 7.0]
    assert both[0].loaded == ["compiled fwd 00"] * 2
