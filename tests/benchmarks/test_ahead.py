"""benchmarks/ahead.py: what a script for a GPU would launch is known without one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from benchmark_scripts import script
from click.testing import CliRunner

from fa2tune.compiling import compiler
from fa2tune.launching import overlapped, ported

ahead = script("ahead")
SCRIPTS = Path(__file__).parents[2] / "benchmarks"
HERE = torch.cuda.is_available()

CALLS = """
    import sys
    from pathlib import Path
    import torch
    import fa2tune

    def new(heads, length, dim):
        return torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    assert sys.argv[1:] == ["--few", "64"] and torch.cuda.get_device_capability() == (9, 0)
    fa2tune.attention(new(32, 64, 128), *(new(8, 16384, 128) for _ in "kv"))
    tensors = [new(heads, 2048, 104) for heads in (16, 2, 2)]
    o = fa2tune.attention(*tensors, causal=True)
    gradients = torch.autograd.grad(o, tensors, torch.randn_like(o))
    assert torch.equal(gradients[0], tensors[0]) and float(o.detach().sum()) == 0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fa2tune.attention(*tensors, window=(300, 0))
    graph.replay()
    assert start.elapsed_time(end) > 0
    print("TFLOP/s 1000000")
    Path(__file__).with_name("times.json").write_text("{}")
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    path = tmp_path / "calls.py"
    path.write_text(textwrap.dedent(CALLS))
    return path


def test_what_a_script_launches_is_known(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ahead.launches(calls, ["--few", "64"])
    assert "TFLOP" not in capsys.readouterr().out and not calls.with_name("times.json").exists()
    names = {variant.short_name for variant, _, _ in found}
    assert {"bwd_spread", "bwd_gather", "sm90/fwd_split", "fwd_combine", "sm90/fwd", "sm90/bwd_fused"} <= names
    assert len(found) == len(set(found)) and {spec.head_dim for _, spec, _ in found} == {104, 128}
    assert {spec.mask for variant, spec, _ in found if variant.short_name == "sm90/fwd"} == {"causal", "band"}
    assert torch.cuda.is_available() == HERE  # as before


def test_the_script_counts_or_compiles(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CliRunner().invoke(ahead.main, ["--count", str(calls), "--few", "64"], catch_exceptions=False)
    count = int(counted.output.split()[0])
    compiled: list[object] = []
    monkeypatch.setattr(ahead, "compile_all", lambda jobs, gpu: compiled.extend([gpu.arch, *jobs]))
    assert CliRunner().invoke(ahead.main, [str(calls), "--few", "64"], catch_exceptions=False).exit_code == 0
    assert compiled[0] == 90 and len(compiled) == count + 1


def test_streams_beside_others_are_not_kept() -> None:
    """Keys of dQ in parts, and both kernels of the backward at a time."""
    before = dict(overlapped.SIDES)
    found = ahead.launches(SCRIPTS / "dense_backwards.py", ["--keys", "--only", "64 queries"])
    assert {"sm90/bwd_dq_split", "bwd_dq_combine", "sm90/bwd_dkdv"} <= {variant.short_name for variant, _, _ in found}
    assert before == overlapped.SIDES


@pytest.mark.parametrize("seconds", ["55", "0.5"])
def test_calls_of_torch_and_pools_of_processes(seconds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA with a mask that has more keys than queries. The script's own pool compiles nothing, and its time is not ours."""
    monkeypatch.setattr("multiprocessing.pool.Pool.__init__", lambda *_, **__: pytest.fail("processes"))
    asked = ["--hopper", "--only", "64 queries", "--seconds", seconds, "--out", str(tmp_path / "times.json")]
    found = ahead.launches(SCRIPTS / "few_queries.py", asked)
    assert {"sm90/fwd", "sm90/fwd_split", "fwd_combine"} <= {variant.short_name for variant, _, _ in found}
    assert not list(tmp_path.iterdir())


def test_code_of_another_gpu_is_assembled_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.py"
    path.write_text(
        "import torch, fa2tune\nfrom fa2tune import gpus\nfrom fa2tune.launching import ported\n"
        "ported.begin(gpus.named('a100'))\nq = torch.empty(1, 2, 512, 64, device='cuda', dtype=torch.bfloat16)\n"
        "fa2tune.attention(q, q, q)\n"
    )
    for name in ("_running", "_for"):  # what begin sets
        monkeypatch.setattr(f"fa2tune.launching.ported.{name}", getattr(ported, name))
    assembled: list[tuple[str, int]] = []
    monkeypatch.setattr(compiler, "compile_kernel", lambda variant, spec, config, arch: (variant.short_name, arch))
    monkeypatch.setattr(ported, "assembled", lambda compiled, here: assembled.append((*compiled, here)))
    done = CliRunner().invoke(ahead.main, [str(path)])
    assert done.exit_code == 0 and "1 binaries for h200, 0 of which do not compile" in done.output, done.output
    assert assembled == [("sm80/fwd", 80, 90)]


def test_a_script_that_fails_is_an_error(calls: Path) -> None:
    with pytest.raises(AssertionError):
        ahead.launches(calls, ["--many"])
    assert torch.cuda.is_available() == HERE


COUNTED = """
import compile_ahead, pytest
compile_ahead.ahead.compile_all = lambda jobs, gpu: print(gpu.name, sorted({variant.name for variant, _, _ in jobs}))
asked = ["-q", "--assert=plain", "-p", "no:cacheprovider", "tests/gpu/test_copies.py", "-k", "error_rule"]
raise SystemExit(pytest.main(asked, plugins=[compile_ahead]))
"""


def test_what_gpu_tests_launch_is_known() -> None:
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(["tests", "tests/gpu", os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-O", "-c", COUNTED], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    launched = next(line for line in done.stdout.splitlines() if "h200" in line)
    assert "sm90/fwd" in launched and "sm90/bwd_fused" in launched


def test_calls_filled_in_and_computed_launch_each_their_own() -> None:
    """Of queries that see no key: behind them there are few, which other tiles may serve."""
    found = ahead.launches(SCRIPTS / "filled_in.py", ["--call", "2 4 4 8000 64 64 64 causal"])
    names = {variant.short_name for variant, _, _ in found}
    assert {"sm90/fwd_one_tile", "sm90/bwd_fused", "sm90/bwd_query_tiles"} <= names
