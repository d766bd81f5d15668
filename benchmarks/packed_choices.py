"""Times what may serve a packed call: parts of query groups, bands of heads, forms of the backward, tiles of the forward.

    python benchmarks/ahead.py benchmarks/packed_choices.py                            # first: every binary; no GPU
    python benchmarks/packed_choices.py --out benchmarks/calls/packed_choices.json     # about a minute
    python benchmarks/packed_choices.py --drawing 2 --pass bwd --out benchmarks/calls/packed_choices_2.json
    python benchmarks/ahead.py benchmarks/packed_choices.py --drawing 3                # tiles of several query heads
    python benchmarks/packed_choices.py --drawing 3 --out benchmarks/calls/packed_choices_3.json
    python benchmarks/ahead.py benchmarks/packed_choices.py --drawing 4                # tiles of forwards, of all drawings
    python benchmarks/packed_choices.py --drawing 4 --out benchmarks/calls/packed_choices_4.json
    python benchmarks/ahead.py benchmarks/packed_choices.py --drawing 5 --pass bwd     # backwards behind the fastest peer
    python benchmarks/packed_choices.py --drawing 5 --pass bwd --out benchmarks/calls/packed_choices_5.json
    python benchmarks/packed_choices.py --drawing 6 --pass bwd --out benchmarks/calls/packed_choices_6.json   # bands of heads
    python benchmarks/ahead.py benchmarks/packed_choices.py --drawing 7                # keys of tiles in parts
    python benchmarks/packed_choices.py --drawing 7 --out benchmarks/calls/packed_choices_7.json
    python benchmarks/ahead.py benchmarks/packed_choices.py --drawing 8 --pass bwd     # longer sequences first
    python benchmarks/packed_choices.py --drawing 8 --pass bwd --out benchmarks/calls/packed_choices_8.json
    python benchmarks/ahead.py benchmarks/packed_choices.py --drawing 9                # one sequence has most tokens
    python benchmarks/packed_choices.py --drawing 9 --out benchmarks/calls/packed_choices_9.json
    python benchmarks/ahead.py benchmarks/packed_choices.py --drawing 10 --pass bwd    # what rows have overlapped, apart
    python benchmarks/packed_choices.py --drawing 10 --pass bwd --out benchmarks/calls/packed_choices_11.json
    python benchmarks/ahead.py benchmarks/packed_choices.py --drawing 11 --pass bwd    # query blocks in parts
    python benchmarks/packed_choices.py --drawing 11 --pass bwd --out benchmarks/calls/packed_choices_12.json
    python benchmarks/packed_choices.py --list                                         # what would be timed; no GPU

The calls: those of a drawing, benchmarks/calls/random_packings.json, random_packings_2.json or _3, that CALLS names by their
number, which had few key heads, few tokens or short sequences, or a head dim between powers of two, and some that the choices
should leave as they were. Of the third drawing, forward alone: calls of short sequences or narrow windows, and some that have
neither, for the kernel whose tiles have several query heads (kernels/sm90/fwd_grouped.py). 4 is TILES, of the drawings since
the second, forward alone: windows, sequences of one length, short and few ones, in the tiles of all rows, small ones, those of
several heads, and with the chosen bands of heads. What they are expected to take: packed_tiles.py --ahead. Forward: the row's
config as packed calls had it before (``packed_schedule``), the other forms, and the choice. Backward, of the first drawing: the
row's config with groups in 1, 2, 4 and 8 parts, heads in its own bands and in one, with the prologue or the epilogue apart, and
the choice; of the second: the choice and what differs from it in one respect (``beside_choice``). 5 is BEHIND, backward alone:
drawn calls of the third, fourth and tenth drawing that were behind the fastest peer, in other bands of heads and parts of
groups, in the loops of the rows of other lengths, and with each kernel started early (``behind_peers``); where one sequence has
all tokens, as a dense call, too. 6 is BANDS, backward alone, in each number of heads a band. 7 is LONG_ONES, forward alone: few
heads, most tokens in one sequence, and some in which splitting is expected to lose, with keys in each number of parts
(``packed_splits_schedule``, whose estimates --list prints). 8 is UNEVEN, backward alone, each with longer sequences first and
in the order of cu_seqlens: most are expected to gain by the former, and the last ones of each drawing little or nothing. 9 is
DOMINATED, forward alone: one sequence has most tokens, or short ones at head dim 64 without a mask, in the tiles of all rows,
with norms and without, small ones, and of 192 rows. 10 is OVERLAPPED and EQUAL, backward alone: drawn calls whose row prepares
rows and finishes dQ beside other programs, and sequences of one length, as the row has them, with each kernel alone, that in
one band, in the other order of sequences, and started early or not. 11,
backward alone: drawn calls that are served with query blocks in parts, in each number of parts, and whole.

Each result is compared with float32 arithmetic as benchmarks/random_packings.py does; a wrong one is an error. Each
candidate is a CUDA graph; replays are interleaved; the file holds medians of seven bursts in microseconds a call, and what the
peers took when the calls were drawn. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import random_packings
import side_by_side
import torch
from dense_backwards import whole_blocks
from launch_choices import race
from random_packings import Packing

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.schedules import (
    fused_schedule,
    group_parts_schedule,
    grouped_schedule,
    packed_grouped_schedule,
    packed_lengths,
    packed_schedule,
    packed_splits_schedule,
    query_parts_schedule,
)
from fa2tune.compiling.choice import Choice
from fa2tune.launching import group_parts, key_splits, passes
from fa2tune.search_spaces.sm90 import bwd_fused, fwd
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import FUSED, Problem, bucket_of

H200 = gpus.named("h200")
DRAWINGS = {
    number: Path(__file__).parent / f"calls/random_packings{rest}.json"
    for number, rest in ((1, ""), *((nth, f"_{nth}") for nth in range(2, 11)))
}
#: Of the drawn calls: that lost with few key heads or tokens; and whose choice is to stay, or to pay where sequences are short.
#: Of the second drawing all whose choice changed, or might have, but for head dims above 128.
CALLS = {
    1: (8, 3, 9, 5, 6, 1, 16, 13),
    2: (38, 31, 5, 22, 58, 26, 19, 10, 16, 87, 69, 42, 9, 68, 46, 89, 7, 24, 17, 11, 36, 60, 73, 13, 83, 66, 25, 95, 97),
    3: (22, 0, 56, 1, 38, 19, 48, 25, 27, 33, 46, 12),
}  # fmt: skip
SEVERAL_HEADS = 3  #: the drawing of that kernel
ALL_TILES = 4  #: that means TILES
#: Drawing -> calls: in a window; of one length; short or few; and some whose tiles stayed.
TILES = {
    2: (10, 32, 2, 69, 14, 27, 73, 59, 55),
    3: (13, 21, 18, 63, 39, 30, 64, 3, 37, 48, 32, 26, 57, 52, 55),
    4: (2, 76, 6, 38, 42, 32, 80, 48, 46, 50, 58, 20, 92, 44, 94, 78, 72),
    10: (71, 30, 69, 17, 89, 42, 3),
}
BEHIND_PEERS = 5  #: that means BEHIND
#: Drawing -> calls, the ones first that differ most: large; small, of one round of tiles; then the others.
BEHIND = {10: (73, 39, 89, 28, 42, 78, 23), 3: (41, 4, 35, 49, 39, 21, 50), 4: (22, 74, 50, 58, 28, 60, 18, 46, 62, 92)}
OTHER_BANDS = 6  #: that means BANDS
#: Drawing -> calls whose bands of heads in the backward a margin by what the L2 holds changed.
BANDS = {1: (13,), 2: (11, 5, 56), 3: (41, 12), 4: (46,)}
KEYS_IN_PARTS = 7  #: that means LONG_ONES
#: Drawing -> calls, the ones first that are expected to gain.
LONG_ONES = {6: (45, 85, 53, 37, 20, 24, 64, 16, 44, 36), 3: (3, 37, 40), 2: (62, 66, 59, 95, 26, 7)}
LONGER_FIRST = 8  #: that means UNEVEN
#: Drawing -> calls, the ones first that are expected to gain most.
UNEVEN = {
    2: (22, 17, 45, 23, 13, 44, 87, 7, 53),
    3: (19, 58, 4, 25, 61, 38, 47, 57),
    4: (24, 30, 86, 54, 78),
    6: (7, 96, 50, 74, 6, 63, 16, 67),
}
ONE_LONG = 9  #: that means DOMINATED
#: Drawing -> calls one of whose sequences has most rows, and, at 64 without a mask, calls that small tiles may suit.
DOMINATED = {10: (30, 69), 8: (28, 14, 79), 6: (89,), 5: (29, 32), 3: (40,), 2: (56, 16), 7: (49,)}
ALONE = 10  #: that means OVERLAPPED and EQUAL
#: Drawing -> calls, the latest first.
OVERLAPPED = {
    10: (73, 39, 89, 78, 28, 4, 9, 29, 49, 61, 75, 97, 38),
    9: (38, 11),
    8: (17, 42, 34, 8, 0, 31, 51, 5),
    7: (0, 11, 27, 54, 65),
    6: (43, 65, 85, 89, 92, 70, 12, 17),
    4: (62, 68, 94, 52, 8),
    3: (5, 10, 24, 36, 53),
    2: (0, 28, 36, 60, 77, 85, 95, 97, 25),
}
#: Sequences, tokens of each, query and key heads, head dim, mask.
EQUAL = (
    (1, 16384, 16, 16, 128, CAUSAL), (2, 8192, 16, 16, 128, CAUSAL), (4, 4096, 16, 16, 128, CAUSAL),
    (8, 2048, 16, 16, 128, CAUSAL), (16, 1024, 16, 16, 128, CAUSAL), (1, 16384, 32, 32, 64, CAUSAL),
    (4, 4096, 32, 32, 64, CAUSAL), (16, 1024, 32, 32, 64, CAUSAL), (4, 4096, 16, 16, 128, FULL),
    (4, 4096, 32, 32, 64, FULL), (4, 4096, 32, 8, 128, CAUSAL), (2, 8192, 64, 8, 128, CAUSAL), (16, 1024, 16, 16, 128, FULL),
)  # fmt: skip
QUERY_BLOCKS = 11  #: that means all drawn calls that are served by parts of query blocks
MOST_FORMS = 10  #: of a call of BEHIND
#: What makes the loop of a backward, by which rows of other lengths differ.
LOOP = ("BLOCK_M", "REDUCE", "ORDER", "EXPONENTIALS_FIRST", "num_warps")
#: Microseconds of a call when drawn, from which rows prepared and dQ finished overlapped are timed, too.
LARGE_US = 300.0
LONG = 1024  #: keys a sequence has on average, from which TILES have 192 x 64, too, which no packed call is offered
MOST_PARTS = 8
ONE_BAND = 32
BURST_MS = 4.0
KERNEL = "bwd_fused"

#: Name of a candidate -> its choice and the parts of its groups.
Candidates = Mapping[str, tuple[Choice, int]]


def masks(said: str) -> Mask:
    """Of the record's text."""
    window = re.fullmatch(r"window (\d+), (\d+)", said)
    return Mask("band", *map(int, window.groups())) if window else {"causal": CAUSAL, "full": FULL}[said]


def of_record(call: Mapping[str, Any]) -> Packing:
    heads = (call[side] for side in ("heads_q", "heads_kv", "head_dim"))
    return Packing(tuple(call["of_q"]), tuple(call["of_k"]), *heads, masks(call["mask"]))


def packings(drawing: int = 1) -> dict[str, tuple[Packing, Mapping[str, Any]]]:
    """Name -> (packing, what was recorded when it was drawn)."""
    found: dict[str, tuple[Packing, Mapping[str, Any]]] = {}
    several = {ALL_TILES: TILES, BEHIND_PEERS: BEHIND, OTHER_BANDS: BANDS, KEYS_IN_PARTS: LONG_ONES,
               LONGER_FIRST: UNEVEN, ONE_LONG: DOMINATED, ALONE: OVERLAPPED, QUERY_BLOCKS: {}}  # fmt: skip
    for which, calls in several.get(drawing, {drawing: CALLS.get(drawing, ())}).items():
        drawn = json.loads(DRAWINGS[which].read_text("utf-8"))["calls"]
        for name in sorted(drawn, key=lambda one: calls.index(n) if (n := int(one.split()[0])) in calls else -1):
            if int(name.split()[0]) in calls:
                found[name] = of_record(drawn[name]), drawn[name]
    for which in DRAWINGS if drawing == QUERY_BLOCKS else ():
        for name, call in json.loads(DRAWINGS[which].read_text("utf-8"))["calls"].items():
            packing = of_record(call)
            now = served(choosing.Chooser(posed(packing), H200)) if "bwd" in call else None
            if now is not None and group_parts.of_queries(now[0].config):
                found[f"{which}: {name}"] = packing, call
    for count, tokens, *heads, mask in EQUAL if drawing == ALONE else ():
        packing = Packing((tokens,) * count, (tokens,) * count, *heads, mask)
        found[f"{count} of {tokens}, {heads[0]}/{heads[1]} x {heads[2]}, {mask}"] = packing, {}
    return found


def posed(packing: Packing) -> Problem:
    extent = Extent(RAGGED, len(packing.of_q), bucket_of(max(packing.of_q), max(packing.of_k)))
    return Problem(
        "bf16", 1, packing.heads_q, packing.heads_kv, sum(packing.of_q), sum(packing.of_k), packing.head_dim,
        packing.head_dim, packing.mask, extent=extent,
    )  # fmt: skip


def _distinct(found: Iterator[tuple[str, Choice, int]]) -> Candidates:
    """The first of equal ones; the choice, which comes last, names the one that it is."""
    kept: dict[str, tuple[Choice, int]] = {}
    for name, choice, parts in found:
        same = next((n for n, (one, p) in kept.items() if (dict(one.config), p) == (dict(choice.config), parts)), None)
        if name == "chosen" and same is not None:
            kept[f"{same}, chosen"] = kept.pop(same)
        elif same is None:
            kept[name] = choice, parts
    return kept


def forwards(chooser: choosing.Chooser) -> Iterator[tuple[str, Choice, int]]:
    chosen, problem = chooser.choose("fwd"), chooser.problem
    row, *others = chooser.among("fwd")
    yield "row", row, 1
    for other in others:
        assert other.row is not None
        yield f"row of {other.row.key.bucket}", other, 1
    few = packed_schedule.for_few_tiles(problem.specialization, chooser.gpu.arch)
    if few is not None:
        yield "small tiles", replace(row, config=few), 1
    yield "chosen", chosen, 1


def several_heads(chooser: choosing.Chooser) -> Iterator[tuple[str, Choice, int]]:
    """Tiles of as many heads as a key head has, or half as many, of both sizes, and of one head what serves and small tiles."""
    problem, chosen = chooser.problem, chooser.choose("fwd")
    for config in grouped_schedule.candidates(problem, chooser.gpu.arch):
        if problem.group < 4 * config["MEMBERS"]:
            name = f"grouped M{config['BLOCK_M']} N{config['BLOCK_N']} of {config['MEMBERS']} heads"
            yield name, Choice(key_splits.splitting(config), config), 1
    few = packed_schedule.for_few_tiles(problem.specialization, chooser.gpu.arch)
    if few is not None:
        yield "small tiles", replace(chosen, config=few), 1
    yield "chosen", chosen, 1


def of_192_rows(problem: Problem, row: Choice) -> Iterator[tuple[str, Choice, int]]:
    """Tiles that no packed call is offered."""
    for how in ("lazy", "never"):
        config = {**fwd.of_tiles(problem.specialization, 192, 64, 0), "RESCALE": how}
        if fwd.SPACE.broken(config, problem.specialization, H200.arch) is None:
            yield f"192 x 64, {how}", replace(row, config=config), 1


def with_maxima(chooser: choosing.Chooser) -> Iterator[tuple[str, Choice, int]]:
    """What may serve a forward, with norms and without, tiles of 192 rows, and what does."""
    *tuned, chosen = forwards(chooser)
    yield from tuned
    for name, choice, parts in tuned:
        yield f"{name}, lazy", replace(choice, config=fwd.without_norms(choice.config)), parts
    yield from of_192_rows(chooser.problem, tuned[0][1])
    yield chosen


def tiles(chooser: choosing.Chooser) -> Iterator[tuple[str, Choice, int]]:
    """What may serve a forward, and what does."""
    problem, chosen = chooser.problem, chooser.choose("fwd")
    *tuned, _ = forwards(chooser)
    yield from tuned
    if problem.mask.measured and problem.seqlen_k >= LONG * problem.extent.given:
        yield from of_192_rows(problem, tuned[0][1])
    if (heads := chosen.config["HEADS_PER_WAVE"]) != 0:
        for name, choice, _ in tuned:
            yield (
                f"{name}, bands of {heads} heads",
                replace(choice, config={**choice.config, "HEADS_PER_WAVE": heads}),
                1,
            )
    if packed_grouped_schedule.asked(problem, chooser.gpu):
        grouped = packed_grouped_schedule.best(problem, chooser.gpu)
        if grouped is not None:
            config = grouped[1]
            name = f"grouped M{config['BLOCK_M']} N{config['BLOCK_N']} of {config['MEMBERS']} heads"
            yield name, Choice(key_splits.splitting(config), config), 1
    several = packed_grouped_schedule.config_of(problem, chosen.config, chooser.gpu, chosen.row)
    served = chosen if several is None else Choice(key_splits.splitting(several), several)
    yield "chosen", served, 1


def parts_of_keys(chooser: choosing.Chooser) -> Iterator[tuple[str, Choice, int]]:
    """Tiles of one and of two groups, with keys in each number of parts, and what serves without them."""
    problem = chooser.problem
    for config in packed_splits_schedule.candidates(problem, chooser.gpu.arch):
        name = f"{config['BLOCK_M']} x {config['BLOCK_N']} in {config['SPLITS']} parts"
        yield name, Choice(key_splits.splitting(config), config), 1
    yield "chosen", chooser.choose("fwd"), 1


def fused_choice(chooser: choosing.Chooser) -> tuple[Choice, int] | None:
    """Of the fused backward with whole query blocks, and the parts of its groups; None: split kernels serve."""
    with whole_blocks():
        return served(chooser)


def served(chooser: choosing.Chooser) -> tuple[Choice, int] | None:
    """The same of what serves."""
    strategy, kinds = chooser.strategy(False)
    if strategy != FUSED:
        return None
    chosen = chooser.choose(KERNEL, kinds.get(KERNEL))
    return chosen, group_parts_schedule.parts_of(chooser.problem, KERNEL, chosen, chooser.gpu)


def backwards(chooser: choosing.Chooser) -> Iterator[tuple[str, Choice, int]]:
    problem = chooser.problem
    if (found := fused_choice(chooser)) is None:
        return
    chosen, chosen_parts = found
    answer = chosen.answer
    assert answer is not None
    row = replace(chosen, config=chooser.fitted(answer.row).row.config)
    own = row.config["HEADS_PER_WAVE"]
    for parts in (n for n in group_parts.allowed(problem) if n <= MOST_PARTS):
        for heads in sorted({own, ONE_BAND}):
            bands = "" if heads == own else ", one band"
            yield f"parts {parts}{bands}", replace(row, config={**row.config, "HEADS_PER_WAVE": heads}), parts
    if row.config["FINISH_BESIDE"]:
        yield "dQ finished after", replace(row, config={**row.config, "FINISH_BESIDE": False}), 1
    if row.config["BESIDE"]:
        yield "nothing overlapped", replace(row, config=packed_schedule.apart(row.config)), 1
    yield "chosen", chosen, chosen_parts


def beside_choice(chooser: choosing.Chooser) -> Iterator[tuple[str, Choice, int]]:
    """The choice and its neighbours: whether rows are prepared and finished beside, parts, bands, half blocks; of head dims in
    parts the orders of an iteration, and padded columns, as packed calls had them before."""
    problem = chooser.problem
    if (found := fused_choice(chooser)) is None:
        return
    chosen, parts = found
    config, spec = chosen.config, problem.specialization
    assert chosen.row is not None
    row = chooser.fitted(chosen.row).row.config
    own, heads_kv = row["HEADS_PER_WAVE"], problem.heads_kv * parts
    others = {"as the row, whole groups": (row, 1), "as the row": (row, parts), "whole groups": (config, 1)}
    others["apart, as the row"] = fused_schedule.apart(row), parts
    others["beside"] = {**config, "BESIDE": row["BESIDE"], "FINISH_BESIDE": row["FINISH_BESIDE"]}, parts
    others["apart"] = fused_schedule.apart(config), parts
    for near in (n for n in group_parts.allowed(problem) if n in (parts // 2, 2 * parts)):
        others[f"parts {near}"] = config, near
    for heads in sorted({own, 4, 8, ONE_BAND}, key=lambda n: (min(n, heads_kv), n != config["HEADS_PER_WAVE"])):
        if any(min(heads, heads_kv) == min(one["HEADS_PER_WAVE"], heads_kv) for one, _ in others.values()):
            continue
        others[f"{heads} heads a band"] = {**config, "HEADS_PER_WAVE": heads}, parts
    if bwd_fused.columns(spec, config) <= 64 and config["BLOCK_M"] == 128:
        others["half blocks"] = fused_schedule.halves(config), parts
    if config["IN_PARTS"]:
        for order in ("together", "behind"):
            others[order] = {**config, "ORDER": order}, parts
        behind = {
            "ORDER": "behind",
            "EXPONENTIALS_FIRST": problem.mask == CAUSAL,
            "BESIDE": False,
            "FINISH_BESIDE": False,
        }
        others["padded"] = {**config, **behind, "IN_PARTS": False}, parts
    for name, (changed, count) in others.items():
        if bwd_fused.SPACE.broken(changed, spec, chooser.gpu.arch) is None:
            yield name, replace(chosen, config=changed), count
    yield "chosen", chosen, parts


def behind_peers(chooser: choosing.Chooser) -> Iterator[tuple[str, Choice, int]]:
    """The choice; with each kernel started early; in other bands of heads; in the loops of the rows of other lengths; in half
    blocks; with rows prepared and dQ finished overlapped, and what of these a long call gains; groups in other parts."""
    problem = chooser.problem
    if (found := fused_choice(chooser)) is None:
        return
    chosen, parts = found
    config, spec = chosen.config, problem.specialization
    others: dict[str, dict[str, Any]] = {"chosen": {**config}}
    if not config["BESIDE"]:
        early = config.get("EARLY_START", False)
        others["one after the other" if early else "started early"] = {**config, "EARLY_START": not early}
    heads_kv = problem.heads_kv * parts
    for heads in (ONE_BAND, 16, 4, 8, 1):
        if any(min(heads, heads_kv) == min(one["HEADS_PER_WAVE"], heads_kv) for one in others.values()):
            continue
        others[f"{heads} heads a band"] = {**config, "HEADS_PER_WAVE": heads}
    loops = {tuple(config[name] for name in LOOP)}
    for other in chooser.among(KERNEL):
        loop = tuple(other.config[name] for name in LOOP)
        if loop not in loops:
            loops.add(loop)
            assert other.row is not None
            others[f"loop of {other.row.key.bucket}"] = {**config, **dict(zip(LOOP, loop, strict=True))}
    if bwd_fused.columns(spec, config) <= 64 and config["BLOCK_M"] == 128:
        others["half blocks"] = fused_schedule.halves(config)
    if config["BESIDE"]:
        others["apart"] = fused_schedule.apart(config)
    elif fused_schedule.predicted_us(problem, config, chooser.gpu, parts) >= LARGE_US:
        others["overlapped"] = {**config, "BESIDE": True, "FINISH_BESIDE": config["REDUCE"] == "vector"}
    able = {name: one for name, one in others.items() if bwd_fused.SPACE.broken(one, spec, chooser.gpu.arch) is None}
    forms = [(name, able[name], parts) for name in able]
    in_parts = [other for other in group_parts.allowed(problem) if other != parts and other <= MOST_PARTS]
    forms += [(f"groups in {other} parts", fused_schedule.apart(config), other) for other in in_parts]
    for name, one, count in forms[:MOST_FORMS]:
        yield name, replace(chosen, config=one), count


def by_length(chooser: choosing.Chooser) -> Iterator[tuple[str, Choice, int]]:
    """The choice, with longer sequences first and in the order of cu_seqlens."""
    if (found := fused_choice(chooser)) is None:
        return
    chosen, parts = found
    for name, first in (("longer first", True), ("as they lie", False)):
        yield name, replace(chosen, config={**fused_schedule.apart(chosen.config), "LONGER_FIRST": first}), parts
    yield "chosen", chosen, parts


def each_alone(problem: Problem, gpu: gpus.Gpu) -> Iterator[tuple[str, Choice, int]]:
    """As the row has it; what is chosen where each kernel is alone on the GPU; that in one band, in the other
    order, and with kernels started early or not."""

    def chosen(alone: bool) -> tuple[Choice, int] | None:
        with mock.patch.object(packed_schedule, "alone", lambda *_: alone):
            return fused_choice(choosing.Chooser(problem, gpu))  # which remembers what it chose

    if (row := chosen(False)) is None or (alone := chosen(True)) is None:
        return
    yield "as the row", *row
    choice, parts = alone
    config = {**choice.config}
    yield "alone", choice, parts
    yield "alone, one band", replace(choice, config={**config, "HEADS_PER_WAVE": ONE_BAND}), parts
    if problem.extent.given > 1:
        other = {**config, "LONGER_FIRST": not config["LONGER_FIRST"]}
        yield "alone, in the other order", replace(choice, config=other), parts
    yield (
        "alone, in the other start",
        replace(choice, config={**config, "EARLY_START": not config["EARLY_START"]}),
        parts,
    )
    now = fused_choice(choosing.Chooser(problem, gpu))
    assert now is not None
    yield "chosen", *now


def in_query_parts(problem: Problem, gpu: gpus.Gpu) -> Iterator[tuple[str, Choice, int]]:
    """What is chosen without parts of query blocks, and with each number of them."""
    if (without := fused_choice(choosing.Chooser(problem, gpu))) is None:
        return
    choice, parts = without
    yield "whole", choice, parts
    form = query_parts_schedule.form(choice)
    for count in group_parts.query_counts(problem, gpu.arch):
        yield f"{count} parts", replace(choice, config=form), count
    yield "3 parts, one after the other", replace(choice, config={**form, "EARLY_START": False}), 3
    now = served(choosing.Chooser(problem, gpu))
    assert now is not None
    yield "chosen", *now


def candidates(problem: Problem, gpu: gpus.Gpu, drawing: int = 1, only: str = "") -> dict[str, Candidates]:
    """By pass. ``only``: of this one; of the other the choice alone."""
    chooser = choosing.Chooser(problem, gpu)
    if drawing == SEVERAL_HEADS:
        return {"fwd": _distinct(several_heads(chooser)), "bwd": {}}
    if drawing == ALL_TILES:
        return {"fwd": _distinct(tiles(chooser)), "bwd": {}}
    if drawing == ONE_LONG:
        return {"fwd": _distinct(with_maxima(chooser)), "bwd": {}}
    if drawing == KEYS_IN_PARTS:
        return {"fwd": _distinct(parts_of_keys(chooser)), "bwd": {}}
    if drawing == BEHIND_PEERS:
        return {"fwd": {"chosen": (chooser.choose("fwd"), 1)}, "bwd": _distinct(behind_peers(chooser))}
    if drawing == LONGER_FIRST:
        return {"fwd": {"chosen": (chooser.choose("fwd"), 1)}, "bwd": _distinct(by_length(chooser))}
    if drawing == QUERY_BLOCKS:
        return {"fwd": {"chosen": (chooser.choose("fwd"), 1)}, "bwd": _distinct(in_query_parts(problem, gpu))}
    if drawing == ALONE:
        return {"fwd": {"chosen": (chooser.choose("fwd"), 1)}, "bwd": _distinct(each_alone(problem, gpu))}
    if drawing == OTHER_BANDS:
        bands = (one for one in behind_peers(chooser) if one[0] == "chosen" or one[0].endswith("a band"))
        return {"fwd": {"chosen": (chooser.choose("fwd"), 1)}, "bwd": _distinct(bands)}
    back = backwards if drawing == 1 else beside_choice
    found = {"fwd": _distinct(forwards(chooser)), "bwd": _distinct(back(chooser))}
    if only == "bwd":
        found["fwd"] = {"chosen": (chooser.choose("fwd"), 1)}
    return found if only != "fwd" else {"fwd": found["fwd"], "bwd": {}}


def expected(problem: Problem, choice: Choice) -> float:
    """Microseconds that a forward of KEYS_IN_PARTS is estimated to take."""
    rows, _ = packed_splits_schedule.longest(problem) or (0, 0)
    lengths = packed_lengths.one_long(problem, rows)
    if key_splits.parts_of(choice.config) > 1:
        return packed_splits_schedule.split_us(problem, choice.config, H200, lengths)
    return packed_schedule.expected_us(problem, choice.config, H200, lengths) or math.nan


def measured(packing: Packing, drawing: int, only: str) -> dict[str, Any]:
    """Microseconds by pass and candidate."""

    def new(total: int, heads: int) -> torch.Tensor:
        return torch.randn(total, heads, packing.head_dim, device="cuda", dtype=torch.bfloat16)

    q, do = (new(sum(packing.of_q), packing.heads_q) for _ in range(2))
    k, v = (new(sum(packing.of_k), packing.heads_kv) for _ in range(2))
    want = random_packings.expected(packing, q, k, v, do)
    views, gradient = [passes.in_one_batch(one) for one in (q, k, v)], passes.in_one_batch(do)
    starts = [torch.tensor([0, *side]).cumsum(0).to("cuda", torch.int32) for side in (packing.of_q, packing.of_k)]
    gpu, problem, scale = dispatch.gpu_of(0), posed(packing), packing.head_dim**-0.5
    named = candidates(problem, gpu, drawing, only)
    ragged = passes.describe(*views, packing.mask, scale, extent=problem.extent)
    calls: dict[str, dict[str, Callable[[], Any]]] = {"fwd": {}, "bwd": {}}
    *_, (first, _) = named["fwd"].values()
    o, lse = passes.ForwardPlan(ragged, *views, scale, first)(*views, *starts)

    def check(name: str, results: Mapping[str, torch.Tensor]) -> None:
        problem_with_it = random_packings.wrong(results, want, packing.group)
        if problem_with_it is not None:
            raise click.ClickException(f"{packing}, {name}: {problem_with_it}")

    for name, (choice, _) in named["fwd"].items():
        split = key_splits.parts_of(choice.config) > 1
        plan = (key_splits.SplitPlan(ragged, *views, scale, choice.config) if split
                else passes.ForwardPlan(ragged, *views, scale, choice))  # fmt: skip
        check(name, {"o": plan(*views, *starts)[0]})
        calls["fwd"][name] = lambda plan=plan: plan(*views, *starts)
    whole = passes.in_one_batch(o)
    posed_back = passes.describe(*views, packing.mask, scale, extent=problem.extent, o=whole, do=gradient)
    for name, (choice, parts) in named["bwd"].items():
        back = passes.BackwardPlan(
            posed_back, gradient, None, *views, whole, scale, FUSED, {KERNEL: choice}, {KERNEL: parts}
        )
        found = back(gradient, None, *views, whole, lse, *starts)
        check(name, dict(zip(("dq", "dk", "dv"), map(passes.without_batch, found), strict=True)))
        calls["bwd"][name] = lambda back=back: back(gradient, None, *views, whole, lse, *starts)
    if drawing == BEHIND_PEERS and max(packing.of_q) == sum(packing.of_q) and max(packing.of_k) == sum(packing.of_k):
        # all tokens in one sequence are a dense call, too: what packing costs
        choice, parts = named["bwd"]["chosen"]
        posed_dense = passes.describe(*views, packing.mask, scale, o=whole, do=gradient)
        dense = passes.BackwardPlan(
            posed_dense, gradient, None, *views, whole, scale, FUSED, {KERNEL: choice}, {KERNEL: parts}
        )
        found = dense(gradient, None, *views, whole, lse)
        check("dense", dict(zip(("dq", "dk", "dv"), map(passes.without_batch, found), strict=True)))
        calls["bwd"]["chosen, dense"] = lambda: dense(gradient, None, *views, whole, lse)
    stream = torch.cuda.Stream()
    return {
        pass_: dict(zip(these, (round(us, 1) for us in race(list(these.values()), stream, BURST_MS)), strict=True))
        for pass_, these in calls.items()
        if these and only in ("", pass_)
    }


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@click.option("--drawing", type=click.IntRange(1, 11), default=1, show_default=True)
@click.option("--pass", "pass_", type=click.Choice(["fwd", "bwd"]), help="Of this pass alone.  [default: both]")
@side_by_side.share_option
@click.option("--seconds", type=float, default=math.inf, help="Begins no call after so long.")
@click.option("--only", type=int, multiple=True, help="The drawn call of this number, and no others.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Every figure, as JSON.")
def main(
    listed: bool, drawing: int, pass_: str | None, share: slice, seconds: float, only: tuple[int, ...], out: Path | None
) -> None:
    asked = dict(list(packings(drawing).items())[share])
    asked = {name: one for name, one in asked.items() if not only or int(name.split()[0]) in only}
    if listed:
        for name, (packing, _) in asked.items():
            click.echo(name)
            problem = posed(packing)
            for which, named in candidates(problem, H200, drawing, pass_ or "").items():
                forms = (f"{name} ({expected(problem, choice):.1f} us)" for name, (choice, _) in named.items())
                click.echo(f"  {which}: {'; '.join(forms if drawing == KEYS_IN_PARTS else named)}")
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "drawing": drawing})

    def one(pair: tuple[Any, Any]) -> dict[str, Any]:
        packing, before = pair
        found = measured(packing, drawing, pass_ or "")
        return {"us": found, "when drawn": {which: before[which]["us"] for which in found if which in before}}

    def line(name: str, call: Mapping[str, Any]) -> str:
        return "\n".join(
            f"{name}, {which}: {us}, when drawn {call['when drawn'].get(which)}" for which, us in call["us"].items()
        )

    side_by_side.fill(record, asked, one, seconds, out, line)


if __name__ == "__main__":
    main()
