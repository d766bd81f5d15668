"""A call's mask is described once: a Mask, or its name. A bool is what the public call, options and files have. Kernels have
its hooks and bounds, and never its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from fa2tune.spec import maskfile

ROOT = Path(__file__).parents[2]
#: What a bool, or a window beside it, is called.
BOOLS = {"causal", "causals", "is_causal", "banded"}
#: (module, function or class): the public call and its checks, its memo key, the options of the command line.
ALLOWED = {
    ("calling/ops.py", "attention"), ("calling/ops.py", "checked"), ("calling/ops.py", "_general"),
    ("calling/asked.py", "_sides"), ("calling/ops.py", "for_operators"), ("calling/ops.py", "check"),
    ("calling/asked.py", "check_mask"), ("calling/asked.py", "mask_for_operator"),
    ("calling/varlen.py", "attention_varlen"), ("calling/varlen.py", "_check"),
    ("calling/varlen.py", "checked"), ("calling/varlen.py", "_general"), ("calling/serving.py", "_checked"),
    ("calling/dispatch.py", "forward_key"), ("calling/serving.py", "explain"), ("calling/serving.py", "is_supported"),
    ("spec/mask.py", "mask_of"),
    ("cli/_options.py", "checked"),
}  # fmt: skip


def named(tree: ast.Module) -> Iterator[str]:
    """Functions with such a parameter, and classes with such a field or property."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if any(each.arg.lower() in BOOLS for each in every):
                yield getattr(node, "name", "lambda")
        elif isinstance(node, ast.ClassDef):
            fields = {
                each.target.id.lower()
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            if (fields | methods) & BOOLS:
                yield node.name


def found() -> set[tuple[str, str]]:
    return {
        (path.relative_to(folder).as_posix(), name)
        for folder in (ROOT / "fa2tune", ROOT / "search_spaces", ROOT / "kernels")
        for path in folder.rglob("*.py")
        if path.parent.name != "compat"  # other libraries' signatures
        for name in named(ast.parse(path.read_text()))
    }


def test_a_mask_is_a_bool_in_the_public_call_alone() -> None:
    assert found() == ALLOWED


def test_it_sees_parameters_fields_and_properties() -> None:
    source = "def f(causal): ...\nclass C:\n    banded: bool\nclass D:\n    def causal(self): ...\ndef g(mask): ...\n"
    assert list(named(ast.parse(f"{source}def h(IS_CAUSAL: gl.constexpr): ..."))) == ["f", "C", "D", "h"]


def masks_by_name(tree: ast.Module) -> Iterator[int]:
    """Lines that compare something with the name of a mask."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if texts & {*maskfile.names()}:
                yield node.lineno


def test_kernels_know_no_mask_by_name() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): [*masks_by_name(ast.parse(path.read_text()))]
        for folder in ("kernels", "search_spaces", "fa2tune/compiling", "fa2tune/launching")
        for path in (ROOT / folder).rglob("*.py")
        if path.parent.name != "masks"
    }
    assert not {path: lines for path, lines in found.items() if lines}
    source = 'a = spec.mask == "causal"\nb = x not in ("full", "causal")\nc = x == "mma"\n'
    assert [*masks_by_name(ast.parse(source))] == [1, 2]
