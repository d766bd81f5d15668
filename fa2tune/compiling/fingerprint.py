"""What makes a row stale: hashes of kernel source and search space, and the versions of the toolchain."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from fa2tune.compiling import binaries
from fa2tune.compiling.compiler import PARSING, variant_named, variants, variants_of
from fa2tune.problem import BACKWARD, FUSED, ROADS
from fa2tune.rows import lookup
from fa2tune.rows.row import backward_way, hashed_as
from fa2tune.variant import WARP_SPECIALIZED, Variant

#: Files below fa2tune/ that decide what is hashed, and how.
SOURCES = ("compiling/compiler.py", "compiling/fingerprint.py", "problem.py", "rows/row.py", "variant.py")


def _parsed(text: str) -> ast.Module:
    with PARSING:
        return ast.parse(text)


@cache
def _tree(path: Path) -> ast.Module:
    """Of a module, for whoever only reads it."""
    return _parsed(path.read_text(encoding="utf-8"))


def _written_anew(tree: ast.Module) -> str:
    """Code from its syntax tree: comments, docstrings, formatting and line numbers do not count."""
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
def _code_of(path: Path) -> str:
    return _written_anew(_parsed(path.read_text(encoding="utf-8")))


@cache
def _imported(path: Path) -> list[Path]:
    """The modules of kernels/ that one of them imports, theirs included, in the order of their names."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        for node in ast.walk(_tree(waiting.pop())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fa2tune.kernels."):
                module = path.with_name(f"{str(node.module).rpartition('.')[2]}.py")
                if module not in found:
                    found.add(module)
                    waiting.append(module)
    return sorted(found)


def _from_spaces(path: Path) -> Iterator[str]:
    """What a module of kernels/ takes from search spaces beside the spaces themselves: constants, and functions."""
    tree = _tree(path)
    package = "fa2tune.search_spaces"
    taken: set[tuple[str, str]] = set()  # module, name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            taken |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            called = {alias.asname or alias.name: f"{package}.{alias.name}" for alias in node.names}
            taken |= {
                (called[each.value.id], each.attr)
                for each in ast.walk(tree)
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in called
            }
    for module, name in sorted(taken):
        if name != "SPACE":
            value = getattr(importlib.import_module(module), name)
            yield _written_anew(_parsed(inspect.getsource(value))) if callable(value) else repr(value)


@cache
def source_digest() -> str:
    """sha256 of every byte that the hashes below may depend on, comments included: where it is known, they are."""
    here = Path(__file__).parent.parent
    folders = [
        Path(str(importlib.import_module(f"fa2tune.{name}").__path__[0])) for name in ("kernels", "search_spaces")
    ]
    paths = [here / name for name in SOURCES]
    paths += sorted(path for folder in folders for path in folder.glob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


@cache
def _known() -> Mapping[str, str]:
    """Hashes that a trusted file of binaries holds for just these sources, by name: made here they take 0.2 s."""
    digest, found = source_digest(), dict[str, str]()
    for _, file in binaries.trusted().files:
        found |= file.sources.get(digest, {})
    return found


@cache
def kernel_hash(variant: Variant) -> str:
    """Hash of the kernel's module, of the modules of kernels/ that it imports, of what these take from search spaces, and the
    same of the kernels that run around it; 16 hex digits."""
    return _known().get(variant.name) or _hashed(variant)


def _file_of(module: str) -> Path:
    """Not imported, since this Triton may not be able to."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{module} has no file")
    return Path(found.origin)


def _hashed(variant: Variant) -> str:
    text = ""
    for one in (variant, *map(variant_named, (*variant.before, *variant.after))):
        path = _file_of(one.kernel.fn.__module__)
        paths = (path, *_imported(path))
        text += "".join([*map(_code_of, paths), *(taken for each in paths for taken in _from_spaces(each))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


#: What the row of a whole backward may be filed as -> (road, whether a kernel on it is warp-specialised).
_BACKWARDS = {backward_way(road, special): (road, special) for road in ROADS for special in (False, True)}


@cache
def backward_hash(way: str) -> str:
    """Hash of every kernel that a whole backward filed as ``way`` may run; 16 hex digits."""
    road, specialized = _BACKWARDS[way]
    names = ["bwd_delta"] if road == FUSED else []
    for kernel in ROADS[road]:
        names += [variant.name for variant in variants_of(kernel) if specialized or not variant.serves]
    return hashlib.sha256("".join(kernel_hash(variant_named(name)) for name in names).encode()).hexdigest()[:16]


def _name_of(variant: Variant) -> str:
    return hashed_as(variant.filed_under, WARP_SPECIALIZED if variant.serves else "")


class _Hashes(Mapping[str, str]):
    """Name -> hash, made when it is asked for: reading and hashing all kernels would be most of a first call's time in here."""

    def __init__(self) -> None:
        self._made = dict[str, str]()

    def __getitem__(self, name: str) -> str:
        if name not in self._made:
            self._made[name] = _known().get(name) or self._make(name)
        return self._made[name]

    @staticmethod
    def _make(name: str) -> str:
        kernel, _, way = name.partition(" ")
        if kernel == BACKWARD and way in _BACKWARDS:
            return backward_hash(way)
        for variant in (*variants_of(kernel), *((variants()[kernel],) if kernel in variants() else ())):
            if _name_of(variant) == name:
                return kernel_hash(variant)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        names = [_name_of(variant) for variant in variants().values()]
        return iter(dict.fromkeys([*names, *(hashed_as(BACKWARD, way) for way in _BACKWARDS)]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def kernel_hashes() -> Mapping[str, str]:
    """Of every kernel and of every way of a whole backward: what a row has to name to be fresh. Keys as ``row.hashed_as`` has
    them; each value is made when it is asked for."""
    return _Hashes()


@cache
def space_hash(variant: Variant) -> str:
    """Hash of the search space: its dimensions and the names of its constraints; 16 hex digits."""
    space = variant.space
    text = repr((space.name, sorted(space.dimensions.items()), [constraint.name for constraint in space.constraints]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def triton_version() -> str:
    """Triton's version, read off its file: to import it takes 0.05 to 0.2 s, and who finds kernels compiled needs no more."""
    found = importlib.util.find_spec("triton")
    if found is not None and found.origin is not None:
        with suppress(OSError):
            text = Path(found.origin).read_text(encoding="utf-8", errors="replace")
            if match := re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", text, re.MULTILINE):
                return match[1]
    import triton

    return str(triton.__version__)


@cache
def driver_version() -> str:
    """Version of the NVIDIA kernel driver, e.g. "580.159.04"; "" without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return _driver_version_by_nvml()
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else ""


def toolchain(driver: str | None = None) -> lookup.Toolchain:
    """What is running here: a row made with another Triton, driver or kernel source is stale. ``driver``: "" for none to be
    compared; None for this host's."""
    return lookup.Toolchain(triton_version(), driver_version() if driver is None else driver, kernel_hashes())


def _driver_version_by_nvml() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # no library, no driver, or one that does not answer: the version is not known
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)
