"""benchmarks/dense_backwards.py without a GPU: which calls and candidates it times."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from benchmark_scripts import script
from click.testing import CliRunner
from gpu_in_python import PythonGpu

from fa2tune import gpus
from fa2tune.compiling import limits
from fa2tune.launching import group_parts, passes
from fa2tune.spec.problem import STRATEGIES

backwards = script("dense_backwards")
H200 = gpus.named("h200")


@functools.cache
def todo() -> dict[str, Any]:
    """Those of the H200: a choice for each call of two recordings."""
    return backwards.todo(H200)  # type: ignore[no-any-return]


def test_the_calls_are_those_behind_those_that_changed_and_some_others() -> None:
    calls = backwards.recorded()
    assert {name for name, (_, call) in calls.items() if call["ratio"] < 0.9} < set(todo()) < set(calls)
    changed = [name for name, (problem, _) in todo().items()
               if any(choice.otherwise is not None for choice, _ in backwards.chosen(problem, H200).values())]  # fmt: skip
    assert len(changed) == 90 and 50 < len(todo()) < 140
    assert any(call["ratio"] > 1.3 for name, (_, call) in todo().items() if name not in changed)


def test_every_candidate_can_run_and_the_choice_is_one_of_them() -> None:
    for problem, _ in todo().values():
        named = backwards.candidates(problem, H200)
        assert len([name for name in named if name.endswith("chosen")]) == 1
        for candidate, order in named.values():
            assert not order or set(candidate) == {"bwd_dq", "bwd_dkdv"}
            for kernel, (choice, parts) in candidate.items():
                assert limits.before_compile(choice.variant, problem.specialization, choice.config, H200) is None
                assert parts == 1 or (kernel != "bwd_dq" and parts in group_parts.allowed(problem))


def test_every_candidate_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors, workspaces, descriptors and arguments of every launch, next to no GPU."""
    PythonGpu(monkeypatch)
    raced = [
        (todo()[name][0], backwards.candidates)
        for name in ("a 88 grouped", "a 82 V apart", "b 0 unequal", "b 9 grouped")
    ]
    raced += [(problem, backwards.key_candidates) for problem, _ in backwards.KEY_CALLS.values()]
    raced += [(problem, made) for calls, made in backwards.FORMS.values() for problem, _ in calls.values()]
    for problem, candidates in raced:
        queries, keys = ((problem.batch, heads, rows) for heads, rows in
                         ((problem.heads_q, problem.seqlen_q), (problem.heads_kv, problem.seqlen_k)))  # fmt: skip
        shapes = {
            "q": (*queries, problem.head_dim), "k": (*keys, problem.head_dim), "v": (*keys, problem.head_dim_v),
            "o": (*queries, problem.head_dim_v), "do": (*queries, problem.head_dim_v), "lse": queries,
        }  # fmt: skip
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
        gradients = {f"d{one}": tensors[one] for one in "qkv"}
        for candidate, order in candidates(problem, H200).values():
            configs = {kernel: choice for kernel, (choice, _) in candidate.items()}
            parts = {kernel: count for kernel, (_, count) in candidate.items()}
            assert tuple(configs) in STRATEGIES.values()
            shared = {"delta": (queries, "fp32")}
            passes.Kernels(configs, problem, {**tensors, **gradients}, 0.1, 0, shared, parts, order)


def test_it_lists_what_it_would_time() -> None:
    done = CliRunner().invoke(backwards.main, ["--list"], catch_exceptions=False)
    assert len(done.output.splitlines()) == len(todo())
    assert "half blocks, chosen" in done.output and "at a time, dQ first" in done.output


@pytest.mark.parametrize(
    ("forms", "name"),
    [
        ("apart", "V apart"),
        ("stored", "dS in memory"),
        ("turns", "early"),
        ("grouped", "row, 1 parts"),
    ],
)
def test_forms_are_timed_next_to_what_serves(forms: str, name: str) -> None:
    calls, made = backwards.FORMS[forms]
    for problem, _ in calls.values():
        found = made(problem, H200)
        assert next(iter(found)) == "served" and name in found
        assert forms in ("apart", "stored") or len(found) <= backwards.MOST_FORMS
        for candidate, _ in list(found.values())[1:]:
            for choice, _ in candidate.values():
                assert limits.before_compile(choice.variant, problem.specialization, choice.config, H200) is None
    done = CliRunner().invoke(backwards.main, ["--forms", forms, "--list"], catch_exceptions=False)
    assert len(done.output.splitlines()) == len(calls)


def test_keys_of_dq_in_parts_are_timed_next_to_whole_ones() -> None:
    done = CliRunner().invoke(backwards.main, ["--keys", "--list"], catch_exceptions=False)
    lines = done.output.splitlines()
    assert len(lines) == len(backwards.KEY_CALLS) and all("keys whole; " in line for line in lines)
    assert sum("parts, chosen" in line for line in lines) >= 5 and any("parts, chosen" not in line for line in lines)
