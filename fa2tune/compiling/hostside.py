"""The host's side of a kernel file without Triton: its Variants, for a process that finds its kernels compiled.

Importing Triton and its Gluon takes 0.1 to 0.4 s, most of a first call that compiles nothing, and all that such a call wants of
a kernel file are the Variants: parameter names, grids, workspaces. So the file is run with stand-ins for Triton and for what
other kernel files hold. Device code is never run; the first to want it gets the real kernel, Triton and all (``Kernel.real``).
A test holds every Variant made so against the real one.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
from collections.abc import Callable
from importlib.abc import SourceLoader
from typing import Any

from fa2tune.variant import Variant

#: What the host's side calls of Triton.
HELPERS: dict[str, Callable[..., Any]] = {
    "triton.cdiv": lambda x, y: -(-x // y),
    "triton.next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
}


class Kernel:
    """Stands in for a kernel. ``fn``: its Python function, for the names of its parameters."""

    def __init__(self, fn: Callable[..., Any], gluon: bool) -> None:
        self.fn, self._gluon = fn, gluon

    def is_gluon(self) -> bool:
        return self._gluon

    def real(self) -> Any:
        """The kernel as Triton has it."""
        return getattr(importlib.import_module(self.fn.__module__), self.fn.__name__)

    def __getitem__(self, grid: Any) -> Any:
        return self.real()[grid]


class _StandIn:
    """Anything of Triton's that a kernel file names: decorators, constants and annotations of device code."""

    def __init__(self, name: str) -> None:
        self.__name__ = name.rpartition(".")[2]
        self._path = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self._path}.{name}"
        return HELPERS.get(path) or _StandIn(path)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.__name__ == "jit" and arguments:
            return Kernel(arguments[0], "gluon" in self._path)
        return self


def _import(name: str, *rest: Any) -> Any:
    if name.split(".")[0] == "triton" or name.startswith("fa2tune.kernels."):
        from_list = rest[2:3] and rest[2]  # ``import a.b as c`` asks for a, and then for b of it
        return _StandIn(name if from_list else name.split(".")[0])
    return builtins.__import__(name, *rest)


def variants(module_name: str) -> tuple[Variant, ...]:
    """What a module of fa2tune.kernels holds. Raises whatever running it raises: then it has to be imported."""
    found = importlib.util.find_spec(f"fa2tune.kernels.{module_name}")
    if found is None or not isinstance(found.loader, SourceLoader):
        raise ImportError(f"fa2tune.kernels.{module_name} has no file")
    code: Any = found.loader.get_code(found.name)
    namespace = {"__name__": found.name, "__builtins__": {**vars(builtins), "__import__": _import}}
    exec(code, namespace)
    single = (namespace["VARIANT"],) if "VARIANT" in namespace else ()
    return (*single, *namespace.get("VARIANTS", ()))
