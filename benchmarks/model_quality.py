"""How well the analytic model ranks: measured times against predicted ones.

    python benchmarks/model_quality.py measured.json [--gpu h200] [--pairs pairs.json]

measured.json: a list of {"kernel", "dtype", "head_dim", "causal", "config", "bucket", "time_us"}, with "head_dim_v" and
"precision" where they differ from the head dim and "ieee"; the specialization may also stand under "spec". Needs no GPU:
binaries are rebuilt (or taken from Triton's cache). Per key and in all: Spearman's rank correlation over all configs and
over the measured best quarter, and regret: how much slower than the best measured config the model's first choice is, and
the best of its first five; scale: median of predicted / measured time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fa2tune import compiler, gpus, limits, model
from fa2tune.problem import TuningKey


def ranks(values: Sequence[float]) -> list[float]:
    """1-based ranks; equal values share their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for position in order[start:stop]:
            result[position] = (start + 1 + stop) / 2
        start = stop
    return result


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; NaN where one side is constant or fewer than three points are given."""
    if len(a) < 3 or len(set(a)) < 2 or len(set(b)) < 2:
        return float("nan")
    return statistics.correlation(ranks(a), ranks(b))


def quality(measured: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """Figures of one key: n, spearman, spearman_best (measured best quarter), regret_1 and regret_5 (0.05: 5 % slower)."""
    best = min(measured)
    by_time = sorted(range(len(measured)), key=measured.__getitem__)[: max(3, len(measured) // 4)]
    choice = sorted(range(len(predicted)), key=predicted.__getitem__)
    return {
        "n": len(measured),
        "spearman": spearman(measured, predicted),
        "spearman_best": spearman([measured[i] for i in by_time], [predicted[i] for i in by_time]),
        "regret_1": measured[choice[0]] / best - 1,
        "regret_5": min(measured[i] for i in choice[:5]) / best - 1,
        "scale": statistics.median(p / m for p, m in zip(predicted, measured, strict=True)),
    }


def predicted_us(entry: dict[str, Any], gpu: gpus.Gpu) -> tuple[TuningKey, float | str]:
    """The key of a measurement, and its predicted microseconds or the name of the limit that would have dropped it."""
    spec = {**entry, **entry.get("spec", {})}
    key = TuningKey(
        gpu.name, gpu.sm_count, gpu.arch, entry["kernel"], spec["dtype"], spec.get("precision", "ieee"), spec["head_dim"],
        spec.get("head_dim_v", spec["head_dim"]), spec["causal"], entry["bucket"],
    )  # fmt: skip
    binary = compiler.build(compiler.variant_named(key.kernel), key.specialization(), entry["config"], gpu.arch)
    refusal = limits.after_compile(binary, gpu)
    if refusal is not None:
        return key, refusal.name
    return key, model.predict(binary, key.workload(), gpu) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--gpu", default="h200", help="the GPU that measured (default: h200)")
    parser.add_argument("--pairs", type=Path, help="write every measured and predicted time here, as JSON")
    arguments = parser.parse_args()
    gpu = gpus.named(arguments.gpu)
    entries = json.loads(arguments.measured.read_text())
    by_key: dict[TuningKey, list[tuple[float, float, dict[str, Any]]]] = defaultdict(list)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, (entry, (key, predicted)) in enumerate(
            zip(entries, pool.map(lambda e: predicted_us(e, gpu), entries), strict=True), 1
        ):
            if isinstance(
                predicted, str
            ):  # the limits would have dropped a config that was measured: show how good it was
                print(f"{predicted} drops {key.kernel} {entry['config']}: {entry['time_us']:.0f} us", file=sys.stderr)
                predicted = float("inf")
            by_key[key].append((entry["time_us"], predicted, entry["config"]))
            print(f"\r{done}/{len(entries)}", end="", file=sys.stderr)
    print(file=sys.stderr)

    columns = ("n", "spearman", "spearman_best", "regret_1", "regret_5", "scale")
    print("kernel     dtype  hd causal bucket " + " ".join(f"{c:>13}" for c in columns))
    figures = []
    for key in sorted(by_key):
        measured, predicted = ([pair[i] for pair in by_key[key]] for i in (0, 1))
        figures.append(quality(measured, predicted))
        cells = " ".join(f"{figures[-1][c]:13.3f}" for c in columns)
        print(f"{key.kernel:10} {key.dtype:5} {key.head_dim:3} {key.causal!s:6} {key.bucket:6} {cells}")
    if arguments.pairs:
        pairs = [{"kernel": k.kernel, "head_dim": k.head_dim, "causal": k.causal, "bucket": k.bucket, "config": c,
                  "time_us": m, "predicted_us": p} for k, found in by_key.items() for m, p, c in found]  # fmt: skip
        arguments.pairs.write_text(json.dumps(pairs, indent=1))
    print(f"\n{len(figures)} keys, {len(entries)} measurements")
    for column in columns[1:]:
        known = [f[column] for f in figures if f[column] == f[column]]  # without NaN
        if known:
            print(
                f"{column:14} median {statistics.median(known):6.3f}  worst {(max if 'regret' in column else min)(known):6.3f}"
            )


if __name__ == "__main__":
    main()
