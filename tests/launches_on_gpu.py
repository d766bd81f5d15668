"""What tests/gpu asks of a backward's plan whose results have the same bits on every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fa2tune.launching import passes

Found = Sequence[torch.Tensor]


def same(one: Found, other: Found) -> bool:
    """Whether tensors of 16 bits have the same ones."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not written holds NaN."""
    monkeypatch.setattr(passes, "ALLOCATE", None)
    made = torch.empty_strided

    def poisoned(*sizes: Any, **named: Any) -> torch.Tensor:
        found = made(*sizes, **named)
        return found.fill_(0xFF if found.dtype is torch.uint8 else torch.nan) if found.is_cuda else found

    monkeypatch.setattr(torch, "empty_strided", poisoned)


def check_stream_and_graph(run: Callable[[], Found], right: Found) -> None:
    """On a stream of its own, then ten replays of a CUDA graph, whose results are 0 before each."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run()
    stream.synchronize()
    assert same(found, right)
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(10):
        for one in found:
            one.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, right)


def check_memory_given_out_again(posed: Any, plan: Callable[..., Found], right: Found, workspace: int = 0) -> None:
    """Inputs are freed right after the call, and their memory is overwritten on the same stream. ``posed``: has do, q, k, v, o
    and lse; ``workspace``: numbers of 16 bits in the plan's own memory, which is freed as well."""
    for _ in range(20):
        copies = [one.clone() for one in (posed.do, posed.q, posed.k, posed.v, posed.o)]
        do, q, k, v, o = copies
        found = plan(do, None, q, k, v, o, posed.lse)
        sizes = [one.numel() for one in copies]
        del copies, do, q, k, v, o
        for size in (*sizes, workspace) if workspace else sizes:
            torch.full((size,), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert same(found, right)
