"""Whether and how keys of a forward are split, held to times recorded on an H200 (benchmarks/few_queries.py)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fa2tune import gpus
from fa2tune.calling import choosing, serving, split_schedule
from fa2tune.launching import key_splits
from fa2tune.search_spaces.portable import fwd_split
from fa2tune.spec.extent import Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = ROOT / "benchmarks/calls/few_queries.json"
H200 = gpus.named("h200")
DECODING = Problem("bf16", 1, 32, 8, 1, 8192, 128, 128, FULL)
TUNED = {"BLOCK_M": 128, "BLOCK_N": 128, "maxnreg": 0}


def split_of(problem, gpu=H200):
    return split_schedule.config_of(problem, choosing.choose(problem, "fwd", gpu, True).config, gpu)


def losses():
    """Time of what is chosen over that of the fastest candidate, by call; nearest recorded number of parts where the chosen one
    was not timed."""
    found = {}
    for case in json.loads(RECORDED.read_text())["cases"]:
        problem = Problem(**{**case["problem"], "mask": Mask(case["problem"]["mask"])})
        ours = {name: us for name, us in case["us"].items() if name not in ("cudnn", "flash")}
        chosen = split_of(problem)
        timed = ours["tuned"]
        if chosen is not None:
            tile = f"M{chosen['BLOCK_M']} "
            alike = {int(name.rpartition("x")[2]): us for name, us in ours.items() if name.startswith(tile)}
            timed = alike[min(alike, key=lambda parts: abs(math.log(parts / chosen["SPLITS"])))]
        found[case["call"]] = timed / min(ours.values())
    return found


def test_choices_are_near_the_fastest_recorded():
    found = losses()
    assert len(found) == 15
    assert math.exp(sum(map(math.log, found.values())) / len(found)) < 1.01
    assert max(found.values()) < 1.03, found


@pytest.mark.parametrize(
    "changed",
    [
        {"batch": 8, "seqlen_q": 2000, "seqlen_k": 2000, "mask": CAUSAL},  # tiles enough
        {"seqlen_q": 777, "seqlen_k": 777, "mask": CAUSAL},  # a prompt
        {"extent": Extent("ragged", 4)},
        {"seqlen_k": 0},
    ],
)
def test_calls_that_are_not_split(changed):
    assert split_schedule.config_of(replace(DECODING, **changed), TUNED, H200) is None


@pytest.mark.parametrize("arch", ["a100", "h100", "h200", "l40s"])
@pytest.mark.parametrize("group", [1, 4, 71])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_configs_are_of_the_kernels_space(arch, group, dtype):
    gpu = gpus.named(arch)
    for queries in (1, 4, 40):
        for keys in (1, 100, 100_000):
            asked = replace(DECODING, dtype=dtype, heads_q=8 * group, seqlen_q=queries, seqlen_k=keys)
            time, config = split_schedule.best(asked, gpu)
            assert time > 0 and 1 <= config["SPLITS"] <= fwd_split.MOST_SPLITS
            for variant, its_config, _ in key_splits.kernels(asked, config, gpu.arch):
                dimensions = variant.space.dimensions
                assert set(its_config) == set(dimensions)
                assert all(value in dimensions[name] for name, value in its_config.items())


def test_other_gpus_are_not_served_so():
    assert split_of(DECODING) is not None
    for name in ("a100", "l40s", "b200"):
        assert split_schedule.config_of(DECODING, TUNED, gpus.named(name)) is None


def test_more_idle_multiprocessors_take_more_parts():
    parts = [split_of(replace(DECODING, batch=batch))["SPLITS"] for batch in (1, 8, 64)]
    assert parts == sorted(parts, reverse=True) and parts[0] >= 8
    assert split_of(replace(DECODING, seqlen_k=300))["SPLITS"] <= 5  # blocks that there are


def test_a_window_is_split_by_the_keys_that_it_has():
    windowed = replace(DECODING, seqlen_k=100_000, mask=Mask("band", 1023, 0))
    assert split_of(windowed)["SPLITS"] <= 17


def test_tiles_have_the_queries_of_a_group_as_rows():
    for heads, queries, rows in ((32, 1, 16), (8, 1, 16), (64, 4, 32), (128, 1, 16)):
        assert split_of(replace(DECODING, heads_q=heads, seqlen_q=queries))["BLOCK_M"] == rows


def test_explain_names_the_kernels_that_run():
    found = serving.explain_problem(DECODING, H200, ("fwd",))
    served = found.kernels[0]
    assert served.split is not None and set(served.binaries) == {"fwd_split", "fwd_combine"}
    assert f"keys are split into {served.split['SPLITS']} parts" in str(found)
    assert "tiles have the 4 query heads of a key head as rows" in str(found)
    told = found.as_dict()["kernels"][0]
    assert told["split"] == told["config"] == told["runs"]["fwd_split"] == dict(served.split)
    assert list(told["runs"]) == ["fwd_split", "fwd_combine"] and told["runs"]["fwd_combine"]["SPLITS"] > 1
    whole = serving.explain_problem(replace(DECODING, batch=8, seqlen_q=2000, seqlen_k=2000), H200, ("fwd",))
    assert whole.kernels[0].split is None and "fwd_split" not in str(whole)


def test_explain_says_that_no_row_runs_and_which_would():
    found = serving.explain_problem(DECODING, H200, ("fwd",))
    served, told = found.kernels[0], found.as_dict()["kernels"][0]
    assert (found.status, served.status) == ("estimated", "estimated") and found.next == "nothing to do"
    assert (
        found.verdict
        == "Estimated: fwd runs fwd_split, fwd_combine, with a config of the schedule model that no row has."
    )
    assert (
        "otherwise warp_specialized, measured on h200" in str(served) and str(served).count("x portable default") == 1
    )
    assert all(told[name] is None for name in ("implementation", "obtained", "time_us", "gain", "lead"))
    row = served.row
    assert told["otherwise"]["implementation"] == "warp_specialized" and told["otherwise"]["time_us"] == row.time_us
    assert told["otherwise"]["config"] == choosing.choose(DECODING, "fwd", H200).config
    assert serving.served_by(DECODING, H200, backward=False) == {"fwd": "fwd_split + fwd_combine"}
    training = serving.explain_problem(DECODING, H200)
    (backward,) = {one.status for one in training.kernels[1:]}  # stale under another Triton than the rows'
    assert training.status == {"tuned": "estimated", "stale": "stale"}[backward]


def test_a_config_for_few_tiles_is_no_rows_either():
    short = Problem("bf16", 1, 16, 16, 512, 512, 128, 128, CAUSAL)
    found = serving.explain_problem(short, H200, ("fwd",))
    served, told = found.kernels[0], found.as_dict()["kernels"][0]
    assert served.few_tiles and served.status == "estimated" and list(served.runs) == ["sm90/fwd"]
    assert found.verdict == "Estimated: fwd runs warp_specialized, with a config of the schedule model that no row has."
    assert told["config"]["BLOCK_M"] == 64 and told["gain"] is None
    assert told["otherwise"]["config"]["BLOCK_M"] == told["changed"]["BLOCK_M"]["row"] == 128
    choice = choosing.choose(short, "fwd", H200)
    assert choice.step == "schedule model, few tiles" and choice.lead is None and choice.row is not None
    tuned = choosing.choose(replace(short, batch=32), "fwd", H200)
    assert not tuned.few_tiles and "problem exact" in tuned.step and tuned.lead > 1


def test_explain_says_of_a_call_that_nothing_compiles_what_it_lacks(monkeypatch):
    monkeypatch.setattr("fa2tune.compiling.fingerprint.triton_version", lambda: "")
    found = serving.explain_problem(replace(DECODING, batch=8, seqlen_q=2000, seqlen_k=2000), H200, ("fwd",))
    said = "there is no file of binaries, and no Triton is installed to compile it."
    assert found.verdict == f"Cannot run here: {found.as_dict()['lacking']}." and found.verdict.endswith(said)
    assert found.next == "pip install --upgrade 'triton>=3.6'" and "not to be had" in str(found.kernels[0].binaries)
