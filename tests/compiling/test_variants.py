"""Several variants of a kernel: which one a config is of, whose hashes make which rows stale."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cache_rows import CONFIG, row
from tuner_runs import H200, SPEC
from variant_fakes import DEFAULT

from fa2tune import gpus
from fa2tune.compiling import fingerprint, limits, registry
from fa2tune.compiling.registry import variant_named, variant_of
from fa2tune.rows.row import backward_implementation, over_portable
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BACKWARD, KERNELS, STRATEGIES
from fa2tune.spec.variant import DESCRIPTOR, POINTER, WARP_SPECIALIZED, implementation_of

pytestmark = pytest.mark.usefixtures("specialized_fakes", "quick_starts")


def test_a_config_tells_its_variant() -> None:
    assert implementation_of(CONFIG) == POINTER and variant_of("fwd", CONFIG).name == "portable/fwd"
    assert implementation_of(DEFAULT) == WARP_SPECIALIZED and variant_of("fwd", DEFAULT).name == "sm90/fwd"
    first, *others = (v.name for v in registry.variants_of("bwd_dq"))
    assert first == "portable/bwd_dq" and "sm90/bwd_dq" in others
    pointer, descriptor, *more = registry.implementations("fwd")
    assert (pointer, descriptor) == (POINTER, DESCRIPTOR) and WARP_SPECIALIZED in more
    with pytest.raises(ValueError, match=r"known are pointer, descriptor, .*warp_specialized"):
        variant_of("fwd", {"LOADS": "by mail"})


def test_two_variants_of_one_implementation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = {**registry.variants(), "again": variant_named("sm90/fwd"), "more": SimpleNamespace(
        name="more", serves="fwd", portable=False, implementations=(WARP_SPECIALIZED,))}  # fmt: skip
    monkeypatch.setattr(registry, "variants", lambda: twice)
    registry.implementations.cache_clear()
    with pytest.raises(ValueError, match="sm90/fwd and more are both warp_specialized"):
        registry.implementations("fwd")


def test_other_architectures_are_refused() -> None:
    variant = variant_named("sm90/fwd")
    assert limits.before_compile(variant, SPEC, DEFAULT, H200) is None
    for gpu in ("a100", "b200"):
        refused = limits.before_compile(variant, SPEC, DEFAULT, gpus.named(gpu))
        assert refused is not None and refused.name == "architecture" and "exactly 9.0" in refused.why


def test_portable_rows_stay_fresh_whatever_the_others_are() -> None:
    hashes = fingerprint.kernel_hashes()
    filed = {f"{strategy} {backward_implementation(special)}" for strategy in STRATEGIES for special in (False, True)}
    assert set(hashes) >= {
        f"{name} {mask}"
        for name in (
            *KERNELS,
            *(f"{kernel} {WARP_SPECIALIZED}" for kernel in KERNELS),
            *(f"bwd {variant}" for variant in filed),
        )
        for mask in ROW_MASKS
    }
    assert len({hashes[f"bwd {variant} full"] for variant in filed}) == len(filed)


def test_a_whole_backward_is_held_against_the_portable_one_by_their_lead_over_the_default() -> None:
    """Each may have been timed at another clock."""
    portable = row({"kernel": BACKWARD}, strategy="split", implementation="portable", time_us=400.0, gain=1.1)
    default = row({"kernel": BACKWARD}, strategy="fused", implementation="portable", time_us=380.0, gain=None)
    later = row({"kernel": BACKWARD}, strategy="fused", implementation="warp_specialized", time_us=390.0, gain=1.65)
    assert over_portable(later, [portable, default, later]) == pytest.approx(1.5)
    assert over_portable(later, [default, later]) == pytest.approx(380 / 390)
