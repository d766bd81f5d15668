"""The masks of kernels/masks/, on the host: what each says of itself, against one pair at a time; and what a call may name."""

from __future__ import annotations

import importlib.util
import itertools
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fa2tune
from fa2tune.spec import maskfile, scorefile, standins
from fa2tune.spec.mask import (
    ABSENT,
    CAUSAL,
    FULL,
    Mask,
    band,
    checked,
    for_operator,
    mask_of,
    of_operator,
    row_mask_named,
)

SIDES = (None, 0, 1, 2, 5, 9)
LENGTHS = (1, 2, 3, 7)
CHUNKS = tuple(Mask("chunked", chunk) for chunk in (1, 2, 3, 5, 9))
TOP_LEFT = Mask("causal_top_left")
NAMES = ", ".join(maskfile.offered())
BANDS = tuple(band(left, right) for left, right in itertools.product(SIDES, SIDES))


def sees(mask: Mask, i: int, j: int, offset: int) -> bool:
    """The definitions, once more."""
    if mask.name == "band":
        left, right = mask.values
        return (left < 0 or j >= i + offset - left) and (right < 0 or j <= i + offset + right)
    if mask.name == "chunked":
        return j <= i + offset and j // mask.values[0] == (i + offset) // mask.values[0]
    return mask == FULL or j <= i + (0 if mask == TOP_LEFT else offset)


def visible(mask: Mask, seqlen_q: int, seqlen_k: int) -> set[tuple[int, int]]:
    pairs = itertools.product(range(seqlen_q), range(seqlen_k))
    return {(i, j) for i, j in pairs if sees(mask, i, j, seqlen_k - seqlen_q)}


@pytest.mark.parametrize("mask", (*BANDS, *CHUNKS, TOP_LEFT), ids=repr)
def test_what_a_mask_says_of_itself(mask: Mask) -> None:
    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        seen = visible(mask, seqlen_q, seqlen_k)
        said = mask.visible(np.arange(seqlen_q)[:, None], np.arange(seqlen_k), seqlen_q, seqlen_k)
        found = np.broadcast_to(said, (seqlen_q, seqlen_k))
        assert {(int(i), int(j)) for i, j in zip(*found.nonzero(), strict=True)} == seen
        assert all(
            bool(mask.visible(i, j, seqlen_q, seqlen_k)) == ((i, j) in seen)
            for i, j in itertools.product(range(seqlen_q), range(seqlen_k))
        )
        assert mask.pairs(seqlen_q, seqlen_k) == len(seen)
        assert visible(mask.fitted(seqlen_q, seqlen_k), seqlen_q, seqlen_k) == seen
        if mask.name == "band":
            assert visible(Mask("band", *mask.arguments(seqlen_q, seqlen_k)), seqlen_q, seqlen_k) == seen


def test_pairs_that_no_file_states_are_counted() -> None:
    for name in maskfile.names():
        stated = maskfile.mask_named(name)
        uncounted = maskfile.MaskHooks(name, stated.left, stated.right, stated.visible, "full", stated.values)
        values = [min(max(3, least), most) for least, most in stated.values.values()]
        for lengths in itertools.product(LENGTHS, LENGTHS):
            assert maskfile.visible_pairs(uncounted, lengths, values) == Mask(name, *values).pairs(*lengths)


def test_what_a_call_asks_for() -> None:
    assert (
        mask_of(True)
        == CAUSAL
        == mask_of(False, (None, 0))
        == mask_of(True, (-1, -1))
        == mask_of(False, None, "causal")
    )
    assert mask_of(False) == FULL == checked("full")
    assert mask_of(True, (7, 3)) == band(7, 0) == Mask("band", 7, 0)
    assert mask_of(False, (np.int64(5), np.int64(-1))) == band(5, None) == Mask("band", np.int64(5), -1)
    assert Mask("band", -1, 0).fitted(9, 9) == CAUSAL and Mask("band", -1, -1).fitted(9, 9) == FULL


@pytest.mark.parametrize(
    ("mask", "name", "row_mask", "text", "asked", "window"),
    [
        (FULL, "full", "full", "full", ("band", -1, -1), None),
        (CAUSAL, "causal", "causal", "causal", ("band", -1, 0), None),
        (band(1024, 0), "band", "causal", "window 1024, 0", ("band", 1024, 0), (1024, 0)),
        (band(4, 5), "band", "full", "window 4, 5", ("band", 4, 5), (4, 5)),
        (band(None, 3), "band", "full", "window unbounded, 3", ("band", -1, 3), (None, 3)),
        (band(4, None), "band", "full", "window 4, unbounded", ("band", 4, -1), (4, None)),
        (Mask("chunked", 8192), "chunked", "causal", "chunked 8192", ("chunked", 8192, ABSENT), None),
        (TOP_LEFT, "causal_top_left", "causal", "causal_top_left", ("causal_top_left", ABSENT, ABSENT), None),
    ],
    ids=str,
)
def test_what_a_mask_is_called(mask, name, row_mask, text, asked, window) -> None:
    assert (mask.name, mask.row_mask, str(mask), mask.window) == (name, row_mask, text, window)
    assert for_operator(mask) == asked
    assert of_operator(*asked) == mask
    assert eval(repr(mask)) == mask == pickle.loads(pickle.dumps(mask))
    assert hash(eval(repr(mask))) == hash(mask)
    assert mask.measured == (mask in (FULL, CAUSAL))


def test_rows_have_masks_of_two_names() -> None:
    assert row_mask_named("full") == FULL
    assert row_mask_named("causal") == CAUSAL
    with pytest.raises(ValueError, match="mask: got 'band', allowed are full and causal"):
        row_mask_named("band")


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("caussal", ValueError, r"mask: got 'caussal', allowed are " + NAMES),
        ("../spec/key", ValueError, r"mask: got '../spec/key', allowed are"),
        ("full.py", ValueError, r"mask: got 'full.py', allowed are"),
        ("band", ValueError, r"mask: got 'band', band has 2 values: fa2tune.Mask\('band', left, right\)"),
        (Mask("causal", 3), ValueError, r"mask: got Mask\('causal', 3\), causal has 0 values: fa2tune.Mask\('causal'\)"),
        (Mask("band", -2, 0), ValueError, r"mask: got Mask\('band', -2, 0\), left must be from -1 to 9223372036854775807"),
        (Mask("band", 0, 2**63), ValueError, r"right must be from -1"),
        ("chunked", ValueError, r"mask: got 'chunked', chunked has 1 value: fa2tune.Mask\('chunked', chunk\)"),
        (Mask("chunked", 0), ValueError, r"mask: got Mask\('chunked', 0\), chunk must be from 1 to 9223372036854775807"),
        (True, TypeError, r"mask: got True, must be a name or a fa2tune.Mask: " + NAMES),
        (("band", 1, 2), TypeError, r"mask: got \('band', 1, 2\), must be a name or a fa2tune.Mask"),
    ],
)  # fmt: skip
def test_a_wrong_mask_is_named(given, error, said) -> None:
    with pytest.raises(error, match=said):
        checked(given)


@pytest.mark.parametrize("wrong", [("band", 1.0, 0), ("band", True, 0), ("band", "1", 0), (3,), (None, 3)])
def test_a_mask_is_a_name_and_integers(wrong) -> None:
    with pytest.raises(TypeError, match=r"(name|values): got"):
        fa2tune.Mask(*wrong)


def test_a_mask_has_no_more_values_than_kernels_take() -> None:
    with pytest.raises(ValueError, match="values: got 3 of mask wide, kernels take up to 2"):
        maskfile.MaskHooks("wide", True, True, lambda *asked: True, "full", dict.fromkeys("abc", (0, 1)))


@pytest.mark.parametrize(
    "mask", [FULL, CAUSAL, band(3, None), band(None, 4), Mask("band", -1, 0), Mask("chunked", 7)], ids=repr
)
def test_an_operator_gets_the_mask_that_a_call_names(mask: Mask) -> None:
    found = of_operator(*for_operator(mask))
    assert found == mask or (mask == Mask("band", -1, 0) and found == CAUSAL)


@pytest.mark.parametrize(
    "mask",
    [Mask("causal", 5), Mask("full", 9), Mask("chunked", 8, 7), Mask("chunked"), Mask("chunked", 1, 2, 3), Mask("band", 5),
     Mask("band"), Mask("band", -5, 0), Mask("chunked", 0)],
    ids=repr,
)  # fmt: skip
def test_a_mask_with_other_values_than_its_file_asks_for_is_refused_in_a_compiled_graph_too(mask: Mask) -> None:
    """There the file is read by the operator, not while the graph is made."""
    with pytest.raises(ValueError, match=r"^mask: got "):
        of_operator(*for_operator(mask))


@pytest.mark.parametrize("kind", [maskfile, scorefile])
def test_stray_files_are_neither_masks_nor_score_terms(kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = kind.names()
    (place,) = importlib.util.find_spec(kind.FOLDER).submodule_search_locations
    for file in Path(place).glob("*.py"):
        shutil.copy(file, tmp_path)
    for stray in ("._full.py", "__init__.py", "full copy.py", "full-old.py", "old.pyc", "notes.txt"):
        (tmp_path / stray).touch()
    for link in (".#full.py", "dangling.py"):
        (tmp_path / link).symlink_to("nowhere")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert kind.names() == known


def test_a_file_must_say_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = maskfile.mask_named("causal")
    for held in ({"MASK": causal}, {}, {"MASK": 3}):
        monkeypatch.setattr(maskfile.standins, "run", lambda module, held=held: held)
        with pytest.raises(ValueError, match=r"kernels/masks/full\.py: MASK is .*must be MaskHooks\('full'"):
            maskfile.mask_named.__wrapped__("full")
    with pytest.raises(ValueError, match="row_mask: got 'casual' of mask mine"):
        replace(causal, name="mine", row_mask="casual")
    with pytest.raises(ValueError, match="row_mask: got 'casual' of mask mine"):
        replace(causal, name="mine", row_mask=lambda values: "casual").row_mask_of(())


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"left": True}, "left=True, right=True, values: none"),
        ({"right": False}, "left=False, right=False, values: none"),
        ({"values": {"prefix": (0, 9)}}, "left=False, right=True, values: prefix"),
    ],
    ids=["left", "not right", "values"],
)
def test_a_last_key_is_all_that_bounds_its_mask(
    stated: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that ask it drop every other bound, and all values."""
    file = dict(standins.run("masks.causal"))
    monkeypatch.setattr(maskfile.standins, "run", lambda module: file)
    assert maskfile.mask_named.__wrapped__("causal").right
    file["MASK"] = replace(file["MASK"], **stated)
    allowed = "allowed with it are left=False, right=True, values: none"
    with pytest.raises(ValueError, match=f"^kernels/masks/causal.py: last_key is defined with {said}; {allowed}$"):
        maskfile.mask_named.__wrapped__("causal")
    del file["last_key"]
    assert maskfile.mask_named.__wrapped__("causal") is file["MASK"]


@pytest.mark.parametrize(
    "line", ["from fa2tune.kernels.masks.causal import keep", "from fa2tune.kernels.masks import causal"]
)
def test_masks_do_not_import_each_other(line: str) -> None:
    built = {"__name__": "fa2tune.kernels.masks.mine", "__builtins__": {"__import__": standins._import}}
    with pytest.raises(
        ImportError, match=r"masks\.mine imports fa2tune\.kernels\.masks.*through fa2tune\.kernels\.lib"
    ):
        exec(line, built)
