"""benchmarks/packed_choices.py without a GPU: which calls and candidates it times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmark_scripts import script
from gpu_in_python import PythonGpu

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import group_parts_schedule
from fa2tune.compiling import limits
from fa2tune.launching import group_parts, passes
from fa2tune.spec.mask import CAUSAL, Mask

choices = script("packed_choices")
H200 = gpus.named("h200")
RECORDS = Path(__file__).parents[2] / "benchmarks" / "calls"


def test_the_calls_are_those_that_were_drawn() -> None:
    for drawing, numbers in choices.CALLS.items():
        assert [int(name.split()[0]) for name in choices.packings(drawing)] == list(numbers)
    tiled = choices.packings(choices.ALL_TILES)
    assert [int(name.split()[0]) for name in tiled] == [n for numbers in choices.TILES.values() for n in numbers]
    behind = choices.packings(choices.BEHIND_PEERS)
    assert [int(name.split()[0]) for name in behind] == [n for numbers in choices.BEHIND.values() for n in numbers]
    long = choices.packings(choices.KEYS_IN_PARTS)
    assert [int(name.split()[0]) for name in long] == [n for numbers in choices.LONG_ONES.values() for n in numbers]
    uneven = choices.packings(choices.LONGER_FIRST)
    assert [int(name.split()[0]) for name in uneven] == [n for numbers in choices.UNEVEN.values() for n in numbers]
    dominated = choices.packings(choices.ONE_LONG)
    assert [int(name.split()[0]) for name in dominated] == [
        n for numbers in choices.DOMINATED.values() for n in numbers
    ]
    for _, call in behind.values():
        assert call["bwd"]["ratio"] < 0.99
    for name, (packing, call) in {**choices.packings(1), **choices.packings(2)}.items():
        assert name.endswith(str(packing)) and {"fwd", "bwd"} <= set(call)
    assert choices.masks("causal") == CAUSAL and choices.masks("window 7, 0") == Mask("band", 7, 0)


@pytest.mark.parametrize("drawing", [1, 2, 4, 7, 9])
def test_every_candidate_can_run_and_the_choice_is_one_of_them(drawing: int) -> None:
    for packing, _ in choices.packings(drawing).values():
        problem = choices.posed(packing)
        for pass_, named in choices.candidates(problem, H200, drawing).items():
            if drawing in (choices.ALL_TILES, choices.KEYS_IN_PARTS, choices.ONE_LONG) and pass_ == "bwd":
                assert not named
                continue
            assert [name for name in named if name.endswith("chosen")] == list(named)[-1:] and len(named) > 1
            for choice, parts in named.values():
                assert limits.before_compile(choice.variant, problem.specialization, choice.config, H200) is None
                assert parts == 1 or (pass_ == "bwd" and parts in group_parts.allowed(problem))


@pytest.mark.parametrize("drawing", [choices.BEHIND_PEERS, choices.LONGER_FIRST, choices.ALONE, choices.QUERY_BLOCKS])
def test_backwards_are_timed_in_few_forms_with_the_choice_among_them(drawing: int) -> None:
    for packing, _ in choices.packings(drawing).values():
        problem = choices.posed(packing)
        named = choices.candidates(problem, H200, drawing, "bwd")["bwd"]
        assert 1 < len(named) <= choices.MOST_FORMS and sum(name.endswith("chosen") for name in named) == 1
        for choice, _ in named.values():
            assert limits.before_compile(choice.variant, problem.specialization, choice.config, H200) is None


def test_every_candidate_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors, workspaces, descriptors and arguments of every launch, next to no GPU."""
    PythonGpu(monkeypatch)
    for packing, _ in choices.packings().values():
        problem = choices.posed(packing)
        queries, keys = ((1, heads, rows, packing.head_dim) for heads, rows in
                         ((packing.heads_q, problem.seqlen_q), (packing.heads_kv, problem.seqlen_k)))  # fmt: skip
        shapes = {"q": queries, "k": keys, "v": keys, "o": queries, "lse": queries[:3]}
        back = {**shapes, "do": queries, "dq": queries, "dk": keys, "dv": keys}
        for pass_, named in choices.candidates(problem, H200).items():
            tensors = {
                name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
                for name, shape in (shapes if pass_ == "fwd" else back).items()
            } | passes.meta_offsets(problem.extent)
            shared = {"delta": (queries[:3], "fp32")} if pass_ == "bwd" else {}
            for choice, parts in named.values():
                kernel = "fwd" if pass_ == "fwd" else choices.KERNEL
                made = passes.Kernels({kernel: choice}, problem, tensors, 0.1, 0, shared, {kernel: parts})
                assert made.size > 0


def test_the_choice_is_what_a_call_gets() -> None:
    packing, _ = next(iter(choices.packings().values()))
    problem = choices.posed(packing)
    *_, (choice, parts) = choices.candidates(problem, H200)["bwd"].values()
    kernel = choices.KERNEL
    _, chosen = choosing.choose_backward(choosing.Chooser(problem, H200), False)
    assert choice.config == chosen[kernel].config
    assert parts == group_parts_schedule.parts(problem, chosen, H200)[kernel] > 1


def test_raced_keys_in_parts() -> None:
    """What serves is the fastest number of parts or takes at most 5 % longer, and no call that takes them would be faster
    without."""
    raced = json.loads((RECORDS / "packed_choices_7.json").read_text("utf-8"))["calls"]
    taken = 0
    for name, (packing, _) in choices.packings(choices.KEYS_IN_PARTS).items():
        problem, times = choices.posed(packing), raced[name]["us"]["fwd"]
        choice = choices.choosing.choose(problem, "fwd", choices.H200, WARP_SPECIALIZED_ROWS)
        config = choices.packed_splits_schedule.config_of(problem, choice.config, choices.H200, choice.row)
        if config is None:
            assert min(times.values()) > 0.8 * times["chosen"], name
            continue
        taken += 1
        served = times[f"{config['BLOCK_M']} x {config['BLOCK_N']} in {config['SPLITS']} parts"]
        assert served <= min(0.9 * times["chosen"], 1.05 * min(times.values())), name
    assert taken == 8
