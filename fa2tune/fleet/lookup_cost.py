"""What a lookup across keys costs, as measured: steps between two keys, and the shipped summary (cache/lookup_cost.json) of
benchmarks/lookup_cost.py, which ``fa2tune explain`` quotes. Pure: no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import median
from typing import Any

from fa2tune.measuring.samples import quantile
from fa2tune.rows.describe import PASSES
from fa2tune.rows.lookup import differences
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import padded_head_dim

SHORTER, LONGER = "bucket: next shorter", "bucket: next longer"
FAR, FARTHER = "bucket: 4 times off", "bucket: 8 times off and more"
DTYPE, HEAD_DIM = "other 16-bit dtype", "same padded head dim"
WITHOUT_TMA, DEFAULT = "tensors that TMA cannot address", "documented default"
STEPS = (SHORTER, LONGER, FAR, FARTHER, DTYPE, HEAD_DIM, WITHOUT_TMA, DEFAULT)


def step_between(asked: TuningKey, has: TuningKey) -> str | None:
    """What a row filed under ``has`` is for ``asked``, of the same GPU: a step above; None if it is its own, or differs in
    more than one respect (of these nothing was measured)."""
    what = set(differences(asked, has))
    if what == {"dtype"}:
        return DTYPE
    if what and what <= {"head_dim", "head_dim_v"}:
        pairs = ((asked.head_dim, has.head_dim), (asked.head_dim_v, has.head_dim_v))
        return HEAD_DIM if all(padded_head_dim(mine) == padded_head_dim(theirs) for mine, theirs in pairs) else None
    if what != {"bucket"}:
        return None
    times = max(asked.bucket / has.bucket, has.bucket / asked.bucket)
    if times == 2:
        return SHORTER if has.bucket < asked.bucket else LONGER
    return FAR if times == 4 else FARTHER


@dataclass(frozen=True)
class LookupCost:
    """Time lost to the key's own row, as a share of its time."""

    cases: int
    median: float
    p90: float  #: 90 % quantile
    worst: float

    def __str__(self) -> str:
        of = (f"{100 * share:.1f} %" for share in (self.median, self.p90, self.worst))
        return "median {}, p90 {}, worst {}".format(*of) + f" of {self.cases} cases"


def summary(cases: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], LookupCost]:
    """(pass, step) -> cost, of cases {"kernel", "step", "cost"}."""
    found: dict[tuple[str, str], list[float]] = {}
    for case in cases:
        found.setdefault((PASSES[case["kernel"]], case["step"]), []).append(case["cost"])
    return {
        of: LookupCost(len(values), median(values), quantile(values, 0.9), max(values)) for of, values in found.items()
    }


@cache
def shipped_cases() -> tuple[str, Sequence[Mapping[str, Any]]]:
    """(catalogue name of the GPU they were measured on, cases); ("", ()) where the package has none."""
    try:
        data = json.loads((resources.files("fa2tune.cache") / "lookup_cost.json").read_text(encoding="utf-8"))
        return str(data["environment"]["gpu_key"]), tuple(data["cases"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ()


def cost_line(key: TuningKey, step: str | None) -> str | None:
    """One line for a lookup of ``key`` over this step: what that cost where it was measured, on this GPU, for this pass, head
    dim and dtype; None where it was not."""
    gpu, cases = shipped_cases()
    alike = [
        case for case in cases
        if key.gpu == gpu and (key.kernel, key.head_dim, key.dtype) == (case["kernel"], case["head_dim"], case["dtype"])
    ]  # fmt: skip
    found = summary(alike).get((PASSES.get(key.kernel, ""), step or ""))
    return None if found is None else f"{step}: {found}"


def markdown(found: Mapping[tuple[str, str], LookupCost], passes: Sequence[str] = tuple(PASSES.values())) -> str:
    """A table: per pass and step how many cases, the median, the p90, the worst."""
    lines = ["| pass | served by | cases | median | p90 | worst |", "|---|---|--:|--:|--:|--:|"]
    for of in ((name, step) for name in passes for step in STEPS):
        if cost := found.get(of):
            shares = (f"{100 * share:.1f} %" for share in (cost.median, cost.p90, cost.worst))
            lines.append(f"| {of[0]} | {of[1]} | {cost.cases} | {' | '.join(shares)} |")
    return "\n".join(lines)
