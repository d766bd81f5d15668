"""What a step from Hopper to another GPU is worth, held to FlashAttention-2's published speeds: by one level, by the model.

    python benchmarks/sm80_published.py                        # no compile, no GPU
    python benchmarks/sm80_published.py --page docs/model.md

The level: the A100's published speeds over those that benchmarks/sm80_calls.py recorded of SDPA's FlashAttention-2 on an H200,
both passes together. It is the geometric mean at head dim 64 and is held to head dim 128, whose figures it has not seen.
A peer that was published for two GPUs says how much slower the one is for code of this kind: nothing of it was used to fit the
model. The model's figure is of the default configs of kernels/sm80, by the recorded counts (benchmarks/sm80_model.py): the time
it expects on the one GPU over that on the other. Both passes together where both were published together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import marked
import sm80_model

from fa2tune import gpus
from fa2tune.spec.problem import WORKLOAD_HIDDEN, WORKLOAD_TOKENS

SCRIPT, PART = "sm80_published", "published"
HERE = Path(__file__).parent
RECORD = HERE / "calls" / "flash_attention_2_published.json"
#: Of one session each; a call is that of the last that has it.
CALLS = (HERE / "calls" / "sm80_calls.json", HERE / "calls" / "sm80_calls_shipped.json")
PEER, OURS = "fa2", "fa2tune"
FROZEN_ON, HELD_TO = "64", "128"  #: head dims
HOPPER, A100 = "h100-sxm", "a100-sxm-80gb"
PASSES_OF = {"both": ("fwd", "bwd"), "fwd": ("fwd",)}
NAMES = {"both": "forward and backward", "fwd": "forward"}
NAMES_APART = {"fwd": "forward", "bwd": "backward"}
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
    for what, part in ((what, record[what]) for what in PASSES_OF):
        for name, cells in part["gpus"].items():
            for cell, speeds in cells.items() if name != HOPPER else ():
                both = zip(part["lengths"], speeds, part["gpus"][HOPPER][cell], strict=True)
                known = [(length, theirs / own) for length, own, theirs in both if own and theirs]
                model = tuple(
                    sum(
                        defaults[one, cell].predicted_ms(change(gpus.named(name)), "there", length)
                        for one in PASSES_OF[what]
                    )
                    / sum(defaults[one, cell].predicted_ms(hopper, "here", length) for one in PASSES_OF[what])
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


# ---- one level


def recorded(paths: Iterable[Path] = CALLS) -> dict[str, Any]:
    """Calls that were timed as sm_80 code on an H200."""
    found: dict[str, Any] = {}
    for path in paths:
        if path.exists():
            found |= json.loads(path.read_text(encoding="utf-8"))["calls"]
    return found


def speed(calls: Mapping[str, Any], cell: str, length: int, passes: Sequence[str], whose: str = PEER) -> float:
    """TFLOP/s of passes together, counted as they were published: half of the operations under a causal mask."""
    done = 2.0 * length * WORKLOAD_TOKENS * WORKLOAD_HIDDEN * sum({"fwd": 2, "bwd": 5}[pass_] for pass_ in passes)
    us = sum(calls[f"{cell} {length}"][pass_]["us"][whose] for pass_ in passes)
    return done * (0.5 if cell.endswith("causal") else 1.0) / us / 1e6


def shares(record: Mapping[str, Any], calls: Mapping[str, Any], gpu: str = A100) -> dict[str, list[float]]:
    """Head dim and mask -> published speeds of both passes over the recorded ones."""
    part = record["both"]
    return {
        cell: [
            theirs / speed(calls, cell, length, PASSES_OF["both"])
            for length, theirs in zip(part["lengths"], speeds, strict=True) if theirs
        ]
        for cell, speeds in part["gpus"][gpu].items()
    }  # fmt: skip


def _of(found: Mapping[str, Sequence[float]], head_dim: str) -> list[float]:
    return [share for cell, own in found.items() if cell.split()[0] == head_dim for share in own]


def level(record: Mapping[str, Any], calls: Mapping[str, Any]) -> float:
    """Speed on an A100 over that of the same code on an H200, by the head dim that it may see."""
    return geometric_mean(_of(shares(record, calls), FROZEN_ON))


def expected(calls: Mapping[str, Any], step: float, length: int = 8192) -> Iterator[tuple[str, dict[str, float]]]:
    """(head dim and mask, pass -> TFLOP/s of fa2tune that are expected of an A100)."""
    for dim in (FROZEN_ON, HELD_TO):
        for mask in ("full", "causal"):
            cell = f"{dim} {mask}"
            yield cell, {pass_: step * speed(calls, cell, length, (pass_,), OURS) for pass_ in PASSES_OF["both"]}


def by_model(samples: Sequence[sm80_model.Sample], cell: str, pass_: str, length: int = 8192) -> float:
    """TFLOP/s that the model expects of the default config on an A100, without a mask."""
    default = next(one for one in samples if (one.pass_, f"{one.head_dim} {one.mask}") == (pass_, cell))
    done = 2.0 * length * WORKLOAD_TOKENS * WORKLOAD_HIDDEN * {"fwd": 2, "bwd": 5}[pass_]
    return done / default.predicted_ms(gpus.named(A100), "there", length) / 1e9


def _percent(values: Sequence[float]) -> str:
    least, most = (f"{100 * one:+.1f}" for one in (min(values), max(values)))
    return f"{least} to {most} %"


def by_level(record: Mapping[str, Any], calls: Mapping[str, Any]) -> Iterator[str]:
    found, step = shares(record, calls), level(record, calls)
    same = shares(record, calls, HOPPER)
    yield "| FlashAttention-2, forward and backward | cells | A100, published, over the H200, recorded | expected by the level, less 1 | within 5 % | H100, published, over the H200 |"  # noqa: E501
    yield "|---|--:|--:|--:|--:|--:|"
    for dim, said in ((FROZEN_ON, "the level is their mean"), (HELD_TO, "held to it")):
        own = _of(found, dim)
        off = [step / share - 1 for share in own]
        yield (
            f"| head dim {dim}, {said} | {len(own)} | {_range(own, '.3f')} | {_percent(off)} | "
            f"{sum(abs(one) <= WITHIN for one in off)} | {_range(_of(same, dim), '.2f')} |"
        )
    most = {
        pass_: max(step * speed(calls, cell, length, (pass_,)) for cell in found for length in record["both"]["lengths"])
        for pass_ in PASSES_OF["both"]
    }  # fmt: skip
    known = record["most"]
    said = {pass_: f"{known[pass_]:.0f} ({100 * (own / known[pass_] - 1):+.0f} %)" for pass_, own in most.items()}
    yield ""
    yield (
        f"The level: {step:.3f}. By it FlashAttention-2 itself has at most {most['fwd']:.0f} TFLOP/s forward and "
        f"{most['bwd']:.0f} backward on an A100; published are {said['fwd']} and {said['bwd']}."
    )
    peak = gpus.named(A100).tensor_tflops
    yield from (
        "",
        "| length 8k, fa2tune | forward on the H200, TFLOP/s | by the level | share of 312 | backward on the H200 | by the level | share of 312 |",  # noqa: E501
        "|---|--:|--:|--:|--:|--:|--:|",
    )
    for cell, speeds in expected(calls, step):
        cells = [f"{one / step:.0f} | {one:.0f} | {100 * one / peak:.0f} %" for one in speeds.values()]
        yield f"| {cell.replace(' ', ', ')} | {' | '.join(cells)} |"


# ---- as a page


def _range(values: Sequence[float], form: str) -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def text(
    levels: Iterable[str], found: Sequence[Step], changed: Iterable[tuple[str, Sequence[float]]]
) -> str:  # fmt: skip
    lines = [
        *levels,
        "",
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
    return "\n".join(lines)


@click.command(help=__doc__)
@marked.page_option
def main(page: Path | None) -> None:
    _, samples = sm80_model.load()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    marked.publish(
        page, PART, SCRIPT, text(by_level(record, recorded()), list(steps(record, samples)), what_if(record, samples))
    )


if __name__ == "__main__":
    main()
