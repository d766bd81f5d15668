"""A name that travels between the files of fa2tune/ means one thing; words are the field's, in kernels/, too."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from private_words import EVERYWHERE, IN_NAMES, found_in

ROOT = Path(__file__).parent.parent / "fa2tune"
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
    if not {"kernels", "search_spaces"} & {*path.relative_to(ROOT).parts}
}
#: Two limits of files that happen to be as large, constants that each schedule model has of its own, and an exit status that
#: ``fa2tune --help`` must not import.
SAME_BY_CHANCE = {"MAX_FILE", "LAUNCH_US", "MARGIN", "TIE", "INTERRUPTED"}


def defined(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, value of a constant) of all that a file defines at its top level."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, None
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple):
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
                    pairs = list(zip(target.elts, values, strict=False))
                yield from ((one.id, value) for one, value in pairs if isinstance(one, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


FILES = defaultdict[str, dict[str, ast.expr | None]](dict)  # name -> file -> value
for file, tree in TREES.items():
    for name, value in defined(tree):
        FILES[name][file] = value
SEVERAL = {name: files for name, files in FILES.items() if len(files) > 1 and not name.startswith("__")}


def imported() -> dict[str, set[str]]:
    """Name -> the modules of fa2tune that files import it from by that name."""
    found = defaultdict[str, set[str]](set)
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fa2tune"):
                for one in node.names:
                    if one.asname in (None, one.name):
                        found[one.name].add(node.module or "")
    return found


def test_a_type_has_a_name_of_its_own() -> None:
    """Classes, and aliases of types. A type variable is its file's."""
    types = {
        name: [*files]
        for name, files in SEVERAL.items()
        if len(name) > 1 and name.lstrip("_") != name.upper().lstrip("_")
    }
    types = {name: files for name, files in types.items() if name.lstrip("_")[:1].isupper()}
    assert types == {}


def test_a_name_is_imported_from_one_file() -> None:
    """Packages import what the modules in them define, under the same name."""
    several = {
        name: modules for name, modules in imported().items() if len(modules & {*map(module_of, FILES[name])}) > 1
    }
    assert several == {}


def test_a_constant_that_is_imported_has_a_name_of_its_own() -> None:
    travels = imported()
    assert {name: [*files] for name, files in SEVERAL.items() if name.isupper() and name in travels} == {}


def test_a_fact_stands_once() -> None:
    """No two files give the same name to the same number or text."""
    twice = {}
    for name, files in SEVERAL.items():
        values = [ast.dump(value) for value in files.values() if isinstance(value, ast.Constant)]
        if name.isupper() and len(values) != len({*values}) and name not in SAME_BY_CHANCE:
            twice[name] = [*files]
    assert twice == {}


def test_no_kernel_is_named_by_its_path() -> None:
    """What launches one asks for what it serves, or for its role (spec/roles.py). Nor does it import its search space, but for
    SHARED_FORMAT, and in schedules MODELLED."""
    folders = {path.name for path in (ROOT.parent / "kernels").iterdir()}
    found: dict[str, list[str]] = defaultdict(list)
    for file, tree in TREES.items():
        allowed = SHARED_FORMAT | (MODELLED if file.startswith("calling/schedules/") else set())
        for name in [*paths_in(tree), *spaces_in(tree)]:
            folder, _, kernel = name.partition("/")
            if folder in folders - {"lib"} and kernel.isidentifier() and name not in allowed:
                found[name].append(file)
    assert dict(found) == {}


#: What several kernels and the host agree on, of which no kernel can have one of its own: entries of orders of tiles.
SHARED_FORMAT = {"portable/packed_order"}
#: Tuned kernels, of whose time calling/schedules has a model: constants that are fitted to the kernel itself.
MODELLED = {"sm90/fwd", "sm90/bwd_fused", "sm90/bwd_dq", "sm90/bwd_dkdv", "sm80/bwd_fused"}


def paths_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def spaces_in(tree: ast.Module) -> Iterator[str]:
    """Paths of kernels whose search spaces, or files, are imported, in either way of importing one."""
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in [within, *(f"{within}{one}" for one in names)]:
            parts = name.rstrip(".").split(".")
            if parts[0] == "fa2tune" and parts[1:2] in (["search_spaces"], ["kernels"]):
                yield "/".join(parts[2:4])


def test_an_import_of_a_search_space_is_seen_however_it_is_written() -> None:
    source = (
        "from fa2tune.search_spaces.sm90 import fwd, fwd_split\nfrom fa2tune.search_spaces.sm90.bwd_dq import rows\n"
    )
    found = {*spaces_in(ast.parse(f"{source}import fa2tune.kernels.portable.fwd\n"))}
    assert {"sm90/fwd", "sm90/fwd_split", "sm90/bwd_dq", "portable/fwd"} <= found


def test_one_file_times_by_events() -> None:
    """Races and benchmarks call it. Attention within a training step has events of its own, around passes of a model."""
    found = {
        path.relative_to(ROOT.parent).as_posix()
        for folder in (ROOT, ROOT.parent / "benchmarks")
        for path in folder.rglob("*.py")
        if any(isinstance(node, ast.Attribute) and node.attr in ("elapsed_time", "do_bench")
               for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    }  # fmt: skip
    assert found == {"fa2tune/measuring/timing.py", "benchmarks/gpt_training.py"}


def test_threads_of_a_warp_and_of_a_warpgroup_are_no_numbers_in_kernels() -> None:
    """WARP_THREADS and WARPGROUP_THREADS of spec/variant.py, and kernels/lib/warps.py."""
    literal = re.compile(
        r"BlockedLayout\([^)]*\[(1, )?32\b|arange\(0, 32\b|\b32 \* (WARPS|8)\b|constexpr\((32|128)\b|\+ 32\)"
    )
    found = {
        f"{path.relative_to(ROOT.parent)}: {line.strip()}"
        for path in (ROOT.parent / "kernels").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if literal.search(line)
    }
    assert found == {"kernels/lib/extent.py: STEP = tl.constexpr(128)"}


def module_of(file: str) -> str:
    return "fa2tune." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


#: Names that files and databases keep are text.
PRIVATE = {*EVERYWHERE, *IN_NAMES}
#: Dimensions of the search, as rows, journals and recorded searches name them in their configs: other names would be other
#: rows, and none of these would be found by a search of the new names.
STORED = {"BESIDE", "FINISH_BESIDE"}
DEVICE_TREES = {
    path.relative_to(ROOT.parent).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("kernels", "search_spaces")
    for path in sorted((ROOT.parent / folder).rglob("*.py"))
}


def test_a_type_of_the_host_is_called_as_none_of_a_kernel() -> None:
    """Kernels share names of types among each other: each has a Form, what is compiled into it."""
    of_kernels = {
        name
        for file, tree in DEVICE_TREES.items()
        if file.startswith("kernels/")
        for name, _ in defined(tree)
        if name.isidentifier() and name != name.upper() and name[0].isupper()
    }
    assert {name: [*FILES[name]] for name in of_kernels if name in FILES} == {}


def names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = (getattr(node, field, None) for field in ("id", "name", "attr", "arg", "asname"))
        yield from (name for name in names if isinstance(name, str))


def test_names_in_the_code_are_the_fields_terms() -> None:
    found = defaultdict[str, set[str]](set)
    for file, tree in {**TREES, **DEVICE_TREES}.items():
        for name in names_in(tree):
            if name not in STORED and {*name.lower().split("_")} & PRIVATE:
                found[name].add(file)
    assert found == {}


#: Plain English in the name of a test or a script.
PLAIN = {"beside", "heard", "hopeless", "regret", "tells", "today", "told", "ways"}


def test_so_are_those_in_tests_and_scripts() -> None:
    found = defaultdict[str, set[str]](set)
    for folder in ("tests", "benchmarks", "examples"):
        for path in sorted((ROOT.parent / folder).rglob("*.py")):
            for name in names_in(ast.parse(path.read_text(encoding="utf-8"))):
                if {*name.lower().split("_")} & (PRIVATE - PLAIN):
                    found[name].add(path.name)
    assert found == {}


def texts(tree: ast.Module) -> Iterator[str]:
    """What is shown to people: text of several words that documents nothing."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documents = {id(node.body[0].value) for node in ast.walk(tree)
                 if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and " " in text.strip() and id(node) not in documents:
            yield text


def test_texts_for_people_have_the_fields_terms() -> None:
    """Errors, screens, reasons of constraints."""
    found = {
        file: several
        for file, tree in {**TREES, **DEVICE_TREES}.items()
        if (several := [text for text in texts(tree) if found_in(text, EVERYWHERE)])
    }
    assert found == {}


def test_a_text_is_no_docstring_and_no_parameter() -> None:
    source = 'def f():\n    """who is told"""\n    print("who is told", f"is told {1}", "who", "BESIDE is needed")\n'
    assert [text for text in texts(ast.parse(source)) if found_in(text, EVERYWHERE)] == ["who is told", "is told "]
