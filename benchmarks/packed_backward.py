"""Times the backward of packed sequences: beside a deterministic call, the dense calls of equal lengths, and FlashAttention-4.

    python benchmarks/packed_backward.py [--heads 16] [--out benchmarks/calls/packed_backward.json]
    python benchmarks/packed_backward.py --head-dim 256 [--only REGEX] [--out benchmarks/calls/packed_backward_256.json]

Causal, bf16, public calls as they are served; and the split kernels of one kind, Hopper or portable, by their best rows.
FlashAttention-4 takes part where flash_attn.cute can be imported. Packings and times are those of benchmarks/packed.py;
--head-dim gives them all this head dim, and as many heads as keep heads times head dim. Needs a GPU.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from packed import PACKINGS, Packing, microseconds, record

import fa2tune
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.kinds import PORTABLE_ROWS, WARP_SPECIALIZED_ROWS, Kind
from fa2tune.launching import passes
from fa2tune.search_spaces.portable import packed_order
from fa2tune.search_spaces.portable.packed_order import ALL
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import SPLIT, STRATEGIES


def _peer() -> Callable[..., Any] | None:
    try:
        return importlib.import_module("flash_attn.cute").flash_attn_varlen_func  # type: ignore[no-any-return]
    except ImportError:
        return None


def _split(
    kind: Kind, tensors: list[torch.Tensor], do: torch.Tensor, offsets: torch.Tensor, longest: int
) -> Callable[[], Any]:
    """A deterministic backward by the warp-specialised kernels, or by the portable ones."""
    scale = tensors[0].shape[-1] ** -0.5
    found = fa2tune.attention_varlen(*tensors, offsets, offsets, longest, longest, causal=True, return_lse=True)  # type: ignore[call-overload]
    q, k, v, o, gradient = (passes.in_one_batch(t.detach()) for t in (*tensors, found[0], do))
    lse = found[1].detach()[None]
    extent = Extent(RAGGED, len(offsets) - 1, longest)
    problem = passes.describe(q, k, v, CAUSAL, scale, extent=extent, o=o, do=gradient)
    gpu = dispatch.gpu_of(0)
    configs = {kernel: choosing.choose(problem, kernel, gpu, kind) for kernel in STRATEGIES[SPLIT]}
    plan = passes.BackwardPlan(problem, gradient, None, q, k, v, o, scale, SPLIT, configs)
    return lambda: plan(gradient, None, q, k, v, o, lse, offsets, offsets)


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
    for name, kind in (("split, Hopper", WARP_SPECIALIZED_ROWS), ("split, portable", PORTABLE_ROWS)):
        calls[name] = _split(kind, tensors, do, offsets, longest)
    if len(set(lengths)) == 1:
        dense = [t.detach().unflatten(0, (len(lengths), -1)).transpose(1, 2).requires_grad_() for t in tensors]
        gradient = do.unflatten(0, (len(lengths), -1)).transpose(1, 2)
        for name, fixed in (("dense", False), ("dense, deterministic", True)):
            calls[name] = backward(fa2tune.attention(*dense, causal=True, deterministic=fixed), dense, gradient)
    if (peer := _peer()) is not None:
        sides = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
        o = peer(*tensors, **sides, causal=True)
        calls["FlashAttention-4"] = backward(o[0] if isinstance(o, tuple) else o, tensors, do)
    times = microseconds(calls)
    flops = 10 * dim * packing.heads_q * sum(length * (length + 1) / 2 for length in lengths)
    served = {}
    for fixed in (False, True):
        explained = fa2tune.explain(
            *tensors, cu_seqlens_q=offsets, max_seqlen_q=longest, causal=True, backward=True, deterministic=fixed
        ).as_dict()
        served |= {one["kernel"]: one["implementation"] for one in explained["kernels"] if one["kernel"] != "fwd"}
    return {"us": times, "tflops": {name: round(flops / us / 1e6) for name, us in times.items()}, "served": served}


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Every figure, as JSON.")
@click.option("--heads", type=click.Choice(["1", "4", "8", "16", "32"]), help="HEADS_PER_WAVE of the Hopper backward.")
@click.option("--head-dim", type=click.Choice(["64", "128", "256"]), help="Of all packings.")
@click.option("--in-turns", type=click.Choice(["32", "64", "all"]), help="Tiles of equal sequences in turns, of dQ.")
@click.option("--only", default="", help="Regular expression: packings whose name it is found in.")
def main(out: Path | None, heads: str | None, head_dim: str | None, in_turns: str | None, only: str) -> None:
    if heads is not None:
        bwd_fused.PACKED["HEADS_PER_WAVE"] = int(heads)
    if in_turns is not None:
        packed_order.DQ_IN_TURNS = ALL if in_turns == "all" else int(in_turns)
    packings = {name: packing for name, packing in PACKINGS.items() if re.search(only, name)}
    if head_dim is not None:
        packings = dict(_of_head_dim(int(head_dim), packing) for packing in packings.values())
    record(packings, measured, out)


def _of_head_dim(dim: int, packing: Packing) -> tuple[str, Packing]:
    heads_q, heads_kv = (max(1, heads * packing.dim // dim) for heads in (packing.heads_q, packing.heads_kv))
    lengths = packing.lengths
    name = f"{sum(lengths)} rows in {len(lengths)}, the longest {max(lengths)}, {heads_q}/{heads_kv} heads of {dim}"
    return name, packing._replace(heads_q=heads_q, heads_kv=heads_kv, dim=dim)


if __name__ == "__main__":
    main()
