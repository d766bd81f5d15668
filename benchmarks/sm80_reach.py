"""What sm_80 code reached on a Hopper GPU, from the records: no GPU.

    python benchmarks/sm80_reach.py layout --page docs/experiments/mma-sync.md
    python benchmarks/sm80_reach.py reach --page docs/a100.md

reach: what was asked for, what was measured, what is missing. Of each call the figures of the last record that has it: after a
run of benchmarks/sm80_calls.py on the rows of today, sm80_calls_shipped.json (--gpu l4: sm80_calls_l4_shipped.json).
layout: backwards raced by benchmarks/sm80_race.py when SDPA's backward was given (batch, heads, seqlen, dim) in memory, and so
copied O and dO first; and what they come to by SDPA's time without the copies, which benchmarks/sm80_calls.py recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click
import marked
import sm80_calls
import sm80_model
import sm80_published

from fa2tune import gpus

HERE = Path(__file__).parent
CALLS = HERE / "calls"
PEER = "SDPA FlashAttention-2"
IN_ORDER = "in order"
LENGTHS = (512, 2048, 4096, 8192, 16384)


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CALLS / f"{name}.json").read_text(encoding="utf-8"))
    return found


# ---- races in which SDPA copied


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['head_dim']} {cell['mask']} {cell['length']}"


def _backwards(name: str) -> list[dict[str, Any]]:
    return [cell for cell in record(name)["cells"] if cell["pass"] == "bwd"]


def copied() -> dict[str, float]:
    """Call -> SDPA's time with the copies over that without."""
    plain = record("sm80_calls")["calls"]
    with_copies = {_name(cell): cell["methods"][PEER]["ms"] for cell in _backwards("sm80_in_order")}
    for cell in _backwards("sm80_forms"):
        with_copies.setdefault(_name(cell), cell["methods"][PEER]["ms"])
    return {name: 1e3 * ms / plain[name]["bwd"]["us"]["fa2"] for name, ms in with_copies.items()}


def _free(name: str) -> bool:
    return not name.startswith(("SDPA", IN_ORDER))


def _ordered(name: str) -> bool:
    return name.startswith(IN_ORDER)


#: What is said of a race -> (its record, which of its methods).
RACES: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "first race": ("sm80_race", _free),
    "dQ in a fixed order": ("sm80_in_order", _ordered),
    "beside it, in none": ("sm80_in_order", _free),
    "fewer operands read": ("sm80_forms", _free),
    "the same, 99 KiB": ("sm80_forms_l4", _free),
}


def without_copies(race: str) -> dict[str, tuple[float, float]]:
    """Call -> (the best ratio to SDPA's FlashAttention-2 as recorded, that by SDPA's time without copies)."""
    name, wanted = RACES[race]
    factors, found = copied(), {}
    for cell in _backwards(name):
        best = max(one["ratio"] for method, one in cell["methods"].items() if wanted(method))
        found[_name(cell)] = best, best / factors[_name(cell)]
    return found


def layout() -> Iterator[str]:
    yield f"| backward, head dim, mask | {' | '.join(map(str, LENGTHS))} |"
    yield f"|---|{'--:|' * len(LENGTHS)}"
    lines = []
    for race in RACES:
        found = without_copies(race)
        for what in dict.fromkeys(name.rpartition(" ")[0] for name in found):
            cells = [found.get(f"{what} {length}") for length in LENGTHS]
            said = " | ".join("" if cell is None else f"{cell[1]:.2f} ({cell[0]:.2f})" for cell in cells)
            yield f"| {race}, {what.replace(' ', ', ')} | {said} |"
        lines.append(f"- {race}: {_in_short([one for _, one in found.values()])}; recorded "
                     f"{_in_short([one for one, _ in found.values()])}")  # fmt: skip
    yield from ("", *lines)


def _in_short(ratios: Sequence[float]) -> str:
    level = sum(ratio >= 1 for ratio in ratios)
    return (
        f"{level} of {len(ratios)} at least 1.0, least {min(ratios):.2f}, geometric mean {geometric_mean(ratios):.2f}"
    )


# ---- what was asked for

#: Records of calls as they are served, earlier ones first.
SERVED = {
    "a100": ("sm80_calls", "sm80_calls_256", "sm80_calls_shipped"),
    "l4": ("sm80_calls_l4", "sm80_calls_l4_256", "sm80_calls_l4_shipped"),
}
STEADY_CALLS = "sm80_calls_turns"  #: the record of deterministic backwards
SHARES = {"fwd": 0.65, "bwd": 0.55}  #: of an A100's peak


def served(gpu: str) -> dict[str, Any]:
    """A record of the last figures of each call."""
    found: dict[str, Any] = {"calls": {}, "peers": []}
    for name in SERVED[gpu]:
        if (CALLS / f"{name}.json").exists():
            one = record(name)
            found = {**one, "calls": found["calls"] | one["calls"], "peers": [*found["peers"], *one["peers"]]}
    return found


def _line(asked: str, found: Mapping[str, float], least: float, mean: float | None, why: str) -> str:
    if not found:
        return f"| {asked} | not measured | | | {why} |"
    values = list(found.values())
    below = sum(one < least for one in values)
    first = min(found, key=found.__getitem__)
    got = geometric_mean([max(one, 0.01) for one in values])
    short = [f"{below} of {len(values)} cells"] if below else []
    if mean is not None and got < mean:
        short.append(f"mean by {100 * (1 - got / mean):.0f} %")
    return f"| {asked} | {got:.2f} | {found[first]:.2f} ({first}) | {', '.join(short) or 'nothing'} | {why} |"


def _dims(found: Mapping[str, float], *dims: int) -> dict[str, float]:
    return {
        name: one
        for name, one in found.items()
        if name.split()[0] in map(str, dims) and name.split()[1] in ("full", "causal")
    }


def _steady(calls: Mapping[str, Any]) -> dict[str, Any]:
    """Calls whose deterministic backward was tried."""
    name = sm80_calls.STEADY
    return {one: call for one, call in calls.items() if name in call["bwd"]["us"] or name in call["missing"]}


def _is_here(name: str) -> bool:
    return (CALLS / f"{name}.json").exists()


def reach() -> Iterator[str]:
    a100, l4 = served("a100"), served("l4")

    def computed(race: str) -> dict[str, float]:
        return {name: one for name, (_, one) in without_copies(race).items()}

    def of(record: Mapping[str, Any], what: str, *dims: int) -> dict[str, float]:
        found = sm80_calls.ratios(record, what, "fa2")
        return _dims(found, *dims) if dims else found

    steady = of({"calls": _steady(record(STEADY_CALLS)["calls"])}, "deterministic backward")
    older = "" if _is_here(SERVED["a100"][-1]) else "rows of before the last races at 96, 128 and 256; "
    small = "" if any("causal" in name for name in of(l4, "forward", 64)) else "causal not timed; "
    small += (
        "96: tiles that leave an L4 room for a second block"
        if _is_here(SERVED["l4"][-1])
        else "96: rows of before their races"
    )
    apart = computed("the same, 99 KiB").values()
    wide = "" if _is_here(SERVED["l4"][-1]) else "rows of before the last races; "
    lines: list[tuple[str, Mapping[str, float], float, float | None, str]] = [
        ("forward, 58 calls: 1.0, mean 1.15", of(a100, "forward"), 1, 1.15, "256: shared memory; 128 full: rate of products"),
        ("backward, 58 calls: 1.0, mean 1.20", of(a100, "backward"), 1, 1.2, f"{older}1.20 was of races with SDPA's copies"),
        ("the same, computed: configs of the last race", computed("fewer operands read"), 1, 1.2, "shared memory"),
        ("deterministic backward: 0.85", steady, 0.85, None, "a fence in each block, a turn to wait for"),
        ("forward, times flash-attn: mean 1.0", sm80_calls.ratios(a100, "forward", "flash_attn"), 0, 1, ""),
        ("99 KiB, 64 to 128, forward: 1.0", of(l4, "forward", 64, 96, 128), 1, None, small),
        ("99 KiB, 64 to 128, backward: 0.95", of(l4, "backward", 64, 96, 128), 0.95, None, ""),
        ("99 KiB, 256, forward: reported", of(l4, "forward", 256), 0, None, ""),
        ("99 KiB, 256, backward: reported", of(l4, "backward", 256), 0, None,
         f"{wide}computed of the last race: {min(apart):.2f} to {max(apart):.2f}"),
    ]  # fmt: skip
    yield "| asked, times SDPA's FlashAttention-2 where nothing is said | mean | least | missing | why |"
    yield "|---|--:|---|---|---|"
    for line in lines:
        yield _line(*line)
    published, calls = json.loads(sm80_published.RECORD.read_text(encoding="utf-8")), sm80_published.recorded()
    step = sm80_published.level(published, calls)
    unseen = sm80_published._of(sm80_published.shares(published, calls), sm80_published.HELD_TO)
    within = sum(abs(step / one - 1) <= sm80_published.WITHIN for one in unseen)
    yield from ("", "| asked of an A100 | found |", "|---|---|")
    samples = sm80_model.load()[1]
    off = dict(sm80_published.what_if(published, samples))["none"]
    asked = "published FlashAttention-2 within 5 %, by constants frozen beforehand"
    yield (
        f"| {asked} | not frozen: {within} of {len(unseen)} cells by one level of another head dim, a rule chosen with all "
        f"figures known; {sum(abs(one) <= sm80_published.WITHIN for one in off)} of {len(off)} by the model |"
    )
    peak, speeds = gpus.named(sm80_published.A100).tensor_tflops, dict(sm80_published.expected(calls, step))
    for pass_, said in sm80_published.NAMES_APART.items():
        level = 100 * speeds["128 full"][pass_] / peak
        model = 100 * sm80_published.by_model(samples, "128 full", pass_) / peak
        asked = f"{said} at 128, full, 8k: {100 * SHARES[pass_]:.0f} % of its peak"
        yield f"| {asked} | {level:.0f} % by the level, {model:.0f} % by the model |"


PARTS: Mapping[str, Callable[[], Iterator[str]]] = {"layout": layout, "reach": reach}


@click.command(help=__doc__)
@click.argument("part", type=click.Choice(list(PARTS)))
@marked.page_option
def main(part: str, page: Path | None) -> None:
    marked.publish(page, f"sm80-{part}", "sm80_reach", "\n".join(PARTS[part]()))


if __name__ == "__main__":
    main()
