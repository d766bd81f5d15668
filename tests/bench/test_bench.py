"""fa2tune bench: selection, correctness, records, resuming, budget; with fake peers and a fake GPU, on the CPU."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from added_terms import add_terms
from bench_fakes import FakeGpu
from click.testing import CliRunner

from fa2tune import gpus
from fa2tune.bench import comparison, oracle, tables
from fa2tune.bench import gpu as bench_gpu
from fa2tune.bench.peers import PEERS, PLAIN_CONFIGS, SUBJECT, Peer, select
from fa2tune.cli.bench import bench as command
from fa2tune.measuring import timing
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import NONE, Score

REAL_GPU = bench_gpu.BenchGpu
STANDARD = PEERS["standard"]


def problem(causal: bool = True, seqlen: int = 100, heads: int = 3) -> Problem:
    return Problem("bf16", 2, heads, heads, seqlen, seqlen, 16, 16, CAUSAL if causal else FULL)


def bshd(of: Problem) -> Any:
    inner = STANDARD.make(of)
    return lambda q, k, v: inner(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def broken(of: Problem) -> Any:
    raise RuntimeError("no kernel\nfor this")


#: The subject and three peers: right in another layout, wrong (it forgets the mask), failing.
FAKES: Mapping[str, Peer] = {
    SUBJECT: replace(STANDARD, name=SUBJECT),
    "turned": Peer("turned", "Turned", bshd, layout="bshd"),
    "maskless": Peer("maskless", "Maskless", lambda of: STANDARD.make(replace(of, mask=FULL))),
    "broken": Peer("broken", "Broken", broken),
    "huge": replace(STANDARD, name="huge", unfit=lambda problem, pass_, free: f"{free} bytes are too few"),
}


def cells(*passes: str, seqlens: tuple[int, ...] = (64, 100)) -> list[comparison.Cell]:
    return [comparison.Cell("time", problem(seqlen=length), pass_) for length in seqlens for pass_ in passes]


# ---- what is measured


def test_the_grid_is_the_papers() -> None:
    grid = comparison.Grid().cells()
    timed = [cell for cell in grid if cell.kind == "time"]
    assert len(timed) == 3 * 2 * 6 * 3
    both = comparison.Grid(timings=("interleaved", "sustained")).cells()
    sustained = [cell for cell in both if cell.kind == "sustained"]
    assert [(c.problem, c.pass_) for c in sustained] == [(c.problem, c.pass_) for c in timed]
    assert {cell.problem.batch * cell.problem.seqlen_q for cell in timed} == {16384}
    assert {cell.problem.heads_q * cell.problem.head_dim for cell in grid} == {2048}
    memory = [cell for cell in grid if cell.kind == "memory"]
    assert max(cell.problem.seqlen_q for cell in memory) == 131072
    assert {(cell.problem.batch, cell.problem.head_dim, cell.pass_) for cell in memory} == {
        (1, 128, "fwd"),
        (1, 128, "both"),
    }
    assert len({tuple(cell.identity.values()) for cell in grid}) == len(grid)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtypes": ["fp8"]}, "dtype: got 'fp8', allowed are bf16, fp16"),
        ({"head_dims": [63]}, "headdim: got 63"),
        ({"seqlens": [0]}, "seqlen: got 0"),
        ({"passes": ["fwd", "sideways"]}, "pass: got 'sideways'"),
        ({"timings": ["cold"]}, "timing: got 'cold', allowed are interleaved, sustained"),
    ],
)
def test_a_bad_grid_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        comparison.Grid(**wrong)


def test_flops_are_the_papers() -> None:
    of = problem(causal=False, seqlen=128)
    forward = 4 * 2 * 3 * 128 * 128 * 16
    assert comparison.flops(of, "fwd") == forward
    assert comparison.flops(of, "both") == 3.5 * forward


# ---- peers


def test_selecting_peers() -> None:
    absent = replace(STANDARD, name="absent", missing=lambda: "it is not installed")
    known = {**FAKES, "absent": absent}
    chosen, notes = select(None, known)
    assert list(chosen) == list(FAKES)
    assert notes == {"absent": "it is not installed"}
    assert list(select(["turned"], known)[0]) == [SUBJECT, "turned"]
    with pytest.raises(ValueError, match="absent cannot run: it is not installed"):
        select(["absent"], known)
    with pytest.raises(ValueError, match="got 'flash', known are fa2tune, turned"):
        select(["flash"], known)


def test_the_plain_configs_are_complete() -> None:
    from fa2tune.compiling.registry import portable_of

    for kernel, config in PLAIN_CONFIGS.items():
        assert set(config) == set(portable_of(kernel).space.dimensions), kernel


def test_standard_attention_is_left_out_where_it_does_not_fit() -> None:
    large = Problem("bf16", 1, 16, 16, 65536, 65536, 128, 128, CAUSAL)
    why = STANDARD.unfit(large, "fwd", 80 << 30)
    assert why is not None and "384 GiB" in why
    assert STANDARD.unfit(large, "fwd", 500 << 30) is None


def test_a_peer_is_asked_for_the_mask_that_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = replace(problem(), mask=Mask("chunked", 8))
    asked = []
    monkeypatch.setattr("fa2tune.attention", lambda q, k, v, **options: asked.append(options) or q)
    PEERS[SUBJECT].make(chunked)(*torch.zeros(3, 1, 1, 4, 16))
    assert asked == [{"mask": Mask("chunked", 8), "score": NONE}]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute"].flash_attn_func = lambda *tensors, **options: tensors[0]  # type: ignore[attr-defined]
    PEERS["fa4"].make(problem())
    with pytest.raises(NotImplementedError, match="FlashAttention-4 has no mask chunked 8"):
        PEERS["fa4"].make(chunked)


def test_a_peer_is_asked_for_the_score_term_that_is_recorded_or_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = replace(problem(), score=Score("softcap", 20.0))
    asked: list[Any] = []
    monkeypatch.setattr("fa2tune.attention", lambda q, k, v, **options: asked.append(options) or q)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute"].flash_attn_func = lambda *tensors, **options: asked.append(options) or tensors[0]  # type: ignore[attr-defined]
    for name in (SUBJECT, "fa4"):
        PEERS[name].make(capped)(*torch.zeros(3, 1, 1, 4, 16))
    assert asked == [{"mask": CAUSAL, "score": capped.score}, {"causal": True, "softcap": 20.0}]
    with pytest.raises(NotImplementedError, match="SDPA has no score term softcap 20"):
        PEERS["sdpa-cudnn"].make(capped)
    for name, label in (("fa4", "FlashAttention-4"), ("flash-attn", "flash-attn")):
        other = SimpleNamespace(mask=CAUSAL, score=Score("mine", 2.0))
        with pytest.raises(NotImplementedError, match=f"{label} has no score term mine 2"):
            PEERS[name].make(other)  # type: ignore[arg-type]


def test_flex_attention_computes_masks_and_score_terms() -> None:
    capped = replace(problem(seqlen=64), mask=Mask("chunked", 16), score=Score("softcap", 0.5))
    q, k, v = torch.randn(3, 2, 3, 64, 16)
    by_flex, by_standard = (PEERS[name].make(capped)(q, k, v) for name in ("flex", "standard"))
    torch.testing.assert_close(by_flex, by_standard)


def test_cells_of_masks_by_name_are_told_apart(tmp_path: Path) -> None:
    masks = [FULL, CAUSAL, band(8, 0), Mask("chunked", 8), Mask("chunked", 9)]
    cells = [comparison.Cell("time", replace(problem(), mask=mask), "fwd") for mask in masks]
    results = comparison.Results(tmp_path / "bench.json", FakeGpu().environment(), False)
    for done, cell in enumerate(cells):
        assert [results.holds(one, {}) for one in cells] == [place < done for place in range(len(cells))]
        results.add(cell, {**cell.identity, "peers": {}})
    kept = comparison.load(tmp_path / "bench.json")
    assert list(map(tables.mask_label, kept["cells"])) == list(map(str, masks))
    for wrong in ([], "chunked", [8], ["a b", 8], ["chunked", 8.0], ["chunked", True]):
        kept["cells"][-1]["mask"] = wrong
        (tmp_path / "bench.json").write_text(json.dumps(kept))
        with pytest.raises(ValueError, match="mask of cell 4 must be null or a name and integers"):
            comparison.load(tmp_path / "bench.json")


# ---- whether it is right


@pytest.mark.parametrize("score", [NONE, Score("softcap", 0.7), Score("alibi", 4)], ids=str)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(20, 0), band(5, 90), band(None, 7), Mask("chunked", 30)], ids=str)
def test_the_reference_is_attention(monkeypatch: pytest.MonkeyPatch, mask: Mask, score: Score) -> None:
    """Of the second head, which a term may tell from the first."""
    add_terms(monkeypatch)
    of = replace(problem(seqlen=130), batch=1, heads_q=2, heads_kv=2, mask=mask, score=score)
    q, k, v, do = torch.randn(4, 1, 2, 130, 16, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = STANDARD.make(of)(*leaves)
    wanted = dict(zip(("o", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, do)), strict=True))
    got = oracle.reference(*(t.detach()[0, 1] for t in (q, k, v, do)), of.mask, of.score, head=1)
    for name, want in wanted.items():
        torch.testing.assert_close(got[name], want[0, 1].float(), rtol=1e-4, atol=1e-5)


def test_a_wrong_late_tile_is_seen() -> None:
    want = torch.cat([torch.ones(960, 16), torch.full((64, 16), 0.03)])  # early rows large, as under a causal mask
    got = want.clone()
    got[-64:] *= 1.5
    assert comparison.tile_error(got, want) == pytest.approx(0.5)
    assert (got - want).square().mean().sqrt() / want.square().mean().sqrt() < 0.01  # over all rows, it hides


def test_a_nan_is_wrong() -> None:
    stand = comparison.Stand(problem(), FAKES, "cpu")
    (out,) = stand.call(SUBJECT, "fwd")()
    assert stand.error(SUBJECT, "fwd", (out,)) < 0.02
    out[0, 1, 2, 3] = float("nan")
    assert stand.error(SUBJECT, "fwd", (out,)) == float("inf")


# ---- measuring


@pytest.mark.parametrize("pass_", comparison.BENCHED)
def test_only_what_is_right_is_timed(pass_: str) -> None:
    cell = comparison.Cell("time", problem(), pass_)
    record = comparison.measure(comparison.Stand(cell.problem, FAKES, "cpu"), FakeGpu(), cell, 0.1)
    entries = record["peers"]
    assert {name: entry["status"] for name, entry in entries.items()} == {
        SUBJECT: "ok", "turned": "ok", "maskless": "wrong", "broken": "failed", "huge": "skipped",
    }  # fmt: skip
    assert entries["broken"]["why"] == "RuntimeError: no kernel"
    assert entries["huge"]["why"] == f"{7 << 30} bytes are too few"
    assert "ms" not in entries["maskless"] and "float32 reference" in entries["maskless"]["why"]
    assert entries["turned"]["ms"] == 3.0 and entries["turned"]["ratio"] == pytest.approx(1.5)
    assert entries[SUBJECT]["tflops"] == pytest.approx(comparison.flops(cell.problem, pass_) / 2e-3 / 1e12)


def test_ratios_are_taken_within_a_round() -> None:
    # a GPU that slows down in the run: ratios of medians would say 2.0
    summary = comparison.summarise({SUBJECT: [1.0, 2.0, 4.0], "other": [3.0, 4.0, 12.0]}, 1.0)
    assert summary["other"]["ratio"] == 3.0
    assert (summary["other"]["low_ms"], summary["other"]["high_ms"]) == (3.0, 12.0)  # of so few the extremes
    many = comparison.summarise({"other": [float(time) for time in range(11)]}, 1.0)["other"]
    assert (many["low_ms"], many["high_ms"]) == (pytest.approx(1.0), pytest.approx(9.0))
    assert "ratio" not in comparison.summarise({"other": [3.0, 4.0]}, 1.0)["other"]  # the subject was wrong


def test_a_sustained_cell_is_timed_by_turns() -> None:
    cell = comparison.Cell("sustained", problem(), "fwd")
    record = comparison.measure(comparison.Stand(cell.problem, FAKES, "cpu"), FakeGpu(), cell, 0.1)
    assert record["kind"] == "sustained" and record["peers"]["turned"]["ratio"] == pytest.approx(2.0)
    assert record["peers"]["turned"]["samples"] == 2 and record["peers"][SUBJECT]["high_ms"] == 2.2


def test_each_call_has_the_gpu_for_itself_forth_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now, did = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def call(name: str, milliseconds: float) -> Callable[[], object]:
        def launch() -> None:
            did.append(name)
            now[0] += milliseconds

        return launch

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0] / 1e3)
    rig = object.__new__(REAL_GPU)
    samples = rig.sustain({"a": call("a", 1.0), "b": call("b", 50.0)})
    assert samples == {"a": [pytest.approx(1.0)] * bench_gpu.TURNS, "b": [pytest.approx(50.0)] * bench_gpu.TURNS}
    blocks = [name for name, _ in itertools.groupby(did)]
    assert blocks == ["a", "b", "a", "b", "a"]  # warm-up, forth, and back: the last forth is the first back
    turn = bench_gpu.SETTLE_SECONDS + bench_gpu.TURN_SECONDS
    hot = bench_gpu.HOT_SECONDS / 2
    assert did.count("a") == pytest.approx(1e3 * (hot + 2 * turn), rel=0.05)
    assert did.count("b") == pytest.approx(1e3 * (hot + 2 * turn) / 50, rel=0.35)


def test_a_broken_cuda_context_ends_the_run_with_advice() -> None:
    gpu = FakeGpu()
    gpu.alive = False
    cell = cells("fwd")[0]
    with pytest.raises(comparison.BenchError, match="--peers without broken"):
        comparison.measure(comparison.Stand(cell.problem, FAKES, "cpu"), gpu, cell, 0.1)


def test_memory_cells() -> None:
    cell = comparison.Cell("memory", problem(), "both")
    record = comparison.measure(comparison.Stand(cell.problem, FAKES, "cpu"), FakeGpu(), cell, 0.1)
    assert record["peers"]["turned"]["peak_bytes"] == 1 << 20
    assert record["kind"] == "memory"


# ---- the results file


def test_run_writes_after_each_cell_and_resumes(tmp_path: Path) -> None:
    path, gpu = tmp_path / "bench.json", FakeGpu()
    two = {name: FAKES[name] for name in (SUBJECT, "turned")}
    seen: list[int] = []

    def interrupt(done: int, total: int, record: Mapping[str, Any]) -> None:
        seen.append(len(json.loads(path.read_text())["cells"]))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results = comparison.Results(path, gpu.environment(), resume=False)
        comparison.run(cells("fwd", "bwd"), two, gpu, results, progress=interrupt)
    assert seen == [1, 2]

    with pytest.raises(ValueError, match="--resume"):
        comparison.Results(path, gpu.environment(), resume=False)
    results = comparison.Results(path, gpu.environment(), resume=True)
    finished: list[int] = []
    assert comparison.run(cells("fwd", "bwd"), two, gpu, results, progress=lambda done, *_: finished.append(done))
    assert finished == [3, 4]
    data = comparison.load(path)
    assert data["complete"] and [cell["run"] for cell in data["cells"]] == [0, 0, 1, 1]

    # another peer: its cells are measured again, with everyone in them
    results = comparison.Results(path, gpu.environment(), resume=True)
    assert not results.data["complete"]
    assert comparison.run(cells("fwd"), FAKES, gpu, results)
    assert len(results.data["cells"]) == 4
    assert sum(set(cell["peers"]) == set(FAKES) for cell in results.data["cells"]) == 2


def test_a_file_of_another_machine_is_not_resumed(tmp_path: Path) -> None:
    path, gpu = tmp_path / "bench.json", FakeGpu()
    comparison.Results(path, gpu.environment(), resume=False).save()
    with pytest.raises(ValueError, match="gpu 'fake', here it is 'other'"):
        comparison.Results(path, gpu.environment() | {"gpu": "other"}, resume=True)
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a results file"):
        comparison.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        comparison.load(path)


def test_the_time_budget_stops_before_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))  # every look at the clock is 10 s later
    monkeypatch.setattr(comparison.time, "monotonic", lambda: next(clock))
    results = comparison.Results(tmp_path / "bench.json", FakeGpu().environment(), resume=False)
    one = {SUBJECT: FAKES[SUBJECT]}
    assert not comparison.run(cells("fwd", "bwd", "both"), one, FakeGpu(), results, time_budget=45)
    assert len(results.data["cells"]) == 2
    assert not results.data["complete"]


# ---- the GPU and the command


def test_cudnn_version_is_readable() -> None:
    assert bench_gpu._cudnn(91900) == "9.19.0"
    assert bench_gpu._cudnn(None) is None


def test_nvidia_smi_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert set(bench_gpu._smi("GPU-0").values()) == {None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "needs a CUDA GPU" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "nobody"], "known are fa2tune, fa4, sdpa-cudnn"),
        (["--headdim", "64,x"], "'64,x', expected numbers"),
        (["--seqlen", "-5"], "seqlen: got -5"),
        (["--time-budget", "0"], "--time-budget"),
        (["--window", "1024"], "--window': got '1024', expected LEFT,RIGHT"),
        (["--window", "8,-2"], "--window': got '8,-2', expected LEFT,RIGHT"),
        (["--mask", "chunked"], "--mask': got 'chunked', chunked has 1 value: 'chunked,chunk'"),
        (["--mask", "causl"], "--mask': got 'causl', allowed are band, causal,"),
        (["--score", "softcap,x"], "--score': got 'softcap,x', expected NAME or NAME,VALUE,...: numbers"),
        (["--score", "softcap,-1"], "--score': got 'softcap,-1.0', cap must be from"),
    ],
)
def test_bad_options_are_usage_errors(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("name", "here", "said"),
    [
        ("sm_80", None, "here is no GPU"),
        ("sm_80", "a100", "here is a100-sxm-80gb (8.0); it takes a GPU of compute capability 9.0"),
        ("h100", "h200", "h100-sxm has compute capability 9.0"),
        ("sm_90", "h200", "allowed are sm_80, sm_86, sm_87, sm_88, sm_89, sm_120, sm_121, or the name of a GPU"),
        ("a1000", "h200", "as: got 'a1000', allowed are sm_80, sm_86"),
    ],
)
def test_whose_code_cannot_be_had(
    name: str, here: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "BenchGpu", FakeGpu)
    monkeypatch.setattr("fa2tune.gpus.present", lambda: gpus.named(here) if here else None)
    result = CliRunner().invoke(command, ["--as", name, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())


def test_as_another_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, asked = [], []
    monkeypatch.setattr(bench_gpu, "BenchGpu", FakeGpu)
    monkeypatch.setattr("fa2tune.gpus.present", lambda: gpus.named("h200"))
    monkeypatch.setattr("fa2tune.launching.ported.begin", begun.append)

    def chosen(names: Any, _known: Any) -> Any:
        asked.append(names)
        return {SUBJECT: FAKES[SUBJECT], "sdpa-flash": replace(FAKES["turned"], name="sdpa-flash")}, {}

    monkeypatch.setattr("fa2tune.cli.bench.select", chosen)
    monkeypatch.setattr(comparison, "WORKLOAD_TOKENS", 64)
    monkeypatch.setattr(comparison, "WORKLOAD_HIDDEN", 32)
    arguments = [
        "--headdim",
        "16",
        "--seqlen",
        "64",
        "--no-memory",
        "--causal",
        "--pass",
        "fwd",
        "--out",
        str(tmp_path),
    ]
    result = CliRunner().invoke(command, [*arguments, "--as", "sm_86"])
    assert result.exit_code == 0, result.output
    assert [gpu.name for gpu in begun] == ["a10"] and asked == [["sdpa-flash", "triton-plain"]]
    assert comparison.load(tmp_path / "bench.json")["runs"][0]["code"] == "sm_80 code for a10"
    assert "running sm_80 code for a10" in " ".join(tables.setting(comparison.load(tmp_path / "bench.json")).split())
    mixed = CliRunner().invoke(command, [*arguments, "--resume"])
    assert mixed.exit_code == 2 and "measured with code 'sm_80 code for a10'" in mixed.output


def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "BenchGpu", FakeGpu)
    monkeypatch.setattr("fa2tune.cli.bench.select", lambda *_: ({
        SUBJECT: FAKES[SUBJECT], "sdpa-flash": replace(FAKES["turned"], name="sdpa-flash"),
    }, {"fa4": "it is not installed"}))  # fmt: skip
    monkeypatch.setattr(comparison, "WORKLOAD_TOKENS", 64)
    monkeypatch.setattr(comparison, "WORKLOAD_HIDDEN", 32)
    arguments = ["--headdim", "16", "--seqlen", "64", "--memory-seqlen", "64,128", "--causal", "--out", str(tmp_path)]
    arguments += ["--timing", "interleaved,sustained"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "fa4 is left out: it is not installed" in result.output
    assert "[1/10] interleaved fwd bf16 head dim 16 causal length 64" in result.output
    assert "[2/10] sustained fwd bf16 head dim 16 causal length 64" in result.output
    assert "1.50 x the best peer (sdpa-flash)" in result.output and "2.00 x the best peer" in result.output
    passes = ("forward", "backward", "forward_backward")
    plots = {"memory", "overview", *(f"{name}_bf16{how}" for name in passes for how in ("", "_sustained"))}
    files = {"bench.json", *(f"{name}.{suffix}" for name in plots for suffix in ("png", "svg"))}
    assert {path.name for path in tmp_path.iterdir()} == files
    again = CliRunner().invoke(command, arguments)
    assert again.exit_code == 2 and "--resume" in again.output
    assert CliRunner().invoke(command, [*arguments, "--resume"]).exit_code == 0


def test_windows_stand_in_place_of_the_masks_or_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "BenchGpu", FakeGpu)
    monkeypatch.setattr("fa2tune.cli.bench.select", lambda *_: ({SUBJECT: FAKES[SUBJECT]}, {}))
    monkeypatch.setattr(comparison, "WORKLOAD_TOKENS", 64)
    monkeypatch.setattr(comparison, "WORKLOAD_HIDDEN", 32)
    arguments = ["--headdim", "16", "--seqlen", "64", "--no-memory", "--pass", "fwd", "--out", str(tmp_path)]
    result = CliRunner().invoke(command, [*arguments, "--window", "8,0", "--window", "-1,3"])
    assert result.exit_code == 0, result.output
    assert "[1/2] interleaved fwd bf16 head dim 16 window 8, 0 length 64" in result.output
    assert "window unbounded, 3" in result.output and "head dim 16 causal" not in result.output
    more = CliRunner().invoke(command, [*arguments, "--window", "8,0", "--causal", "--resume"])
    assert more.exit_code == 0, more.output
    cells = comparison.load(tmp_path / "bench.json")["cells"]
    found = {tables.mask_label(cell): cell for cell in cells}
    assert list(map(tables.mask_label, tables.records({"cells": cells}, "time"))) == [
        "causal", "window 8, 0", "window unbounded, 3",
    ]  # fmt: skip
    assert all(cell["peers"][SUBJECT]["status"] == "ok" for cell in cells)
    rate = {name: cell["peers"][SUBJECT]["tflops"] * cell["peers"][SUBJECT]["ms"] for name, cell in found.items()}
    # pairs: a causal mask counts as half of all, as the paper has it; a window's are counted one by one
    assert rate["window 8, 0"] / rate["causal"] == pytest.approx((64 * 9 - 36) / (64 * 64 / 2), rel=1e-3)
    cells[0]["window"] = [8]
    (tmp_path / "bench.json").write_text(
        json.dumps({**json.loads((tmp_path / "bench.json").read_text()), "cells": cells})
    )
    with pytest.raises(ValueError, match="window of cell 0 must be null or two numbers"):
        comparison.load(tmp_path / "bench.json")


def test_masks_and_score_terms_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "BenchGpu", FakeGpu)
    sdpa = replace(PEERS["sdpa-cudnn"], name="sdpa-cudnn")
    monkeypatch.setattr("fa2tune.cli.bench.select", lambda *_: ({SUBJECT: FAKES[SUBJECT], "sdpa-cudnn": sdpa}, {}))
    monkeypatch.setattr(comparison, "WORKLOAD_TOKENS", 64)
    monkeypatch.setattr(comparison, "WORKLOAD_HIDDEN", 32)
    arguments = ["--headdim", "16", "--seqlen", "64", "--no-memory", "--pass", "both", "--out", str(tmp_path)]
    arguments += ["--mask", "chunked,16", "--mask", "band,-1,0", "--causal", "--window", "8,0", "--mask", "band,8,0"]
    result = CliRunner().invoke(command, [*arguments, "--score", "softcap,2", "--score", "none"])
    assert result.exit_code == 0, result.output
    assert "[1/6] interleaved both bf16 head dim 16 causal, softcap 2 length 64" in result.output
    assert "sdpa-cudnn failed in 3 cells: NotImplementedError: SDPA has no score term softcap 2" in result.output
    cells = comparison.load(tmp_path / "bench.json")["cells"]
    assert [(cell["causal"], cell["window"], cell["mask"], cell["score"]) for cell in cells] == [
        (True, window, mask, score)
        for window, mask in ((None, None), ([8, 0], None), (None, ["chunked", 16])) for score in (["softcap", 2.0], None)
    ]  # fmt: skip
    assert [*map(tables.mask_label, tables.records({"cells": cells}, "time"))] == [
        "causal", "causal, softcap 2", "chunked 16", "chunked 16, softcap 2", "window 8, 0", "window 8, 0, softcap 2",
    ]  # fmt: skip
    own = {tables.mask_label(cell): cell["peers"][SUBJECT] for cell in cells}
    assert {entry["status"] for entry in own.values()} == {"ok"}
    rate = {name: entry["tflops"] * entry["ms"] for name, entry in own.items()}
    assert rate["chunked 16"] / rate["causal"] == pytest.approx(4 * 17 * 8 / (64 * 64 / 2), rel=1e-3)
    assert rate["chunked 16, softcap 2"] == rate["chunked 16"]
    data = json.loads((tmp_path / "bench.json").read_text())
    for wrong in ([], "softcap", ["softcap", "2"], ["soft cap", 2.0], ["softcap", 2]):
        data["cells"][0]["score"] = wrong
        (tmp_path / "bench.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match="score of cell 0 must be null or a name and numbers"):
            comparison.load(tmp_path / "bench.json")


def test_an_interrupted_run_shows_what_it_has_and_exits_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "BenchGpu", FakeGpu)
    monkeypatch.setattr("fa2tune.cli.bench.select", lambda *_: ({SUBJECT: FAKES[SUBJECT]}, {}))
    measured = comparison.measure

    def second_is_interrupted(stand: Any, rig: Any, cell: comparison.Cell, seconds: float) -> dict[str, Any]:
        if cell.pass_ == "bwd":
            raise KeyboardInterrupt
        return measured(stand, rig, cell, seconds)

    monkeypatch.setattr(comparison, "measure", second_is_interrupted)
    monkeypatch.setattr(comparison, "WORKLOAD_TOKENS", 64)
    monkeypatch.setattr(comparison, "WORKLOAD_HIDDEN", 32)
    arguments = ["--headdim", "16", "--seqlen", "64", "--no-memory", "--causal", "--out", str(tmp_path)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 130, result.output
    assert "--resume continues" in result.output and "Traceback" not in result.output
    assert len(comparison.load(tmp_path / "bench.json")["cells"]) == 1
