"""Simulates in which order the fused Hopper backward of packed sequences gives out its key tiles. Needs no GPU.

    python benchmarks/packed_backward_order.py            # the drawn calls that a better order shortens the most
    python benchmarks/packed_backward_order.py --all      # every one that was simulated

Calls: benchmarks/calls/random_packings_2.json to _4 and _6 with several sequences, as far as the kernel serves them alone on
the GPU. Each tile goes to the program that is free first, with the microseconds of
fa2tune/calling/schedules/fused_schedule.py and the lengths that were drawn. Orders: as they lie (sequence after sequence, of
each the first keys first, heads in the bands of the choice); longer sequences first, which some calls are served by, by the
lengths that the host assumes (LONGER_FIRST); and tiles by how many of their sequence are left, which under a causal mask is
the longest tile first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import click
from packed_choices import DRAWINGS, KERNEL, masks, posed
from random_packings import Packing

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.schedules import fused_schedule, group_parts_schedule
from fa2tune.spec.problem import FUSED

GPU = gpus.named("h200")
SHOWN = 12
#: Share of a call's recorded time, from which an order is said to gain or to lose.
GAINS, LOSES = 0.03, -0.02


class Orders(NamedTuple):
    """Microseconds of the main kernel's tiles."""

    name: str
    as_they_lie: float
    longer_first: float
    most_left_first: float
    mean: float  #: of all programs, which no order is below
    drawn: float  #: of the whole backward, recorded
    ratio: float  #: of the fastest peer's time over that
    taken: bool  #: longer sequences come first


def simulated(name: str, packing: Packing, drawn: float, ratio: float) -> Orders | None:
    """None: the fused kernel does not serve it, or not alone on the GPU."""
    problem = posed(packing)
    chooser = choosing.Chooser(problem, GPU)
    strategy, kinds = chooser.strategy(False)
    if strategy != FUSED:
        return None
    choice = chooser.choose(KERNEL, kinds.get(KERNEL))
    if choice.config["BESIDE"]:
        return None
    parts = group_parts_schedule.parts_of(problem, KERNEL, choice, GPU)
    group, heads = problem.group // parts, problem.heads_kv * parts
    rows, columns = choice.config["BLOCK_M"], 128 if packing.head_dim > 64 else 64
    block, ends = fused_schedule.BLOCK_US[columns, rows], fused_schedule.TILE_US[columns, rows]
    lengths = zip(packing.of_q, packing.of_k, strict=True)
    of_each = {
        number: [group * blocks * block + ends for blocks in fused_schedule._blocks(*pair, packing.mask, rows)]
        for number, pair in enumerate(lengths)
    }

    def last(tiles: list[float]) -> float:
        band = min(choice.config["HEADS_PER_WAVE"], heads)
        return fused_schedule.last_done([0.0] * GPU.sm_count, tuple(tiles), heads, band)

    def seen(number: int) -> int:
        return fused_schedule.most_seeing(packing.of_q[number], packing.of_k[number], packing.mask)

    lie = [us for its in of_each.values() for us in its]
    longer = [us for number in sorted(of_each, key=seen, reverse=True) for us in of_each[number]]
    left = sorted(
        ((len(its) - nth, us) for its in of_each.values() for nth, us in enumerate(its)), key=lambda one: -one[0]
    )
    mean, most_left = sum(lie) * heads / GPU.sm_count, [us for _, us in left]
    taken = bool(choice.config["LONGER_FIRST"])
    return Orders(name, last(lie), last(longer), last(most_left), mean, drawn, ratio, taken)


def all_calls() -> Iterator[Orders]:
    for number in (2, 3, 4, 6):
        for name, call in json.loads(DRAWINGS[number].read_text("utf-8"))["calls"].items():
            drawn = call.get("bwd", {}).get("us", {}).get("fa2tune")
            if drawn is None or len(call["of_q"]) < 2 or max(call["of_k"]) == 0:
                continue
            heads = (call[side] for side in ("heads_q", "heads_kv", "head_dim"))
            packing = Packing(tuple(call["of_q"]), tuple(call["of_k"]), *heads, masks(call["mask"]))
            found = simulated(f"{number}: {name}", packing, drawn, call["bwd"]["ratio"])
            if found is not None:
                yield found


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--all", "every", is_flag=True, help="Every call.")
def main(every: bool) -> None:
    found = sorted(all_calls(), key=lambda one: (one.longer_first - one.as_they_lie) / one.drawn)
    for one in found if every else found[:SHOWN]:
        click.echo(
            f"{one.name}: as they lie {one.as_they_lie:.0f} us, longer first {one.longer_first:.0f}"
            f"{' (served)' if one.taken else ''}, most left first {one.most_left_first:.0f}, mean {one.mean:.0f}; drawn "
            f"{one.drawn:.0f}, {one.ratio} of the peer's speed"
        )
    taken = [one for one in found if one.taken]
    for name, calls in (("longer_first", found), ("longer_first", taken), ("most_left_first", found)):
        shares = [(one.as_they_lie - getattr(one, name)) / one.drawn for one in calls]
        which = f"{name}, served by it" if calls is taken else name
        click.echo(
            f"{which}: {sum(shares) / len(shares):.1%} of a call on average, {sum(one > GAINS for one in shares)} of "
            f"{len(shares)} calls gain {GAINS:.0%}, {sum(one < LOSES for one in shares)} lose {-LOSES:.0%}"
        )


if __name__ == "__main__":
    main()
