"""`fa2tune cache verify` on a real GPU: rows are compiled, checked and timed where they are."""

from __future__ import annotations

from dataclasses import replace

from fa2tune.compiling.registry import portable_of
from fa2tune.fleet import finding
from fa2tune.fleet.finding import FAILS, HOLDS, LOST, UNTOLD
from fa2tune.fleet.upkeep import Verification
from fa2tune.rows.row import MEASURED, Row
from fa2tune.spec.key import TuningKey
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.select import evidence, finalists


def rows() -> list[Row]:
    """Forward and both kernels of the split backward, by pointer, with times that nothing can keep; and the whole backward."""
    present = finding.present_gpu()
    assert present is not None
    provenance = Provenance(MEASURED, present.name, present.driver)
    key = TuningKey(
        present.gpu.name, present.gpu.sm_count, present.gpu.arch, "fwd", "bf16", "ieee", 64, 64, "causal", 2048
    )
    found = []
    for kernel in ("fwd", "bwd_dq", "bwd_dkdv"):
        config = finalists.rival(portable_of(kernel).space, key.specialization(), key.arch, "pointer")
        found.append(evidence.measured(key.with_(kernel=kernel), "pointer", config, provenance, [1.0] * 9, None))
    whole = evidence.measured(key.with_(kernel="bwd"), "portable", {}, provenance, [1.0] * 9, None, "split")
    return [*found, whole]


def test_rows_are_compiled_checked_and_timed() -> None:
    held = rows()
    first = Verification(held, held, finding.present_gpu()).go()
    assert [one.state for one in first] == [LOST] * 4, [one.why for one in first]
    fresh = [one.fresh for one in first]
    for row in fresh:
        assert row is not None and row.errors and row.samples > 6 and (row.time_us or 0.0) > 10
    again = [row for row in fresh if row]
    second = Verification(again, again, finding.present_gpu()).go()
    for one in second:  # how alike two runs are depends on what else uses the GPU
        assert one.state in (HOLDS, LOST, UNTOLD), one.why
        assert one.time_us is None or 0.7 < one.time_us / (one.row.time_us or 0.0) < 1.4


def test_a_config_that_no_call_takes_fails_and_costs_no_other() -> None:
    fwd, *others = rows()
    spoilt = replace(fwd, config={**fwd.config, "BLOCK_N": 48})
    found = Verification([spoilt, *others], others, finding.present_gpu()).go()
    assert found[0].state == FAILS, found[0].why
    assert [one.state for one in found[1:]] == [LOST] * 3
