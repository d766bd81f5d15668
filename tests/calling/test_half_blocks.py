"""Where the fused Hopper backward of up to 64 columns has blocks of 64 queries: the margin, against what was raced."""

from __future__ import annotations

import json

from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.schedules import fused_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

H200 = gpus.named("h200")


def chosen(problem: Problem) -> Choice:
    return choosing.choose_backward(choosing.Chooser(problem, H200), False)[1]["bwd_fused"]


def test_half_blocks_that_are_expected_to_be_the_fastest_were() -> None:
    """So the share that they must gain is that of other forms, where none of those serves."""
    backwards = script("dense_backwards")
    calls, gains = backwards.recorded(), []
    for name, call in json.loads((BENCHMARKS / "calls/dense_backwards.json").read_text("utf-8"))["calls"].items():
        us = {form.removesuffix(", chosen"): time for form, time in call["us"].items()}
        if "half blocks" in us:
            problem, row = calls[name][0], chosen(calls[name][0]).of_row.config
            forms = {"row": row, "apart": fused_schedule.apart(row), "half blocks": fused_schedule.halves(row)}
            expected = {form: fused_schedule.least_us(problem, config, H200) for form, config in forms.items()}
            if expected["half blocks"] < min(expected["row"], expected["apart"]):
                gains.append(min(us["row"], us.get("apart", us["row"])) / us["half blocks"])
    assert len(gains) == 6 and min(gains) > 1.0


def test_half_blocks_need_a_larger_share_where_the_kernel_alone_on_the_gpu_is_faster() -> None:
    """3 x 18 heads took 90.7 us when they were drawn, FlashAttention-4 84.2: 87 are expected of the row's form, 77 of this."""
    served = chosen(Problem("bf16", 3, 18, 18, 1053, 1053, 56, 56, CAUSAL))
    assert served.config["BLOCK_M"] == 64 and not served.config["BESIDE"] and served.of_row.config["BLOCK_M"] == 128
    alone = chosen(Problem("bf16", 3, 4, 4, 2128, 2128, 48, 48, FULL))  # 88 us, half blocks 92, the row's form 95
    assert alone.config["BLOCK_M"] == 128 and not alone.config["BESIDE"] and alone.of_row.config["BESIDE"]
