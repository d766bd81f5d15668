"""Proves the numerics of an A100 cache file on a Hopper GPU: sm_80 PTX is assembled for sm_90, run and checked.

    python benchmarks/sm80_on_hopper.py a100.sqlite proved.sqlite

The code uses mma.sync and cp.async as on an A100; ptxas' sm_80 back end is not tested. Every distinct (kernel,
specialization, config) is checked, gradients included. Rows that pass get the proof "sibling"; one that fails is dropped
and named.
"""

from __future__ import annotations

import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import click

from fa2tune.compiling import compiler, registry
from fa2tune.launching import cuda, launch
from fa2tune.measuring import verify
from fa2tune.rows import reader
from fa2tune.rows.row import SIBLING
from fa2tune.rows.store import Store
from fa2tune.spec.problem import BACKWARD, STRATEGIES, Specialization
from fa2tune.spec.variant import Variant

ARCH, HERE = 80, 90


@cache
def assembled(variant: Variant, spec: Specialization, config: tuple[tuple[str, Any], ...]) -> bytes:
    """The kernel's sm_80 PTX as an sm_90 cubin."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiler.compile_kernel(variant, spec, dict(config), ARCH).asm["ptx"])
        subprocess.run([compiler.tool("ptxas"), f"--gpu-name=sm_{HERE}", str(ptx), "-o", str(cubin)], check=True)
        return cubin.read_bytes()


def load(
    variant: Variant, spec: Specialization, config: tuple[tuple[str, Any], ...], device_index: int, _measured: str = ""
) -> Any:  # fmt: skip
    """Stands in for ``launch.load``."""
    compiled = compiler.compile_kernel(variant, spec, dict(config), ARCH)
    compiled.kernel = assembled(variant, spec, config)
    kinds = launch.kinds(variant, spec, dict(config))
    return cuda.Function(launch.image_of(compiled), kinds, device_index, "sm_80 PTX")


@click.command(help=__doc__)
@click.argument("predicted", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("proved", type=click.Path(exists=False, path_type=Path))
def main(predicted: Path, proved: Path) -> None:
    launch.load = load  # type: ignore[assignment]
    rows = list(reader.read(predicted))
    jobs = {
        (row.key.kernel, row.key.specialization(), tuple(sorted(row.config.items())))
        for row in rows
        if row.key.kernel != BACKWARD
    }
    with ThreadPoolExecutor() as pool:  # compile ahead
        list(pool.map(lambda job: assembled(registry.variant_of(job[0], dict(job[2])), job[1], job[2]), jobs))
    errors: dict[Any, verify.Errors] = {}
    for job in sorted(jobs, key=str):
        kernel, spec, config = job
        try:
            errors[job] = verify.check(kernel, dict(config), spec, ARCH, device="cuda")
        except verify.WrongResult as wrong:
            click.echo(f"dropped: {kernel} {spec} {dict(config)}: {wrong}")
    kept = []
    for row in rows:
        job = row.key.kernel, row.key.specialization(), tuple(sorted(row.config.items()))
        if job in errors:
            kept.append(replace(row, proof=SIBLING, errors=errors[job]))
    proved_keys = {row.key for row in kept}
    for row in rows:
        if row.key.kernel == BACKWARD and all(
            row.key.with_(kernel=kernel) in proved_keys for kernel in STRATEGIES[row.strategy]
        ):
            kept.append(replace(row, proof=SIBLING))
    Store(proved).put(kept)
    click.echo(f"{len(errors)} of {len(jobs)} configs right, {len(kept)} of {len(rows)} rows kept: {proved}")


if __name__ == "__main__":
    main()
