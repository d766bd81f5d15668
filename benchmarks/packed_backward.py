"""Times the backward of packed sequences: beside a deterministic call, the dense call of equal lengths, and FlashAttention-4.

    python benchmarks/packed_backward.py [--heads 16] [--out benchmarks/calls/packed_backward.json]

Causal, bf16, public calls as they are served. A deterministic call is served by the portable kernels. FlashAttention-4 takes
part where flash_attn.cute can be imported. Packings and times are those of benchmarks/packed.py. Needs a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from packed import PACKINGS, Packing, microseconds, record

import fa2tune
from fa2tune.search_spaces.sm90 import bwd_fused


def _peer() -> Callable[..., Any] | None:
    try:
        return importlib.import_module("flash_attn.cute").flash_attn_varlen_func  # type: ignore[no-any-return]
    except ImportError:
        return None


def measured(packing: Packing) -> dict[str, Any]:
    """Times of one packing, TFLOP/s, and the kernels that served the packed call."""
    lengths, dim = packing.lengths, packing.dim
    tensors = [
        torch.randn(sum(lengths), heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (packing.heads_q, packing.heads_kv, packing.heads_kv)
    ]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    do, longest = torch.randn_like(tensors[0]), max(lengths)

    def backward(o: torch.Tensor, inputs: list[torch.Tensor], gradient: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(o, inputs, gradient, retain_graph=True)

    def packed(deterministic: bool) -> Callable[[], Any]:
        options = {"causal": True, "deterministic": deterministic}
        o = fa2tune.attention_varlen(*tensors, offsets, offsets, longest, longest, **options)  # type: ignore[call-overload]
        return backward(o, tensors, do)

    calls = {"packed": packed(False), "packed, deterministic": packed(True)}
    if len(set(lengths)) == 1:
        dense = [t.detach().unflatten(0, (len(lengths), -1)).transpose(1, 2).requires_grad_() for t in tensors]
        gradient = do.unflatten(0, (len(lengths), -1)).transpose(1, 2)
        calls["dense"] = backward(fa2tune.attention(*dense, causal=True), dense, gradient)
    if (peer := _peer()) is not None:
        sides = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
        o = peer(*tensors, **sides, causal=True)
        calls["FlashAttention-4"] = backward(o[0] if isinstance(o, tuple) else o, tensors, do)
    times = microseconds(calls)
    flops = 10 * dim * packing.heads_q * sum(length * (length + 1) / 2 for length in lengths)
    explained = fa2tune.explain(
        *tensors, cu_seqlens_q=offsets, max_seqlen_q=longest, causal=True, backward=True
    ).as_dict()
    served = {one["kernel"]: one["implementation"] for one in explained["kernels"] if one["kernel"] != "fwd"}
    return {"us": times, "tflops": {name: round(flops / us / 1e6) for name, us in times.items()}, "served": served}


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Every figure, as JSON.")
@click.option("--heads", type=click.Choice(["1", "4", "8", "16", "32"]), help="HEADS_PER_WAVE of the Hopper backward.")
def main(out: Path | None, heads: str | None) -> None:
    if heads is not None:
        bwd_fused.PACKED["HEADS_PER_WAVE"] = int(heads)
    record(PACKINGS, measured, out)


if __name__ == "__main__":
    main()
