"""What a row must have been made with to be fresh here, and whether its machine code is in a trusted file of binaries.

Where it is, the row's times hold whichever Triton is installed: the driver loads that code and nothing is compiled. This is
so for calls like the row's workload. Another specialization (a window, other head dims, tensors that are not aligned) has
another binary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from fa2tune.compiling import binaries, fingerprint, overrules, registry
from fa2tune.compiling.binaries import Entry
from fa2tune.rows.lookup import Toolchain
from fa2tune.rows.row import Row
from fa2tune.spec.problem import BACKWARD, Specialization

#: (architecture, kernel, hash of its source, specialization)
_Kind = tuple[Any, ...]
NO_TRITON = "none"  #: for a version, where no Triton is installed


def toolchain(driver: str | None = None) -> Toolchain:
    """What is running here: a row made with another kernel source is stale, and one made with another Triton, unless its
    machine code is here. ``driver``: "" for none to be compared; None for this host's."""
    version = fingerprint.triton_version() or NO_TRITON
    driver = fingerprint.driver_version() if driver is None else driver
    return Toolchain(version, driver, fingerprint.kernel_hashes(), _never if overrules.found() else has_code)


def _never(row: Row) -> bool:
    return False


def has_code(row: Row) -> bool:
    """Of a whole backward: code for each kernel that it names; their own rows say with which configs they run."""
    try:
        if row.key.kernel == BACKWARD:
            named = [registry.implementations(kernel)[name] for kernel, name in row.config.items()]
            return all(_entries(row, one.short_name, fingerprint.kernel_hash(one, row.key.hooks)) for one in named)
        variant = registry.variant_of(row.key.kernel, row.config)
    except (KeyError, ValueError):  # of kernels that are not here
        return False
    found, config = _entries(row, variant.short_name, row.kernel_hash), variant.space.completed(row.config)
    return any(_part(entry.about.get("config"), config) for entry in found)


def _entries(row: Row, kernel: str, source: str) -> list[Entry]:
    kind = row.key.arch, kernel, source, row.key.specialization()
    return [entry for entry in _index(binaries.trusted()).get(kind, ()) if entry.compiled_by(row.triton)]


def _part(compiled_in: Any, config: Mapping[str, Any]) -> bool:
    return isinstance(compiled_in, dict) and all(
        name in config and config[name] == value for name, value in compiled_in.items()
    )


@cache
def _index(trusted: binaries.Trusted) -> Mapping[_Kind, list[Entry]]:
    found: dict[_Kind, list[Entry]] = {}
    for _, file in trusted.files:
        for entry in file.entries.values():
            about, spec = entry.about, entry.about.get("spec")
            of_source = [about.get(name) for name in ("arch", "kernel", "source")]
            if not isinstance(spec, dict) or not all(
                isinstance(one, str | int) for one in (*of_source, *spec.values())
            ):
                continue
            with suppress(TypeError):  # of another version, with other fields
                found.setdefault((*of_source, Specialization(**spec)), []).append(entry)
    return found
