"""100 random packings of documents beside the varlen calls of FlashAttention-4, FlashAttention-3, torch and flash-attn.

    python benchmarks/random_packings.py --seed $(git rev-parse HEAD) --out p.json [--seconds 480]    # resumes from the file
    python benchmarks/random_packings.py --seed $(git rev-parse HEAD) --list                          # what is drawn; no GPU
    python benchmarks/random_packings.py --table p.json [--page docs/benchmarks.md]                   # a file, as Markdown

The seed is the hash of the commit that is measured, so that nothing is tuned for what is drawn. bf16, max_seqlen given. Results
are compared with float32 arithmetic, a sequence at a time, before anything is timed: all query heads of the last key head, each
by the RMS error of tiles of 64 rows. A result that is wrong is not timed; fa2tune's counts as 0. Timed as
benchmarks/side_by_side.py has it. TFLOP/s count the pairs that the mask lets see.

Peers that are not installed are left out: flash_attn.cute, the operator ``_vllm_fa3_C::fwd`` of a library that FA3_LIBRARY
names (forward only), torch.nn.attention.varlen, flash_attn.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import click
import marked
import side_by_side

from fa2tune.bench import packed, peers
from fa2tune.bench.oracle import reference, tile_error
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band

TOLERANCE = 0.02  #: of ``tile_error``, bf16
#: Of a drawing: bytes of all tensors of a backward, and time of both passes at 250 TFLOP/s.
MOST_BYTES, MOST_MS, ASSUMED_TFLOPS = 4 << 30, 20.0, 250.0
TOKENS, DOCUMENTS = (2048, 65536), (1, 256)
HEAD_DIMS = (64, 64, 128, 128, 128, 128, 96, 256)
LEAST, LEVEL = 0.9, 1.0  #: ratios that the summary counts by


@dataclass(frozen=True)
class Packing:
    """Sequences one after the other: queries and keys of each."""

    of_q: tuple[int, ...]
    of_k: tuple[int, ...]
    heads_q: int
    heads_kv: int
    head_dim: int
    mask: Mask

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    def operations(self, pass_: str) -> float:
        """Floating-point operations of visible pairs: 2 products forward, 5 backward."""
        pairs = sum(self.mask.pairs(*lengths) for lengths in zip(self.of_q, self.of_k, strict=True))
        return 2.0 * pairs * self.heads_q * self.head_dim * (2 if pass_ == "fwd" else 5)

    @property
    def bytes(self) -> int:
        """q, dq, o, do; k, dk, v, dv."""
        return 8 * self.head_dim * (self.heads_q * sum(self.of_q) + self.heads_kv * sum(self.of_k))

    def __str__(self) -> str:
        kind = "" if self.of_q == self.of_k else f" of {sum(self.of_k)} keys"
        longest = max(self.of_q)
        return (
            f"{sum(self.of_q)} tokens{kind} in {len(self.of_q)}, the longest {longest}, {self.heads_q}/{self.heads_kv} x "
            f"{self.head_dim}, {self.mask}"
        )


# ---- what is drawn


def logarithmic(source: random.Random, low: int, high: int) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(high))))


def lengths(source: random.Random, total: int, count: int) -> tuple[int, ...]:
    """``count`` lengths, ``total`` together: equal, or shares of any skew; one in five packings has absent sequences."""
    skew = source.choice((0.0, 0.5, 1.0, 2.0))
    shares = [math.exp(skew * source.gauss(0.0, 1.0)) for _ in range(count)]
    if source.random() < 0.2:
        shares = [0.0 if n and source.random() < 0.3 else share for n, share in enumerate(shares)]
    ends = [round(total * done / sum(shares)) for done in accumulate(shares, initial=0.0)]
    return tuple(end - start for start, end in pairwise(ends))


def masks(source: random.Random, longest: int) -> Mask:
    """Seven in ten causal, two in ten causal windows."""
    kind = source.random()
    if kind < 0.7:
        return CAUSAL
    return FULL if kind < 0.8 else band(logarithmic(source, 2, max(2, longest)), 0)


def drawn(seed: str, count: int = 100) -> dict[str, Packing]:
    source = random.Random(seed)
    return {f"{place} {packing}": packing for place, packing in enumerate(_draw(source) for _ in range(count))}


def _draw(source: random.Random) -> Packing:
    while True:
        total = logarithmic(source, *TOKENS)
        count = min(logarithmic(source, *DOCUMENTS), total // 8)
        of_q = lengths(source, total, count)
        of_k = of_q
        if source.random() < 0.2:  # queries behind keys that are there already
            of_k = tuple(length + logarithmic(source, 1, 2048) if length else 0 for length in of_q)
        heads_kv, group = source.choice((1, 2, 4, 8, 16, 32)), source.choice((1, 1, 2, 4, 8))
        packing = Packing(
            of_q, of_k, heads_kv * group, heads_kv, source.choice(HEAD_DIMS), masks(source, max(of_k))
        )  # fmt: skip
        work = (packing.operations("fwd") + packing.operations("bwd")) / ASSUMED_TFLOPS / 1e9
        if packing.heads_q <= 64 and packing.bytes <= MOST_BYTES and work <= MOST_MS:
            return packing


# ---- the peers: (q, k, v) of (total, heads, dim) -> o


def _sides(packing: Packing) -> packed.Sides:
    return packed.sides_of(packing.of_q, packing.of_k)


def _fa2tune(packing: Packing) -> side_by_side.Attention:
    return packed.own_call(_sides(packing), packing.mask)


def _fa4(packing: Packing) -> side_by_side.Attention:
    return packed.fa4_call(_sides(packing), packing.mask)


def _fa3(packing: Packing) -> side_by_side.Attention:
    return packed.fa3_call(_sides(packing), packing.mask)


def _torch(packing: Packing) -> side_by_side.Attention:
    if packing.group > 1:
        raise side_by_side.Unfit("varlen_attn of torch 2.11 has no grouped heads")
    return packed.torch_call(_sides(packing), packing.mask)


def _fa2(packing: Packing) -> side_by_side.Attention:
    from flash_attn import flash_attn_varlen_func

    options = {"causal": packing.mask == CAUSAL, "window_size": peers.window_sides(packing.mask)}
    return functools.partial(_called, flash_attn_varlen_func, _sides(packing), options)


def _called(
    call: Callable[..., Any], sides: tuple[Any, ...], options: Mapping[str, Any], q: Any, k: Any, v: Any
) -> Any:
    return call(q, k, v, *sides, **options)


def _has(name: str) -> Callable[[], bool]:
    def here() -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ImportError:
            return False

    return here


PEERS: Mapping[str, side_by_side.Peer] = {
    side_by_side.SUBJECT: side_by_side.Peer(_fa2tune),
    "fa4": side_by_side.Peer(_fa4, side_by_side.fa4_is_here),
    "fa3": side_by_side.Peer(_fa3, lambda: packed.FA3_LIBRARY in os.environ, backward=False),
    "torch": side_by_side.Peer(_torch, _has("torch.nn.attention.varlen")),
    "fa2": side_by_side.Peer(_fa2, _has("flash_attn.flash_attn_interface")),
}


# ---- measuring


def expected(packing: Packing, q: Any, k: Any, v: Any, do: Any) -> dict[str, Any]:
    """o, dq (total_q, group, dim) and dk, dv (total_k, dim) of the last key head, in float32, a sequence at a time."""
    group = packing.group
    found = {"o": do[:, -group:].float().zero_(), "dq": q[:, -group:].float().zero_()}
    found |= {"dk": k[:, -1].float().zero_(), "dv": v[:, -1].float().zero_()}
    starts = (pairwise(accumulate(side, initial=0)) for side in (packing.of_q, packing.of_k))
    for (first, last), (begin, end) in zip(*starts, strict=True):
        if first == last or begin == end:
            continue
        for head in range(-group, 0):
            one = reference(q[first:last, head], k[begin:end, -1], v[begin:end, -1], do[first:last, head], packing.mask)
            for name in ("o", "dq"):
                found[name][first:last, head] = one[name]
            for name in ("dk", "dv"):
                found[name][begin:end] += one[name]
    return found


def wrong(results: Mapping[str, Any], want: Mapping[str, Any], group: int) -> str | None:
    """What is wrong with results of (total, heads, dim), or None."""
    for name, tensor in results.items():
        if not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
        mine = tensor[:, -group:] if name in ("o", "dq") else tensor[:, -1]
        error = tile_error(mine.flatten(1), want[name].flatten(1))
        if not error <= TOLERANCE:
            return f"{name} differs from float32 by {error:.2g}, {TOLERANCE} is let pass"
    return None


def measure(packing: Packing, peers: Mapping[str, side_by_side.Peer], device: str = "cuda") -> dict[str, Any]:
    """As ``side_by_side.beside``."""
    import torch

    def new(total: int, heads: int) -> Any:
        return torch.randn(total, heads, packing.head_dim, device=device, dtype=torch.bfloat16)

    q, do = (new(sum(packing.of_q), packing.heads_q) for _ in range(2))
    k, v = (new(sum(packing.of_k), packing.heads_kv) for _ in range(2))
    want, group = expected(packing, q, k, v, do), packing.group
    done = {pass_: packing.operations(pass_) for pass_ in ("fwd", "bwd")}
    return side_by_side.beside(packing, peers, (q, k, v), do, lambda results: wrong(results, want, group), done)


# ---- the record and the table


def summary(calls: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for pass_ in ("fwd", "bwd"):
        ratios = {
            name: call[pass_]["ratio"] for name, call in calls.items()
            if pass_ in call and call[pass_]["ratio"] is not None
        }  # fmt: skip
        if not ratios:
            continue
        level, below = (sum(test(ratio) for ratio in ratios.values()) for test in (LEVEL.__le__, LEAST.__gt__))
        mean = math.exp(statistics.fmean(math.log(max(ratio, 0.01)) for ratio in ratios.values()))
        least = min(ratios, key=ratios.__getitem__)
        yield (
            f"{pass_}: {level} of {len(ratios)} at or above {LEVEL} of the best peer, {below} below {LEAST}, geometric mean "
            f"{mean:.3f}, least {ratios[least]} ({least})"
        )


def report(record: Mapping[str, Any]) -> Iterator[str]:
    here = record["environment"]
    yield (
        f"{here['gpu']}, driver {here['driver']}, torch {here['torch']}, Triton {here['triton']}, {record['date']}, bfloat16, "
        f"seed {record['seed']}, peers {', '.join(record['peers'])}."
    )
    yield from (
        "",
        "| packing | forward, x best peer | TFLOP/s | backward, x best peer | TFLOP/s |",
        "|---|---|---|---|---|",
    )
    for name, call in record["calls"].items():
        cells = []
        for found in (call.get("fwd"), call.get("bwd")):
            has = found is not None and found["ratio"] is not None
            cells += [
                f"{found['ratio']:.2f} ({found['best_peer']})" if has else "",
                f"{found['tflops']:.0f}" if found else "",
            ]
        yield f"| {name} | {' | '.join(cells)} |"
    yield from ("", *(f"- {line}" for line in summary(record["calls"])))


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--seed", default="", help="The commit's hash.")
@click.option("--count", type=click.IntRange(1), default=100, show_default=True)
@click.option("--peers", help=f"{', '.join(PEERS)}.  [default: those that are here]")
@side_by_side.share_option
@click.option("--seconds", type=float, default=480.0, show_default=True, help="Begins no packing after so long.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON; packings that it has are not measured again.")
@click.option("--list", "listed", is_flag=True, help="Print what is drawn, measure nothing.")
@marked.page_option
@click.option(
    "--table", "shown", type=click.Path(path_type=Path, exists=True), help="Print this file's table, measure nothing."
)
def main(seed: str, count: int, peers: str | None, share: slice, seconds: float, out: Path | None, listed: bool,
         shown: Path | None, page: Path | None) -> None:  # fmt: skip
    if shown is not None:
        marked.publish(
            page, "random_packings", "random_packings", "\n".join(report(json.loads(shown.read_text("utf-8"))))
        )
        return
    if not seed:
        raise click.BadParameter("is missing: the hash of the commit that is measured", param_hint="--seed")
    packings = side_by_side.in_share(drawn(seed, count), share)
    if listed:
        for name, packing in packings.items():
            click.echo(f"{name}: {packing.operations('fwd') / 1e9:.1f} GFLOP forward")
        return
    here = side_by_side.asked(peers, PEERS)
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "peers": list(here), "seed": seed})

    def one(packing: Packing) -> dict[str, Any]:
        return {**asdict(packing), "mask": str(packing.mask), **measure(packing, here)}

    side_by_side.fill(record, packings, one, seconds, out)
    click.echo("\n".join(summary(record["calls"])))


if __name__ == "__main__":
    main()
