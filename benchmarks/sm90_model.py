"""How well the model predicts the warp-specialised kernels of kernels/sm90: its times against those of the shipped rows of an
H200, and its ranking of the configs of recorded races (launch_choices.py), to which nothing is fitted.

    python benchmarks/sm90_model.py          # recorded counts, the present constants, no compile
    python benchmarks/sm90_model.py --fit    # constants fitted to the rows; and the errors of fits without some head dims
    python benchmarks/sm90_model.py --count  # compile the configs of rows and races, and record what their loops hold

Predicted / measured time: its median is the level, its errors are logarithms.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from model_fit import quality
from scipy.optimize import least_squares

from fa2tune import gpus
from fa2tune.compiling import compiler, registry, sass
from fa2tune.compiling.compiler import Binary
from fa2tune.predicting import model
from fa2tune.report.facts import workload
from fa2tune.rows import reader
from fa2tune.rows.row import WORKLOAD
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import BACKWARD, FUSED, Problem, Specialization
from fa2tune.spec.variant import WARP_SPECIALIZED
from fa2tune.tuning.select.evidence import streaming_us

HERE = Path(__file__).parent / "calls"
COUNTS = HERE / "sm90_counts.json.gz"
RACES = "launch_choices_small", "launch_choices_small_64"
GPU, TRITON = "h200", "3.6"
LOOP_FIELDS = [one.name for one in fields(sass.Loop)]
#: Constants -> (where the fit starts, how far from there counts as one deviation of the logarithm). Two of ``block``: of a
#: program a tile, and of persistent ones.
FITTED = {
    "clock": (0.87, 0.3), "mixed": (0.2, 1.0), "own_bytes": (60.0, 1.0), "block": (3000.0, 0.7), "persistent": (2000.0, 0.7)
}  # fmt: skip
PRIOR = 0.05  #: weight of a deviation
OUTLIER = 0.1  #: logarithmic error from which on it counts linearly only
LEFT_OUT = (64,), (128,), (256,), (32, 80, 96, 144, 160, 192)  #: head dims that a fit does without, by turns


@dataclass(frozen=True)
class Sample:
    """A config that was timed."""

    binary: Binary
    loops: tuple[sass.Loop, ...]
    problem: Problem
    us: float
    race: str = ""  #: "": a row

    @cached_property
    def kernel(self) -> str:
        return registry.variant_named(self.binary.kernel).serves

    @cached_property
    def alone_us(self) -> float:
        """Without what runs before and after a fused backward, which the model does not count."""
        around = streaming_us(self.problem, FUSED, gpus.named(GPU)) if self.kernel == "bwd_fused" else 0.0
        return self.us - around

    @cached_property
    def constants(self) -> model.Calibration:
        return model.calibration_of(registry.variant_named(self.binary.kernel), self.binary.config)

    def error(self, fitted: Mapping[str, float] | None = None) -> float:
        """Logarithm of predicted / measured time. ``fitted``: other constants than the model's."""
        constants = self.constants if fitted is None else calibration(fitted, self.constants is model.PERSISTENT)
        found = model.explain(self.binary, self.problem, gpus.named(GPU), constants, self.loops)
        return math.log(found.seconds * 1e6 / self.alone_us)


def calibration(fitted: Mapping[str, float], persistent: bool) -> model.Calibration:
    block = fitted["persistent" if persistent else "block"]
    return replace(model.CALIBRATION, **{**{k: v for k, v in fitted.items() if k != "persistent"}, "block": block})


# ---- what was timed


def timed() -> Iterator[tuple[str, Specialization, dict[str, Any], dict[str, int], float, str]]:
    """(kernel, specialization, config, workload, microseconds, race) of rows and races."""
    rows = (row for layer in reader.layers() for row in layer.rows)
    for row in rows:
        wanted = row.implementation == WARP_SPECIALIZED and row.key.kernel != BACKWARD
        if row.key.gpu == GPU and row.triton.startswith(TRITON) and wanted and row.time_us:
            variant, config = registry.fitting(row.key.kernel, row.implementation, row.config)
            sizes = {name: getattr(workload(row), name) for name in WORKLOAD}
            yield variant.name, row.key.specialization(), config, sizes, row.time_us, ""
    variant = registry.implementations("fwd")[WARP_SPECIALIZED]
    for name in RACES:
        for number, case in enumerate(json.loads(gzip.decompress((HERE / f"{name}.json.gz").read_bytes()))["cases"]):
            shape = case["shape"]
            spec = Specialization("bf16", *2 * (shape["head_dim"],), "causal" if shape["causal"] else "full")
            for one in case["candidates"]:
                config = variant.space.completed({"IN_PARTS": "none", **one["configs"]["fwd"]})
                if "LOADS" not in config:
                    sizes = {size: shape[size] for size in WORKLOAD}
                    yield variant.name, spec, config, sizes, one["us"], f"{name} {number}"


def counted() -> dict[str, Any]:
    """Of all that was timed, each binary once."""
    binaries: dict[str, dict[str, Any]] = {}
    samples = []
    for kernel, spec, config, sizes, us, race in timed():
        variant = registry.variant_named(kernel)
        compiled = compiler.binary_config(variant, config)
        name = repr((kernel, spec, sorted(compiled.items())))
        if name not in binaries:
            built = compiler.build(variant, spec, compiled, gpus.named(GPU).arch)
            pair = model.plain_and_masked(sass.counts(built.cubin_path))
            binaries[name] = {
                "kernel": kernel, "spec": [spec.dtype, spec.head_dim, spec.head_dim_v, spec.mask],
                "shared_bytes": built.shared_bytes, "num_warps": built.num_warps, "registers": built.registers,
                "stack": built.stack_bytes, "loops": [[getattr(loop, name) for name in LOOP_FIELDS] for loop in pair],
            }  # fmt: skip
            click.echo(f"{len(binaries)} compiled", err=True)
        samples.append(
            {"binary": [*binaries].index(name), "config": config, "sizes": [*sizes.values()], "us": us, "race": race}
        )
    return {"gpu": GPU, "binaries": [*binaries.values()], "samples": samples}


def load(path: Path = COUNTS) -> list[Sample]:
    data = json.loads(gzip.decompress(path.read_bytes()))
    arch, found = gpus.named(data["gpu"]).arch, []
    for one in data["samples"]:
        facts = data["binaries"][one["binary"]]
        spec, space = Specialization(*facts["spec"]), registry.variant_named(facts["kernel"]).space
        binary = Binary(
            facts["kernel"], spec, space.completed(one["config"]), arch, facts["shared_bytes"], facts["num_warps"],
            facts["registers"], facts["stack"], "",
        )  # fmt: skip
        loops = tuple(sass.Loop(**dict(zip(LOOP_FIELDS, values, strict=True))) for values in facts["loops"])
        dims = spec.head_dim, spec.head_dim_v
        problem = Problem(spec.dtype, *one["sizes"], *dims, {mask.name: mask for mask in (CAUSAL, FULL)}[spec.mask])
        found.append(Sample(binary, loops, problem, one["us"], one["race"]))
    return found


# ---- how well


def errors(samples: Sequence[Sample], fitted: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Kernel -> logarithms of predicted / measured time."""
    found: dict[str, list[float]] = {}
    for one in samples:
        found.setdefault(one.kernel, []).append(one.error(fitted))
    return {kernel: np.array(values) for kernel, values in found.items()}


def figures(samples: Sequence[Sample], fitted: Mapping[str, float] | None = None) -> dict[str, dict[str, float]]:
    """Per kernel: how many, the level, and the median, 90 % quantile and largest of the errors' sizes."""
    return {
        kernel: {
            "n": len(found), "level": math.exp(np.median(found)), "median": float(np.median(abs(found))),
            "p90": float(np.quantile(abs(found), 0.9)), "most": float(abs(found).max()),
        }
        for kernel, found in errors(samples, fitted).items()
    }  # fmt: skip


def races(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """Per race: ``model_fit.quality`` of its ranking; "default": how far the default behind the best, where it ran."""
    by_race: dict[str, list[Sample]] = {}
    for one in samples:
        by_race.setdefault(one.race, []).append(one)
    by_race.pop("", None)
    found = []
    for own in by_race.values():
        figure = quality([one.us for one in own], [one.us * math.exp(one.error()) for one in own])
        binary = own[0].binary
        default = registry.variant_named(binary.kernel).space.default(binary.spec, binary.arch)
        its_us = [one.us for one in own if one.binary.config == default]
        figure["default"] = min(its_us) / min(one.us for one in own) - 1 if its_us else math.nan
        found.append(figure)
    return found


def fit(samples: Sequence[Sample]) -> dict[str, float]:
    """Constants by least squares on the errors, each kernel's together as much as another's, near where they start."""
    start, spread = (np.array([entry[place] for entry in FITTED.values()]) for place in (0, 1))
    middle = np.log(start)

    def residuals(logs: Any) -> Any:
        found = errors(samples, dict(zip(FITTED, np.exp(logs).tolist(), strict=True)))
        parts = [values / np.sqrt(len(values)) for values in found.values()]
        return np.concatenate([*parts, PRIOR * (logs - middle) / spread])

    found = least_squares(
        residuals, middle, diff_step=1e-2, loss="soft_l1", f_scale=OUTLIER, xtol=1e-3, ftol=1e-4
    )  # fmt: skip
    return dict(zip(FITTED, np.exp(found.x).tolist(), strict=True))


def show(title: str, found: Mapping[str, Mapping[str, float]]) -> None:
    for kernel, one in found.items():
        click.echo(
            f"{title:24} {kernel:10} {one['n']:4} configs, predicted / measured {one['level']:.2f}, error: median "
            f"{one['median']:.3f}, 90 % {one['p90']:.3f}, most {one['most']:.3f}"
        )


def show_fits(rows: Sequence[Sample], say: Callable[[str], None] = click.echo) -> None:
    fitted = fit(rows)
    say(", ".join(f"{name} {value:.4g}" for name, value in fitted.items()))
    show("fitted", figures(rows, fitted))
    for dims in LEFT_OUT:
        others = fit([one for one in rows if one.problem.head_dim not in dims])
        show(
            f"without {', '.join(map(str, dims))}",
            figures([one for one in rows if one.problem.head_dim in dims], others),
        )


@click.command(help=__doc__)
@click.option("--count", is_flag=True, help="Compile first, and record.")
@click.option("--fit", "fits", is_flag=True, help="Fit constants.")
def main(count: bool, fits: bool) -> None:
    if count:
        COUNTS.write_bytes(gzip.compress(json.dumps(counted(), separators=(",", ":")).encode(), mtime=0))
    samples = load()
    rows = [one for one in samples if not one.race]
    show("present constants", figures(rows))
    found = races(samples)
    click.echo(f"{len(found)} races, {sum(int(one['n']) for one in found)} configs")
    for name in ("spearman", "level", "regret_1", "regret_5", "default"):
        values = sorted(one[name] for one in found if not math.isnan(one[name]))
        click.echo(f"{name:10} median {median(values):.3f}, {values[0]:.3f} to {values[-1]:.3f}, of {len(values)}")
    if fits:
        show_fits(rows)


if __name__ == "__main__":
    main()
