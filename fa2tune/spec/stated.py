"""The files of kernels/, and what each says of its kernel as literals in the call that VARIANT is.

Read off the text: to run all files takes 0.1 s, for which a first call would wait.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fa2tune.spec.standins import is_module

#: Held by whatever has Python parse sources, as Triton does to hash a kernel and again to translate it. CPython (3.11 at least)
#: counts the depth of a syntax tree for all threads together, so two that parse at once may be refused by a SystemError
#: (python/cpython issue 106905), and Triton would keep its half of a hash for the whole.
PARSING = threading.RLock()
#: Folders of kernels/ that hold no kernels. Every other one but PORTABLE_FOLDER is an architecture, whose kernels may be
#: written in a language that this Triton does not have.
NO_KERNELS = ("lib", "masks", "scores")
#: Where a file's last statements usually begin: to parse from there takes a tenth of what the device code above would add.
_VARIANT = re.compile(r"^VARIANT\b", re.MULTILINE)


@cache
def kernel_texts() -> dict[str, str]:
    """The text of each kernel's file, by its path: kernels/<folder>/<name>.py is "<folder>/<name>"."""
    package = importlib.util.find_spec("fa2tune.kernels")
    roots = [Path(root) for root in (package and package.submodule_search_locations) or ()]
    folders = sorted({one.name for root in roots for one in root.iterdir() if one.is_dir()})
    found = {}
    for folder in folders:
        if folder.isidentifier() and folder not in NO_KERNELS:
            files = (file for root in roots for file in (root / folder).glob("*.py"))
            for file in sorted(filter(is_module, files)):
                found[f"{folder}/{file.stem}"] = file.read_text(encoding="utf-8")
    return found


def calls(text: str, where: str) -> Iterator[dict[str, ast.expr]]:
    """The arguments by name of each call that is assigned to VARIANT. ``where``: the file, for errors. ValueError: something
    else is."""
    for value in _variants_in(text, where):
        if not isinstance(value, ast.Call):
            raise ValueError(
                f"{where}: VARIANT has to be a call that names serves itself, got {ast.unparse(value):.60}"
            )
        said = {each.arg: each.value for each in value.keywords}
        if None in said:
            raise ValueError(
                f"{where}: the call that VARIANT is has to name its arguments, got **{ast.unparse(said[None])}"
            )
        yield {name: found for name, found in said.items() if name is not None}


def _variants_in(text: str, where: str) -> list[ast.expr]:
    """What is assigned to VARIANT."""
    begins = [match.start() for match in _VARIANT.finditer(text)]
    with PARSING:
        try:
            # one line that begins so, and the rest is whole statements: no text of a docstring, and no branch of an ``if``
            tree = ast.parse(text[begins[0] :]) if len(begins) == 1 else ast.parse(text)
        except SyntaxError:
            try:
                tree = ast.parse(text)
            except SyntaxError as error:
                raise ValueError(f"{where}: line {error.lineno}: {error.msg}") from error
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == "VARIANT"
    ]
