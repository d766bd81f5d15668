"""Times the portable default config against the warp-specialised default config, for calls that no row serves.

    python benchmarks/default_of_variants.py [--seconds 600]
    python benchmarks/default_of_variants.py --wider          # against the rows of head dim 64, for head dims 16 and 32

Head dims 16 to 256, both masks, three lengths at 16k tokens, bf16: the forward, and the deterministic backward (split),
each with either default, interleaved on a warm GPU with a cold L2. Prints the portable time divided by the other: above 1,
the warp-specialised default is faster. ``default_from`` in the search spaces is based on it. With --wider the other is
what a call gets (rows of wider head dims), and the backward may be the fused one. Needs a Hopper GPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click

from fa2tune.calling.choosing import Chooser, choose_backward
from fa2tune.compiling import compiler, limits, registry
from fa2tune.compiling.support import supports
from fa2tune.gpus import Gpu
from fa2tune.measuring.samples import gain_over
from fa2tune.spec.key import TuningKey
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BACKWARD, SPLIT, STRATEGIES, Config, Specialization
from fa2tune.spec.variant import WARP_SPECIALIZED

DIMS = ((16, 16), (32, 32), (48, 48), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
NARROW = ((16, 16), (32, 32))  #: of --wider
LENGTHS = (512, 2048, 8192)


def variant_default(kernel: str, spec: Specialization, gpu: Gpu, specialized: bool) -> Config | None:
    """The default of a kernel's portable variant, or of its warp-specialised one; None where that cannot run on this GPU."""
    for variant in registry.variants_of(kernel):
        alike = WARP_SPECIALIZED in variant.implementations if specialized else variant.portable
        if alike and supports(variant, spec, gpu):
            config = variant.space.default(spec, gpu.arch)
            if limits.before_compile(variant, spec, config, gpu) is None:
                return config
    return None


def pairs(gpu: Gpu) -> Iterator[tuple[TuningKey, Any, Any]]:
    """(key, portable default, warp-specialised default), as measure.race takes them."""
    for dims in DIMS:
        for mask in ROW_MASKS:
            for length in LENGTHS:
                key = TuningKey(gpu.name, gpu.sm_count, gpu.arch, "fwd", "bf16", "ieee", *dims, mask, length)
                spec = key.specialization()
                both = [variant_default("fwd", spec, gpu, kind) for kind in (False, True)]
                if both[1] is not None:
                    yield key, both[0], both[1]
                both_kinds = [
                    {one: variant_default(one, spec, gpu, kind) for one in STRATEGIES[SPLIT]} for kind in (False, True)
                ]
                # one kernel may have a warp-specialised variant where the other has none
                for kernel in STRATEGIES[SPLIT]:
                    if both_kinds[1][kernel] is None:
                        both_kinds[1][kernel] = both_kinds[0][kernel]
                if both_kinds[0] != both_kinds[1]:
                    portable, other = ({"strategy": "split", "configs": configs} for configs in both_kinds)
                    yield key.with_(kernel=BACKWARD), portable, other


def wider_pairs(gpu: Gpu) -> Iterator[tuple[TuningKey, Any, Any]]:
    """(key, portable default, what serves a call), as measure.race takes them."""
    for dims, mask, length in itertools.product(NARROW, ROW_MASKS, LENGTHS):
        key = TuningKey(gpu.name, gpu.sm_count, gpu.arch, "fwd", "bf16", "ieee", *dims, mask, length)
        chooser = Chooser(key.workload(), gpu)
        yield key, chooser.portable_default("fwd").config, chooser.choose("fwd").config
        strategy, choices = choose_backward(chooser, deterministic=False)
        portable = {kernel: chooser.portable_default(kernel).config for kernel in STRATEGIES[SPLIT]}
        served = {kernel: choice.config for kernel, choice in choices.items()}
        default = {"strategy": SPLIT, "configs": portable}
        yield key.with_(kernel=BACKWARD), default, {"strategy": strategy, "configs": served}


def _compile(key: TuningKey, kernel: str, config: Any) -> None:
    compiler.compile_kernel(registry.variant_of(kernel, config), key.specialization(), config, key.arch)


@click.command(help=__doc__)
@click.option("--seconds", type=float, default=600.0, show_default=True, help="Start no race after this time.")
@click.option("--workers", type=int, default=16, show_default=True, help="Compiles at a time.")
@click.option("--wider", is_flag=True, help="Against the rows that serve narrow head dims.")
def main(seconds: float, workers: int, wider: bool) -> None:
    from fa2tune import gpus
    from fa2tune.measuring import measure

    gpu = gpus.present()
    if gpu is None:
        raise click.ClickException("needs a CUDA GPU that torch can use")
    begun, found = time.monotonic(), list((wider_pairs if wider else pairs)(gpu))
    jobs = [
        (key, kernel, config)
        for key, *both in found if wider or key.bucket == LENGTHS[0]
        for one in both for kernel, config in (one["configs"] if "strategy" in one else {"fwd": one}).items()
    ]  # fmt: skip
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True)))
    shares: dict[tuple[Any, ...], list[float]] = {}
    for key, portable, other in found:
        if time.monotonic() - begun > seconds:
            raise click.ClickException("out of time")
        race = measure.race(key, [portable, other], "screen")
        ratio = None if race.failures else gain_over(*race.times).median
        mask = key.mask
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
