"""What the model's step from Hopper to another GPU is worth: FlashAttention-2's published speeds on both.

    python benchmarks/sm80_published.py                        # no compile, no GPU
    python benchmarks/sm80_published.py --page docs/model.md

A peer that was published for two GPUs says how much slower the one is for code of this kind: nothing of it was used to fit the
model. The model's figure is of the default configs of kernels/sm80, by the recorded counts (benchmarks/sm80_model.py): the time
it expects on the one GPU over that on the other. Both passes together where both were published together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import marked
import sm80_model

from fa2tune import gpus
from fa2tune.rows import reader
from fa2tune.rows.row import PORTED
from fa2tune.spec.problem import BACKWARD

SCRIPT, PART = "sm80_published", "published"
HERE = Path(__file__).parent
RECORD = HERE / "calls" / "flash_attention_2_published.json"
CACHE = HERE.parent / "cache" / "a100.sqlite"
HOPPER, A100 = "h100-sxm", "a100-sxm-80gb"
PASSES = {"both": ("fwd", "bwd"), "fwd": ("fwd",)}
NAMES = {"both": "forward and backward", "fwd": "forward"}
WITHIN = 0.05  #: what the model is to keep to


@dataclass(frozen=True)
class Step:
    """One mask and head dim on two GPUs: per length how many times as long the one takes."""

    gpu: str
    what: str
    cell: str
    lengths: tuple[int, ...]
    published: tuple[float, ...]
    model: tuple[float, ...]

    @property
    def off(self) -> list[float]:
        """The speed that the model expects on the GPU, from that on Hopper, over the published one, less 1."""
        return [theirs / ours - 1 for theirs, ours in zip(self.published, self.model, strict=True)]


def steps(
    record: Mapping[str, Any],
    samples: Sequence[sm80_model.Sample],
    change: Callable[[gpus.Gpu], gpus.Gpu] = lambda gpu: gpu,
) -> Iterator[Step]:
    """Of every GPU in the record, ``change`` applied to it. Cells that one of the two lacks are left out."""
    defaults: dict[tuple[str, str], sm80_model.Sample] = {}
    for one in samples:  # the default is the first of each
        defaults.setdefault((one.pass_, f"{one.head_dim} {one.mask}"), one)
    hopper = gpus.named(HOPPER)
    for what, part in record.items():
        for name, cells in part["gpus"].items():
            for cell, speeds in cells.items() if name != HOPPER else ():
                both = zip(part["lengths"], speeds, part["gpus"][HOPPER][cell], strict=True)
                known = [(length, theirs / own) for length, own, theirs in both if own and theirs]
                model = tuple(
                    sum(
                        defaults[one, cell].predicted_ms(change(gpus.named(name)), "there", length)
                        for one in PASSES[what]
                    )
                    / sum(defaults[one, cell].predicted_ms(hopper, "here", length) for one in PASSES[what])
                    for length, _ in known
                )
                yield Step(name, what, cell, *zip(*known, strict=True), model)  # type: ignore[misc]


def what_if(record: Mapping[str, Any], samples: Sequence[sm80_model.Sample]) -> Iterator[tuple[str, list[float]]]:
    """(a change of the A100's properties, errors of its cells)."""
    changes: dict[str, Callable[[gpus.Gpu], gpus.Gpu]] = {
        "none": lambda gpu: gpu,
        "as many float32 lanes as Hopper": lambda gpu: replace(gpu, fp32_tflops=2 * gpu.fp32_tflops),
        "all rates 10 % higher": lambda gpu: replace(
            gpu, clock_mhz=round(1.1 * gpu.clock_mhz), tensor_tflops=1.1 * gpu.tensor_tflops,
            fp32_tflops=1.1 * gpu.fp32_tflops,
        ),
    }  # fmt: skip
    for name, change in changes.items():
        yield name, [off for step in steps(record, samples, change) if step.gpu == A100 for off in step.off]


def expected(found: Sequence[Step], cache: Path = CACHE) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    """(head dim and mask, pass -> (TFLOP/s of the ported row on the H200, that over the published step)), at 8k tokens."""
    rows = [row for row in reader.read(cache) if row.obtained == PORTED and row.key.bucket == 8192]
    for step in found:
        if step.gpu == A100:
            ratio = step.published[step.lengths.index(8192)]
            dim, mask = step.cell.split()
            own = {row.key.kernel: row for row in rows if (str(row.key.head_dim), row.key.mask) == (dim, mask)}
            speeds = {kernel: own[kernel].tflops or 0.0 for kernel in ("fwd", BACKWARD)}
            yield step.cell, {kernel: (speed, speed / ratio) for kernel, speed in speeds.items()}


def _range(values: Sequence[float], form: str) -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def text(found: Sequence[Step], changed: Iterable[tuple[str, Sequence[float]]]) -> str:
    lines = [
        "| GPU, pass | head dim, mask | lengths | its time over the H100's, published | by the model | "
        "expected speed over published, less 1 |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for step in found:
        off = f"{100 * min(step.off):+.0f} to {100 * max(step.off):+.0f} %"
        lines.append(
            f"| {step.gpu}, {NAMES[step.what]} | {step.cell.replace(' ', ', ')} | {len(step.lengths)} | "
            f"{_range(step.published, '.2f')} | {_range(step.model, '.2f')} | {off} |"
        )
    lines += ["", f"| the A100 changed | cells within {100 * WITHIN:.0f} % | median | range |", "|---|--:|--:|--:|"]
    lines += [
        f"| {name} | {sum(abs(one) <= WITHIN for one in off)} of {len(off)} | {100 * median(off):+.0f} % | "
        f"{100 * min(off):+.0f} to {100 * max(off):+.0f} % |"
        for name, off in changed
    ]
    lines += [
        "",
        "| length 8k | forward: the A100's row on the H200, TFLOP/s | over the published step | share of 312 | "
        "backward: row on the H200 | over the published step | share of 312 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    peak = gpus.named(A100).tensor_tflops
    for cell, speeds in expected(found):
        cells = [
            f"{here:.0f} | {there:.0f} | {100 * there / peak:.0f} %"
            for here, there in (speeds["fwd"], speeds[BACKWARD])
        ]
        lines.append(f"| {cell.replace(' ', ', ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@marked.page_option
def main(page: Path | None) -> None:
    _, samples = sm80_model.load()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    marked.publish(page, PART, SCRIPT, text(list(steps(record, samples)), what_if(record, samples)))


if __name__ == "__main__":
    main()
