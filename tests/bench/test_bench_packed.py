"""fa2tune bench --packed: packings as text, what peers are called with, what is compared, timed and shown; on the CPU."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_fakes import FakeGpu
from click.testing import CliRunner

from fa2tune.bench import comparison, packed, plotting, tables
from fa2tune.bench import gpu as bench_gpu
from fa2tune.bench.packed import PACKED_PEERS, label_of, lengths_of, posed
from fa2tune.bench.peers import PEERS, SUBJECT, Peer, select
from fa2tune.cli.bench import bench as command
from fa2tune.measuring.reference import attention as by_torch
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import NONE, Score

LENGTHS = (30, 1, 70, 9)


def apart(problem: Any) -> Any:
    """Each sequence by itself, (1, total, heads, dim)."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        parts = zip(*(t.transpose(1, 2).split(problem.lengths, 2) for t in (q, k, v)), strict=True)
        return torch.cat([by_torch(*part, mask=problem.mask)[0] for part in parts], 2).transpose(1, 2)

    return attention


def mixed(problem: Any) -> Any:
    """Tokens see other sequences."""
    return apart(replace(problem, lengths=(sum(problem.lengths),)))


FAKES = {
    SUBJECT: Peer(SUBJECT, "fa2tune", apart, "bshd"), "fa4": Peer("fa4", "FlashAttention-4", mixed, "bshd"),
    "fa3": replace(PACKED_PEERS["fa3"], make=apart), "torch-varlen": Peer("torch-varlen", "torch", apart, "bshd"),
}  # fmt: skip


# ---- packings


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("3x20", (20, 20, 20)), ("4096,2048,700", (4096, 2048, 700)), ("2x5,7,1x9", (5, 5, 7, 9)), ("8", (8,))],
)
def test_packings_as_text(text: str, lengths: tuple[int, ...]) -> None:
    assert lengths_of(text) == lengths and lengths_of(label_of(lengths)) == lengths


def test_the_label_of_many_lengths_is_short() -> None:
    assert label_of(range(1, 50)) == "49 of 1 to 49"


@pytest.mark.parametrize("text", ["", "16x", "x16", "0x16", "4,0", "4,,5", "-3", "2x3x4", "a", "1e3", " 4"])
def test_bad_packings_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"got '{text}', expected LENGTH or COUNTxLENGTH"):
        lengths_of(text)


def test_packings_that_no_gpu_holds_are_refused() -> None:
    for text, what in (("20000x1", "20000 sequences with 20000 tokens"), ("2x9000000", "2 sequences with 18000000")):
        with pytest.raises(ValueError, match=rf"got '{text}', {what}.*, allowed are at most 16384 and 16777216"):
            lengths_of(text)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(8, 0)], ids=str)
@pytest.mark.parametrize("pass_", comparison.BENCHED)
def test_operations_are_those_of_each_sequence(mask: Any, pass_: str) -> None:
    dense = Problem("bf16", 4, 3, 3, 64, 64, 16, 16, mask)
    assert comparison.flops(posed("bf16", 16, 3, mask, (64,) * 4), pass_) == comparison.flops(dense, pass_)
    both = [comparison.flops(posed("bf16", 16, 3, mask, lengths), pass_) for lengths in ((64,), (9,), (9, 64))]
    assert both[0] + both[1] == both[2]


def test_packings_stand_in_place_of_all_other_cells() -> None:
    masks = (CAUSAL, band(8, 0))
    cells = comparison.Grid(masks=masks, packings=[(64,) * 4, LENGTHS], timings=("interleaved", "sustained")).cells()
    assert len(cells) == 3 * 2 * 2 * 3 * 2 and {cell.kind for cell in cells} == {"packed", "packed-sustained"}
    assert {cell.problem.heads_q * cell.problem.head_dim for cell in cells} == {2048}
    assert {cell.problem.extent.longest for cell in cells} == {64, 70}
    assert len({str(cell.identity) for cell in cells}) == len(cells)


# ---- peers


def test_every_peer_is_asked_for_these_sequences_and_this_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def noted(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            asked[name] = arguments[3:], options
            out = arguments[0] * 2
            return {"fa4": (out, None), "fa3": [out, None]}.get(name, out)

        return call

    for name in ("flash_attn", "flash_attn.cute", "torch.nn.attention.varlen"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", noted("fa4"), raising=False)
    monkeypatch.setattr(sys.modules["torch.nn.attention.varlen"], "varlen_attn", noted("torch-varlen"), raising=False)
    monkeypatch.setattr("fa2tune.attention_varlen", noted(SUBJECT))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=noted("fa3")), raising=False)
    monkeypatch.setenv(packed.FA3_LIBRARY, "fa3.so")
    q = torch.randn(1, sum(LENGTHS), 2, 16)
    for mask in (FULL, CAUSAL, band(8, 0)):
        problem = posed("bf16", 16, 2, mask, LENGTHS)
        for name, peer in PACKED_PEERS.items():
            assert torch.equal(peer.make(problem)(q, q, q), 2 * q), name
        own, fa4, fa3, varlen = (asked[name] for name in (SUBJECT, "fa4", "fa3", "torch-varlen"))
        for starts in (own[0][0], own[0][1], fa4[1]["cu_seqlens_q"], fa3[0][4], varlen[0][1]):
            assert starts.tolist() == [0, 30, 31, 101, 110] and starts.dtype is torch.int32
        assert own[0][2:] == varlen[0][2:] == (70, 70) and fa3[0][9:11] == (70, 70) and fa4[1]["max_seqlen_k"] == 70
        assert own[1] == {"mask": mask, "score": NONE}
        assert fa4[1]["causal"] is (mask == CAUSAL) and fa4[1].get("window_size") == mask.window
        assert fa3[0][20:24] == (0.25, mask == CAUSAL, *((8, 0) if mask.window else (-1, -1)))
        assert varlen[1] == {"window_size": {FULL: (-1, -1), CAUSAL: (-1, 0)}.get(mask, (8, 0))}
    chunked, capped = (posed("bf16", 16, 2, mask, LENGTHS, score) for mask, score in
                       ((Mask("chunked", 8), NONE), (CAUSAL, Score("softcap", 5.0))))  # fmt: skip
    for name, label in (("fa4", "FlashAttention-4"), ("fa3", "FlashAttention-3"), ("torch-varlen", "varlen_attn")):
        with pytest.raises(NotImplementedError, match=f"{label} has no mask chunked 8"):
            PACKED_PEERS[name].make(chunked)
    for name in (SUBJECT, "fa4", "fa3"):
        PACKED_PEERS[name].make(capped)(q, q, q)
    assert asked[SUBJECT][1]["score"] == capped.score
    assert asked["fa4"][1]["softcap"] == asked["fa3"][0][24] == 5.0
    with pytest.raises(NotImplementedError, match="varlen_attn has no score term softcap 5"):
        PACKED_PEERS["torch-varlen"].make(capped)


def test_the_library_of_flash_attention_3_is_named_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "fa3.so"
    monkeypatch.setenv(packed.FA3_LIBRARY, str(library))
    assert select(None, PACKED_PEERS)[1]["fa3"] == f"FA3_LIBRARY: got {str(library)!r}, which is not a file"
    library.touch()
    assert "fa3" in select(None, PACKED_PEERS)[0]
    monkeypatch.delenv(packed.FA3_LIBRARY)
    why = select(None, PACKED_PEERS)[1]["fa3"]
    assert (
        why == "FA3_LIBRARY names no library with _vllm_fa3_C::fwd, FlashAttention-3's operator (it is in vLLM's wheel)"
    )
    with pytest.raises(ValueError, match="peers: got 'flex', known are fa2tune, fa4, fa3, torch-varlen"):
        select(["flex"], PACKED_PEERS)


def test_peers_of_both_kinds_have_one_name_and_label() -> None:
    shared = PEERS.keys() & PACKED_PEERS.keys()
    assert shared == {SUBJECT, "fa4"} and all(PEERS[name].label == PACKED_PEERS[name].label for name in shared)
    assert packed.torch_missing() is None


# ---- what is compared and shown


@pytest.mark.parametrize("pass_", comparison.BENCHED)
def test_only_what_keeps_sequences_apart_is_timed(pass_: str) -> None:
    cell = comparison.Cell("packed", posed("bf16", 16, 3, CAUSAL, LENGTHS), pass_)
    record = comparison.measure(comparison.Stand(cell.problem, FAKES, "cpu"), FakeGpu(), cell, 0.1)
    entries = record["peers"]
    found = {name: entry["status"] for name, entry in entries.items()}
    assert found == {SUBJECT: "ok", "fa4": "wrong", "fa3": "ok" if pass_ == "fwd" else "skipped", "torch-varlen": "ok"}
    assert entries["torch-varlen"]["ratio"] == pytest.approx(1.5) and "ms" not in entries["fa4"]
    assert record["packed"] == list(LENGTHS) and record["seqlen"] == sum(LENGTHS)
    if pass_ != "fwd":
        assert entries["fa3"]["why"] == "it has no backward"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "BenchGpu", FakeGpu)
    monkeypatch.setattr("fa2tune.cli.bench.PACKED_PEERS", FAKES)
    monkeypatch.setattr(comparison, "WORKLOAD_HIDDEN", 32)


def test_the_whole_command(fakes: None, tmp_path: Path) -> None:
    arguments = ["--headdim", "16", "--causal", "--packed", "3x20,4", "--packed", "64", "--out", str(tmp_path)]
    arguments += ["--timing", "interleaved,sustained", "--peers", "fa4,torch-varlen"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    said = "[1/12] packed sequences, interleaved fwd bf16 head dim 16 causal 3x20,4: fa2tune"
    assert said in result.output and "1.50 x the best peer (torch-varlen); fa4 wrong" in result.output
    assert "[12/12] packed sequences, sustained both bf16 head dim 16 causal 64: fa2tune" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json"}  # plots are by length
    data = comparison.load(tmp_path / "bench.json")
    assert data["complete"] and [cell["packed"] for cell in data["cells"]][::6] == [[20, 20, 20, 4], [64]]
    table = tables.markdown(data, "bf16", "fwd", "packed").splitlines()
    assert table[0] == "| head dim | mask | length | fa2tune | FlashAttention-4 | torch varlen_attn | x best |"
    assert table[2].startswith("| 16 | causal | 3x20,4 | **") and " | wrong | " in table[2]
    assert [one.title for one in tables.on_screen(data)][:2] == [
        "Forward, bfloat16, packed sequences, sustained, TFLOP/s", "Forward, bfloat16, packed sequences, interleaved, TFLOP/s",
    ]  # fmt: skip
    again = CliRunner().invoke(command, [*arguments, "--resume"])
    assert again.exit_code == 0 and "[1/12]" not in again.output


def test_a_file_may_have_both_kinds_of_cells(fakes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(comparison, "WORKLOAD_TOKENS", 64)
    monkeypatch.setattr("fa2tune.cli.bench.PEERS", {SUBJECT: replace(PEERS["standard"], name=SUBJECT)})
    arguments = ["--headdim", "16", "--causal", "--pass", "fwd", "--out", str(tmp_path)]
    for more in (["--packed", "64"], ["--seqlen", "64", "--no-memory", "--resume"]):
        result = CliRunner().invoke(command, [*arguments, *more])
        assert result.exit_code == 0, result.output
    data = comparison.load(tmp_path / "bench.json")
    assert [cell["kind"] for cell in data["cells"]] == ["packed", "time"]
    assert tables.sections(data) == [("bf16", "fwd", "time")] and len(plotting.plots(data, tmp_path))
    for wrong, place in itertools.product(([], [0], [True], "64", None), (0,)):
        data["cells"][place]["packed"] = wrong
        (tmp_path / "bench.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"packed of cell 0 must be null or, of packed sequences, their lengths"):
            comparison.load(tmp_path / "bench.json")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--packed", "16x"], "--packed': got '16x', expected LENGTH or COUNTxLENGTH"),
        (["--packed", "16x1024", "--seqlen", "512"], "--packed and --seqlen: got both, one at most is allowed"),
        (["--memory-seqlen", "512", "--packed", "8"], "--packed and --memory-seqlen: got both"),
        (["--packed", "8", "--peers", "flex"], "peers: got 'flex', known are fa2tune, fa4, fa3, torch-varlen"),
        (["--packed", "8", "--peers", "fa3"], "peers: fa3 cannot run: FA3_LIBRARY names no library"),
    ],
)
def test_bad_options_are_usage_errors(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(packed.FA3_LIBRARY, raising=False)
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
