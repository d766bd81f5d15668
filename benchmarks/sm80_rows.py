"""Rows for GPUs without wgmma, raced as sm_80 code on a Hopper GPU ("ported"), in slices that resume.

    python benchmarks/sm80_rows.py build STATE                       # anywhere, optional: compile what will be raced
    python benchmarks/sm80_rows.py race STATE --seconds 80           # on the Hopper GPU; again until it says "done"
    python benchmarks/sm80_rows.py race STATE --seconds 80 --dtype fp16   # what won in bf16, raced again
    python benchmarks/sm80_rows.py race STATE --kernel fwd --headdim 96 --seqlen 512,4096   # of them these alone
    python benchmarks/sm80_rows.py show STATE                        # what leads
    python benchmarks/sm80_rows.py file STATE OUT                    # anywhere: OUT/a100-sxm-80gb.sqlite
    python benchmarks/sm80_rows.py file STATE OUT --gpu l4 --also a10,l40s   # those with the limits of an L4, too

--gpu names the GPU whose limits and occupancy count, and for which rows are filed (a100, a10, l4, rtx-4090, ...). Per head dim,
mask and length there are two races: of the forward, the portable default and what sm80_candidates.py names; of the whole
backward, the split backward of the portable defaults and the fused one of kernels/sm80 with each of its candidates. The fastest
is checked by the error rule, gradients included; the kernel's own default stays unless another beats it beyond the interval.
A row of the kernel bwd_fused has the time of the whole pass: nothing else runs in it. Races of other kernel sources than
today's count as not run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import click
from sm80_candidates import SM80, candidates

from fa2tune import gpus
from fa2tune.cli._options import comma_separated
from fa2tune.compiling import compiler, fingerprint, limits, registry
from fa2tune.gpus import Gpu
from fa2tune.launching import ported
from fa2tune.launching.image import Image
from fa2tune.measuring.samples import EFFORTS, Effort, ratios
from fa2tune.rows import reader
from fa2tune.rows.describe import describe
from fa2tune.rows.row import PORTED, Row, backward_implementation
from fa2tune.rows.store import Store
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, BUCKETS, FUSED, SPLIT, STRATEGIES, Config, Specialization
from fa2tune.spec.variant import Variant, implementation_of
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.search.candidates import Point, point
from fa2tune.tuning.select import evidence, finalists

KERNELS = ("fwd", BACKWARD)
#: Rounds are fixed beforehand, so that the intervals hold. A race has few contenders, all known to be near the front.
EFFORTS["ported"] = Effort(0.04, 10, 30, tie=None)
#: Variant's name, specialization, what a binary depends on.
Asked = tuple[str, Specialization, Point]


@cache
def sources(kernel: str, mask: str) -> dict[str, str]:
    """Of the kernel that the rows of a race are of, the hash of its source."""
    name = SM80["fwd" if kernel == "fwd" else "bwd_fused"]
    return {name: fingerprint.kernel_hash(registry.variant_named(name), mask)}


def of_today(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is of the sources that are here."""
    now = sources(entry["about"][0], entry["about"][3])
    return now.items() <= entry["sources"].items()


def key_of(kernel: str, spec: Specialization, length: int, gpu: Gpu) -> TuningKey:
    dims = spec.head_dim, spec.head_dim_v
    return TuningKey(gpu.name, gpu.sm_count, gpu.arch, kernel, spec.dtype, spec.precision, *dims, spec.mask, length)


def default_of(kernel: str, spec: Specialization) -> dict[str, Any]:
    """The portable kernel's."""
    return dict(registry.portable_of(kernel).space.default(spec, ported.CODE))


# ---- compiling


def asked_of(variant: Variant, spec: Specialization, config: Config) -> Asked:
    return variant.name, spec, point(compiler.binary_config(variant, config))


def needed(spec: Specialization, configs: Mapping[str, Sequence[Config]]) -> Iterator[tuple[Variant, Config]]:
    """Every kernel that the races of a specialization run, and the checks."""
    from fa2tune.launching import passes

    for kernel, some in configs.items():
        for config in some:
            yield from passes.runs(kernel, spec, config, ported.CODE)


def image_of(asked: Asked) -> tuple[Image, dict[str, Any]] | str:
    """In a process of the pool: a kernel for the GPU here and what its own GPU's binary takes, or why there is none."""
    from fa2tune.launching import launch, machine_code

    name, spec, where = asked
    variant = registry.variant_named(name)
    try:
        binary = compiler.build(variant, spec, dict(where), ported.CODE)
        compiled = compiler.compile_kernel(variant, spec, dict(where), ported.CODE)
        image = replace(launch.image_of(compiled), cubin=ported.assembled(compiled, ported.HOSTS[0]))
        digest = machine_code.digest(machine_code.compiled(variant, spec, dict(where), ported.CODE))
    except compiler.CompileError as error:
        return str(error)
    return image, {
        "registers": binary.registers, "spills": binary.spills, "shared_bytes": binary.shared_bytes, "binary_hash": digest,
        "num_warps": binary.num_warps, "stack_bytes": binary.stack_bytes,
    }  # fmt: skip


class Images:
    """STATE/images.pickle, of today's sources: what was compiled."""

    def __init__(self, state: Path) -> None:
        self.path = state / "images.pickle"
        state.mkdir(parents=True, exist_ok=True)
        held = pickle.loads(self.path.read_bytes()) if self.path.exists() else {}
        self.known: dict[Asked, Any] = {
            asked: found for asked, (stamp, found) in held.items() if stamp == self._stamp(asked)
        }

    @staticmethod
    def _stamp(asked: Asked) -> str:
        variant, mask = registry.variant_named(asked[0]), asked[1].mask
        return f"{fingerprint.triton_version()} {fingerprint.kernel_hash(variant, mask)}"

    def compile(self, wanted: Sequence[Asked], cores: int) -> None:
        lacking = [asked for asked in dict.fromkeys(wanted) if asked not in self.known]
        if lacking:
            with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
                for asked, found in zip(lacking, pool.map(image_of, lacking), strict=True):
                    self.known[asked] = found
                    if isinstance(found, str):
                        click.echo(f"left out: {asked[0]} {dict(asked[2])}: {found}")
            held = {asked: (self._stamp(asked), found) for asked, found in self.known.items()}
            self.path.write_bytes(pickle.dumps(held))

    def able(self, kernel: str, spec: Specialization, config: Config, gpu: Gpu) -> dict[str, Any] | None:
        """Facts of a config's binary, if it compiles within the limits."""
        variant = registry.variant_of(kernel, config)
        found = self.known[asked_of(variant, spec, config)]
        if isinstance(found, str):
            return None
        facts = found[1]
        binary = compiler.Binary(
            variant.name, spec, config, gpu.arch, facts["shared_bytes"], facts["num_warps"], facts["registers"],
            facts["stack_bytes"], "",
        )  # fmt: skip
        return facts if limits.after_compile(binary, gpu) is None else None

    def loader(self, gpu: Gpu) -> Callable[..., Any]:
        """Stands in for ``launch.load``."""
        from fa2tune.launching import cuda, launch

        @cache
        def load(
            variant: Variant, spec: Specialization, config: Point, index: int, _measured: str = ""
        ) -> cuda.Function:
            asked = variant.name, spec, config
            found = self.known.get(asked) or image_of(asked)
            if isinstance(found, str):
                raise compiler.CompileError(found)
            image = ported.crowded(found[0], gpu, gpus.device(index))
            return cuda.Function(image, launch.kinds(variant, spec, dict(config)), index, "sm_80 PTX")

        return load


# ---- the record


class Journal:
    """STATE/races.jsonl: entries by what they are about."""

    def __init__(self, state: Path) -> None:
        state.mkdir(parents=True, exist_ok=True)
        self.path = state / "races.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found = map(json.loads, lines)
        self.entries = {_about(entry): entry for entry in found if of_today(entry)}

    def add(self, entry: dict[str, Any]) -> None:
        entry = {**entry, "sources": sources(entry["about"][0], entry["about"][3])}
        self.entries[_about(entry)] = entry
        with self.path.open("a") as file:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")

    def races(self, gpu: Gpu) -> list[dict[str, Any]]:
        return [one for about, one in self.entries.items() if about[0] == "race" and about[-1] == gpu.name]


def _about(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return (entry["what"], *entry["about"])


def of(kernel: str, spec: Specialization, *more: Any) -> tuple[Any, ...]:
    return kernel, spec.dtype, spec.head_dim, spec.mask, *more


# ---- racing


def fused(config: Config) -> dict[str, Any]:
    return {"strategy": FUSED, "configs": {"bwd_fused": config}}


class Racing:
    """Races what a journal lacks."""

    def __init__(self, journal: Journal, images: Images, gpu: Gpu) -> None:
        ported.begin(gpu)
        from fa2tune.launching import launch
        from fa2tune.measuring import measure, verify

        self.measure, self.verify = measure, verify
        self.journal, self.images, self.gpu = journal, images, gpu
        launch.load = images.loader(gpu)  # type: ignore[assignment]
        name = measure.torch.cuda.get_device_name()
        self.stamp = Provenance(PORTED, name, fingerprint.driver_version()).stamp

    def errors(self, kernel: str, spec: Specialization, config: Config) -> Mapping[str, Any] | str:
        """By the error rule, or why it fails."""
        about = of(kernel, spec, json.dumps(config, sort_keys=True))
        known = self.journal.entries.get(("check", *about))
        if known is None:
            try:
                found: Any = self.verify.check(kernel, dict(config), spec, ported.CODE, "cuda")
            except (self.verify.WrongResult, compiler.CompileError) as error:
                found = f"{type(error).__name__}: {error}"
                click.echo(f"WRONG {kernel} {spec.dtype} {spec.head_dim} {spec.mask} {describe(config)}: {error}")
            known = {"what": "check", "about": list(about), "found": found}
            self.journal.add(known)
        return known["found"]

    def race(self, kernel: str, spec: Specialization, length: int, configs: Sequence[Config]) -> None:
        """``configs``: of the kernel of kernels/sm80, its default first."""
        tuned = "fwd" if kernel == "fwd" else "bwd_fused"
        able = [(config, facts) for config in configs if (facts := self.images.able(tuned, spec, config, self.gpu))]
        if kernel == "fwd":
            contenders: list[Any] = [default_of("fwd", spec), *(config for config, _ in able)]
        else:
            split = {"strategy": SPLIT, "configs": {one: default_of(one, spec) for one in STRATEGIES[SPLIT]}}
            contenders = [split, *(fused(config) for config, _ in able)]
        found = self.measure.race(key_of(kernel, spec, length, self.gpu), contenders, "ported")
        entries = [
            {"config": config, "facts": facts, "times": [round(t, 2) for t in times], "failure": found.failures.get(place, "")}
            for place, ((config, facts), times) in enumerate(zip(able, found.times[1:], strict=True), 1)
        ]  # fmt: skip
        while (best := leader(entries, found.tainted)) is not None:
            errors = self.errors(tuned, spec, best["config"])
            if not isinstance(errors, str):
                best["errors"] = errors
                break
            best["times"] = []
        self.journal.add({
            "what": "race", "about": [*of(kernel, spec, length, self.gpu.name)], "stamp": self.stamp(),
            "watched": evidence.watched(found), "tainted": found.tainted,
            "default": {"config": contenders[0], "times": [round(t, 2) for t in found.times[0]]}, "entries": entries,
        })  # fmt: skip


def leader(entries: Sequence[dict[str, Any]], tainted: int) -> dict[str, Any] | None:
    """The fastest, unless it is not ahead of the kernel's default beyond the interval; None: none ran."""
    ran = [entry for entry in entries if entry["times"]]
    if not ran:
        return None
    first = ran[0]
    best = min(ran, key=lambda entry: median(ratios(entry["times"], first["times"])))
    ahead = best is not first and finalists.replaces(first["times"], best["times"], tainted)
    return best if ahead or first is not entries[0] else first


def followers(journal: Journal, kernel: str, spec: Specialization, gpu: Gpu) -> list[dict[str, Any]]:
    """What won in bf16 at any length, after the default: in the journal's races, where it has none in the shipped rows. As such
    a row would serve this dtype."""
    twin = replace(spec, dtype="bf16")
    about = [("race", *of(kernel, twin, length, gpu.name)) for length in BUCKETS]
    races = [journal.entries[one] for one in about if one in journal.entries]
    won = [best["config"] for one in races if (best := leader(one["entries"], one["tainted"]))]
    tuned = "fwd" if kernel == "fwd" else "bwd_fused"
    fitted = registry.variant_named(SM80[tuned]).fitted
    first = [fitted(spec, config) for config in (won or shipped(tuned, twin, gpu))]
    return [dict(where) for where in dict.fromkeys(map(point, [*candidates(tuned, spec, gpu)[:1], *first]))]


def shipped(kernel: str, spec: Specialization, gpu: Gpu) -> list[Config]:
    """Of kernels/sm80, in the ported rows that are shipped for a GPU."""
    keys = {key_of(kernel, spec, length, gpu) for length in BUCKETS}
    rows = (row for path in reader.shipped_paths() for row in reader.read(path))
    return [row.config for row in rows if row.key in keys and row.obtained == PORTED]


@click.group(help=__doc__)
def main() -> None:
    """Commands."""


STATE = click.argument("state", type=click.Path(file_okay=False, path_type=Path))
GPU = click.option("--gpu", "name", default="a100", show_default=True)
DIMS = click.option("--headdim", callback=comma_separated(int), default="128,64,256,96", show_default=True)
MASKS = click.option("--mask", "masks", callback=comma_separated(str), default="full,causal", show_default=True)
DTYPE = click.option("--dtype", type=click.Choice(("bf16", "fp16")), default="bf16", show_default=True)
WANTED = click.option(
    "--kernel", "kernels", callback=comma_separated(str), default=",".join(KERNELS), show_default=True
)
CORES = click.option("--cores", default=len(os.sched_getaffinity(0)), show_default="all")


def planned(
    journal: Journal, dtype: str, dims: Sequence[int], masks: Sequence[str], gpu: Gpu, kernels: Sequence[str] = KERNELS
) -> dict[Any, list[Any]]:  # fmt: skip
    """(kernel, specialization) -> configs to race."""
    if unknown := [kernel for kernel in kernels if kernel not in KERNELS]:
        raise click.BadParameter(f"--kernel: got {', '.join(unknown)}, allowed are {', '.join(KERNELS)}")
    found = {}
    for spec in (Specialization(dtype, dim, dim, mask) for dim in dims for mask in masks):
        for kernel in kernels:
            tuned = "fwd" if kernel == "fwd" else "bwd_fused"
            of_all = candidates(tuned, spec, gpu) if dtype == "bf16" else followers(journal, kernel, spec, gpu)
            found[kernel, spec] = of_all
    return found


def wanted(plan: Mapping[Any, Sequence[Config]]) -> list[Asked]:
    """The binaries that a plan's races and checks take."""
    found: list[Asked] = []
    for kernel, spec in plan:
        tuned = "fwd" if kernel == "fwd" else "bwd_fused"
        configs: dict[str, list[Any]] = {"fwd": [default_of("fwd", spec)]}
        configs.setdefault(tuned, []).extend(plan[kernel, spec])
        if kernel == BACKWARD:
            configs |= {one: [default_of(one, spec)] for one in STRATEGIES[SPLIT]}
        found += [asked_of(variant, spec, config) for variant, config in needed(spec, configs)]
    return found


@main.command()
@STATE
@GPU
@DIMS
@MASKS
@DTYPE
@WANTED
@CORES
def build(
    state: Path, name: str, headdim: list[int], masks: list[str], dtype: str, kernels: list[str], cores: int
) -> None:  # fmt: skip
    """Compile what ``race`` will race. Needs no GPU."""
    images = Images(state)
    images.compile(wanted(planned(Journal(state), dtype, headdim, masks, gpus.named(name), kernels)), cores)
    click.echo(f"{images.path}: {len(images.known)} kernels, {images.path.stat().st_size >> 10} KiB")


@main.command()
@STATE
@click.option("--seconds", default=80.0, show_default=True, help="Begin nothing after so many; it resumes.")
@GPU
@DIMS
@MASKS
@DTYPE
@click.option("--seqlen", callback=comma_separated(int), default=",".join(map(str, BUCKETS)), show_default=True)
@WANTED
@CORES
def race(
    state: Path, seconds: float, name: str, headdim: list[int], masks: list[str], dtype: str, seqlen: list[int],
    kernels: list[str], cores: int,
) -> None:  # fmt: skip
    """Race what STATE lacks, for so many seconds."""
    ends = time.monotonic() + seconds
    here, gpu = gpus.present(), gpus.named(name)
    if here is None or not ported.can_stand_for(gpu.arch, here.arch):
        raise click.ClickException(f"--gpu: got {gpu.name}, whose code takes a GPU of compute capability 9.0 here")
    journal, images = Journal(state), Images(state)
    plan = planned(journal, dtype, headdim, masks, gpu, kernels)
    images.compile(wanted(plan), cores)
    left = carried_out(Racing(journal, images, gpu), plan, seqlen, ends)
    click.echo(
        f"{'done' if not left else f'{left} races left'}, {time.monotonic() - ends + seconds:.0f} s, on {here.name}"
    )
    for line in summary(journal, gpu, short=True):
        click.echo(line)


def carried_out(racing: Racing, plan: Mapping[Any, Sequence[Config]], lengths: Sequence[int], ends: float) -> int:
    """-> how many races are left."""
    todo = [
        (kernel, spec, length)
        for kernel, spec in plan
        for length in lengths
        if ("race", *of(kernel, spec, length, racing.gpu.name)) not in racing.journal.entries
    ]
    left = len(todo)
    for kernel, spec, length in todo:
        if time.monotonic() >= ends:
            break
        racing.race(kernel, spec, length, plan[kernel, spec])
        left -= 1
    return left


def summary(journal: Journal, gpu: Gpu, short: bool) -> Iterator[str]:
    """A line a race: what leads, as times the portable default and its own; ``short``: of length 4096 alone."""
    for entry in journal.races(gpu):
        best = leader(entry["entries"], entry["tainted"])
        if best is None or (short and entry["about"][4] != 4096):
            continue
        default, first = entry["default"]["times"], entry["entries"][0]["times"]
        own = f", {median(ratios(first, best['times'])):.3f}x own default" if first else ""
        yield (
            f"{' '.join(map(str, entry['about'][:-1]))}: {median(ratios(default, best['times'])):.2f}x, "
            f"{median(best['times']):.0f} us{own}, {describe(best['config'])}"
        )


@main.command()
@STATE
@GPU
def show(state: Path, name: str) -> None:
    """What leads, of every race."""
    for line in summary(Journal(state), gpus.named(name), short=False):
        click.echo(line)


def rows_of(entry: Mapping[str, Any], gpu: Gpu) -> Iterator[Row]:
    """The rows of one race: of the forward; or of the whole backward and its kernel."""
    kernel, dtype, dim, mask, length, _ = entry["about"]
    spec = Specialization(dtype, dim, dim, mask)
    best = leader(entry["entries"], entry["tainted"])
    if best is None or "errors" not in best:
        return
    stamp, default = entry["stamp"], entry["default"]["times"]
    made = Provenance(PORTED, stamp["obtained_on"], stamp["driver"])
    facts = {fact: best["facts"].get(fact) for fact in evidence.FACTS}
    more = {"errors": best["errors"], **entry["watched"]}
    config, times, tried = best["config"], best["times"], len(entry["entries"])
    named = implementation_of(config)
    tuned = "fwd" if kernel == "fwd" else "bwd_fused"
    against = default if kernel == "fwd" else None
    found = [
        evidence.measured(
            key_of(tuned, spec, length, gpu), named, config, made, times, against, tried=tried, **facts, **more
        )
    ]  # fmt: skip
    if kernel == BACKWARD:
        implementation = backward_implementation(False)
        found.append(
            evidence.measured(
                key_of(BACKWARD, spec, length, gpu),
                implementation,
                {"bwd_fused": named},
                made,
                times,
                default,
                FUSED,
                **more,
            )
        )
    yield from (replace(row, **stamp) for row in found)


def alike(gpu: Gpu, name: str) -> Gpu:
    """Another GPU that a race of ``gpu`` holds for: nothing that a race allows for differs."""
    other = gpus.named(name)
    for fact in ("shared_per_block", "shared_per_sm", "registers_per_sm", "warps_per_sm"):
        if getattr(other, fact) != getattr(gpu, fact):
            raise click.ClickException(
                f"--also: got {other.name}, whose {fact} is {getattr(other, fact)}; races of {gpu.name} hold for "
                f"{getattr(gpu, fact)}"
            )
    return other


@main.command("file")
@STATE
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@GPU
@click.option("--also", callback=comma_separated(str), help="GPUs with the same limits, a file for each.")
def file_rows(state: Path, out: Path, name: str, also: list[str] | None) -> None:
    """Write cache files into OUT, for `fa2tune cache merge`."""
    gpu = gpus.named(name)
    races = Journal(state).races(gpu)
    if not races:
        raise click.ClickException(f"no race for {gpu.name} of these kernel sources in {state}")
    filed = [gpu, *(alike(gpu, other) for other in also or ())]
    out.mkdir(parents=True, exist_ok=True)
    for each in filed:
        rows = [row for entry in races for row in rows_of(entry, each)]
        path = out / f"{each.name}.sqlite"
        Store(path).put(rows)
        click.echo(f"{path}: {len(rows)} rows of {len(races)} races")


if __name__ == "__main__":
    main()
