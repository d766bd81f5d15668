"""The report of rows that another architecture timed."""

from __future__ import annotations

from dataclasses import replace

from cache_rows import FULL

from fa2tune.report import contents, facts
from fa2tune.rows.row import MEASURED, PORTED


def test_their_speed_is_no_share_of_the_peak_of_their_gpu() -> None:
    key = FULL.key.with_(gpu="a100-sxm-80gb", sm_count=108, arch=80)
    for obtained, has in ((MEASURED, True), (PORTED, False)):
        (standing,) = facts.standings([replace(FULL, key=key, obtained=obtained, tflops=300.0)])
        assert (standing.share is not None) == has


def test_a_note_says_whose_times_they_are() -> None:
    key = FULL.key.with_(gpu="a100-sxm-80gb", sm_count=108, arch=80)
    ported = replace(FULL, key=key, obtained=PORTED, obtained_on="NVIDIA H200")
    note = contents.ported_note(facts.standings([ported, replace(FULL, obtained=MEASURED)]))
    assert note.startswith("1 of the rows are ported to a100-sxm-80gb: they were timed as sm_80 code on NVIDIA H200")
    assert contents.ported_note(facts.standings([replace(FULL, obtained=MEASURED)])) == ""
