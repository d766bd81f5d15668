"""Imports run one way. Every import counts, those inside functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "fa2tune": ROOT / "fa2tune",
    "fa2tune.kernels": ROOT / "kernels",
    "fa2tune.search_spaces": ROOT / "search_spaces",
}

#: From the bottom up. A module imports from the layers below its own, and from no other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("problem", "gpus"),
    ("variant", "row"),
    ("search_spaces", "record"),
    ("kernels",),
    ("compiler", "fingerprint", "reader", "store"),
    ("launch", "limits", "lookup", "sass"),
    ("model", "passes"),
    ("dispatch", "reference"),
    ("attention", "verify", "measure"),
    ("bench_peers", "worker"),
    ("tuner", "bench", "report"),
    ("cli",),
    ("__main__",),
)
#: What a call to attention must never pull in, and what the search has no business with.
TUNING = {"tuner", "worker", "measure", "verify", "model", "store", "report", "bench", "cli"}
CALLING = {"attention", "dispatch"}
SHARED_BY_KERNELS = {"fa2tune.problem", "fa2tune.variant", "fa2tune.kernels.common"}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports(module: str) -> Iterator[str]:
    """The modules of fa2tune that one module imports, ``import_module("fa2tune...")`` included."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: relative import"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES or name in PACKAGES else str(node.module) for name in below]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "fa2tune" and name != "fa2tune")


GRAPH = {module: set(imports(module)) for module in MODULES}


def room(module: str) -> str:
    """``fa2tune.cli.tune`` -> ``cli``."""
    return module.split(".")[1]


def layer(module: str) -> int:
    found = [index for index, rooms in enumerate(LAYERS) if room(module) in rooms]
    assert found, f"{module} has no layer: give it one in LAYERS of {Path(__file__).name}"
    return found[0]


def reached(start: str) -> set[str]:
    """The rooms that importing a module may end up importing."""
    seen, waiting = set(), [start]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += GRAPH.get(module, ())
    return {room(module) for module in seen}


@pytest.mark.parametrize("module", [module for module in MODULES if module != "fa2tune"])
def test_imports_go_down(module: str) -> None:
    for imported in GRAPH[module]:
        assert room(imported) == room(module) or layer(imported) < layer(module), f"{module} imports {imported}"


def test_calling_and_tuning_are_two_roads() -> None:
    assert not reached("fa2tune.attention") & TUNING
    assert not reached("fa2tune.tuner") & CALLING


@pytest.mark.parametrize("module", [module for module in MODULES if room(f"{module}.") == "kernels"])
def test_a_kernel_knows_its_space_and_the_shared_math_only(module: str) -> None:
    others = {name for name in GRAPH[module] if room(name) != "search_spaces"}
    assert others <= SHARED_BY_KERNELS


@pytest.mark.parametrize("module", [module for module in MODULES if room(f"{module}.") == "search_spaces"])
def test_a_search_space_knows_the_shared_constraints_only(module: str) -> None:
    assert GRAPH[module] <= {"fa2tune.problem", "fa2tune.variant", "fa2tune.search_spaces.common"}


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_longer_than_500_lines(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= 500
