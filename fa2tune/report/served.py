"""Which of the page's rows would serve a call: the answers of the lookup itself, so that the page need not repeat its rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fa2tune.fleet import lookup_cost
from fa2tune.gpus import Gpu
from fa2tune.report.facts import Standing
from fa2tune.rows import lookup
from fa2tune.rows.describe import PASSES
from fa2tune.rows.reader import Layer
from fa2tune.spec.key import TuningKey
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BACKWARD, BUCKETS, DTYPES, HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM, padded_head_dim

#: What stands for the documented default config among the numbers of rows.
NO_ROW_NUMBER = -1


def served(standings: Sequence[Standing]) -> dict[str, Any]:
    """{"buckets": [...], "passes": [title], "costs": [sentence], "found": {"GPU dtype mask head-dim": per pass and bucket
    [number of the row or DEFAULT, number of the sentence on what this lookup costs or -1]}}.

    What no row of a GPU serves at any length is left out."""
    from fa2tune.calling.choosing import Chooser

    numbers = {id(s.row): number for number, s in enumerate(standings)}
    rows = tuple(s.row for s in standings)
    layers, node = [Layer("report", Path(), rows)], lookup.Toolchain()
    costs: dict[str, int] = {}

    def entry(key: TuningKey, gpu: Gpu) -> tuple[int, int]:
        chooser = Chooser(key.workload(), gpu, layers, node)
        answer, _ = chooser.find_backward(False) if key.kernel == BACKWARD else chooser.find(key.kernel)
        if answer is None:
            return NO_ROW_NUMBER, -1
        said = lookup_cost.cost_line(key, lookup_cost.step_between(key, answer.row.key))
        return numbers[id(answer.row)], costs.setdefault(said, len(costs)) if said else -1

    found = {}
    for gpu, key in _asked(standings):
        lines = [[entry(key.with_(kernel=kernel, bucket=bucket), gpu) for bucket in BUCKETS] for kernel in PASSES]
        if any(number != NO_ROW_NUMBER for line in lines for number, _ in line):
            found[f"{key.gpu}@{key.sm_count} {key.dtype} {key.mask} {key.head_dim}"] = lines
    return {"buckets": BUCKETS, "passes": list(PASSES.values()), "costs": list(costs), "found": found}


def _asked(standings: Sequence[Standing]) -> Iterator[tuple[Gpu, TuningKey]]:
    """Every GPU of the page with every dtype, mask and head dim that rows of it may serve; kernel and length are left open."""
    from fa2tune.fleet import finding

    groups: dict[tuple[str, int, int], set[tuple[Any, ...]]] = {}
    for s in standings:
        key = s.row.key
        if finding.odd_key(key) is None and key.precision == "ieee" and key.kernel in PASSES:
            groups.setdefault((key.gpu, key.sm_count, key.arch), set()).add(_group(key))
    dims = range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)
    for (name, sms, arch), mine in groups.items():
        for dtype in DTYPES:
            for mask in ROW_MASKS:
                for dim in dims:
                    key = TuningKey(name, sms, arch, "fwd", dtype, "ieee", dim, dim, mask, BUCKETS[0])
                    if _group(key) in mine:
                        yield finding.gpu_of_key(key, None), key


def _group(key: TuningKey) -> tuple[Any, ...]:
    """What the lookup never crosses, the kernel and the compute capability aside."""
    width = 16 if key.dtype in lookup.SIXTEEN_BIT else key.dtype
    return key.mask, width, padded_head_dim(key.head_dim), padded_head_dim(key.head_dim_v)
