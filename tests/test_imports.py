"""Imports run one way. Every import counts, those inside functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "fa2tune": ROOT / "fa2tune",
    "fa2tune.kernels": ROOT / "kernels",
    "fa2tune.search_spaces": ROOT / "search_spaces",
}

#: The rooms, lowest first. A room imports from itself and from those before it; spec and the modules of fa2tune/ itself
#: (catalogue, gpus, devices, versions, text, logs) come before all.
ROOMS = (
    "search_spaces", "kernels", "rows", "compiling", "launching", "calling", "compat", "predicting", "measuring", "sharing",
    "tuning", "fleet", "bench", "report", "cli", "__main__",
)  # fmt: skip
FLOORS = ("request", "search", "select", "run")  #: of the room tuning, lowest first; the same rule
#: What a call to attention must never pull in, and what the search has no business with.
TUNING = {"predicting", "measuring", "sharing", "tuning", "fleet", "bench", "report", "cli"}
CALLING = {"calling"}
SCHEDULES = "fa2tune.calling.schedules"  #: a floor of the room calling
SHARED_BY_KERNELS = {
    "fa2tune.spec.maskfile",
    "fa2tune.spec.problem",
    "fa2tune.spec.scorefile",
    "fa2tune.spec.variant",
    *(f"fa2tune.kernels.lib.{path.stem}" for path in (ROOT / "kernels" / "lib").glob("*.py")),
}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def imports(module: str) -> Iterator[str]:
    """The modules of fa2tune that one module imports, ``import_module("fa2tune...")`` included."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: relative import"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES or name in PACKAGES else str(node.module) for name in below]
        elif isinstance(node, ast.Call) and called(node).endswith("import_module"):
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "fa2tune" and name != "fa2tune")


GRAPH = {module: set(imports(module)) for module in MODULES}
#: without fa2tune/__init__.py, whose public names load what they name on first use
HOST = {module: imported for module, imported in GRAPH.items() if module != "fa2tune"}


def room(module: str) -> str:
    """``fa2tune.cli.tune`` -> ``cli``."""
    return module.split(".")[1]


def place(module: str) -> int:
    return ROOMS.index(room(module)) if room(module) in ROOMS else -1


def floor(module: str) -> int:
    """``fa2tune.tuning.search.study`` -> 1."""
    parts = module.split(".")
    return FLOORS.index(parts[2]) if parts[1] == "tuning" and len(parts) > 2 else -1


def reached(start: str) -> set[str]:
    """The modules that importing one may end up importing."""
    seen, waiting = set(), [start]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += GRAPH.get(module, ())
    return seen


def test_imports_go_down() -> None:
    up = [f"{module} imports {name}" for module in HOST for name in GRAPH[module] if place(name) > place(module)]
    assert not up


def test_tuning_has_four_floors_and_imports_go_down() -> None:
    folder = ROOT / "fa2tune" / "tuning"
    assert {path.name for path in folder.iterdir() if path.name != "__pycache__"} == {"__init__.py", *FLOORS}
    up = [f"{module} imports {name}" for module in HOST for name in GRAPH[module]
          if floor(module) >= 0 and floor(name) > floor(module)]  # fmt: skip
    assert not up


def test_schedules_are_below_the_rest_of_calling() -> None:
    schedules = [module for module in MODULES if module.startswith(SCHEDULES)]
    assert len(schedules) > 10
    assert not {name for module in schedules for name in GRAPH[module] if room(name) == "calling"} - {*schedules}


def test_imports_never_come_back() -> None:
    try:
        TopologicalSorter(HOST).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_calling_and_tuning_are_apart() -> None:
    called = reached("fa2tune.calling.ops")
    assert not set(map(room, called)) & TUNING and "fa2tune.rows.store" not in called
    assert not set(map(room, reached("fa2tune.tuning.run.tuner"))) & CALLING


def test_every_room_has_its_place() -> None:
    assert {path.parent.name for path in (ROOT / "fa2tune").glob("*/__init__.py")} <= {*ROOMS, "spec"}
    loose = {path.stem for path in (ROOT / "fa2tune").glob("*.py")}
    assert loose == {"__init__", "__main__", "catalogue", "gpus", "devices", "logs", "versions", "text"}


def test_tests_have_the_rooms_of_the_code() -> None:
    """At the top: tests of the repository and of fa2tune's own modules. pytest imports a file by its name alone."""
    tests = ROOT / "tests"
    rooms = {path.parent.name for path in tests.glob("*/test_*.py")}
    assert rooms <= {*ROOMS, "spec", "benchmarks", "gpu", "interpreter"}
    assert {path.parent.name for path in (tests / "tuning").rglob("test_*.py")} == set(FLOORS)
    names = [path.name for path in tests.rglob("test_*.py") if path.parent.name not in ("gpu", "interpreter")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("module", [module for module in MODULES if room(f"{module}.") == "kernels"])
def test_a_kernel_knows_its_space_and_the_shared_math_only(module: str) -> None:
    others = {name for name in GRAPH[module] if room(name) != "search_spaces"}
    assert others <= SHARED_BY_KERNELS


@pytest.mark.parametrize("module", [module for module in MODULES if room(f"{module}.") == "search_spaces"])
def test_a_search_space_knows_the_shared_constraints_only(module: str) -> None:
    shared = {name for name in MODULES if name.startswith("fa2tune.search_spaces.lib.")}
    assert GRAPH[module] <= {"fa2tune.spec.problem", "fa2tune.spec.variant", *shared}


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_longer_than_500_lines(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= 500


#: What runs on the host: all but device code.
HOST_FILES = [
    *(path for module, path in MODULES.items() if room(f"{module}.") != "kernels"),
    *(path for folder in ("tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))),
]


@pytest.mark.parametrize("path", HOST_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_on_the_host_is_longer_than_80_lines(path: Path) -> None:
    """A docstring does not count. Device code may be longer: a kernel is one function."""

    def lines(function: ast.FunctionDef) -> int:
        first = function.body[0]
        said = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0
        return function.end_lineno - function.lineno + 1 - said

    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert not {function.name: lines(function) for function in functions if lines(function) > 80}
