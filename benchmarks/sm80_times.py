"""A second check of the model: times A100 code on a Hopper GPU and compares with the model's prediction for it there.

    python benchmarks/sm80_times.py --out sm80_times.json        # on the GPU

    python benchmarks/sm80_times.py --again sm80_times.json      # anywhere: the same samples, the present model

Random legal A100 configs of the forward, dK/dV and dQ at head dims 64 and 128 (bf16, causal, length 4096): their sm_80 PTX
is assembled for this GPU (mma.sync and cp.async, no wgmma, no TMA) and raced against the default. Per key: Spearman's rank
correlation of measured times and predictions for that code on this GPU, over all configs and over the best quarter; the
loss of the first choice and of the best of the first five; and the correlation with the predictions for the A100 itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, fields
from functools import cache
from pathlib import Path
from typing import Any

import click
from model_fit import quality, spearman
from sm80_on_hopper import assembled

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, registry, sass
from fa2tune.compiling.compiler import Binary
from fa2tune.gpus import Gpu
from fa2tune.predicting import model
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import Variant
from fa2tune.tuning.search.candidates import legal, point

ARCH = 80
TARGET = "a100"
KERNELS, HEAD_DIMS, LENGTH = ("fwd", "bwd_dkdv", "bwd_dq"), (64, 128), 4096
LOOP_FIELDS = [spec.name for spec in fields(sass.Loop)]


def key_of(kernel: str, head_dim: int) -> TuningKey:
    gpu = gpus.named(TARGET)
    return TuningKey(gpu.name, gpu.sm_count, ARCH, kernel, "bf16", "ieee", head_dim, head_dim, "causal", LENGTH)


def _facts(cubin: str, shared_bytes: int) -> dict[str, Any]:
    registers, stack = compiler.resources(cubin)
    loops = [list(astuple(loop)) for loop in sass.counts(cubin)]
    return {"registers": registers, "stack": stack, "shared_bytes": shared_bytes, "loops": loops}


def compiled(kernel: str, spec: Specialization, config: Config, here: int) -> tuple[bytes, dict[str, Any]] | str:
    """The cubin for compute capability ``here`` and what the model needs to know of it and of the sm_80 one; or why not."""
    variant = registry.portable_of(kernel)
    try:
        binary = compiler.build(variant, spec, config, ARCH)
    except compiler.CompileError as error:
        return str(error)
    refusal = limits.after_compile(binary, gpus.named(TARGET))
    if refusal is not None:
        return refusal.why
    ptx = compiler.compile_kernel(variant, spec, config, ARCH).asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        subprocess.run([compiler.tool("ptxas"), f"--gpu-name=sm_{here}", str(source), "-o", str(cubin)], check=True)
        facts = {
            "here": _facts(str(cubin), binary.shared_bytes),
            "there": _facts(binary.cubin_path, binary.shared_bytes),
        }
        return cubin.read_bytes(), facts


def chosen(key: TuningKey, count: int, seed: int) -> list[dict[str, Any]]:
    """The default and ``count`` others, drawn at random."""
    variant, spec = registry.portable_of(key.kernel), key.specialization()
    default = dict(variant.space.default(spec, ARCH))
    others = [config for config in legal(variant, spec, gpus.named(TARGET)).configs if config != default]
    return [default, *random.Random(f"{seed} {key.kernel} {key.head_dim}").sample(others, count)]


def record(count: int, seed: int, cores: int) -> dict[str, Any]:
    """Compile on all cores, then race key by key."""
    import torch

    from fa2tune.launching import cuda, launch
    from fa2tune.measuring import measure

    gpu = gpus.present()
    if gpu is None or gpu.arch == ARCH:
        raise click.ClickException(f"needs a GPU newer than sm_{ARCH}")
    keys = [key_of(kernel, head_dim) for kernel in KERNELS for head_dim in HEAD_DIMS]
    configs = {key: chosen(key, count, seed) for key in keys}
    arch = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    built: dict[tuple[TuningKey, Any], Any] = {}
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        waiting = {
            (key, point(config)): pool.submit(compiled, key.kernel, key.specialization(), config, arch)
            for key in keys
            for config in configs[key]
        }
        built = {where: job.result() for where, job in waiting.items()}

    cubins = {}
    for (key, where), result in built.items():
        if not isinstance(result, str):
            variant = registry.portable_of(key.kernel)
            binary_config = compiler.binary_config(variant, dict(where))
            cubins[key.kernel, key.specialization(), tuple(sorted(binary_config.items()))] = result[0]

    @cache
    def load(
        variant: Variant, spec: Specialization, config: tuple[tuple[str, Any], ...], device_index: int, _measured: str = ""
    ) -> Any:  # fmt: skip
        """Stands in for ``launch.load``: this GPU's cubin of the sm_80 PTX."""
        kernel = compiler.compile_kernel(variant, spec, dict(config), ARCH)
        kernel.kernel = cubins.get((variant.name, spec, config)) or assembled(variant, spec, config)
        kinds = launch.kinds(variant, spec, dict(config))
        return cuda.Function(launch.image_of(kernel), kinds, device_index, "sm_80 PTX")

    launch.load = load
    entries = []
    for key in keys:
        runnable = [config for config in configs[key] if not isinstance(built[key, point(config)], str)]
        race = measure.race(key, runnable, "screen")
        anchor = race.times[0]
        for index, (config, times) in enumerate(zip(runnable, race.times, strict=True)):
            if index in race.failures or not times:
                click.echo(f"{key.kernel} {key.head_dim} {config}: {race.failures.get(index)}", err=True)
                continue
            ratio = statistics.median(time / first for time, first in zip(times, anchor, strict=False))
            entries.append({
                "kernel": key.kernel, "head_dim": key.head_dim, "config": config,
                "time_us": round(ratio * statistics.median(anchor), 2), **built[key, point(config)][1],
            })  # fmt: skip
        click.echo(f"{key.kernel} {key.head_dim}: {len(runnable)} of {len(configs[key])} configs raced", err=True)
    return {
        "gpu": gpu.name, "target": TARGET, "causal": True, "length": LENGTH, "loop_fields": LOOP_FIELDS, "entries": entries
    }  # fmt: skip


def _predicted_us(entry: Mapping[str, Any], side: str, names: Sequence[str], gpu: Gpu) -> float:
    key, facts = key_of(entry["kernel"], entry["head_dim"]), entry[side]
    name = registry.portable_of(key.kernel).name
    binary = Binary(
        name, key.specialization(), entry["config"], gpu.arch, facts["shared_bytes"], entry["config"]["num_warps"],
        facts["registers"], facts["stack"], "",
    )  # fmt: skip
    known = set(LOOP_FIELDS)
    loops = [
        sass.Loop(**{name: value for name, value in zip(names, values, strict=True) if name in known})
        for values in facts["loops"]
    ]
    return model.predict(binary, key.workload(), gpu, loops) * 1e6


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Per key: the model's quality on the GPU that measured, and the correlation with its predictions for the A100."""
    result = {}
    for kernel in KERNELS:
        for head_dim in HEAD_DIMS:
            here = [e for e in found["entries"] if (e["kernel"], e["head_dim"]) == (kernel, head_dim)]
            if not here:
                continue
            times = [entry["time_us"] for entry in here]
            predicted, there = (
                [_predicted_us(entry, side, found["loop_fields"], gpus.named(gpu)) for entry in here]
                for side, gpu in (("here", found["gpu"]), ("there", found["target"]))
            )
            result[f"{kernel} {head_dim}"] = {**quality(times, predicted), "spearman_target": spearman(times, there)}
    return result


@click.command(help=__doc__)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Measure, and write samples and figures here."
)
@click.option(
    "--again", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Samples of an earlier run."
)
@click.option("--configs", "count", default=40, show_default=True, help="In addition to the default, per key.")
@click.option("--seed", default=0, show_default=True)
@click.option("--cores", default=len(os.sched_getaffinity(0)), show_default="all")
def main(out: Path | None, again: Path | None, count: int, seed: int, cores: int) -> None:
    if (out is None) == (again is None):
        raise click.UsageError("give --out to measure, or --again to compare earlier samples")
    found = json.loads(again.read_text()) if again else record(count, seed, cores)
    found["figures"] = figures(found)
    columns = ("n", "spearman", "spearman_best", "regret_1", "regret_5", "level", "spearman_target")
    click.echo(f"{'key':14}" + "".join(f"{column:>17}" for column in columns))
    for key, row in found["figures"].items():
        click.echo(f"{key:14}" + "".join(f"{row[column]:17.3f}" for column in columns))
    if out is not None:
        out.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
