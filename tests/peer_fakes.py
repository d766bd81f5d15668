"""Peers of benchmarks/side_by_side.py without a GPU: calls run on the CPU, times are given."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from benchmark_scripts import script

from fa2tune.measuring import reference
from fa2tune.spec.problem import Problem


def without_gpu(patch: pytest.MonkeyPatch, times: Mapping[str, float]) -> None:
    """``times``: name of what is raced -> ms."""
    side_by_side = script("side_by_side")
    patch.setattr(torch.cuda, "Stream", lambda: None)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(side_by_side, "graphed", lambda call, stream: (call, 1))
    patch.setattr(side_by_side, "raced", lambda graphs: {name: [times[name]] for name in graphs})
    patch.setattr(side_by_side, "warm", lambda: None)
    environment = dict.fromkeys(("gpu", "driver", "torch", "triton", "cudnn", "flash-attn-4"), "1")
    patch.setattr(side_by_side, "environment", lambda: environment)


def right(problem: Problem) -> Any:
    """A peer without errors."""

    def attention(q: Any, k: Any, v: Any) -> Any:  # (batch, seqlen, heads, dim)
        tensors = (tensor.transpose(1, 2) for tensor in (q, k, v))
        o = reference.attention(*tensors, mask=problem.mask, softmax_scale=problem.head_dim**-0.5)[0]
        return o.transpose(1, 2)

    return attention
