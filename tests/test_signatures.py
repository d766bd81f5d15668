"""Device functions take few arguments: what belongs together travels in one tuple. And loops are not unrolled by request."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent.parent / "kernels"
MOST = 16


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.relative_to(KERNELS).as_posix())
def test_device_functions_take_few_arguments(path: Path) -> None:
    """The kernels themselves, whose arguments are the contract with the launcher, aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    given = (keyword for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords)
    kernels = {ast.unparse(keyword.value) for keyword in given if keyword.arg == "kernel"}
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef)
            and node.name not in kernels
            and "jit" in str([*map(ast.unparse, node.decorator_list)])
        ):
            assert len(node.args.args) <= MOST, node.name


def test_no_loop_is_unrolled_by_request() -> None:
    """Where its end lies before its start it runs: docs/experiments/defects.md."""
    files = [path for path in sorted(KERNELS.rglob("*.py")) if "loop_unroll_factor" in path.read_text("utf-8")]
    assert files == []
