"""Which variant's default serves best where no row does: the portable default against the warp-specialised one, timed.

    python benchmarks/default_of_variants.py [--seconds 600]

For head dims 16 to 256, both masks and three lengths at 16k tokens (bf16): the forward, and the deterministic backward (split
road), each by the default config of either variant, interleaved on a warm card with a cold L2. Prints the portable time over
the other's: above 1 the warp-specialised default is faster. fa2tune/calling/defaults.py rests on it. Needs a Hopper GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click

from fa2tune.calling.defaults import variant_default
from fa2tune.compiling import compiler
from fa2tune.gpus import Gpu
from fa2tune.measuring.samples import gain_over
from fa2tune.problem import BACKWARD, ROADS, SPLIT, TuningKey

DIMS = ((16, 16), (32, 32), (48, 48), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
LENGTHS = (512, 2048, 8192)


def pairs(gpu: Gpu) -> Iterator[tuple[TuningKey, Any, Any]]:
    """(key, portable default, warp-specialised default), as measure.race takes them."""
    for dims in DIMS:
        for causal in (False, True):
            for length in LENGTHS:
                key = TuningKey(gpu.name, gpu.sm_count, gpu.arch, "fwd", "bf16", "ieee", *dims, causal, length)
                spec = key.specialization()
                both = [variant_default("fwd", spec, gpu, kind) for kind in (False, True)]
                if both[1] is not None:
                    yield key, both[0], both[1]
                roads = [{one: variant_default(one, spec, gpu, kind) for one in ROADS[SPLIT]} for kind in (False, True)]
                for kernel in ROADS[SPLIT]:  # one may be able where the other is not
                    if roads[1][kernel] is None:
                        roads[1][kernel] = roads[0][kernel]
                if roads[0] != roads[1]:
                    portable, other = ({"road": "split", "configs": road} for road in roads)
                    yield key.with_(kernel=BACKWARD), portable, other


def _compile(key: TuningKey, kernel: str, config: Any) -> None:
    compiler.compile_kernel(compiler.variant_of(kernel, config), key.specialization(), config, key.arch)


@click.command(help=__doc__)
@click.option("--seconds", type=float, default=600.0, show_default=True, help="No new race after so long.")
@click.option("--workers", type=int, default=16, show_default=True, help="Compiling at a time.")
def main(seconds: float, workers: int) -> None:
    from fa2tune import gpus
    from fa2tune.measuring import measure

    gpu = gpus.present()
    if gpu is None:
        raise click.ClickException("needs a CUDA GPU that torch can use")
    begun, found = time.monotonic(), list(pairs(gpu))
    jobs = [
        (key, kernel, config)
        for key, *both in found if key.bucket == LENGTHS[0]
        for one in both for kernel, config in (one["configs"] if "road" in one else {"fwd": one}).items()
    ]  # fmt: skip
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True)))
    shares: dict[tuple[Any, ...], list[float]] = {}
    for key, portable, other in found:
        if time.monotonic() - begun > seconds:
            raise click.ClickException("out of time")
        race = measure.race(key, [portable, other], "screen")
        ratio = None if race.failures else gain_over(*race.times).median
        mask = "causal" if key.causal else "full"
        of = f"{key.kernel:4} {key.head_dim:3} x {key.head_dim_v:3} {mask:6} {key.bucket:6}"
        click.echo(f"{of}  {race.failures or f'{ratio:.2f}'}")
        if ratio is not None:
            shares.setdefault((key.kernel, key.head_dim, key.head_dim_v), []).append(ratio)
    for (kernel, d, dv), ratios in shares.items():
        click.echo(
            f"{kernel} {d} x {dv}: geometric mean {statistics.geometric_mean(ratios):.2f}, worst {min(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
