"""What sm_80 code reached on a Hopper GPU, from the records: no GPU.

    python benchmarks/sm80_reach.py layout --page docs/experiments/mma-sync.md

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


PARTS: Mapping[str, Callable[[], Iterator[str]]] = {"layout": layout}


@click.command(help=__doc__)
@click.argument("part", type=click.Choice(list(PARTS)))
@marked.page_option
def main(part: str, page: Path | None) -> None:
    marked.publish(page, f"sm80-{part}", "sm80_reach", "\n".join(PARTS[part]()))


if __name__ == "__main__":
    main()
