"""Files of kernels/ run without Triton, for what they say to the host: Variants of kernels, descriptions of masks.

Importing Triton and its Gluon takes 0.1 to 0.4 s, and all that a process that compiles nothing wants of such a file is plain
Python: parameter names, grids, workspaces, what a mask lets a query see. So the file is run with stand-ins for Triton and for
what other kernel files hold. Device code is not run, but for a mask's arithmetic on where tiles begin (``spec/visits.py``); the
first to want a kernel gets the real one, Triton and all (``Kernel.real``).
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from importlib.abc import SourceLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar


def _of_numpy(name: str) -> Callable[..., Any]:
    """numpy is imported where one is called."""
    find = cache(lambda: getattr(importlib.import_module("numpy"), name))
    return lambda *numbers: find()(*numbers)


def _cdiv(x: Any, y: Any) -> Any:
    return -(-x // y)


#: What the host's side calls of Triton.
HELPERS: dict[str, Callable[..., Any]] = {
    "triton.cdiv": _cdiv,
    "triton.next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
}
#: And device functions that reckon with integers: of Triton's language and of Gluon's, for integers and arrays of them.
for _language in ("triton.language", "triton.experimental.gluon.language"):
    HELPERS |= {f"{_language}.{name}": _of_numpy(name) for name in ("minimum", "maximum", "where")}
    HELPERS[f"{_language}.cdiv"] = _cdiv


#: What kernel files share, which is run in the same way.
LIBRARY = "fa2tune.kernels.lib"
#: Files of hooks, which nothing imports: their names are compiled into a kernel.
HOOK_FOLDERS = ("fa2tune.kernels.masks", "fa2tune.kernels.scores")


class Kernel:
    """Stands in for a kernel. ``fn``: its Python function, for the names of its parameters. Called, it runs as plain Python
    what reckons with integers."""

    def __init__(self, fn: Callable[..., Any], gluon: bool) -> None:
        self.fn, self._gluon = fn, gluon

    def is_gluon(self) -> bool:
        return self._gluon

    def real(self) -> Any:
        """The kernel as Triton has it."""
        return getattr(importlib.import_module(self.fn.__module__), self.fn.__name__)

    def __getitem__(self, grid: Any) -> Any:
        return self.real()[grid]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.fn(*arguments, **named)


class _Described(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_Described)


class _StandIn:
    """Anything of Triton's that a kernel file names: decorators, constants and annotations of device code."""

    def __init__(self, name: str) -> None:
        self.__name__ = name.rpartition(".")[2]
        self._path = name

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        if path == "triton.__version__":  # which only device code depends on
            return ""
        if name.startswith("__"):
            raise AttributeError(name)
        return HELPERS.get(path) or _StandIn(path)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.__name__ == "jit" and arguments:
            return Kernel(arguments[0], "gluon" in self._path)
        if self.__name__ == "constexpr" and arguments:
            return _Constant(self._path, arguments[0])
        return self


class _Constant(_StandIn):
    """Of device code, which the host's side may ask for its value."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name)
        self.value = value


def _import(name: str, *rest: Any) -> Any:
    if name.startswith(f"{LIBRARY}."):
        return SimpleNamespace(**run(name.removeprefix("fa2tune.kernels.")))
    if name.startswith(HOOK_FOLDERS):  # its functions would not be hooks of the file that imports them
        module = rest[0]["__name__"]
        raise ImportError(
            f"{module} imports {name}: masks and score terms share code through {LIBRARY}, not with each other"
        )
    if name.split(".")[0] == "triton":
        from_list = rest[2:3] and rest[2]  # ``import a.b as c`` asks for a, and then for b of it
        return _StandIn(name if from_list else name.split(".")[0])
    return builtins.__import__(name, *rest)


def is_module(file: Path) -> bool:
    """Whether a file is one of ours: not an editor's lock, not a copy that an archive left ("._fwd.py"), no __init__."""
    return file.suffix == ".py" and file.stem.isidentifier() and file.stem != "__init__" and file.is_file()


def names_in(folder: str) -> list[str]:
    """Of the files in a folder of kernels/, which is not imported. ``folder``: as "fa2tune.kernels.masks"."""
    found = importlib.util.find_spec(folder)
    places = found.submodule_search_locations or () if found else ()
    return sorted({file.stem for place in places for file in Path(place).iterdir() if is_module(file)})


def described(folder: str, name: str, constant: str, kind: type[Named]) -> Named:
    """What a file of hooks says of itself. ``folder``: of ``HOOK_FOLDERS``; ``constant``: the name in the file, which is the
    call's argument in capitals. ValueError: there is no such file, or it says the name of another."""
    argument, place = constant.lower(), folder.removeprefix("fa2tune.kernels.")
    if name not in (known := names_in(folder)):
        raise ValueError(f"{argument}: got {name!r:.40}, allowed are {', '.join(known)}")
    found = run(f"{place}.{name}").get(constant)
    if not isinstance(found, kind) or found.name != name:
        made = f"{kind.__name__}({{!r}}, ...)"
        had = made.format(found.name) if isinstance(found, kind) else repr(found)
        raise ValueError(f"kernels/{place}/{name}.py: {constant} is {had:.80}, must be {made.format(name)}")
    return found


@cache
def run(module_name: str) -> dict[str, Any]:
    """The names that a module of fa2tune.kernels defines, device code replaced by stand-ins."""
    found = importlib.util.find_spec(f"fa2tune.kernels.{module_name}")
    if found is None or not isinstance(found.loader, SourceLoader):
        raise ImportError(f"fa2tune.kernels.{module_name} has no file")
    code: Any = found.loader.get_code(found.name)
    namespace = {"__name__": found.name, "__builtins__": {**vars(builtins), "__import__": _import}}
    exec(code, namespace)
    return namespace
