"""Times fused Hopper backwards of drawn calls in other bands of heads, in another order of products, with dQ finished early or
not, and with kernels that overlap or start early.

    python benchmarks/ahead.py benchmarks/band_backwards.py bands RECORD...      # first: every binary, on all cores; no GPU
    python benchmarks/band_backwards.py bands RECORD... --out FILE               # resumes from the file
    python benchmarks/band_backwards.py --table FILE                             # a file, as text

RECORD: of benchmarks/random_calls.py. ``bands``: calls that are not started early and have more tiles than a GPU has
multiprocessors, in the row's bands and in others. ``order``: calls whose row has another order than "together", in both.
``finish``: calls that are started early, with dQ finished early, after the main kernel, and all kernels one after the other.
``beside``: calls whose row has BESIDE, as it is, and alone on the GPU with each kernel started early, or one after the other.
Kernels that start early also have their divisors from the host, which is timed with it. Checks and times are those of
benchmarks/dense_backwards.py. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import dense_backwards
import side_by_side

from fa2tune import gpus
from fa2tune.calling.schedules import bands_schedule, few_blocks_schedule, fused_schedule, group_parts_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts, launch, passes
from fa2tune.spec.problem import Problem

KERNEL = dense_backwards.FUSED_KERNEL
ROW, TOGETHER = "the row's order", "together"
EARLY, AFTER, LATE = "dQ finished early", "dQ finished after", "one after the other"
FINISH = "sm90/bwd_finish"
BESIDE, ALONE_EARLY, ALONE_LATE = "as the row", "alone early", "alone late"
BANDS = (1, 2, 4, 8, 16, 32, 64)


def in_row(problem: Problem, gpu: Gpu) -> tuple[Choice, int]:
    """The fused kernel in its row's bands and order, and parts."""
    with dense_backwards.rows_loops():
        found, _ = dense_backwards.served(problem, gpu)
    return found[KERNEL]


def band_candidates(problem: Problem, gpu: Gpu) -> dict[str, dense_backwards.Ordered]:
    """Heads of a band -> candidate, the row's first."""
    one, parts = in_row(problem, gpu)
    own = one.config["HEADS_PER_WAVE"]
    heads = problem.batch * problem.heads_kv * parts
    bands = [own, *(band for band in BANDS if band != own and band < 2 * heads)]
    made = {band: replace(one, config={**one.config, "HEADS_PER_WAVE": band}) for band in bands}
    return {str(band): ({KERNEL: (choice, parts)}, "") for band, choice in made.items()}


def order_candidates(problem: Problem, gpu: Gpu) -> dict[str, dense_backwards.Ordered]:
    one, parts = in_row(problem, gpu)
    together = replace(one, config=few_blocks_schedule.form(one.config))
    return {name: ({KERNEL: (choice, parts)}, "") for name, choice in ((ROW, one), (TOGETHER, together))}


class _Finished(dict[str, dense_backwards.Ordered]):
    """The same candidate by name, each taken while its plan is made in that way."""

    def items(self) -> Iterator[tuple[str, dense_backwards.Ordered]]:  # type: ignore[override]
        own = launch.starts_early
        for name, one in super().items():

            def early(variant: Any, *about: Any, name: str = name) -> bool:
                if name == LATE:
                    return False
                return name == EARLY if variant.name == FINISH else own(variant, *about)

            with mock.patch.object(launch, "starts_early", early), mock.patch.object(passes, "starts_early", early):
                yield name, one


def finish_candidates(problem: Problem, gpu: Gpu) -> dict[str, dense_backwards.Ordered]:
    return _Finished(dict.fromkeys((EARLY, AFTER, LATE), dense_backwards.served(problem, gpu)))


def beside_candidates(problem: Problem, gpu: Gpu) -> dict[str, dense_backwards.Ordered]:
    """A row with BESIDE, and the kernel alone on the GPU with its kernels started early and one after the other."""
    row = dense_backwards.served(problem, gpu)[0][KERNEL][0].of_row
    alone = fused_schedule.apart(row.config)
    made = {BESIDE: row.config, ALONE_EARLY: fused_schedule.started_early(alone), ALONE_LATE: alone}
    found = {}
    for name, config in made.items():
        choice = bands_schedule.in_bands(problem, replace(row, config=config, otherwise=row.config), gpu)
        found[name] = {KERNEL: (choice, group_parts_schedule.parts_of(problem, KERNEL, choice, gpu))}, ""
    return found


Wanted = Callable[[Problem, Choice, Gpu], bool]


def _many_tiles(problem: Problem, choice: Choice, gpu: Gpu) -> bool:
    tiles = problem.batch * problem.heads_kv * -(-problem.seqlen_k // fused_schedule.TILE)
    return not choice.config["EARLY_START"] and choice.config["DYNAMIC"] and tiles > gpu.sm_count


def _other_order(_problem: Problem, choice: Choice, _gpu: Gpu) -> bool:
    return choice.of_row.config["ORDER"] != "together" and choice.config["BLOCK_M"] == choice.of_row.config["BLOCK_M"]


def _beside(problem: Problem, choice: Choice, gpu: Gpu) -> bool:
    short = fused_schedule.least_us(problem, choice.of_row.config, gpu) <= fused_schedule.EARLY_START_US
    return bool(choice.of_row.config["BESIDE"]) and short


FORMS: dict[str, tuple[Wanted, dense_backwards.Candidates]] = {
    "bands": (_many_tiles, band_candidates), "order": (_other_order, order_candidates),
    "finish": (lambda _problem, choice, _gpu: bool(choice.config["EARLY_START"]), finish_candidates),
    "beside": (_beside, beside_candidates),
}  # fmt: skip


def drawn(records: tuple[Path, ...], form: str, gpu: Gpu) -> dict[str, tuple[Problem, str]]:
    """Name -> (call, name of its record), of all that a form is raced for."""

    def wanted(problem: Problem, choices: Mapping[str, Choice], _call: Mapping[str, Any]) -> bool:
        choice = choices.get(KERNEL)
        whole = choice is not None and (form == "finish" or not group_parts.of_queries(choice.config))
        return whole and FORMS[form][0](problem, choice, gpu)

    found = {path.name: dense_backwards.drawn([path], gpu, wanted) for path in records}
    return {name: (problem, of) for of, problems in found.items() for name, problem in problems.items()}


def line(name: str, call: Mapping[str, Any]) -> str:
    return f"{name}: {', '.join(f'{which} {us} us' for which, us in call['us'].items())}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@side_by_side.of_drawings(FORMS)
def main(
    form: str, records: tuple[Path, ...], share: slice, seconds: float, out: Path | None, shown: Path | None
) -> None:
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    problems = dict(list(drawn(records, form, gpus.named("h200")).items())[share])
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "form": form})

    def one(drawn_call: tuple[Problem, str]) -> dict[str, Any]:
        problem, of = drawn_call
        us = dense_backwards.measured(problem, FORMS[form][1])
        return {"us": us, "of": of, **dense_backwards.shape_of(problem)}

    side_by_side.fill(record, problems, one, seconds, out, line)


if __name__ == "__main__":
    main()
