"""The flash-attn package's build as a peer: a library that the environment names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fa2tune.bench import peers
from fa2tune.bench.peers import PEERS, select
from fa2tune.cli.bench import bench as command
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

LIBRARY = peers.FLASH_ATTN_LIBRARY
PROBLEM = Problem("bf16", 2, 4, 2, 5, 7, 16, 16, CAUSAL)


def loaded(monkeypatch: pytest.MonkeyPatch, dropout: str) -> dict[str, Any]:
    """A stand-in for the library -> what its operator is given, by name."""
    given: dict[str, Any] = {}
    names = (
        "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", dropout,
        "softmax_scale", "is_causal", "window_size_left", "window_size_right", "gen",
    )  # fmt: skip

    class Operator:
        _schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in names])

        def __call__(self, *arguments: Any) -> list[torch.Tensor]:
            given.update(zip(names, arguments, strict=True))
            return [given["q"]]

    monkeypatch.setenv(LIBRARY, "library.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: given.update(path=path))
    space = SimpleNamespace(varlen_fwd=SimpleNamespace(default=Operator()))
    monkeypatch.setattr(torch.ops, "_vllm_fa2_C", space, raising=False)
    return given


@pytest.mark.parametrize("dropout", ["p_dropout", "dropout_p"])
def test_it_gets_what_its_operator_names(dropout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases differ in the order of arguments and in the name of one."""
    given = loaded(monkeypatch, dropout)
    q, k = torch.zeros(2, 5, 4, 16), torch.zeros(2, 7, 2, 16)
    attention = PEERS["flash-attn"].make(PROBLEM)
    assert attention(q, k, k).shape == (2, 5, 4, 16)
    assert given["path"] == "library.so"
    assert given["q"].shape == (10, 4, 16) and given["k"].shape == (14, 2, 16)
    assert given["cu_seqlens_q"].tolist() == [0, 5, 10] and given["cu_seqlens_k"].tolist() == [0, 7, 14]
    assert (given["max_seqlen_q"], given["max_seqlen_k"], given["softmax_scale"]) == (5, 7, 0.25)
    assert given["is_causal"] is True and given["window_size_left"] == -1 and given[dropout] == 0.0
    assert given["out"] is given["seqused_k"] is given["gen"] is None
    offsets = given["cu_seqlens_q"]
    attention(q, k, k)
    assert given["cu_seqlens_q"] is offsets, "a CUDA graph reads them again"


def test_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = loaded(monkeypatch, "dropout_p")
    tensors = torch.zeros(3, 2, 5, 4, 16)
    for mask, expected in ((FULL, (False, -1, -1)), (CAUSAL, (True, -1)), (band(3, 0), (False, 3, 0))):
        PEERS["flash-attn"].make(replace(PROBLEM, seqlen_k=5, mask=mask))(*tensors)
        asked = given["is_causal"], given["window_size_left"], given["window_size_right"]
        assert asked[: len(expected)] == expected
    with pytest.raises(NotImplementedError, match="flash-attn has no mask chunked 8"):
        PEERS["flash-attn"].make(replace(PROBLEM, mask=Mask("chunked", 8)))


def test_it_has_a_forward_only() -> None:
    unfit = PEERS["flash-attn"].unfit
    assert unfit(PROBLEM, "fwd", 0) is None
    assert unfit(PROBLEM, "bwd", 0) == unfit(PROBLEM, "both", 0) == "the library has no backward"


def test_as_another_gpu_takes_the_library_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name it is left out; a name of nothing is said."""
    monkeypatch.delenv(LIBRARY, raising=False)
    assert peers.by_mma_sync() == ["sdpa-flash", "triton-plain"]
    assert "FA2_LIBRARY names no library" in select(None)[1]["flash-attn"]
    with pytest.raises(ValueError, match="flash-attn cannot run: FA2_LIBRARY names no library"):
        select(["flash-attn"])
    library = tmp_path / "library.so"
    monkeypatch.setenv(LIBRARY, str(library))
    result = CliRunner().invoke(command, ["--as", "sm_80", "--out", str(tmp_path / "out")])
    said = " ".join(result.output.replace("\u2502", "").split())
    assert result.exit_code == 2 and "flash-attn cannot run: FA2_LIBRARY: got" in said and "is not a file" in said
    library.touch()
    assert list(select(peers.by_mma_sync())[0]) == ["fa2tune", "sdpa-flash", "flash-attn", "triton-plain"]
