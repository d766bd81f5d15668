"""How a call is served, as answered by ``fa2tune.explain``: a ``Served`` for each kernel, and what follows from all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fa2tune.calling import defaults
from fa2tune.calling.advice import NOTHING_TO_DO, install_command, refresh_command
from fa2tune.calling.backward_plans import Whole
from fa2tune.calling.schedules import in_place_schedule, split_backward_schedule
from fa2tune.calling.schedules.fused_schedule import IN_ORDER_FORM
from fa2tune.compiling.measured_code import NO_TRITON
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import (
    has_longer_blocks,
    is_grouped,
    is_in_shares,
    is_multistage,
    is_one_tile,
    role_in_place,
)
from fa2tune.launching.merged_heads import merged
from fa2tune.rows import lookup
from fa2tune.rows.describe import PASSES
from fa2tune.rows.row import MEASURED, PORTED, PREDICTED, Row, over_portable
from fa2tune.spec.key import BANDED_FAMILY, RAGGED_FAMILY, TuningKey
from fa2tune.spec.mask import FULL, Mask
from fa2tune.spec.problem import BACKWARD, WORKLOAD_HIDDEN, WORKLOAD_TOKENS, Config, Problem
from fa2tune.spec.roles import BWD_ONE_TILE, BWD_QUERY_TILES, BWD_STORED_DS
from fa2tune.spec.variant import WARP_SPECIALIZED, implementation_of

#: How a kernel is served, best first. "tuned": by a row measured on this GPU for this problem, fresh; "estimated": by a config
#: that the schedule model has for the call's shape and no row has, as it is expected to be faster; "stale": by a row as the
#: first, made with another Triton or kernel source; "other gpu": by a row measured on another GPU; "near": by a row measured
#: for another length, head dim or dtype; "predicted": by a row that the analytic model chose; "default": by no row.
TUNED, ESTIMATED, STALE, OTHER_GPU, NEAR, PREDICTION, DEFAULT = STATUSES = (
    "tuned", "estimated", "stale", "other gpu", "near", "predicted", "default",
)  # fmt: skip
#: Beside the size, what rows of a family of their own are tuned on.
TUNED_WITH = {
    BANDED_FAMILY: ", a causal window of an eighth of that length",
    RAGGED_FAMILY: ", packed sequences of up to that length",
}
#: The size that rows are tuned at (``TuningKey.workload``), whatever the size of the call.
TUNED_AT = f"{WORKLOAD_TOKENS // 1024}k tokens, heads x head dim {WORKLOAD_HIDDEN}"


@dataclass(frozen=True)
class Served:
    """How one kernel is served. Of a backward the first, "bwd", says which kernels run (split or fused). Where a config of the
    schedule model runs (``estimated``), the row is the one that would serve otherwise."""

    key: TuningKey  #: what an exact row would be filed under
    #: what runs: the row's config, or the default one, with ``changed`` applied, or the schedule model's; of "bwd" the row's
    config: Config
    answer: lookup.Answer | None  #: the row and its place on the lookup ladder; None: no row serves
    refused: tuple[lookup.Refused, ...] = ()  #: rows that are better placed and cannot serve, each with the reason
    changed: Mapping[str, tuple[Any, Any]] | None = None  #: parameter -> (in the row, for these lengths and heads)
    binaries: Mapping[str, str] | None = None  #: kernel that runs -> where its binary comes from
    nearest: tuple[tuple[lookup.Differences, str], ...] = ()  #: without any candidate: what differs, and the file
    scheduled: Row | None = None  #: row of another length whose config suits this batch, heads and lengths better
    mask: Mask = FULL  #: the call's
    unmeasured: str = ""  #: what of the call no row was measured with: "a window"
    #: that a key head's query heads, or ungrouped ones' query blocks, are split into, each a program's: few tiles leave
    #: programs idle
    parts: int = 1
    #: tensors that TMA cannot address and that are copied before, which is expected to be faster
    copied: tuple[str, ...] = ()
    filled_in: int = 0  #: first queries of a head that see no key and are not computed, which is expected to be faster
    #: so many query heads of a key head are taken as one of as many more queries, which is expected to be faster; 0: each as
    #: one
    merged: int = 0
    #: of a split backward whose kernels run at a time, which is expected to be faster, how they begin ("dQ first"), of "bwd"
    order: str = ""
    #: of the kernel that splits keys among programs, or has equal shares of them, or tiles of several heads or with all keys,
    #: and runs in place of the row's, if any
    split: Config | None = None
    unsplit: str = ""  #: why it does not although that is expected to be faster
    whole: Whole | None = None  #: what makes all of a backward in place of the rows' kernels, of "bwd"
    unsplit_of: Config | None = None  #: config of the kernel that could not be had
    unsplit_whole: Whole | None = None  #: the same of what would make all of a backward, of "bwd"
    few_tiles: bool = False  #: whether the row's kernel has the schedule model's config for few tiles, or would have it
    form: str = ""  #: of the row's kernel, where it is another than the row's: "alone on the GPU"
    otherwise: Config | None = None  #: that would run if none of the schedule model's did
    runs: Mapping[str, Config] | None = None  #: kernel that runs -> its config, in order
    lacking: str = (
        ""  #: which kernel that runs no file has, and why, where no Triton is installed: the call is an error
    )

    @property
    def estimated(self) -> bool:
        """Whether a config runs that the schedule model has for the call's shape, and no row has."""
        return self._replaced or self.few_tiles or self.form != ""

    @property
    def _replaced(self) -> bool:
        """Whether other kernels run than the rows' ones."""
        return self.split is not None or self.whole is not None

    @property
    def grouped(self) -> bool:
        """Whether what runs in place of the row's kernel has tiles of several query heads."""
        return self.split is not None and is_grouped(self.split)

    @property
    def all_keys(self) -> bool:
        """Whether tiles of what runs in place of the row's kernel have all keys of a key head."""
        return self.split is not None and is_one_tile(self.split)

    @property
    def multistage(self) -> bool:
        """Whether warps of what runs in place of the row's kernel load for themselves."""
        return self.split is not None and is_multistage(self.split)

    @property
    def in_shares(self) -> bool:
        """Whether programs of what runs in place of the row's kernel have equal shares of all key blocks."""
        return self.split is not None and is_in_shares(self.split)

    @property
    def longer_blocks(self) -> bool:
        """Whether what runs in place of the row's kernel has blocks of 80 keys."""
        return self.split is not None and has_longer_blocks(self.split)

    @property
    def kernel(self) -> str:
        return self.key.kernel

    @property
    def row(self) -> Row | None:
        return self.answer.row if self.answer else None

    @property
    def file(self) -> Path | None:
        """The cache file that holds the row."""
        return self.answer.layer.path if self.answer else None

    @property
    def stale(self) -> tuple[str, ...]:
        """What the row was made with that differs today."""
        return self.answer.stale if self.answer else ()

    @property
    def differs(self) -> lookup.Differences:
        """Field of the key -> (asked, what the row has)."""
        return lookup.differences(self.key, self.answer.row.key) if self.answer else {}

    @property
    def lead(self) -> float | None:
        """How many times as fast a warp-specialised row is as the best portable row of its key."""
        return over_portable(self.answer.row, self.answer.layer.rows) if self.answer else None

    @property
    def status(self) -> str:
        """One of ``STATUSES``."""
        if self.estimated and not (self.answer is None and self.form == IN_ORDER_FORM):
            return ESTIMATED
        if self.answer is None:
            return DEFAULT
        if self.answer.row.obtained == PREDICTED:
            return PREDICTION
        if self.answer.problem_step != lookup.PROBLEM_STEPS[0] or self.unmeasured:
            return NEAR
        if self.answer.gpu_step != lookup.EXACT or self.answer.row.obtained != MEASURED:
            return OTHER_GPU
        return STALE if self.answer.stale else TUNED

    @property
    def by(self) -> str:
        """What runs, in a few words: "fused warp_specialized", or "fwd_split, fwd_combine"."""
        if self._replaced:
            return ", ".join(self.runs or ())
        return self.row.filed_as if self.row else "default"

    @property
    def evidence(self) -> str:
        """Half a line: "measured on h200 for the bucket of 512 (16k tokens, heads x head dim 2048), fresh"."""
        if not self.estimated:
            return self._of_row
        what = self.form or "few tiles"
        if self.split is not None:
            what = in_place_schedule.words(self.split).what
        elif self.whole is not None:
            what = self.whole.kind.what
        if self.form == IN_ORDER_FORM:
            return f"{what}; calls in any order: {self._of_row}"
        if self.row is None:
            return f"{what}, with a config of the schedule model; otherwise the default config"
        gain = "" if self.row.gain is None else f", {self.row.gain:.2f} x portable default"
        return f"{what}, with a config of the schedule model; otherwise {self.row.filed_as}, {self._of_row}{gain}"

    @property
    def _of_row(self) -> str:
        """The row's evidence."""
        if self.answer is None:
            return "no row serves: the default config does"
        row, asked = self.answer.row, self.differs
        if row.obtained == PREDICTED:
            how = f"predicted for {row.key.gpu}"
        elif row.obtained == MEASURED:
            how = f"measured on {row.key.gpu}"
        elif row.obtained == PORTED:
            how = f"ported to {row.key.gpu}, measured on {row.obtained_on or 'another architecture'}"
        else:
            how = f"measured on {row.obtained_on or 'a sibling'} for {row.key.gpu}"
        other = [
            words.format(asked[name][1])
            for name, words in (("bucket", "the bucket of {}"), ("dtype", "{}"), ("head_dim", "head dim {}"),
                                ("head_dim_v", "V head dim {}"))
            if name in asked and not (name == "head_dim_v" and asked.get("head_dim") == asked[name])
        ]  # fmt: skip
        at = TUNED_AT + TUNED_WITH.get(row.key.family, "")
        problem = f"for {', '.join(other) or f'the bucket of {row.key.bucket}'} ({at})"
        if self.unmeasured:
            problem += f" without {self.unmeasured}"
        if self.few_tiles and self.split is not None:
            problem += ", with the schedule model's config for few tiles"
        elif self.scheduled is not None:
            problem += f", with the config of the bucket of {self.scheduled.key.bucket}, which suits this call better"
        return f"{how} {problem}, {'stale' if self.answer.stale else 'fresh'}"

    def __str__(self) -> str:
        if self.row is None and not self.estimated:
            return f"{self.kernel}: {self.evidence}"
        parts = [self.by, self.evidence]
        if self.row and self.row.gain is not None and not self.estimated:
            parts.append(f"{self.row.gain:.2f} x portable default")
        return f"{self.kernel}: {', '.join(parts)}"


@dataclass(frozen=True)
class Explanation:
    """How a call is served. ``str()`` gives the verdict, a line for each kernel, and what to do next."""

    problem: Problem  #: the call: dtype, batch, heads, lengths, head dims, mask, alignment
    gpu: Gpu
    triton: str  #: the version that runs here
    kernels: tuple[Served, ...]  #: "fwd" and, with the backward, "bwd" and the kernels it runs
    present: bool = True  #: whether ``gpu`` is in this machine

    @property
    def status(self) -> str:
        """The worst status of any kernel, one of ``STATUSES``."""
        return max((served.status for served in self.kernels), key=STATUSES.index)

    def _worst(self) -> list[Served]:
        return [served for served in self.kernels if served.status == self.status]

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.lacking:
            return f"Cannot run here: {self.lacking}."
        worst = self._worst()
        names = ", ".join(served.kernel for served in worst)
        runs = "runs a row" if len(worst) == 1 else "run rows"
        if self.status == TUNED:
            fresh = "without Triton" if self.triton == NO_TRITON else f"for Triton {self.triton}"
            return f"Tuned: every kernel of this call has a row measured on {self.gpu.name}, fresh {fresh}."
        if self.status == ESTIMATED:  # the forward alone
            return f"Estimated: {names} runs {worst[0].by}, with a config of the schedule model that no row has."
        if self.status == STALE:
            parts = sorted({part for served in worst for part in served.stale})
            return f"Tuned, but stale: {names} {runs} measured on {self.gpu.name} with {'; '.join(parts)}."
        if self.status == OTHER_GPU:
            others = sorted({served.row.obtained_on or served.row.key.gpu for served in worst if served.row})
            if any(served.row and served.row.obtained == PORTED for served in worst):
                return f"Ported: {names} {runs} raced as sm_80 code on {', '.join(others)}; no {self.gpu.name} has timed them."
            return f"Tuned on another GPU: {names} {runs} measured on {', '.join(others)}."
        if self.status == NEAR:
            steps = sorted({served.answer.problem_step for served in worst if served.answer})
            if lacking := next((served.unmeasured for served in worst if served.unmeasured), ""):
                steps = [f"tuned without {lacking}"]
            return f"Not tuned for exactly this problem: {names} {runs} of another one ({', '.join(steps)})."
        if self.status == PREDICTION:
            return f"Predicted, not measured: {names} {runs} that the analytic model chose."
        return f"Not tuned: no row serves {names}, so the default config does."

    @property
    def about_gpu(self) -> str:
        """That the GPU is not in the catalogue, in one sentence; "" where it is."""
        return f"{self.gpu.name} is {self.gpu.note}." if self.gpu.note else ""

    @property
    def lacking(self) -> str:
        """Why the call is an error here: the first of its kernels that is not to be had; "": it is none."""
        return next((one.lacking for one in self.kernels if one.lacking), "")

    @property
    def next(self) -> str:
        """A command that improves on this, or "nothing to do"."""
        if self.lacking:
            return install_command("triton")
        if self.status in (TUNED, ESTIMATED) or (self.status == NEAR and self.problem.unmeasured):
            return NOTHING_TO_DO  # whether rows of such a family gain is not measured yet
        if self.status == STALE:
            found = next(served.answer.layer for served in self._worst() if served.answer)
            command = refresh_command(found)
        else:
            command = self._tune_command()
        if self.present or self._predictable:
            return command
        return f"on a machine with {self.gpu.name}: {command}"

    @property
    def _predictable(self) -> bool:
        """Whether predicted rows would help: not where they would stand before what was measured for a near problem, nor where
        the warp-specialised default stands before them."""
        kernels = [served.kernel for served in self.kernels if served.status == DEFAULT]
        better = [defaults.better_default(kernel, self.problem, self.gpu) for kernel in kernels]
        faster = any(config is not None and implementation_of(config) == WARP_SPECIALIZED for config in better)
        return self.status == DEFAULT and not faster

    def _tune_command(self) -> str:
        """``fa2tune tune`` for what is not tuned."""
        p = self.problem
        passes_ = {
            "fwd" if served.kernel == "fwd" else "bwd"
            for served in self.kernels
            if served.status not in (TUNED, ESTIMATED)
        }
        words = ["fa2tune tune"]
        if not self.present and self._predictable:
            words.append(f"--gpu {self.gpu.name}")
        words.append(f"--headdim {p.head_dim}")
        if p.head_dim_v != p.head_dim:
            words.append(f"--headdim-v {p.head_dim_v}")
        words += [f"--dtype {p.dtype}", f"--{p.mask.row_mask}", f"--seqlen {self._worst()[0].key.bucket}"]
        if len(passes_) == 1:
            words.append(f"--pass {passes_.pop()}")
        return " ".join(words)

    def __str__(self) -> str:
        about = [sentence for sentence in (self.about_launch, self.about_gpu) if sentence]
        return "\n".join([self.verdict, *about, *(f"  {served}" for served in self.kernels), f"Next: {self.next}"])

    def __repr__(self) -> str:
        kernels = ", ".join(f"{served.kernel}={served.status!r}" for served in self.kernels)
        return f"<fa2tune.explain on {self.gpu.name}: status={self.status!r}, {kernels}>"

    def _posed(self, one: Served) -> Problem:
        """What a kernel has to do."""
        return merged(self.problem) if one.merged else self.problem

    def _what_is_split(self, one: Served) -> str:
        problem = self._posed(one)
        if problem.group == 1:
            return "the query blocks of each key tile are"
        return f"each group of {problem.group} query heads is"

    @property
    def about_launch(self) -> str:
        """What runs beside the kernels, for these heads, lengths and strides, in a sentence each; "" if nothing."""
        said = []
        for passes_of, names in _by_pass(self.kernels, "copied").items():
            listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
            said.append(f"TMA cannot address {listed}: copied before the {passes_of}, which is expected to be faster.")
        for passes_of, rows in _by_pass(self.kernels, "filled_in").items():
            said.append(
                f"The first {rows} queries see no key: filled in by the {passes_of}, which is expected to be faster."
            )
        for passes_of, heads in _by_pass(self.kernels, "merged").items():
            said.append(
                f"The {heads} query heads of a key head are taken as one of {heads * self.problem.seqlen_q} queries by the "
                f"{passes_of}, which is expected to be faster."
            )
        said += [
            f"{one.kernel}: {self._what_is_split(one)} split into {one.parts} parts, whose dK and dV are summed after."
            for one in self.kernels
            if one.parts > 1
        ]
        said += [
            f"{one.kernel}: {one.form}, not as the row has it, which is expected to be faster."
            for one in self.kernels
            if one.form and one.split is None
        ]
        said += [
            f"bwd: {split_backward_schedule.about(one.order)}, which is expected to be faster."
            for one in self.kernels
            if one.order
        ]
        for one in self.kernels:
            problem = self._posed(one)
            if one.whole is not None:
                said.append(one.whole.kind.about(problem, one.whole.config, self.gpu.arch))
            elif one.unsplit_whole is not None:
                said.append(f"bwd: {one.unsplit_whole.kind.what}: expected to be faster, but {one.unsplit}.")
            elif one.split is not None and one.kernel != "fwd":
                said.append(split_backward_schedule.about_keys(problem, one.split, self.gpu.arch))
            elif one.split is not None:
                said.append(in_place_schedule.about(problem, one.split))
            elif one.unsplit:
                what = in_place_schedule.words(one.unsplit_of or {}).expected
                said.append(f"{one.kernel}: {what} expected to be faster, but {one.unsplit}.")
            elif one.few_tiles:
                why = "short sequences" if self.problem.extent.ragged else "few tiles, or few keys"
                said.append(
                    f"{one.kernel}: {why}, so tiles are of another form than the row's, which is expected to be faster."
                )
        return " ".join(said)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "status": self.status, "verdict": self.verdict, "next": self.next, "note": self.about_launch or None,
            "lacking": self.lacking or None,
            "gpu": self.gpu.name,
            "gpu_present": self.present, "gpu_estimated_from": self.gpu.estimated_from or None, "triton": self.triton,
            "problem": {f.name: getattr(self.problem, f.name) for f in fields(Problem)}
            | {"mask": str(self.problem.mask), "window": self.problem.mask.window, "score": str(self.problem.score)}
            | {"extent": str(self.problem.extent)},
            "kernels": [_as_dict(served) for served in self.kernels],
        }  # fmt: skip


def _by_pass(kernels: Iterable[Served], name: str) -> dict[str, Any]:
    """ "forward", "backward" or both -> what an attribute of their kernels is, where it is something."""
    found: dict[Any, dict[str, None]] = {}
    for one in kernels:
        if value := getattr(one, name):
            found.setdefault(value, {})[PASSES.get(one.kernel, PASSES[BACKWARD])] = None
    return {" and the ".join(names): value for value, names in found.items()}


def _as_dict(served: Served) -> dict[str, Any]:
    answer, facts = served.answer, _of_row(served)
    nothing: dict[str, Any] = dict.fromkeys(facts)
    otherwise = {**facts, "config": dict(served.otherwise or {})}
    whole = {} if served.whole is None else {served.whole.role: dict(served.whole.config)}
    one_tile = dict(served.split or {}) if served.all_keys else whole.get(BWD_ONE_TILE)
    return {
        "kernel": served.kernel, "status": served.status, "evidence": served.evidence,
        "step": answer.step if answer else None, "file": str(served.file) if answer else None,
        "layer": answer.layer.name if answer else None, "config": dict(served.config),
        **(nothing if served.estimated else facts), "otherwise": otherwise if served.estimated else None,
        "stale": list(served.stale),
        "differs": {name: {"asked": asked, "row": has} for name, (asked, has) in served.differs.items()},
        "changed": {name: {"row": old, "call": new} for name, (old, new) in (served.changed or {}).items()},
        "refused": [
            {"implementation": one.candidate.row.implementation, "strategy": one.candidate.row.strategy or None,
             "step": one.candidate.step, "why": one.why}
            for one in served.refused
        ],
        "runs": {name: dict(config) for name, config in (served.runs or {}).items()},
        "binaries": dict(served.binaries or {}),
        "scheduled": served.scheduled.key.bucket if served.scheduled else None, "window": served.mask.window is not None,
        "split": dict(served.split) if served.split and role_in_place(served.split) is None else None,
        "longer_blocks": dict(served.split or {}) if served.longer_blocks else None,
        "shares": dict(served.split or {}) if served.in_shares else None,
        "multistage": dict(served.split or {}) if served.multistage else None,
        "grouped": dict(served.split or {}) if served.grouped else None, "unsplit": served.unsplit or None,
        "one_tile": one_tile, "query_tiles": whole.get(BWD_QUERY_TILES), "stored_ds": whole.get(BWD_STORED_DS),
        "parts": served.parts, "copied": list(served.copied), "filled_in": served.filled_in,
        "merged": served.merged,
        "form": served.form or None, "order": served.order or None,
    }  # fmt: skip


def _of_row(served: Served) -> dict[str, Any]:
    """What is known of a config because it is the row's."""
    row = served.row
    return {
        "implementation": row.implementation if row else None, "strategy": (row.strategy or None) if row else None,
        "family": row.key.family if row else None,
        "obtained": row.obtained if row else None, "obtained_on": row.obtained_on if row else None,
        "time_us": row.time_us if row else None, "gain": row.gain if row else None, "lead": served.lead,
    }  # fmt: skip
