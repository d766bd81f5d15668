"""benchmarks/launch_choices.py --few without a GPU: what it times."""

from __future__ import annotations

from benchmark_scripts import script

from fa2tune.compiling import registry
from fa2tune.spec.problem import Specialization

choices = script("launch_choices")


def test_calls_of_few_tiles_race_each_form_once() -> None:
    space = registry.variant_named("sm90/fwd").space
    for dim, mask, count in ((24, "full", 16), (64, "causal", 14)):
        found = choices.forms_of(dim, mask)
        forms = [tuple(config[name] for name in choices.FORM) for config in found]
        assert len(set(forms)) == len(forms) == count and (64, 64, 1, 80) in forms and (64, 128, 1, 128) in forms
        assert all(space.broken(config, Specialization("bf16", dim, dim, mask), 90) is None for config in found)
    assert {len(call) for call in choices.FEW} == {len(choices.NAMES)}


def test_calls_of_few_tiles_are_drawn_by_their_seed() -> None:
    found = choices.drawn_few(3, 60)
    assert found == choices.drawn_few(3, 60) != choices.drawn_few(4, 60)
    assert {call["head_dim"] for call in found[len(choices.FEW) :]} == set(choices.FEW_DIMS)
    assert all(call["few"] and call["heads_q"] <= 96 for call in found)
