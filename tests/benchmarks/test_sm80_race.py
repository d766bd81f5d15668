"""benchmarks/sm80_race.py without a GPU: what SDPA is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmark_scripts import script

from fa2tune.spec.mask import CAUSAL

sm80_race = script("sm80_race")


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_sdpa_need_not_copy_what_it_is_given(pass_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward copies O and dO unless they are (batch, seqlen, heads, dim) in memory. O has the layout of Q."""
    given: list[torch.Tensor] = []

    def forward(q: Any, k: Any, v: Any, *_: Any, scale: float) -> tuple[Any, ...]:
        given.extend((q, k, v))
        return torch.empty_like(q), torch.empty(q.shape[:3]), None, None, q.shape[2], k.shape[2], None, None, None

    def backward(do: Any, q: Any, k: Any, v: Any, o: Any, *_: Any, scale: float) -> tuple[Any, ...]:
        given.extend((do, q, k, v, o))
        return q, k, v

    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda shape, device, dtype: randn(shape, dtype=dtype))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", backward, raising=False)
    found, _ = sm80_race._methods(sm80_race.Cell(pass_, 64, CAUSAL, 512, ()))
    assert list(found) == [sm80_race.PEER] and len(given) == (6 if pass_ == "fwd" else 8)
    for tensor in given:
        assert tensor.shape == (32, 32, 512, 64)
        assert tensor.transpose(1, 2).is_contiguous()
