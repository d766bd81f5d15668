"""Which configs have been shown to be right, of kernels that no interpreter runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fa2tune.compiling.compiler import is_gluon
from fa2tune.rows.row import PREDICTED, Row
from fa2tune.spec.problem import Specialization, padded_head_dim
from fa2tune.spec.variant import Variant
from fa2tune.tuning.search.candidates import Point, point

#: The documented default: tests/gpu/test_sm80.py and test_specialized.py run it.
NO_ERRORS: Mapping[str, Any] = {}


def _dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    return padded_head_dim(head_dim), padded_head_dim(head_dim_v)


def proven(
    variant: Variant, spec: Specialization, arch: int, rows: Iterable[Row]
) -> dict[Point, Mapping[str, Any]] | None:
    """Config -> the errors of its results on a GPU, as a row of any GPU has them; the default first. None: every config can
    be checked, in the interpreter."""
    if not is_gluon(variant):
        return None
    found = {point(variant.space.default(spec, arch)): NO_ERRORS}
    wanted = variant.serves, spec.dtype, spec.mask, _dims(spec.head_dim, spec.head_dim_v)
    for row in rows:
        key = row.key
        if row.obtained == PREDICTED or row.implementation not in variant.implementations or not row.errors:
            continue
        if (key.kernel, key.dtype, key.mask, _dims(key.head_dim, key.head_dim_v)) == wanted:
            where = point(variant.space.completed(row.config))
            if not found.get(where):
                found[where] = row.errors
    return found
