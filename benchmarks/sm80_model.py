"""How well the model predicts the kernels of kernels/sm80: its times against the races of sm_80 code on a Hopper GPU.

    python benchmarks/sm80_model.py                        # the recorded counts, the present model: no compile
    python benchmarks/sm80_model.py --count sm80_race.json   # compile the configs of a race (sm80_race.py), record their counts

Counts are of the machine code: of sm_80's for an A100, and of the same PTX assembled for the GPU that raced. Per pass, head
dim, mask and length: Spearman's rank correlation, what the model's first choice costs, and predicted over measured time.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
from model_fit import spearman

from fa2tune import gpus
from fa2tune.compiling import compiler, registry, sass
from fa2tune.compiling.compiler import Binary
from fa2tune.launching import ported
from fa2tune.predicting import model
from fa2tune.rows.describe import describe
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.search.candidates import legal

COUNTS = Path(__file__).parent / "calls" / "sm80_counts.json.gz"
KERNELS = {"fwd": "sm80/fwd", "bwd": "sm80/bwd_fused"}
PEER = "SDPA FlashAttention-2"
LOOP_FIELDS = [spec.name for spec in fields(sass.Loop) if spec.name != "phases"]
LEAST = 2048  #: shorter lengths are launches and tails, of which the model knows little


@dataclass(frozen=True)
class Sample:
    """A config that was raced, and what its machine code holds."""

    pass_: str
    head_dim: int
    mask: str
    config: Mapping[str, Any]
    sides: Mapping[str, Any]  #: "here", "there" -> registers, stack, shared_bytes, loops
    times: Mapping[str, float]  #: length -> milliseconds

    @property
    def spec(self) -> Specialization:
        return Specialization("bf16", self.head_dim, self.head_dim, self.mask)

    def key(self, gpu: gpus.Gpu, kernel: str, length: int) -> TuningKey:
        dims = self.head_dim, self.head_dim
        return TuningKey(gpu.name, gpu.sm_count, gpu.arch, kernel, "bf16", "ieee", *dims, self.mask, length)

    def predicted_ms(self, gpu: gpus.Gpu, side: str, length: int) -> float:
        variant, facts = registry.variant_named(KERNELS[self.pass_]), self.sides[side]
        binary = Binary(
            variant.name, self.spec, self.config, gpu.arch, facts["shared_bytes"], self.config["num_warps"],
            facts["registers"], facts["stack"], "",
        )  # fmt: skip
        loops = [sass.Loop(**dict(zip(LOOP_FIELDS, values, strict=True))) for values in facts["loops"]]
        key = self.key(gpu, variant.serves, length)
        return model.predict(binary, key.workload(), gpu, loops) * 1e3


def _facts(cubin: str, shared_bytes: int) -> dict[str, Any]:
    registers, stack = compiler.resources(cubin)
    loops = [[getattr(loop, name) for name in LOOP_FIELDS] for loop in sass.counts(cubin)]
    return {"registers": registers, "stack": stack, "shared_bytes": shared_bytes, "loops": loops}


def counted(race: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Compile the configs of a race (benchmarks/sm80_race.py), by the names that the search spaces of today give them."""
    cells: dict[tuple[str, int, str], dict[str, dict[str, float]]] = {}
    for cell in race["cells"]:
        named = cells.setdefault((cell["pass"], cell["head_dim"], cell["mask"]), {})
        for name, found in cell["methods"].items():
            if name != PEER:
                named.setdefault(name, {})[str(cell["length"])] = found["ms"]
    for (pass_, head_dim, mask), named in cells.items():
        variant, spec = registry.variant_named(KERNELS[pass_]), Specialization("bf16", head_dim, head_dim, mask)
        card = gpus.named(race["limits"])
        default = dict(variant.space.default(spec, card.arch))
        known = {describe(config): config for config in [*legal(variant, spec, card).configs, default]}
        for name, times in named.items():
            if name not in known:
                click.echo(f"left out, as no config of today has this name: {pass_} {head_dim} {mask} {name}", err=True)
                continue
            config = compiler.binary_config(variant, known[name])
            there = compiler.build(variant, spec, config, ported.CODE)
            code = ported.assembled(compiler.compile_kernel(variant, spec, config, ported.CODE), ported.HOSTS[0])
            with tempfile.TemporaryDirectory() as folder:
                here = Path(folder) / "kernel.cubin"
                here.write_bytes(code)
                sides = {
                    "here": _facts(str(here), there.shared_bytes), "there": _facts(there.cubin_path, there.shared_bytes)
                }  # fmt: skip
            click.echo(f"{pass_} {head_dim} {mask} {name}", err=True)
            yield {
                "pass_": pass_, "head_dim": head_dim, "mask": mask, "config": known[name], "sides": sides, "times": times
            }  # fmt: skip


def load(path: Path = COUNTS) -> tuple[str, list[Sample]]:
    """(the GPU that raced, samples)."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    return data["gpu"], [Sample(**one) for one in data["samples"]]


def figures(gpu_name: str, samples: list[Sample]) -> list[dict[str, Any]]:
    """A line a pass, head dim, mask and length."""
    gpu, found = gpus.named(gpu_name), []
    keys = dict.fromkeys((one.pass_, one.head_dim, one.mask, length) for one in samples for length in one.times)
    for pass_, head_dim, mask, length in keys:
        if int(length) < LEAST:
            continue
        own = [one for one in samples if (one.pass_, one.head_dim, one.mask) == (pass_, head_dim, mask)]
        times = [one.times[length] for one in own]
        predicted = [one.predicted_ms(gpu, "here", int(length)) for one in own]
        found.append({
            "pass": pass_, "head_dim": head_dim, "mask": mask, "length": int(length), "configs": len(own),
            "spearman": spearman(times, predicted),
            "first": times[predicted.index(min(predicted))] / min(times) - 1,
            "level": median(p / t for p, t in zip(predicted, times, strict=True)),
        })  # fmt: skip
    return found


def on(target: str, samples: list[Sample], length: int) -> Iterator[tuple[str, float]]:
    """(pass, head dim and mask, TFLOP/s of the default config that the model expects of a GPU)."""
    gpu, seen = gpus.named(target), set()
    for one in samples:
        what = (one.pass_, one.head_dim, one.mask)
        if what not in seen:  # the default is the first of each
            seen.add(what)
            flops = one.key(gpu, one.pass_, length).workload().flops(one.pass_)
            yield f"{one.pass_} {one.head_dim} {one.mask}", flops / one.predicted_ms(gpu, "there", length) * 1e-9


@click.command(help=__doc__)
@click.option(
    "--count", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A race to take the configs of."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=COUNTS, show_default=True)
@click.option("--target", default="a100", show_default=True)
def main(count: Path | None, out: Path, target: str) -> None:
    if count is not None:
        race = json.loads(count.read_text())
        text = json.dumps({"gpu": race["gpu"], "samples": list(counted(race))}, separators=(",", ":"))
        out.write_bytes(gzip.compress(text.encode(), mtime=0))
    gpu, samples = load(out)
    found = figures(gpu, samples)
    for one in found:
        click.echo(
            f"{one['pass']} {one['head_dim']:3} {one['mask']:6} {one['length']:5}: {one['configs']} configs, Spearman "
            f"{one['spearman']:.2f}, first choice {100 * one['first']:.1f} % behind, predicted / measured {one['level']:.2f}"
        )
    click.echo(
        f"mean Spearman {mean(one['spearman'] for one in found):.2f}, worst first choice "
        f"{100 * max(one['first'] for one in found):.1f} %, predicted / measured {median(one['level'] for one in found):.2f}"
    )
    for what, tflops in on(target, samples, 16384):
        click.echo(f"{target} {what} 16384, default config: {tflops:.0f} TFLOP/s expected")


if __name__ == "__main__":
    main()
