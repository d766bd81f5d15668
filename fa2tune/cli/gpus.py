"""``fa2tune gpus``: the catalogue, what is shipped for each GPU, and which GPU this machine has."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import click

from fa2tune import devices
from fa2tune.catalogue import ALIASES, GENERATIONS, GIB, KIB, Gpu
from fa2tune.cli._options import shown_errors
from fa2tune.cli._tables import lines
from fa2tune.gpus import MIN_ARCH, catalogue, same_silicon
from fa2tune.rows import reader
from fa2tune.rows.row import MEASURED, OBTAINED, PORTED, PREDICTED, SIBLING, Row
from fa2tune.text import plain

WIDTH = 80
OTHER, NO_ROWS = "of another GPU", "none"
LEGEND = {
    MEASURED: "on this GPU",
    SIBLING: "measured on another GPU of the same chip",
    PORTED: "measured on another architecture, which ran its code",
    PREDICTED: "by the model; run on no GPU",
    OTHER: "no rows of its own; those of that GPU serve it",
    NO_ROWS: "calls run the default config; `fa2tune tune` makes rows",
}


@dataclass(frozen=True)
class Shipped:
    """What the shipped cache files hold for one GPU."""

    standing: str  #: one of LEGEND
    rows: Mapping[str, int] = field(default_factory=dict)  #: evidence -> rows of its own
    served_by: str = ""  #: the GPU whose rows serve; "": none does

    @property
    def cell(self) -> str:
        return f"of {self.served_by}" if self.standing == OTHER else self.standing


def shipped_rows() -> dict[str, Counter[str]]:
    """GPU -> evidence -> rows in the shipped files that a call can get."""
    found: dict[str, Counter[str]] = {}
    with shown_errors():
        for path in reader.shipped_paths():
            _count(reader.read(path), found)
    return found


def _count(rows: Iterable[Row], found: dict[str, Counter[str]]) -> None:
    for row in rows:
        if not row.barred:
            found.setdefault(row.key.gpu, Counter())[row.obtained] += 1


def standing(gpu: Gpu, found: Mapping[str, Mapping[str, int]]) -> Shipped:
    """What of ``found`` a call on ``gpu`` is served."""
    if own := found.get(gpu.name):
        return Shipped(min(own, key=OBTAINED.index), own, gpu.name)

    def order(other: Gpu) -> tuple[bool, int]:
        return not same_silicon(other, gpu), OBTAINED.index(min(found[other.name], key=OBTAINED.index))

    best = min(
        (other for other in catalogue() if other.name in found and other.arch == gpu.arch), key=order, default=None
    )
    return Shipped(OTHER, served_by=best.name) if best else Shipped(NO_ROWS)


def _heading(gpu: Gpu) -> str:
    shared = f"{gpu.shared_per_block // KIB} KiB shared memory per block"
    return f"{GENERATIONS[gpu.arch]}: compute capability {gpu.capability}, {shared}"


def _tables(shown: Mapping[str, Shipped], present: set[str]) -> Iterator[str]:
    titles = ("", "name", "chip", "SMs", "TFLOP/s", "memory", "GB/s", "shipped rows")
    rows: list[tuple[str, ...]] = []
    heads: dict[int, Gpu] = {}  # row -> the first GPU of its compute capability
    for _, members in groupby(sorted(catalogue(), key=lambda gpu: gpu.arch), key=lambda gpu: gpu.arch):
        for first, gpu in enumerate(members):
            if not first:
                heads[len(rows)] = gpu
            rows.append((
                "*" if gpu.name in present else "", gpu.name, gpu.silicon, str(gpu.sm_count),
                f"{gpu.tensor_tflops:.0f}", f"{gpu.hbm_bytes // GIB} GB", f"{gpu.hbm_gbs:.0f}", shown[gpu.name].cell,
            ))  # fmt: skip
    table = list(lines(titles, rows, None, right=("SMs", "TFLOP/s", "memory", "GB/s")))
    yield table[0]
    for number, line in enumerate(table[1:]):
        if head := heads.get(number):
            yield from ("", _heading(head))
        yield line


def _wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _legend(shown: Iterable[Shipped]) -> Iterator[str]:
    used = {each.standing for each in shown}
    yield "TFLOP/s: dense bf16 with float32 accumulation. Shipped rows:"
    for name, meaning in LEGEND.items():
        if name in used:
            yield f"  {name:{max(map(len, LEGEND))}}  {meaning}"
    yield from _wrapped(
        "--gpu takes a name above, the driver's name (NVIDIA H200), a slice (a100@42sm: 42 SMs) or one of "
        + ", ".join(ALIASES) + "."
    )  # fmt: skip


def _about(device: devices.Device, count: int, found: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """What a device of this machine is and gets, in one sentence or two."""
    gpu = device.gpu
    times = f"{count} x " if count > 1 else ""
    text = f"This machine: {times}{plain(device.name)}, {gpu.sm_count} SMs, compute capability {gpu.capability}"
    text += f", {gpu.note} ({gpu.tensor_tflops:.0f} TFLOP/s)" if gpu.note else f": {gpu.name}"
    yield from _wrapped(f"{text}.")
    if device.arch < MIN_ARCH:
        yield from _wrapped("  It is too old: fa2tune needs compute capability 8.0 or newer.")
        return
    shipped = standing(gpu, found)
    if shipped.rows:
        counts = ", ".join(f"{count} {name}" for name, count in shipped.rows.items())
        yield from _wrapped(f"  Shipped rows: {counts}. `fa2tune doctor` says whether they are up to date.")
    elif shipped.served_by:
        yield from _wrapped(f"  No rows of its own are shipped; those of {shipped.served_by} serve. Next: fa2tune tune")
    else:
        yield from _wrapped("  No rows are shipped for it: calls run the default config. Next: fa2tune tune")


def _as_json(shown: Mapping[str, Shipped], seen: devices.FoundDevices, found: Mapping[str, Mapping[str, int]]) -> str:
    def about(gpu: Gpu, shipped: Shipped) -> dict[str, object]:
        return {
            "name": gpu.name, "driver_names": [f"NVIDIA {name}" for name in gpu.driver_names], "chip": gpu.silicon,
            "compute_capability": gpu.capability, "sm_count": gpu.sm_count, "clock_mhz": gpu.clock_mhz,
            "shared_bytes_per_block": gpu.shared_per_block, "shared_bytes_per_sm": gpu.shared_per_sm,
            "warps_per_sm": gpu.warps_per_sm, "blocks_per_sm": gpu.blocks_per_sm, "bf16_tflops": gpu.tensor_tflops,
            "tf32_tflops": gpu.tf32_tflops, "fp32_tflops": gpu.fp32_tflops, "l2_bytes": gpu.l2_bytes,
            "memory_bytes": gpu.hbm_bytes, "memory_gb_per_s": gpu.hbm_gbs, "estimated_from": gpu.estimated_from or None,
            "shipped": shipped.standing, "shipped_rows": dict(shipped.rows), "served_by": shipped.served_by or None,
        }  # fmt: skip

    here = [
        {"device": device.number, "driver_name": device.name, "gpu": about(device.gpu, standing(device.gpu, found))}
        for device in seen.devices
    ]
    return json.dumps(
        {
            "gpus": [about(gpu, shown[gpu.name]) for gpu in catalogue()],
            "aliases": ALIASES,
            "present": here,
            "none_present_because": seen.why or None,
            "cuda_of_driver": seen.cuda or None,
        },
        indent=2,
    )


def _distinct(seen: Sequence[devices.Device]) -> Iterator[tuple[devices.Device, int]]:
    """Devices that differ in more than their number, each with how many there are."""
    counts = Counter((device.name, device.arch, device.sm_count) for device in seen)
    for device in seen:
        if count := counts.pop((device.name, device.arch, device.sm_count), 0):
            yield device, count


@click.command()
@click.option("--json", "as_json", is_flag=True, help="All figures, as JSON.")
def gpus(as_json: bool) -> None:
    """List the GPUs that --gpu knows, and what is shipped for each; * marks the one present. Needs no torch.

    A GPU that is not listed can be used and tuned, too: the limits are those of its compute capability, and rates for the
    prediction of times are estimated from a listed GPU.
    """
    found = shipped_rows()
    shown = {gpu.name: standing(gpu, found) for gpu in catalogue()}
    seen = devices.find()
    if as_json:
        click.echo(_as_json(shown, seen, found))
        return
    for line in _tables(shown, {device.gpu.name.partition("@")[0] for device in seen.devices}):
        click.echo(line)
    click.echo()
    for line in _legend(shown.values()):
        click.echo(line)
    click.echo()
    for device, count in _distinct(seen.devices):
        for line in _about(device, count, found):
            click.echo(line)
    if not seen.devices:
        for line in _wrapped(f"This machine: {plain(seen.why)}."):
            click.echo(line)
