"""Attention calls of real models beside the best peer of each: one GPU, one process, interleaved.

    python benchmarks/workloads.py --out w.json                                   # the named calls; resumes from the file
    python benchmarks/workloads.py --table w.json [--page docs/benchmarks.md]     # what is in a file, as Markdown

Timed as benchmarks/side_by_side.py has it: replays of CUDA graphs, 7 rounds of bursts of 12 ms; ratios above 1: fa2tune is
faster; 0: it cannot run the call, or its result is wrong.

Results are compared with float32 arithmetic before anything is timed: all heads of one key head, in the last batch. TFLOP/s
count the pairs that the mask lets see. Small calls find their inputs in L2, as each replay reads the same tensors.

Peers: FlashAttention-4 (flash_attn.cute), FlashAttention-3 (forward only; a library with the operator ``_vllm_fa3_C::fwd``,
named by FA3_LIBRARY), cuDNN and FlashAttention-2 by way of scaled_dot_product_attention. Those that are not installed are
left out.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import marked
import side_by_side

from fa2tune.bench.oracle import reference, tile_error
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import QUERIES_FIRST, Problem

TOLERANCE = 0.02  #: of ``tile_error``, bf16
FEW_QUERIES = 16  #: calls of at most so many queries are reported apart: decoding

#: name: batch, query heads, key heads, queries, keys, head dim, V head dim, mask
MODELS: Mapping[str, tuple[int, int, int, int, int, int, int, Mask]] = {
    "llama-3.1-8b train": (2, 32, 8, 8192, 8192, 128, 128, CAUSAL),
    "llama-3.1-70b, 1 of 8 tensor-parallel ranks": (1, 8, 1, 8192, 8192, 128, 128, CAUSAL),
    "llama-3.2-1b train": (8, 32, 8, 2048, 2048, 64, 64, CAUSAL),
    "llama prompt 128": (1, 32, 8, 128, 128, 128, 128, CAUSAL),
    "llama prompt 777": (1, 32, 8, 777, 777, 128, 128, CAUSAL),
    "llama prompt 1536": (1, 32, 8, 1536, 1536, 128, 128, CAUSAL),
    "qwen3-0.6b train": (4, 16, 8, 4096, 4096, 128, 128, CAUSAL),
    "qwen2.5-7b train": (2, 28, 4, 4096, 4096, 128, 128, CAUSAL),
    "qwen2.5-14b prompt 6000": (1, 40, 8, 6000, 6000, 128, 128, CAUSAL),
    "mistral-7b 4x4099": (4, 32, 8, 4099, 4099, 128, 128, CAUSAL),
    "nano gpt 12x1024": (12, 12, 12, 1024, 1024, 64, 64, CAUSAL),
    "gpt2-medium 4x900": (4, 16, 16, 900, 900, 64, 64, CAUSAL),
    "gemma-2-9b 2x4096": (2, 16, 8, 4096, 4096, 256, 256, CAUSAL),
    "gemma-3-4b 2x2048": (2, 8, 4, 2048, 2048, 256, 256, CAUSAL),
    "phi-3-mini 4x2048": (4, 32, 32, 2048, 2048, 96, 96, CAUSAL),
    "phi-2 4x2048": (4, 32, 32, 2048, 2048, 80, 80, CAUSAL),
    "nemotron d192 2x4096": (2, 48, 8, 4096, 4096, 192, 192, CAUSAL),
    "deepseek-v3 prefill, 1 of 8 ranks": (1, 16, 16, 4096, 4096, 192, 128, CAUSAL),
    "chatglm 4x2048": (4, 32, 2, 2048, 2048, 128, 128, CAUSAL),
    "falcon-7b 2x2048": (2, 71, 1, 2048, 2048, 64, 64, CAUSAL),
    "starcoder 1x8192": (1, 48, 1, 8192, 8192, 128, 128, CAUSAL),
    "chunked prefill 1k of 8k": (1, 32, 8, 1024, 8192, 128, 128, CAUSAL),
    "chunked prefill 256 of 32k": (1, 32, 8, 256, 32768, 128, 128, CAUSAL),
    "decode 1x4k": (1, 32, 8, 1, 4096, 128, 128, CAUSAL),
    "decode 16x4k": (16, 32, 8, 1, 4096, 128, 128, CAUSAL),
    "decode 64x2k, tensor-parallel": (64, 8, 1, 1, 2048, 128, 128, CAUSAL),
    "speculative 4 queries 8x4k": (8, 32, 8, 4, 4096, 128, 128, CAUSAL),
    "sdxl self 1024": (2, 20, 20, 1024, 1024, 64, 64, FULL),
    "sdxl cross 1024x77": (2, 20, 20, 1024, 77, 64, 64, FULL),
    "sd1.5 self 4096": (2, 8, 8, 4096, 4096, 40, 40, FULL),
    "sd1.5 self 256, d160": (2, 8, 8, 256, 256, 160, 160, FULL),
    "flux 4096+512": (1, 24, 24, 4608, 4608, 128, 128, FULL),
    "wan-1.3b video": (1, 12, 12, 32760, 32760, 128, 128, FULL),
    "vit-l 64x577": (64, 16, 16, 577, 577, 64, 64, FULL),
    "vit-h 32x257": (32, 16, 16, 257, 257, 80, 80, FULL),
    "siglip 16x729": (16, 16, 16, 729, 729, 72, 72, FULL),
    "dinov2 8x1370": (8, 24, 24, 1370, 1370, 64, 64, FULL),
    "bert-large 32x512": (32, 16, 16, 512, 512, 64, 64, FULL),
    "whisper encoder 8x1500": (8, 20, 20, 1500, 1500, 64, 64, FULL),
    "whisper cross 448x1500": (8, 20, 20, 448, 1500, 64, 64, FULL),
    "protein pairs 256x256, d32": (256, 4, 4, 256, 256, 32, 32, FULL),
    "one head 1x16k": (1, 1, 1, 16384, 16384, 128, 128, CAUSAL),
    "3 sequences of 1339": (3, 12, 12, 1339, 1339, 64, 64, CAUSAL),
    "12k context 1x12288": (1, 32, 8, 12288, 12288, 128, 128, CAUSAL),
    "window 1024 of 8192": (2, 32, 8, 8192, 8192, 128, 128, band(1023, 0)),
    "window 4096 of 32768": (1, 32, 8, 32768, 32768, 128, 128, band(4095, 0)),
    "window 128 of 16384": (1, 64, 8, 16384, 16384, 64, 64, band(127, 0)),
    "window 4096 of 8192, d256": (2, 16, 8, 8192, 8192, 256, 256, band(4095, 0)),
}


# ---- the calls


def named() -> dict[str, Problem]:
    return {name: Problem("bf16", *shape) for name, shape in MODELS.items()}


def operations(problem: Problem, pass_: str) -> float:
    """Floating-point operations of the pairs that the mask lets see; of a backward five products."""
    pairs = problem.batch * problem.heads_q * problem.mask.pairs(problem.seqlen_q, problem.seqlen_k)
    dim, dim_v = problem.head_dim, problem.head_dim_v
    return 2.0 * pairs * (dim + dim_v if pass_ == "fwd" else 3 * dim + 2 * dim_v)


def described(problem: Problem) -> str:
    """A call in one line."""
    dims = f"{problem.head_dim}" + ("" if problem.head_dim == problem.head_dim_v else f"/{problem.head_dim_v}")
    return (
        f"{problem.batch} x {problem.heads_q}/{problem.heads_kv} heads, {problem.seqlen_q} queries, {problem.seqlen_k} keys, "
        f"head dim {dims}, {problem.mask}"
    )


# ---- the peers: (q, k, v) of (batch, seqlen, heads, dim) -> o


def _fa2tune(problem: Problem) -> side_by_side.Attention:
    import fa2tune

    return functools.partial(fa2tune.attention, mask=problem.mask, layout="bshd")


def _fa4(problem: Problem) -> side_by_side.Attention:
    from flash_attn.cute import flash_attn_func

    if (
        problem.head_dim_v > problem.head_dim
    ):  # one such call (56 / 192) ended in an illegal access; each other peer alone did not
        raise side_by_side.Unfit("V is wider than Q and K: flash_attn.cute may end the process")
    window = {} if problem.mask.window is None else {"window_size": problem.mask.window}

    def attention(q: Any, k: Any, v: Any) -> Any:
        out = flash_attn_func(q, k, v, causal=problem.mask == CAUSAL, **window)
        return out[0] if isinstance(out, tuple) else out  # some releases return lse, too

    return attention


def _fa3(problem: Problem) -> side_by_side.Attention:
    import torch

    torch.ops.load_library(os.environ["FA3_LIBRARY"])
    operator, causal = torch.ops._vllm_fa3_C.fwd, problem.mask == CAUSAL
    left, right = (-1 if side is None else side for side in problem.mask.window or (None, None))
    lengths = problem.seqlen_q, problem.seqlen_k
    offsets = [torch.arange(problem.batch + 1, device="cuda", dtype=torch.int32) * length for length in lengths]

    def attention(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        out = operator(
            q, k, v, *[None] * 4, *offsets, *[None] * 3, *lengths, *[None] * 9, problem.head_dim**-0.5, causal, left, right,
            0.0, True, None, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out[0].unflatten(0, (problem.batch, problem.seqlen_q))

    return attention


def _sdpa(backend: str) -> Callable[[Problem], side_by_side.Attention]:
    def make(problem: Problem) -> side_by_side.Attention:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        if problem.mask not in (FULL, CAUSAL):
            raise side_by_side.Unfit("scaled_dot_product_attention has no windows")
        causal = problem.mask == CAUSAL and problem.seqlen_q > 1  # one query sees all keys
        if causal and problem.seqlen_q != problem.seqlen_k:
            raise side_by_side.Unfit("scaled_dot_product_attention aligns its causal mask at the top left")

        def attention(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            with sdpa_kernel(getattr(SDPBackend, backend)):
                out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=problem.group > 1)
            return out.transpose(1, 2)

        return attention

    return make


PEERS: Mapping[str, side_by_side.Peer] = {
    side_by_side.SUBJECT: side_by_side.Peer(_fa2tune),
    "fa4": side_by_side.Peer(_fa4, side_by_side.fa4_is_here),
    "fa3": side_by_side.Peer(_fa3, lambda: "FA3_LIBRARY" in os.environ, backward=False),
    "cudnn": side_by_side.Peer(_sdpa("CUDNN_ATTENTION")),
    "fa2": side_by_side.Peer(_sdpa("FLASH_ATTENTION")),
}


# ---- measuring


def expected(problem: Problem, q: Any, k: Any, v: Any, do: Any) -> dict[str, Any]:
    """o, dq (S, group, D) and dk, dv (S, D) of the last key head of the last batch, in float32."""
    import torch

    heads = [
        reference(q[-1, :, h], k[-1, :, -1], v[-1, :, -1], do[-1, :, h], problem.mask) for h in range(-problem.group, 0)
    ]
    found = {name: torch.stack([head[name] for head in heads], 1) for name in ("o", "dq")}
    return found | {name: torch.stack([head[name] for head in heads]).sum(0) for name in ("dk", "dv")}


def wrong(results: Mapping[str, Any], want: Mapping[str, Any], group: int) -> str | None:
    """What is wrong with results of (batch, seqlen, heads, dim), or None."""
    for name, tensor in results.items():
        if not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
        mine = tensor[-1, :, -group:] if name in ("o", "dq") else tensor[-1, :, -1]
        error = tile_error(mine.flatten(1), want[name].flatten(1))
        if not error <= TOLERANCE:
            return f"{name} differs from float32 by {error:.2g}, {TOLERANCE} is let pass"
    return None


def inputs(problem: Problem, device: str = "cuda") -> tuple[Any, Any, Any, Any]:
    """q, k, v and do of a call, bf16 (batch, seqlen, heads, dim), drawn."""
    import torch

    def new(length: int, heads: int, dim: int) -> Any:
        return torch.randn(problem.batch, length, heads, dim, device=device, dtype=torch.bfloat16)

    q = new(problem.seqlen_q, problem.heads_q, problem.head_dim)
    k = new(problem.seqlen_k, problem.heads_kv, problem.head_dim)
    v = new(problem.seqlen_k, problem.heads_kv, problem.head_dim_v)
    return q, k, v, new(problem.seqlen_q, problem.heads_q, problem.head_dim_v)


def posed(problem: Problem, device: str = "cuda") -> tuple[Any, ...]:
    """Inputs of a call, the check of its results and the operations of its passes, as ``side_by_side.captured`` takes them."""
    q, k, v, do = inputs(problem, device)
    want = expected(problem, q, k, v, do)
    done = {pass_: operations(problem, pass_) for pass_ in ("fwd", "bwd")}
    if problem.seqlen_q <= FEW_QUERIES:
        del done["bwd"]
    return (q, k, v), do, lambda results: wrong(results, want, problem.group), done


def as_called(problem: Problem) -> Problem:
    """The same with what (batch, seqlen, heads, dim) tensors tell a call besides."""
    return replace(problem, stacked=QUERIES_FIRST) if problem.heads_kv == 1 < problem.group else problem


def measure(problem: Problem, peers: Mapping[str, side_by_side.Peer], device: str = "cuda") -> dict[str, Any]:
    """{"fwd": ``verdict``, "bwd": the same, "missing": name of a peer -> why it is not among them}."""
    return side_by_side.beside(problem, peers, *posed(problem, device))


def recorded(
    measured: Callable[[Problem, Mapping[str, side_by_side.Peer]], dict[str, Any]], peers: Mapping[str, side_by_side.Peer],
    problem: Problem,
) -> dict[str, Any]:  # fmt: skip
    """A call, and what was measured of it."""
    return {**asdict(problem), "mask": str(problem.mask), **measured(problem, peers)}


# ---- the record and the table


def summary(calls: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Per pass: how many calls are at or above the best peer (within 1 % counts), the least, the geometric mean."""
    for pass_ in ("fwd", "bwd"):
        for few in (False, True):
            ratios = {
                name: call[pass_]["ratio"] for name, call in calls.items()
                if pass_ in call and call[pass_]["ratio"] is not None and (call["seqlen_q"] <= FEW_QUERIES) == few
            }  # fmt: skip
            if ratios:
                mean = math.exp(statistics.fmean(math.log(max(ratio, 0.01)) for ratio in ratios.values()))
                least = min(ratios, key=ratios.__getitem__)
                level = sum(ratio >= 0.99 for ratio in ratios.values())
                alone = sum(call.get(pass_, {}).get("ratio", 0) is None for call in calls.values()) if not few else 0
                yield (
                    f"{pass_}{', at most 16 queries' if few else ''}: {level} of {len(ratios)} at or above the best peer, "
                    f"geometric mean {mean:.3f}, least {ratios[least]} ({least})"
                    + (f"; no peer ran {alone} others" if alone else "")
                )


def setting(record: Mapping[str, Any]) -> Iterator[str]:
    """What was measured where."""
    here = record["environment"]
    yield (
        f"{here['gpu']}, driver {here['driver']}, torch {here['torch']}, Triton {here['triton']}, cuDNN {here['cudnn']}, "
        f"FlashAttention-4 {here['flash-attn-4'] or 'not here'}, {record['date']}, bfloat16, CUDA graphs."
    )
    if record["seed"]:
        yield f"Drawn with the seed {record['seed']}."


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The summary as a list."""
    yield from (f"- {line}" for line in summary(record["calls"]))


def report(record: Mapping[str, Any]) -> Iterator[str]:
    """A record as Markdown."""
    yield from (*setting(record), "", *table(record), "", *lines(record))


def table(record: Mapping[str, Any]) -> Iterator[str]:
    yield "| call | forward, x best peer | TFLOP/s | backward, x best peer | TFLOP/s |"
    yield "|---|---|---|---|---|"
    for name, call in record["calls"].items():
        cells = []
        for found in (call.get("fwd"), call.get("bwd")):
            has = found is not None and found["ratio"] is not None
            cells += [
                f"{found['ratio']:.2f} ({found['best_peer']})" if has else "",
                f"{found['tflops']:.0f}" if found else "",
            ]
        yield f"| {name} | {' | '.join(cells)} |"


@click.command(help=__doc__.partition("\n\n")[0])
@click.option("--peers", help=f"{', '.join(PEERS)}.  [default: those that are here]")
@click.option("--only", default="", help="Calls whose name has this text.")
@side_by_side.share_option
@click.option("--seconds", type=float, default=480.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON; calls that it has are not measured again.")
@marked.page_option
@click.option(
    "--table", "shown", type=click.Path(path_type=Path, exists=True), help="Print this file's table, measure nothing."
)
def main(peers: str | None, only: str, share: slice, seconds: float, out: Path | None, shown: Path | None,
         page: Path | None) -> None:  # fmt: skip
    if shown is not None:
        marked.publish(page, "workloads", "workloads", "\n".join(report(json.loads(shown.read_text("utf-8")))))
        return
    here = side_by_side.asked(peers, PEERS)
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "peers": list(here), "seed": None})

    problems = side_by_side.in_share({name: problem for name, problem in named().items() if only in name}, share)
    side_by_side.fill(record, problems, functools.partial(recorded, measure, here), seconds, out)
    click.echo("\n".join(summary(record["calls"])))


if __name__ == "__main__":
    main()
