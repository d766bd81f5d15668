"""``fa2tune gpus``: the catalogue, and which of it is in this machine."""

from __future__ import annotations

import click

from fa2tune.gpus import GIB, KIB, Gpu, catalogue, present


def _row(gpu: Gpu, here: Gpu | None) -> tuple[str, ...]:
    return (
        "*" if gpu == here else "", gpu.name, gpu.silicon, f"{gpu.arch // 10}.{gpu.arch % 10}", str(gpu.sm_count),
        f"{gpu.shared_per_block // KIB} KiB", f"{gpu.tensor_tflops:.0f}", f"{gpu.hbm_bytes // GIB} GiB",
        f"{gpu.hbm_gbs:.0f}",
    )  # fmt: skip


@click.command()
def gpus() -> None:
    """List the GPUs that --gpu knows; * marks the one present."""
    here = present()
    known = catalogue()
    # a slice, or a GPU that is not listed, has a line of its own
    rows = [_row(gpu, here) for gpu in (known if here is None or here in known else (*known, here))]
    head = ("", "name", "chip", "capability", "SMs", "shared/block", "TFLOP/s", "memory", "GB/s")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = (cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        click.echo("  ".join(cells).rstrip())
    click.echo("\nTFLOP/s: dense bf16 with float32 sums. a100 = a100-sxm-80gb, h100 = h100-sxm; a slice: a100@42sm.")
    click.echo(f"Present: {here.name}, {here.sm_count} SMs." if here else "Present: no CUDA GPU.")
