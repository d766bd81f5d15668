"""Why candidates were never timed, in plain words."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from cache_rows import row
from private_words import EVERYWHERE, IN_PROSE, found_in

from fa2tune.cli.tune import _reasons
from fa2tune.compiling.registry import variants
from fa2tune.rows import pruned, reader
from fa2tune.tuning.search.failures import BLAMELESS, FAULTS
from fa2tune.tuning.search.space import OTHER_FORM, PRUNED
from fa2tune.tuning.search.status import _WORDS

#: Where candidates are refused by name, beside the constraints of search spaces.
REFUSE = [Path(__file__).parents[2] / "fa2tune" / "compiling" / name for name in ("limits.py", "support.py")]
#: Words of the code, which say nothing to a reader of a table.
CONSTRAINTS = [rule for space in pruned.spaces().values() for rule in space.constraints]
PRIVATE = {*EVERYWHERE, *IN_PROSE, "whose", "select"}


def names() -> set[str]:
    """Every name under which this version counts candidates, constraints aside."""
    found = {name for file in REFUSE for name in re.findall(r'Refusal\(\s*"(\w+)"', file.read_text())}
    return found | FAULTS | BLAMELESS | {word for word, _ in _WORDS} | {PRUNED, OTHER_FORM, "wrong_result"}


def test_every_name_has_a_text_and_every_text_a_name() -> None:
    assert len(names()) > 20
    assert set(pruned.WORDS) == names()


def test_constraints_bring_their_text_the_same_wherever_the_name_is() -> None:
    assert len(CONSTRAINTS) > 40
    shorts = defaultdict[str, set[str]](set)
    for rule in CONSTRAINTS:
        shorts[rule.name].add(rule.short)
    assert shorts == {name: {pruned.words(name)} for name in shorts}
    assert not shorts.keys() & pruned.WORDS.keys(), "one would hide the other"


def test_the_constraints_of_every_kernel_are_read() -> None:
    used = {rule for variant in variants().values() for rule in variant.space.constraints}
    assert {rule.name for rule in used - {*CONSTRAINTS}} == set()


def test_rows_that_are_shipped_hold_no_name_without_a_text() -> None:
    held = {name for path in reader.shipped_paths() for row in reader.read(path) for name in row.pruned}
    assert len(held) > 20
    assert held <= {*pruned.WORDS, *(rule.name for rule in CONSTRAINTS)}


@pytest.mark.parametrize("text", sorted({*pruned.WORDS.values(), *(rule.short for rule in CONSTRAINTS)}))
def test_a_text_is_short_and_plain(text: str) -> None:
    assert len(text) <= 64 and not {*":;"} & {*text}, "they stand between texts and counts"
    assert not found_in(text, PRIVATE)
    assert "_" not in re.sub(r"\b[A-Z][A-Z_]+\b|num_warps", "", text), "only parameters of a config have underscores"


def test_counts_are_listed_with_the_most_first() -> None:
    found = {"crash": 2, "who_prepares_makes_room_for_who_finishes": 31, "timeout_before": 1, "of_another_version": 1}
    assert pruned.counted(found) == (
        "FINISH_BESIDE without the options that it needs: 31; crash: 2; timeout, in an earlier run: 1; of another version: 1"
    )


def test_the_tuner_sums_reasons_up_in_words() -> None:
    rows = [row({"bucket": bucket}, pruned={"spills": count}) for bucket, count in ((512, 3), (1024, 5))]
    ampere = [row({"arch": 80}, implementation="sm80", pruned={"crash": 2}), row(pruned={})]
    assert _reasons([*rows, *ampere]) == ["portable/fwd: too many spills: 5", "sm80/fwd: crash: 2"], (
        "not of the kernel fwd"
    )
