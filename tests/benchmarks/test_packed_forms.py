"""benchmarks/packed_forms.py without a GPU: which calls and candidates it times."""

from __future__ import annotations

from benchmark_scripts import script

from fa2tune import gpus
from fa2tune.compiling import limits
from fa2tune.compiling.registry import variant_of

forms = script("packed_forms")
H200 = gpus.named("h200")


def test_the_calls_are_those_that_are_named() -> None:
    found = list(forms.packings())
    assert [name.split()[0] for name, *_ in found[: len(forms.CALLS)]] == [str(number) for number in forms.CALLS]
    assert all(name.endswith(str(packing)) for name, packing, _ in found[: len(forms.CALLS)])
    assert sum(in_forms for *_, in_forms in found) == len(forms.IN_FORMS)


def test_every_candidate_can_run() -> None:
    for _, packing, in_forms in forms.packings():
        named = forms.candidates(packing, in_forms, False, H200)
        served = [name for name in named if name.endswith("served")]
        assert served == ["packed, served", "dense, served"][: 1 + (forms.dense(packing) is not None)]
        assert len(named) == len(served) * (1 + 4 * in_forms)
        for problem, config in named.values():
            assert limits.before_compile(variant_of("fwd", config), problem.specialization, config, H200) is None
        assert list(forms.candidates(packing, in_forms, True, H200)) == ["packed, served"]
