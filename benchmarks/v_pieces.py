from __future__ import annotations
import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
import click
import side_by_side
import torch
import workloads
from launch_choices import race
from fa2tune.calling import choosing, dispatch
from fa2tune.compiling import registry
from fa2tune.launching import passes
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

CONFIGS = json.loads((Path(__file__).parent / "v_pieces_configs.json").read_text())


def _calls():
    P = lambda *a: Problem("bf16", *a)
    found = {}
    for d in (104, 112, 168, 176, 200, 208, 216, 224, 240, 248, 256):
        found[f"{d} full"] = P(3, 20, 10, 2872, 2872, d, d, FULL)
        if d >= 176:
            found[f"{d} causal"] = P(3, 20, 10, 2872, 2872, d, d, CAUSAL)
    found["a"] = P(3, 50, 10, 2872, 2872, 224, 224, FULL)
    found["b"] = P(1, 60, 2, 4393, 4393, 224, 224, CAUSAL)
    found["c"] = P(7, 2, 2, 535, 535, 224, 224, FULL)
    found["d"] = P(2, 2, 2, 628, 7765, 224, 224, FULL)
    found["e"] = P(2, 54, 9, 2541, 2541, 224, 224, FULL)
    found["f"] = P(3, 6, 6, 7833, 7833, 248, 248, FULL)
    found["g"] = P(2, 16, 2, 1676, 1676, 248, 248, CAUSAL)
    found["h"] = P(4, 28, 28, 700, 700, 208, 208, FULL)
    found["i"] = P(1, 3, 3, 13696, 13696, 176, 176, FULL)
    return found


def of(choice, **constants_):
    variant = choice.variant
    config = {**choice.config, **{k: v for k, v in constants_.items() if k in choice.config}}
    over = {k: v for k, v in constants_.items() if k not in choice.config}
    old = variant.constants

    def constants(spec: Any, config: Any) -> dict[str, Any]:
        return {**old(spec, config), **over}

    return replace(choice, config=config, variant=replace(variant, constants=constants))


def measured(problem):
    (q, k, v), _, check, _ = workloads.posed(problem)
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    scale = problem.head_dim**-0.5
    ours = passes.describe(q, k, v, problem.mask, scale)
    served = choosing.choose(ours, "fwd", dispatch.gpu_of(0))
    [name_] = [n for n, p in _calls().items() if p == problem]
    served = replace(served, variant=registry.variant_named("sm90/fwd"), config=CONFIGS[name_])
    used = -(-problem.head_dim // 16) * 16
    forms = {"all": of(served)}
    if used < 256 and used not in (192,):
        forms["pieces"] = of(served, USED_DV=used)
    if used > 192:
        forms["q128"] = of(served, USED_DV=used, Q_IN_REGISTERS=True, Q_HELD=128)
        if used <= 224:
            forms["qmost"] = of(served, USED_DV=used, Q_IN_REGISTERS=True, Q_HELD=208 if used == 208 else 192)
            forms["qmost turns"] = of(
                served,
                USED_DV=used,
                Q_IN_REGISTERS=True,
                Q_HELD=208 if used == 208 else 192,
                PINGPONG=not served.config["PINGPONG"],
            )
        else:
            forms["q128 turns"] = of(
                served, USED_DV=used, Q_IN_REGISTERS=True, Q_HELD=128, PINGPONG=not served.config["PINGPONG"]
            )
    plans = {}
    for name, choice in forms.items():
        try:
            plan = passes.ForwardPlan(ours, q, k, v, scale, choice)
            if wrong := check({"o": plan(q, k, v)[0].transpose(1, 2)}):
                print("WRONG", workloads.described(problem), name, wrong, flush=True)
                continue
        except Exception as e:
            print("ERR", name, repr(e)[:300], flush=True)
            continue
        plans[name] = plan
    times = race([functools.partial(plan, q, k, v) for plan in plans.values()], torch.cuda.Stream(), 3.0)
    return {
        "call": workloads.described(problem),
        "us": dict(zip(plans, (round(us, 2) for us in times), strict=True)),
        "config": dict(served.config),
    }


def line(name, call):
    us = call["us"]
    return f"{name:10} {call['call']:40} {us.get('all')} " + ", ".join(
        f"{k} {v / us['all']:.3f}" for k, v in us.items() if k != "all"
    )


@click.command()
@side_by_side.share_option
@click.option("--seconds", type=float, default=200.0)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(share: slice, seconds: float, out: Path | None) -> None:
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    side_by_side.fill(record, side_by_side.in_share(_calls(), share), measured, seconds, out, line)


if __name__ == "__main__":
    main()
