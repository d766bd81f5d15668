"""What a cold call works out, and how often. Tensors of the CPU pass for an H200's; nothing is compiled or launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.choosing import Chooser
from fa2tune.calling.schedules import group_parts_schedule
from fa2tune.compiling import choice, limits
from fa2tune.launching import passes
from fa2tune.rows import lookup
from fa2tune.rows.lookup import Toolchain
from fa2tune.spec.extent import WHOLE, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import NONE

H200 = gpus.named("h200")


class Derived:
    """How often each thing was derived: (what, of what) -> times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: Counter[tuple[str, Any]] = Counter()
        self.kept: list[Any] = []  # so that no identity is given to another object
        self.patch = monkeypatch

    def count(self, module: Any, name: str, of: Callable[..., Any]) -> None:
        real = getattr(module, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            self.kept.append(arguments)
            self.times[name, of(*arguments)] += 1
            return real(*arguments, **named)

        self.patch.setattr(module, name, counted)

    def of(self, name: str) -> Counter[Any]:
        return Counter({what: times for (one, what), times in self.times.items() if one == name})


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> Derived:
    for module, name, value in (
        (dispatch, "gpu_of", lambda index: H200), (choosing, "toolchain", Toolchain),
        (dispatch, "FORWARD_PLANS", {}), (dispatch, "BACKWARD_PLANS", {}),
        (passes, "arch_of", lambda index: 90), (passes, "bind", lambda *asked: None), (passes, "chain", lambda *asked: None),
        (passes, "starts_early", lambda *asked: False), (torch.Tensor, "get_device", lambda tensor: 0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    found = Derived(monkeypatch)
    found.count(lookup, "candidates", lambda key, *rest: key.kernel)
    found.count(choosing, "fitting", lambda kernel, filed_as, config: id(config))
    found.count(limits, "before_compile", lambda variant, spec, config, gpu: (variant.name, id(config)))
    found.count(choosing, "better_default", lambda kernel, *rest: kernel)
    found.count(choice, "variant_of", lambda kernel, config: kernel)
    found.count(Chooser, "suited", lambda chooser, answer: (chooser.problem, id(answer.row)))
    found.count(group_parts_schedule, "parts", lambda problem, choices, gpu: problem)
    return found


def cold(mask: Mask, dim: int, heads: tuple[int, int], dtype: torch.dtype, odd: bool = False) -> None:
    """Make the plans of one call, forward and backward. ``odd``: its tensors are copied, since TMA cannot address them."""
    rows = 4096
    q, k, v, do = (
        torch.empty(2, count, rows, dim + odd, dtype=dtype)[..., :dim] for count in (heads[0], *heads[1:] * 2, heads[0])
    )
    o, lse = torch.empty(2, heads[0], rows, dim, dtype=dtype), torch.empty(passes.lse_shape(q))
    dispatch.forward_plan(("a call",), q, k, v, mask, 0.1, NONE)
    with pytest.raises(TypeError, match="NoneType"):  # the plan is made; its chain is none
        dispatch.backward(do, None, q, k, v, o, lse, mask, 0.1, False, NONE)
    assert len(dispatch.FORWARD_PLANS) == len(dispatch.BACKWARD_PLANS) == 1


@pytest.mark.parametrize("odd", [False, True], ids=["", "copied"])
@pytest.mark.parametrize(
    ("mask", "dim", "heads"), [(CAUSAL, 128, (8, 8)), (FULL, 96, (8, 2)), (band(512, 0), 64, (8, 8))]
)
def test_a_cold_call_derives_nothing_twice(
    derived: Derived, mask: Mask, dim: int, heads: tuple[int, int], odd: bool
) -> None:
    cold(mask, dim, heads, torch.bfloat16, odd)
    ladders = derived.of("candidates")
    assert {"fwd", "bwd"} < set(ladders) and max(ladders.values()) == 1, ladders
    for name in ("fitting", "before_compile", "better_default", "suited", "parts"):
        assert max(derived.of(name).values(), default=1) == 1, name
    assert derived.of("suited") and derived.of("parts")
    assert derived.of("fitting") and not derived.of("variant_of"), (
        "rows serve: no launch looks for their Variants again"
    )


def test_a_default_has_its_variant_looked_up_once(derived: Derived) -> None:
    cold(CAUSAL, 128, (8, 8), torch.float32)
    assert dict(derived.of("variant_of")) == {"fwd": 1, "bwd_dq": 1, "bwd_dkdv": 1}
    assert max(derived.of("candidates").values()) == 1


def test_the_choice_names_variant_config_and_row() -> None:
    chooser = Chooser(Problem("bf16", 2, 16, 16, 4096, 4096, 128, 128, CAUSAL), H200, node=Toolchain())
    found = chooser.choose("fwd")
    assert found is chooser.choose("fwd") and found == Chooser(chooser.problem, H200, node=Toolchain()).choose("fwd")
    assert found.row is not None and found.answer is not None and found.triton == found.row.triton
    assert found.variant.name == "sm90/fwd" and set(found.config) == set(found.variant.space.dimensions)
    nothing = Chooser(chooser.problem, H200, among=[]).choose("fwd")
    assert (nothing.row, nothing.answer, nothing.step, nothing.triton) == (None, None, "default", "")


def test_another_problem_is_worked_out_anew_and_the_same_one_is_not() -> None:
    problem = Problem("bf16", 2, 16, 16, 4096, 4096, 128, 128, CAUSAL)
    chooser = Chooser(problem, H200, among=[])
    assert chooser.of(Problem("bf16", 2, 16, 16, 4096, 4096, 128, 128, CAUSAL)) is chooser
    other = chooser.of(Problem("bf16", 2, 16, 16, 4096, 4096, 128, 128, FULL))
    assert other is not chooser and other.layers is chooser.layers and other.node is chooser.node


def test_a_new_length_of_a_bucket_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    choosing.forget()
    asked: list[str] = []
    candidates = lookup.candidates

    def counted(key: Any, *rest: Any) -> Any:
        asked.append(key.kernel)
        return candidates(key, *rest)

    monkeypatch.setattr(lookup, "candidates", counted)
    lengths = [Problem("bf16", 1, 32, 8, 1, length, 128, 128, FULL) for length in range(3000, 3020)]
    first, *others = (choosing.choose(problem, "fwd", H200) for problem in lengths)
    assert asked == ["fwd"] and all(one.answer is first.answer for one in others)
    choosing.choose(replace(lengths[0], seqlen_k=5000), "fwd", H200)  # another bucket
    choosing.choose(replace(lengths[0], aligned=False, tma=False), "fwd", H200)
    assert asked == ["fwd"] * 3


def test_what_choosers_share_changes_no_choice() -> None:
    choosing.forget()
    extents = (WHOLE, Extent("ragged", 3, 700))
    asked = [
        Problem("bf16", 2, 16, heads_kv, length, keys, dim, dim, mask, aligned=tma, tma=tma, extent=extent)
        for length, keys, dim, mask, tma, extent in product(
            (1, 1000), (1000, 1001), (64, 96), (CAUSAL, band(100, 0)), (True, False), extents
        )
        for heads_kv in (16, 2)
    ]
    for problem in asked:
        own = Chooser(problem, H200, choosing.layers(), choosing.toolchain())
        ours = Chooser(problem, H200)
        assert ours.choose("fwd") == own.choose("fwd")
        for deterministic in (True, False):
            assert choosing.choose_backward(ours, deterministic) == choosing.choose_backward(own, deterministic)
