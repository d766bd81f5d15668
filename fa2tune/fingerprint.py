"""What makes a row stale: hashes of kernel source and search space, and the versions of the toolchain."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

from fa2tune.compiler import variant_named
from fa2tune.variant import Variant


def _code_of(path: Path) -> str:
    """The module written anew from its syntax tree: comments, docstrings, formatting and line numbers do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]
    return ast.unparse(tree)  # not ast.dump, which differs from one Python version to the next


@cache
def kernel_hash(variant: Variant) -> str:
    """Hash of the kernel's module and of what the kernels share; 16 hex digits."""
    module = importlib.import_module(variant.kernel.fn.__module__)
    path = Path(inspect.getfile(module))
    return hashlib.sha256((_code_of(path) + _code_of(path.with_name("common.py"))).encode()).hexdigest()[:16]


@cache
def backward_hash() -> str:
    """Hash of every kernel that a whole backward, split or fused, may run; 16 hex digits."""
    names = ("bwd_delta", "bwd_dq", "bwd_dkdv", "bwd_fused")
    return hashlib.sha256("".join(kernel_hash(variant_named(name)) for name in names).encode()).hexdigest()[:16]


@cache
def space_hash(variant: Variant) -> str:
    """Hash of the search space: its dimensions and the names of its constraints; 16 hex digits."""
    space = variant.space
    text = repr((space.name, sorted(space.dimensions.items()), [constraint.name for constraint in space.constraints]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def driver_version() -> str:
    """Version of the NVIDIA kernel driver, e.g. "580.159.04"; "" without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return _driver_version_by_nvml()
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else ""


def _driver_version_by_nvml() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # no library, no driver, or one that does not answer: the version is not known
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)
