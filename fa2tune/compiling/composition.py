"""The source that a binary is composed of: definitions of kernels/ and search_spaces/, followed by name from file to file.

A kernel's file holds more than one binary needs, and so do the files that it imports from. What counts is what can be reached
from the kernel function and from what its Variant says about code and launch. Files are read, never imported: this Triton may
not be able to.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from fa2tune.spec.stated import PARSING
from fa2tune.spec.tuned import BRINGS

#: Packages whose definitions are followed. The rest of fa2tune is the host's, which describes binaries but is not in them.
FOLLOWED = ("fa2tune.kernels", "fa2tune.search_spaces")
#: What a kernel's file says as literals in the call that VARIANT is, beside the architectures and what brings a name
#: (``spec/tuned.py``): what the registry reads off the text.
STATED = ("serves", "role", "ordered_form_of")
#: What a Variant or a mask says that neither its binary nor its launch depends on: names, the search, which calls it is chosen
#: for. (The kernels before and after are followed on their own.)
NOT_CODE = {
    "Variant": (*STATED, *BRINGS, "space", "min_arch", "max_arch", "fitted", "suited", "before", "after"),
    "ScoreHooks": ("transformed", "numbered"),
    "MaskHooks": ("visible", "row_mask", "pairs", "fitted", "text"),
}

#: (module, top-level name in it)
Definition = tuple[str, str]


def file_of(module: str) -> Path:
    """FileNotFoundError: there is no such module."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{module} has no file")
    return Path(found.origin)


class _Module:
    """One file: its top-level definitions, and where the names that it imports are defined."""

    def __init__(self, name: str) -> None:
        with PARSING:
            tree = _Code().visit(ast.parse(file_of(name).read_text(encoding="utf-8")))
        self.name = name
        self._read: dict[str, tuple[list[Definition], str]] = {}
        self.defined: dict[str, list[ast.stmt]] = {}
        self.imported: dict[str, Definition] = {}
        self.modules: dict[str, str] = {}  #: alias -> module
        self.foreign: set[str] = set()  #: names of other packages, which a file may pass on
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom):
                self._import(statement)
            elif isinstance(statement, ast.Import):
                self.foreign |= {alias.asname or alias.name for alias in statement.names}
            else:
                for defined in _defines(statement):
                    self.defined.setdefault(defined, []).append(statement)

    def _import(self, statement: ast.ImportFrom) -> None:
        package = statement.module or ""
        if not package.startswith(FOLLOWED):
            self.foreign |= {alias.asname or alias.name for alias in statement.names}
            return
        found = importlib.util.find_spec(package)
        is_folder = found is not None and found.submodule_search_locations is not None
        for alias in statement.names:
            called = alias.asname or alias.name
            if is_folder:
                self.modules[called] = f"{package}.{alias.name}"
            else:
                self.imported[called] = package, alias.name

    def of(self, name: str) -> tuple[list[Definition], str]:
        """(what the definition of ``name`` refers to, its text)."""
        if name not in self._read:
            # not ast.dump, which differs between Python versions
            text = "\n".join(map(ast.unparse, self.defined[name]))
            self._read[name] = list(self._uses(name)), text
        return self._read[name]

    def _uses(self, name: str) -> Iterator[Definition]:
        for statement in self.defined[name]:
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    if node.value.id in self.modules:
                        yield self.modules[node.value.id], node.attr
                elif isinstance(node, ast.Name):
                    if node.id in self.imported:
                        yield self.imported[node.id]
                    elif node.id in self.defined and node.id != name:
                        yield self.name, node.id


def _defines(statement: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement binds; a block's are bound by the whole block."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


class _Code(ast.NodeTransformer):
    """Leaves out docstrings, what a call of NOT_CODE says there, what is STATED in the call that makes VARIANT, its space, and
    of host functions the parameters that they do not use, named with an underscore or ``serves``: a signature that gains one
    changes no kernel. Device code loses its docstrings alone. A syntax tree has no comments and no layout."""

    _device = False

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> ast.AST:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        named = any(isinstance(one, ast.Name) and one.id == "VARIANT" for one in targets)
        if named and node.col_offset == 0 and isinstance(node.value, ast.Call):
            node.value.keywords = [each for each in node.value.keywords if each.arg not in (*STATED, *BRINGS, "space")]
        return self.generic_visit(node)

    visit_AnnAssign = visit_Assign

    def generic_visit(self, node: ast.AST) -> ast.AST:
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del node.body[0]  # type: ignore[attr-defined]
        return super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if not self._device:
            node.keywords = [each for each in node.keywords if each.arg not in NOT_CODE.get(called, ())]
        return self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        if not self._device:
            _without_unused(node.args, [node.body])
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outside, self._device = self._device, self._device or bool(node.decorator_list)
        self.generic_visit(node)
        if not self._device:
            _without_unused(node.args, node.body)
        self._device = outside
        return node


def _without_unused(taken: ast.arguments, body: Sequence[ast.AST]) -> None:
    """``body``: as it is kept, where a function that passes ``serves`` on to a Variant does so no longer."""
    used = {each.id for part in body for each in ast.walk(part) if isinstance(each, ast.Name)}
    if "serves" not in used and not taken.defaults:
        taken.args = [each for each in taken.args if each.arg != "serves"]
    while taken.args and taken.args[-1].arg.startswith("_") and taken.args[-1].arg not in used and not taken.defaults:
        taken.args.pop()


@cache
def _module(name: str) -> _Module:
    return _Module(name)


def composed(roots: Iterable[Definition]) -> Iterator[str]:
    """The text of every definition that ``roots`` are composed of, theirs included, in a fixed order. NameError: one of
    them, or a name that a file imports, is not defined."""
    found: set[Definition] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        module, name = one
        file = _module(module)
        if name in file.imported:
            waiting.append(file.imported[name])
            continue
        if name in file.foreign:
            continue
        if name not in file.defined:
            raise NameError(f"{module} does not define {name}")
        if one not in found:
            found.add(one)
            waiting += file.of(name)[0]
    yield from sorted(f"{_module(module).of(name)[1]}\n" for module, name in found)  # wherever their files stand
