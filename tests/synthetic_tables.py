"""Tables made of arithmetic, for tests of whatever replays tables: the model's estimates, distorted."""

import random
import sys
from dataclasses import fields
from pathlib import Path

from fa2tune import gpus
from fa2tune.compiling import compiler, registry, sass
from fa2tune.predicting import prior
from fa2tune.rows import record
from fa2tune.spec.key import TuningKey
from fa2tune.tuning.search.candidates import legal, point

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import tables

H200 = gpus.named("h200")


def synthetic(kernel="fwd", head_dim=256, seed=0, distortion=0.08):
    """Every legal config of a key: 5 % cannot run, the others take what the model says, off by effects of single dimensions
    and of each binary, each with that deviation."""
    rng = random.Random(seed)
    key = TuningKey(H200.name, H200.sm_count, 90, kernel, "bf16", "ieee", head_dim, head_dim, "causal", 4096)
    variant = registry.portable_of(kernel)
    spec = key.specialization()
    (runtime,) = compiler.runtime_names(variant)
    names = [name for name in variant.space.dimensions if name != runtime]
    default = dict(variant.space.default(spec, 90))
    header = {
        "key": record.key_record(key), "default": default, "complete": True, "dimensions": names, "runtime": runtime,
        "values": list(variant.space.dimensions[runtime]), "loop_fields": [f.name for f in fields(sass.Loop)],
        "seconds": 0.0, "gpu": "none: made of arithmetic",
    }  # fmt: skip
    table = tables.Table(header)
    configs = legal(variant, spec, H200).configs
    guesses = dict(zip(map(point, configs), prior.estimates(variant, spec, configs, H200, key.workload()), strict=True))
    effects = {
        (name, value): rng.gauss(0, distortion) for name, values in variant.space.dimensions.items() for value in values
    }
    anchor = guesses[point(default)]
    table.take({"heat": 0, "anchor": [round(anchor * rng.gauss(1, 0.003), 2) for _ in range(5)]})
    binaries = {}
    for config in configs:
        binaries.setdefault(point({name: config[name] for name in names}), []).append(config)
    for where, launches in binaries.items():
        values = [dict(where)[name] for name in names]
        status = "spills" if rng.random() < 0.05 and dict(where) != {name: default[name] for name in names} else ""
        table.take({"c": values, "fate": status, "why": status, "r": 100, "s": 0, "m": 1000, "w": dict(where)["num_warps"],
                    "loops": [], "compile_s": round(rng.uniform(0.5, 1.5), 3)})  # fmt: skip
        off = rng.gauss(0, distortion)
        for config in launches if not status else ():
            factor = 2.718 ** (off + sum(effects[item] for item in config.items()))
            samples = [round(guesses[point(config)] * factor * rng.gauss(1, 0.005), 2) for _ in range(5)]
            table.take({"heat": 0, "anchor": table.anchors[0], "of": [[values, config[runtime], "", samples]]})
    return table
