"""The versions of torch and Triton that fa2tune works with. pip checks them at the install; this check is for what was
installed later, or with ``--no-deps``.

Triton's is checked where it is to compile or to interpret: machine code runs with any, or none. torch 2.8 lacks
``torch.backends.cuda.matmul.fp32_precision``."""

from __future__ import annotations

import re

#: package -> lowest version; a test holds it to pyproject.toml
REQUIRED = {"torch": (2, 9), "triton": (3, 6)}


class VersionError(ImportError):
    """A package that is installed is too old."""


def numbers(version: str) -> tuple[int, ...]:
    """ "2.11.0a0+nv26.02" -> (2, 11): a pre-release counts as its release. () where the text does not begin with a number."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else ()


def check(package: str, version: str) -> None:
    """Raises VersionError if ``version`` of ``package`` is too old; a version without numbers passes."""
    lowest, found = REQUIRED[package], numbers(version)
    if found and found < lowest:
        wanted = ".".join(map(str, lowest))
        raise VersionError(
            f"fa2tune needs {package} {wanted} or newer; this Python has {package} {version}. Upgrade it: "
            f"pip install --upgrade '{package}>={wanted}'"
            + (
                " (this upgrades torch, too, where torch asks for one version of Triton)" if package == "triton" else ""
            ),
            name=package,
        )
