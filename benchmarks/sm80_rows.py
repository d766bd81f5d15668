"""Rows for GPUs without wgmma, raced as sm_80 code on a Hopper GPU ("ported"), in slices that resume.

    python benchmarks/sm80_rows.py race STATE --seconds 80           # on the Hopper GPU; again until it says "done"
    python benchmarks/sm80_rows.py race STATE --seconds 80 --dtype fp16   # the winners of bf16, raced again
    python benchmarks/sm80_rows.py show STATE                        # what leads, against the portable default
    python benchmarks/sm80_rows.py file STATE OUT                    # anywhere: OUT/a100.sqlite, OUT/a10.sqlite, ...

Per kernel, head dim, mask and length: the portable default, the portable config of cache/a100.sqlite, and of the kernel of
kernels/sm80 its defaults, ``EXTRA`` and what differs from the defaults in one dimension. They are screened; the leaders for
163 KiB of shared memory a block and for 99 KiB are checked by the error rule, gradients included, and race the default once
more: rows have the samples of that last race. STATE/races.jsonl holds all of it. Races of
other kernel sources than today's count as not run.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import click
from sm80_candidates import CLASSES, candidates, fits

from fa2tune import gpus
from fa2tune.cli._options import comma_separated
from fa2tune.compiling import compiler, fingerprint, limits, registry
from fa2tune.launching import ported
from fa2tune.measuring.samples import ratios
from fa2tune.rows import reader
from fa2tune.rows.describe import describe
from fa2tune.rows.row import PORTED, Row, backward_implementation
from fa2tune.rows.store import Store
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, BUCKETS, FUSED, SPLIT, STRATEGIES, Config, Specialization
from fa2tune.spec.variant import implementation_of
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.search.candidates import point
from fa2tune.tuning.select import evidence, finalists

SOURCE = Path(__file__).parents[1] / "cache" / "a100.sqlite"
#: GPUs that get rows of a class.
FILED = {
    "163 KiB": ("a100-sxm-80gb",),
    "99 KiB": ("a10", "rtx-3090", "l4", "l40s", "rtx-4090", "rtx-5090"),
}
KERNELS = ("fwd", "bwd_fused", "bwd_dkdv", "bwd_dq")


def key_of(kernel: str, spec: Specialization, length: int, gpu: gpus.Gpu) -> TuningKey:
    return TuningKey(
        gpu.name,
        gpu.sm_count,
        gpu.arch,
        kernel,
        spec.dtype,
        spec.precision,
        spec.head_dim,
        spec.head_dim_v,
        spec.mask,
        length,
    )


def facts_of(kernel: str, spec: Specialization, config: Config) -> dict[str, Any] | str:
    """In a process of the pool: compile and assemble; what the binary takes and the classes it fits, or why not."""
    variant = registry.variant_of(kernel, config)
    try:
        binary = compiler.build(variant, spec, compiler.binary_config(variant, config), ported.CODE)
        ported.prepare(variant, spec, config, ported.HOSTS[0])
    except compiler.CompileError as error:
        return str(error)
    able = [
        name for name in fits(variant, spec, config) if limits.after_compile(binary, gpus.named(CLASSES[name])) is None
    ]
    if not able:
        return str(limits.after_compile(binary, gpus.named(CLASSES["163 KiB"])))
    digest = hashlib.sha256(Path(binary.cubin_path).read_bytes()).hexdigest()
    return {
        "registers": binary.registers, "spills": binary.spills, "shared_bytes": binary.shared_bytes,
        "binary_hash": digest, "able": able,
    }  # fmt: skip


class Journal:
    """STATE/races.jsonl: entries by what they are about."""

    def __init__(self, state: Path) -> None:
        state.mkdir(parents=True, exist_ok=True)
        self.path = state / "races.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found = map(json.loads, lines)
        self.entries = {_about(entry): entry for entry in found if entry.get("sources") in (None, _now(entry))}

    def add(self, entry: dict[str, Any]) -> None:
        self.entries[_about(entry)] = entry
        with self.path.open("a") as file:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")

    def ended(self, *about: Any) -> None:
        """It did not kill the process."""
        self.add({"what": "begun", "about": list(about), "times": 0})

    def begun(self, *about: Any) -> int:
        """How often something was begun, this time included: what kills the process is not tried for ever."""
        entry = self.entries.get(("begun", *about), {"what": "begun", "about": list(about), "times": 0})
        self.add({**entry, "times": entry["times"] + 1})
        return int(entry["times"]) + 1


def _now(entry: Mapping[str, Any]) -> Any:
    """What an entry's sources would be today."""
    kernel, _, _, mask = entry["about"][:4]
    return sources(kernel, mask)


def _about(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return (entry["what"], *entry["about"])


def _spec_of(about: Sequence[Any]) -> tuple[str, Specialization, int]:
    kernel, dtype, dim, mask, length = about
    return kernel, Specialization(dtype, dim, dim, mask), length


class Slice:
    """What one run of ``race`` does until its time is over."""

    def __init__(self, journal: Journal, seconds: float, pool: ProcessPoolExecutor) -> None:
        ported.begin()
        from fa2tune.measuring import measure, verify

        self.measure, self.verify = measure, verify
        self.journal, self.pool, self.ends = journal, pool, time.monotonic() + seconds
        made = Provenance(PORTED, measure.torch.cuda.get_device_name(), fingerprint.driver_version())
        self.stamp = made.stamp
        self.compiles: dict[tuple[str, Specialization], list[tuple[dict[str, Any], Future[Any]]]] = {}

    def over(self) -> bool:
        return time.monotonic() >= self.ends

    def compile(self, kernel: str, spec: Specialization, configs: Sequence[Config]) -> None:
        if (kernel, spec) not in self.compiles:
            self.compiles[kernel, spec] = [
                (dict(config), self.pool.submit(facts_of, kernel, spec, config)) for config in configs
            ]

    def errors(self, kernel: str, spec: Specialization, config: Config) -> Mapping[str, Any] | str:
        """By the error rule, or why it fails; of the whole backward ``config`` is {strategy, configs}."""
        about = [kernel, spec.dtype, spec.head_dim, spec.mask, json.dumps(config, sort_keys=True)]
        known = self.journal.entries.get(("check", *about))
        if known is None:
            try:
                if kernel == BACKWARD:
                    forward = registry.portable_of("fwd").space.default(spec, ported.CODE)
                    configs = {"fwd": forward, **config["configs"]}
                    found: Any = self.verify.check_backward(configs, spec, config["strategy"], "cuda")
                else:
                    found = self.verify.check(kernel, dict(config), spec, ported.CODE, "cuda")
            except (self.verify.WrongResult, compiler.CompileError) as error:
                found = f"{type(error).__name__}: {error}"
                click.echo(f"WRONG {kernel} {spec.dtype} {spec.head_dim} {spec.mask} {describe(config)}: {error}")
            known = {"what": "check", "about": about, "found": found, "sources": sources(kernel, spec.mask)}
            self.journal.add(known)
        return known["found"]

    def _screened(self, key: TuningKey, configs: Sequence[Config]) -> dict[int, float]:
        """Place among ``configs`` -> time over the first one's."""
        race = self.measure.race(key, list(configs), "screen")
        for index, why in race.failures.items():
            click.echo(f"left out: {describe(configs[index])}: {why}")
        return {index: median(ratios(times, race.times[0])) for index, times in enumerate(race.times) if times}

    def kernel(self, kernel: str, spec: Specialization, length: int) -> None:
        """Race one kernel at one length."""
        key = key_of(kernel, spec, length, gpus.named(CLASSES["163 KiB"]))
        built = [(config, job.result()) for config, job in self.compiles[kernel, spec]]
        for config, facts in built:
            about = [kernel, spec.head_dim, spec.mask, describe(config)]
            if isinstance(facts, str) and ("out", *about) not in self.journal.entries:
                self.journal.add({"what": "out", "about": about, "why": facts})
        able = [(config, facts) for config, facts in built if not isinstance(facts, str)]
        placed: dict[int, float] = {0: 1.0}
        for small in (True, False):
            places = [i for i, (_, facts) in enumerate(able) if i and ("99 KiB" in facts["able"]) == small]
            if places:
                found = self._screened(key, [able[i][0] for i in (0, *places)])
                placed |= {places[n - 1]: ratio for n, ratio in found.items() if n}
        chosen = [0]
        for implementation in dict.fromkeys(implementation_of(config) for config, _ in able):
            for name in CLASSES:
                own = [
                    i
                    for i in sorted(placed, key=placed.__getitem__)
                    if implementation_of(able[i][0]) == implementation and name in able[i][1]["able"]
                ]
                right = (i for i in own if not isinstance(self.errors(kernel, spec, able[i][0]), str))
                if (best := next(right, None)) is not None and best not in chosen:
                    chosen.append(best)
        if isinstance(self.errors(kernel, spec, able[0][0]), str):
            raise click.ClickException(f"the portable default of {kernel} {spec} is wrong")
        self._proof(key, [able[i] for i in chosen], [placed[i] for i in chosen], tried=len(able))

    def _proof(self, key: TuningKey, chosen: Sequence[Any], screened: Sequence[float], **more: Any) -> None:
        """The last race: rows come of it."""
        race = self.measure.race(key, [config for config, _ in chosen], "proof")
        spec = key.specialization()
        entry = {
            "what": "race", "about": [key.kernel, spec.dtype, spec.head_dim, spec.mask, key.bucket], "stamp": self.stamp(),
            "sources": sources(key.kernel, spec.mask), "watched": evidence.watched(race), "tainted": race.tainted, **more,
            "entries": [
                {"config": config, "facts": facts, "screened": round(ratio, 4), "times": [round(t, 2) for t in times],
                 "errors": self.errors(key.kernel, spec, config)}
                for (config, facts), ratio, times in zip(chosen, screened, race.times, strict=True)
            ],
        }  # fmt: skip
        self.journal.add(entry)

    def whole(self, spec: Specialization, length: int) -> None:
        """Split against fused, with what leads of each kernel, for each class."""
        key = key_of(BACKWARD, spec, length, gpus.named(CLASSES["163 KiB"]))
        races = {
            kernel: self.journal.entries[("race", *_of(kernel, spec, length))] for kernel in KERNELS if kernel != "fwd"
        }
        default = {kernel: races[kernel]["entries"][0]["config"] for kernel in STRATEGIES[SPLIT]}
        asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"strategy": SPLIT, "configs": default}, {"able": [*CLASSES]})
        ]
        for strategy, kernels in STRATEGIES.items():
            for name in CLASSES:
                configs = {kernel: leader(races[kernel], name)["config"] for kernel in kernels}
                one = {"strategy": strategy, "configs": configs}
                same = [facts for contender, facts in asked[1:] if contender == one]
                if same:
                    same[0]["able"].append(name)
                elif not isinstance(self.errors(BACKWARD, spec, one), str):
                    asked.append((one, {"able": [name]}))
        self._proof(key, asked, [0.0] * len(asked))


def _of(kernel: str, spec: Specialization, length: int) -> tuple[Any, ...]:
    return kernel, spec.dtype, spec.head_dim, spec.mask, length


@cache
def sources(kernel: str, mask: str) -> dict[str, str]:
    """Of every implementation of a kernel, the hash of its source."""
    kernels = STRATEGIES[SPLIT] + STRATEGIES[FUSED] if kernel == BACKWARD else (kernel,)
    return {
        variant.name: fingerprint.kernel_hash(variant, mask)
        for one in kernels
        for variant in registry.variants_of(one)
        if variant.runs_on(ported.CODE)
    }


def leader(race: Mapping[str, Any], name: str, implementation: str = "") -> Mapping[str, Any]:
    """Of a kernel's last race the fastest for a class, of an implementation or of any; of pointer loads the default, unless
    another one beats it beyond the interval."""
    default = race["entries"][0]
    own = [
        entry
        for entry in race["entries"]
        if name in entry["facts"]["able"]
        and implementation in ("", implementation_of(entry["config"]))
        and entry["times"]
    ]
    best: Mapping[str, Any] = min(own, key=lambda entry: median(ratios(entry["times"], default["times"])))
    alike = implementation_of(best["config"]) == implementation_of(default["config"])
    if alike and best is not default and not finalists.replaces(default["times"], best["times"], race["tainted"]):
        return default
    return best


def plan(dtype: str, dims: Sequence[int], masks: Sequence[str]) -> list[Specialization]:
    return [Specialization(dtype, dim, dim, mask) for dim in dims for mask in masks]


@click.group(help=__doc__)
def main() -> None:
    """Commands."""


STATE = click.argument("state", type=click.Path(file_okay=False, path_type=Path))


@main.command()
@STATE
@click.option("--seconds", default=80.0, show_default=True, help="Begin nothing after so many; it resumes.")
@click.option("--dtype", type=click.Choice(("bf16", "fp16")), default="bf16", show_default=True)
@click.option("--headdim", callback=comma_separated(int), default="128,64,96,256", show_default=True)
@click.option("--mask", "masks", callback=comma_separated(str), default="full,causal", show_default=True)
@click.option("--seqlen", callback=comma_separated(int), default=",".join(map(str, BUCKETS)), show_default=True)
@click.option("--cores", default=len(os.sched_getaffinity(0)), show_default="all")
def race(
    state: Path, seconds: float, dtype: str, headdim: list[int], masks: list[str], seqlen: list[int], cores: int
) -> None:  # fmt: skip
    """Race what STATE lacks, for so many seconds."""
    here = gpus.present()
    if here is None or here.arch not in ported.HOSTS:
        raise click.ClickException("needs a GPU of compute capability 9.0")
    os.environ["TRITON_CACHE_DIR"] = str((state / "triton").resolve())
    journal = Journal(state)
    known = [row for row in reader.read(SOURCE) if row.key.kernel != BACKWARD]
    began = time.monotonic()
    pool = ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"))
    try:
        left = _slice(Slice(journal, seconds, pool), dtype, plan(dtype, headdim, masks), seqlen, known)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    click.echo(f"{'done' if not left else f'{left} races left'}, {time.monotonic() - began:.0f} s, on {here.name}")
    for line in summary(journal, short=True):
        click.echo(line)
    os._exit(0)  # compiles under way are not waited for


def _slice(
    work: Slice, dtype: str, specs: Sequence[Specialization], lengths: Sequence[int], known: Sequence[Row]
) -> int:
    """-> how many races are left."""
    entries = work.journal.entries
    todo = [
        (spec, kernel, length)
        for spec in specs
        for kernel in (*KERNELS, BACKWARD)
        for length in lengths
        if ("race", *_of(kernel, spec, length)) not in entries
    ]
    for spec, kernel in dict.fromkeys((spec, kernel) for spec, kernel, _ in todo):
        if kernel != BACKWARD:
            configs = candidates(kernel, spec, known) if dtype == "bf16" else _followers(entries, kernel, spec)
            work.compile(kernel, spec, configs)
    left = len(todo)
    for spec, kernel, length in todo:
        if work.over():
            break
        if work.journal.begun(*_of(kernel, spec, length)) > 2:
            click.echo(f"given up, as it ended the process twice: {kernel} {spec.head_dim} {spec.mask} {length}")
            left -= 1
            continue
        if kernel == BACKWARD:
            work.whole(spec, length)
        else:
            work.kernel(kernel, spec, length)
        work.journal.ended(*_of(kernel, spec, length))
        left -= 1
    return left


def _followers(entries: Mapping[Any, Any], kernel: str, spec: Specialization) -> list[dict[str, Any]]:
    """The winners of bf16 at any length, the default first."""
    bf16 = replace(spec, dtype="bf16")
    races = [entries[about] for length in BUCKETS if (about := ("race", *_of(kernel, bf16, length))) in entries]
    if not races:
        raise click.ClickException(f"{kernel} {spec.head_dim} {spec.mask}: bf16 has not been raced yet")
    default = races[0]["entries"][0]["config"]
    found = [default] + [entry["config"] for one in races for entry in one["entries"]]
    return [dict(where) for where in dict.fromkeys(map(point, found))]


def summary(journal: Journal, short: bool) -> Iterator[str]:
    """A line a race: what leads per class, as times the portable default; ``short``: of length 4096 alone."""
    for about, entry in journal.entries.items():
        if about[0] != "race" or (short and about[5] != 4096):
            continue
        default = entry["entries"][0]["times"]
        said = []
        for name in CLASSES:
            one = leader(entry, name)
            config = one["config"]
            what = config["strategy"] if about[1] == BACKWARD else describe(config)
            said.append(f"{name} {median(ratios(default, one['times'])):.2f}x {median(one['times']):.0f}us {what}")
        yield f"{' '.join(map(str, about[1:]))}: " + " | ".join(dict.fromkeys(said))


@main.command()
@STATE
def show(state: Path) -> None:
    """What leads, against the portable default, of every race."""
    for line in summary(Journal(state), short=False):
        click.echo(line)


def rows_of(entry: Mapping[str, Any], name: str, gpu: gpus.Gpu) -> Iterator[Row]:
    """The rows of one race for a GPU of a class."""
    kernel, spec, length = _spec_of(entry["about"])
    key, default = key_of(kernel, spec, length, gpu), entry["entries"][0]
    stamp = entry["stamp"]
    made = Provenance(PORTED, stamp["obtained_on"], stamp["driver"])
    if kernel == BACKWARD:
        found = [one for one in entry["entries"][1:] if name in one["facts"]["able"] and one["times"]]
    else:
        names = dict.fromkeys(implementation_of(one["config"]) for one in entry["entries"])
        found = [leader(entry, name, implementation) for implementation in names]
    for one in found:
        config, strategy = one["config"], ""
        if kernel == BACKWARD:
            strategy = config["strategy"]
            config = {each: implementation_of(its) for each, its in config["configs"].items()}
        implementation = backward_implementation(False) if kernel == BACKWARD else implementation_of(config)
        facts = {fact: one["facts"].get(fact) for fact in evidence.FACTS} if kernel != BACKWARD else {}
        if gpu.arch != ported.CODE:
            facts["binary_hash"] = None  # its own code has other bytes
        row = evidence.measured(
            key, implementation, config, made, one["times"], default["times"], strategy, errors=one["errors"],
            tried=entry.get("tried", 0), **facts, **entry["watched"],
        )  # fmt: skip
        yield replace(row, **stamp)


@main.command("file")
@STATE
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--gpu", "wanted", callback=comma_separated(str), help="Of which.  [default: all of FILED]")
def file_rows(state: Path, out: Path, wanted: list[str] | None) -> None:
    """Write a cache file for each GPU into OUT, for `fa2tune cache merge`. A GPU without rows of its own gets those of one of
    its compute capability."""
    asked = [gpus.named(one).name for one in wanted or ()]
    if odd := [one for one in asked if one not in sum(FILED.values(), ())]:
        raise click.UsageError(f"--gpu: got {', '.join(odd)}, allowed are {', '.join(sum(FILED.values(), ()))}")
    races = [entry for entry in Journal(state).entries.values() if entry["what"] == "race"]
    if not races:
        raise click.ClickException(f"no race of these kernel sources in {state}")
    out.mkdir(parents=True, exist_ok=True)
    for name, targets in FILED.items():
        for target in targets:
            if asked and target not in asked:
                continue
            gpu = gpus.named(target)
            rows = [row for entry in races for row in rows_of(entry, name, gpu)]
            path = out / f"{'a100' if gpu.name.startswith('a100') else gpu.name}.sqlite"
            Store(path).put(rows)
            click.echo(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
