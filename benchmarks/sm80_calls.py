"""Times fa2tune as it serves GPUs without wgmma, on a Hopper GPU, next to FlashAttention-2, which is mma.sync code, too.

    python benchmarks/sm80_calls.py --out calls.json
    FA2_LIBRARY=.../_vllm_fa2_C.abi3.so python benchmarks/sm80_calls.py --gpu l4 --only "128 " --out l4.json
    python benchmarks/sm80_calls.py --table calls.json --page docs/a100.md

Calls are those of --gpu: its shipped rows and defaults, its limits, compiled for sm_80 and assembled for this GPU. With --crowd
no more blocks share a multiprocessor than there. What does not carry over: docs/a100.md.
The calls: head dims 64, 96, 128 and 256, both masks, 512 to 16k tokens of 16k in all, hidden size 2048; and ten calls of models
with grouped heads or lengths that are no multiples of a block (benchmarks/workloads.py). bf16, CUDA graphs, peers in turns,
right before timed. Backwards run a second time with deterministic=True. Of limited --seconds the long and the short calls of
all head dims come first, then those of models, then lengths between.
Peers: SDPA's FlashAttention-2; and, forward only, the flash-attn package's build: a library with the operator
``_vllm_fa2_C::varlen_fwd``, named by FA2_LIBRARY.

Most of a first run is compiling, by one core; on all, before it and into the same TRITON_CACHE_DIR:

    python benchmarks/ahead.py benchmarks/sm80_calls.py --gpu a100
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import marked
import side_by_side
import workloads

from fa2tune import gpus
from fa2tune.bench import peers
from fa2tune.launching import ported
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import WORKLOAD_HIDDEN, WORKLOAD_TOKENS, Problem

HEAD_DIMS, LENGTHS = (64, 96, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
OF_MODELS = (
    "llama-3.2-1b train", "llama prompt 777", "qwen2.5-7b train", "mistral-7b 4x4099", "gpt2-medium 4x900", "gemma-2-9b 2x4096",
    "phi-3-mini 4x2048", "dinov2 8x1370", "whisper cross 448x1500", "falcon-7b 2x2048",
)  # fmt: skip
#: Peers by their names in the tables.
LABELS = {"fa2": "SDPA's FlashAttention-2", "flash_attn": "flash-attn"}
STEADY = f"{side_by_side.SUBJECT} deterministic"
#: What is timed of fa2tune: heading -> (pass, name in a record). Beside a peer, or beside what is not deterministic.
OURS = {
    "forward": ("fwd", side_by_side.SUBJECT),
    "backward": ("bwd", side_by_side.SUBJECT),
    "deterministic backward": ("bwd", STEADY),
}
#: The order of measuring, where time is limited: lengths, of each all head dims; 0: calls of models.
FIRST = (8192, 512, 2048, 0, 16384, 4096, 1024)
FIRST_DIMS = (128, 96, 256, 64)


def calls() -> dict[str, Problem]:
    found = {}
    for dim in HEAD_DIMS:
        for mask in (FULL, CAUSAL):
            for length in LENGTHS:
                heads = WORKLOAD_HIDDEN // dim
                shape = WORKLOAD_TOKENS // length, heads, heads, length, length, dim, dim
                found[f"{dim} {mask} {length}"] = Problem("bf16", *shape, mask)
    return found | {name: problem for name, problem in workloads.named().items() if name in OF_MODELS}


def in_turn(problems: Mapping[str, Problem]) -> dict[str, Problem]:
    """Calls in the order of measuring."""

    def place(name: str) -> tuple[int, int]:
        if name in OF_MODELS:
            return FIRST.index(0), OF_MODELS.index(name)
        dim, _, length = name.split()
        return FIRST.index(int(length)), FIRST_DIMS.index(int(dim))

    return {name: problems[name] for name in sorted(problems, key=place)}


def _deterministic(problem: Problem) -> side_by_side.Attention:
    import fa2tune

    return functools.partial(fa2tune.attention, mask=problem.mask, layout="bshd", deterministic=True)


def _flash_attn_is_here() -> bool:
    """BadParameter: a library is named that is not there."""
    why = peers.flash_attn_missing()
    if why and os.environ.get(peers.FLASH_ATTN_LIBRARY):
        raise click.BadParameter(why)
    return why is None


PEERS: Mapping[str, side_by_side.Peer] = {
    side_by_side.SUBJECT: workloads.PEERS[side_by_side.SUBJECT],
    "fa2": workloads.PEERS["fa2"],
    "flash_attn": side_by_side.Peer(peers.flash_attn, _flash_attn_is_here, backward=False),
    STEADY: side_by_side.Peer(_deterministic, forward=False),
}


def measured(rivals: Mapping[str, side_by_side.Peer], problem: Problem) -> dict[str, Any]:
    """A call, and how long measuring it took."""
    begin = time.monotonic()
    found = workloads.recorded(workloads.measure, rivals, problem)
    return {**found, "seconds": round(time.monotonic() - begin, 1)}


# ---- the record and the tables


def ratios(record: Mapping[str, Any], what: str, peer: str) -> dict[str, float]:
    """Call -> the peer's time over that of what is timed of fa2tune (``OURS``); 0: fa2tune cannot run it. Calls that the peer
    cannot run are left out."""
    found, (pass_, ours) = dict[str, float](), OURS[what]
    for name, call in record["calls"].items():
        us = call[pass_]["us"]
        if peer in us:
            found[name] = us[peer] / us[ours] if ours in us else 0.0
    return found


def _kinds(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is timed of fa2tune, beside which peer; what is deterministic also beside what is not."""
    for peer in (*LABELS, side_by_side.SUBJECT):
        for what, (_, ours) in OURS.items():
            beside_itself = peer == side_by_side.SUBJECT and ours == peer
            if ours in record["peers"] and not beside_itself and ratios(record, what, peer):
                yield what, peer


def _said(what: str, peer: str) -> str:
    return f"{what}, x {LABELS.get(peer, 'in no fixed order')}"


def summary(record: Mapping[str, Any]) -> Iterator[str]:
    for what, peer in _kinds(record):
        found = ratios(record, what, peer)
        mean = math.exp(statistics.fmean(math.log(max(ratio, 0.01)) for ratio in found.values()))
        least = min(found, key=found.__getitem__)
        level = sum(ratio >= 1 for ratio in found.values())
        yield (
            f"{_said(what, peer)}: {level} of {len(found)} at least 1.0, geometric mean {mean:.2f}, least "
            f"{found[least]:.2f} ({least})"
        )


def grid_table(record: Mapping[str, Any]) -> Iterator[str]:
    yield f"| head dim, mask | {' | '.join(map(str, LENGTHS))} |"
    yield f"|---|{'--:|' * len(LENGTHS)}"
    for what, peer in _kinds(record):
        found = ratios(record, what, peer)
        for dim in HEAD_DIMS:
            for mask in (FULL, CAUSAL):
                cells = [found.get(f"{dim} {mask} {length}") for length in LENGTHS]
                if any(cell is not None for cell in cells):
                    said = " | ".join("-" if cell is None else f"{cell:.2f}" for cell in cells)
                    yield f"| {_said(what, peer)}, {dim}, {mask} | {said} |"


def models_table(record: Mapping[str, Any]) -> Iterator[str]:
    kinds = list(_kinds(record))
    yield f"| call | {' | '.join(_said(*kind) for kind in kinds)} |"
    yield f"|---|{'--:|' * len(kinds)}"
    found = [ratios(record, *kind) for kind in kinds]
    for name in OF_MODELS:
        if name in record["calls"]:
            cells = [f"{one[name]:.2f}" if name in one else "-" for one in found]
            yield f"| {name}: {workloads.described(calls()[name])} | {' | '.join(cells)} |"


def report(record: Mapping[str, Any]) -> Iterator[str]:
    """A record as Markdown."""
    here = record["environment"]
    yield (
        f"sm_80 code for {record['for']} on one {here['gpu']}, driver {here['driver']}, torch {here['torch']}, Triton "
        f"{here['triton']}, bf16, CUDA graphs; as many blocks a multiprocessor as "
        + (f"{record['for']} holds." if record["crowded"] else "fit here.")
    )
    yield from ("", *(f"- {line}" for line in summary(record)), "", *grid_table(record), "", *models_table(record))


@click.command(help=__doc__.partition("\n\n")[0])
@click.option("--gpu", default="a100", show_default=True, help="Whose calls they are.")
@click.option("--crowd", is_flag=True, help="As many blocks a multiprocessor as that GPU holds.")
@click.option("--only", default="", help="Calls whose name has this text.")
@side_by_side.share_option
@click.option("--seconds", type=float, default=480.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON; calls that it has are not measured again.")
@marked.page_option
@click.option(
    "--table", "shown", type=click.Path(path_type=Path, exists=True), help="Print this file's tables, measure nothing."
)
def main(gpu: str, crowd: bool, only: str, share: slice, seconds: float, out: Path | None, shown: Path | None,
         page: Path | None) -> None:  # fmt: skip
    if shown is not None:
        record = json.loads(shown.read_text("utf-8"))
        marked.publish(page, f"sm80-{record['for']}", "sm80_calls", "\n".join(report(record)))
        return
    whose = gpus.named(gpu)
    if not ported.can_stand_for(whose.arch, ported.HOSTS[0]):
        raise click.BadParameter(
            f"got {gpu!r}, allowed are GPUs of compute capability 8.0 to 8.9 and 12", param_hint="--gpu"
        )
    here = side_by_side.asked(None, PEERS)
    about = {"environment": side_by_side.environment(), "peers": list(here), "for": whose.name, "crowded": crowd}
    record = side_by_side.begun(out, about)
    ported.begin(whose, crowd)
    problems = in_turn({name: problem for name, problem in calls().items() if only in name})
    side_by_side.fill(record, side_by_side.in_share(problems, share), functools.partial(measured, here), seconds, out)
    click.echo("\n".join(summary(record)))


if __name__ == "__main__":
    main()
