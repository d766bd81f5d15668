"""Exhaustive tables: what every legal config of one tuning key compiled to, and its time. Written by record_tables.py, read
by the scripts that replay a search or check the model without a GPU.

A file is JSON lines, gzipped without a time stamp. The first line is the header. Then one line per binary: "c" (values of
the header's compile dimensions), "fate" and "why" ("" if it may be launched), "r" registers, "s" spilled words, "m" bytes
of shared memory, "w" warps, "loops" (values of the header's loop fields, per loop), "compile_s", and "runs": for each value
of the run-time dimension [value, status, [heat, sample, ...], ...], in microseconds. And one line per heat: {"heat",
"anchor"}, the samples of the default config, one per round; sample i of a run was taken in the same round as sample i of
its heat's anchor.

While a table is being recorded it is a journal: the same lines, except that runs have lines of their own,
{"heat", "anchor", "of": [[values, value, status, samples], ...]}.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from fa2tune.compiling.sass import Loop
from fa2tune.rows import record
from fa2tune.spec.key import TuningKey
from fa2tune.tuning.search.candidates import Point, point

SUFFIX, JOURNAL = ".jsonl.gz", ".jsonl"
FOLDER = Path(__file__).parent / "tables"


@dataclass
class Run:
    """One launch configuration of a binary: a value of the run-time dimension, and how it fared."""

    status: str = ""  #: "" if it ran
    heats: list[tuple[int, list[float]]] = field(default_factory=list)  #: (heat, microseconds by round)


@dataclass
class Built:
    """One binary, or why there is none."""

    config: dict[str, Any]  #: compile dimensions only
    status: str
    why: str
    registers: int
    spills: int
    shared_bytes: int
    num_warps: int
    loops: tuple[Loop, ...]
    compile_s: float  #: of one core
    runs: dict[Any, Run] = field(default_factory=dict)  #: value of the run-time dimension -> run


@dataclass
class Table:
    """Everything that is known of one key."""

    header: dict[str, Any]
    binaries: dict[Point, Built] = field(default_factory=dict)  #: by point(compile dimensions)
    anchors: dict[int, list[float]] = field(default_factory=dict)  #: heat -> the default's microseconds by round

    @property
    def key(self) -> TuningKey:
        return record.key_from(self.header["key"])

    @property
    def default(self) -> dict[str, Any]:
        return dict(self.header["default"])

    @property
    def complete(self) -> bool:
        """Whether every legal config is in it."""
        return bool(self.header.get("complete"))

    @property
    def runtime(self) -> str:
        """The dimension that a binary does not depend on."""
        return str(self.header["runtime"])

    def config(self, built: Built, value: Any) -> dict[str, Any]:
        return {**built.config, self.runtime: value}

    def built(self, config: Mapping[str, Any]) -> Built | None:
        """The binary of a config."""
        return self.binaries.get(point({name: v for name, v in config.items() if name != self.runtime}))

    @cached_property
    def anchor_us(self) -> float:
        """The default's time: the median of all its samples."""
        return median(sample for samples in self.anchors.values() for sample in samples)

    def ratios(self, run: Run) -> list[float]:
        """Times over the default's of the same heat and round. Of several heats the longest counts, which is the last:
        candidates near the best were raced again."""
        if run.status or not run.heats:
            return []
        heat, samples = max(run.heats, key=lambda entry: len(entry[1]))
        return [s / a for s, a in zip(samples, self.anchors[heat], strict=False)]

    def ratio(self, run: Run) -> float | None:
        """Time over the default's, free of drift: the median over rounds; None if it did not run."""
        ratios = self.ratios(run)
        return median(ratios) if ratios else None

    @cached_property
    def times(self) -> dict[Point, float]:
        """Microseconds of every config that ran, free of drift."""
        found = {}
        for built in self.binaries.values():
            for value, run in built.runs.items():
                ratio = self.ratio(run)
                if ratio is not None:
                    found[point(self.config(built, value))] = ratio * self.anchor_us
        return found

    @cached_property
    def statuses(self) -> dict[Point, str]:
        """Why each of the other configs has no time."""
        values = self.header["values"]
        found = {}
        for built in self.binaries.values():
            for value in values:
                run = built.runs.get(value)
                status = built.status or (run.status if run else "not_recorded")
                if status:
                    found[point(self.config(built, value))] = status
        return found

    # ---- lines

    def take(self, line: Mapping[str, Any]) -> None:
        """Add what one line after the header says. Later lines win."""
        if "c" in line:
            config = dict(zip(self.header["dimensions"], line["c"], strict=True))
            known = {spec.name for spec in fields(Loop)}
            names = self.header["loop_fields"]
            loops = tuple(
                Loop(**{name: _frozen(value) for name, value in zip(names, values, strict=True) if name in known})
                for values in line["loops"]
            )
            built = Built(config, line["fate"], line["why"], line["r"], line["s"], line["m"], line["w"], loops,
                          line["compile_s"])  # fmt: skip
            earlier = self.binaries.get(point(config))
            if earlier is not None:  # recorded, then compiled again, maybe out of the compiler's cache
                built.runs, built.compile_s = earlier.runs, earlier.compile_s
            self.binaries[point(config)] = built
            for value, status, *heats in line.get("runs", ()):
                built.runs[value] = Run(status, [(heat, samples) for heat, *samples in heats])
        elif "heat" in line:
            self.anchors[line["heat"]] = list(line["anchor"])
            for values, value, status, samples in line.get("of", ()):
                config = dict(zip(self.header["dimensions"], values, strict=True))
                run = self.binaries[point(config)].runs.setdefault(value, Run())
                run.status = status
                if samples:
                    run.heats.append((line["heat"], samples))

    def lines(self) -> Iterator[dict[str, Any]]:
        """The canonical lines: equal tables give equal bytes."""
        names = self.header["dimensions"]
        loop_fields = [spec.name for spec in fields(Loop)]
        yield {**self.header, "loop_fields": loop_fields}
        for built in sorted(self.binaries.values(), key=lambda built: repr([built.config[name] for name in names])):
            runs = [
                [value, run.status, *([heat, *samples] for heat, samples in run.heats)]
                for value, run in sorted(built.runs.items())
            ]
            yield {
                "c": [built.config[name] for name in names], "fate": built.status, "why": built.why,
                "r": built.registers, "s": built.spills, "m": built.shared_bytes, "w": built.num_warps,
                "loops": [[getattr(loop, name) for name in loop_fields] for loop in built.loops],
                "compile_s": built.compile_s, "runs": runs,
            }  # fmt: skip
        for heat, samples in sorted(self.anchors.items()):
            yield {"heat": heat, "anchor": samples}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Of a packed file or a journal. A journal's last line may have been cut off: it is left out."""
    if path.name.endswith(SUFFIX):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)
        return
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        yield json.loads(line)


def load(path: Path | str) -> Table:
    """ValueError if it is no table."""
    lines = read_lines(Path(path))
    header = next(lines, None)
    if not header or "key" not in header or "dimensions" not in header:
        raise ValueError(f"table: {path} does not begin with a table's header")
    table = Table(header)
    for line in lines:
        table.take(line)
    return table


def pack(table: Table, path: Path) -> None:
    """Write the packed file, whole or not at all."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in table.lines())
    new = path.with_name(path.name + ".new")
    new.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    new.replace(path)


def stem(key: TuningKey) -> str:
    """File name of a key's table, without its suffix."""
    return f"{key.gpu}_{key.kernel}_{key.dtype}_{key.head_dim}_{key.mask}_{key.bucket}"


def named(text: str) -> Iterable[str]:
    """The words of a key as the command line takes it, "fwd:128:causal:4096" (bf16) or "fwd:128:full:4096:fp16"."""
    words = text.split(":")
    if len(words) not in (4, 5):
        raise ValueError(f"key: got {text!r}, wanted kernel:head dim:causal or full:length[:dtype]")
    return words
