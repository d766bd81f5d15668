"""Device functions take few arguments: what belongs together travels in one tuple. And loops are not unrolled by request."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent.parent / "kernels"
MOST = 20
#: What its loop carries, each a value of its own: of the forward's loop a tuple of those was other machine code
#: (docs/experiments/compilers.md); of this one it was not tried.
MORE = {"sm90/bwd_fused.py:_over_queries": 23}


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.relative_to(KERNELS).as_posix())
def test_device_functions_take_few_arguments(path: Path) -> None:
    """The kernels themselves, whose arguments are the contract with the launcher, aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    given = (keyword for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords)
    kernels = {ast.unparse(keyword.value) for keyword in given if keyword.arg == "kernel"}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in kernels:
            name = f"{path.relative_to(KERNELS).as_posix()}:{node.name}"
            if any("jit" in ast.unparse(one) for one in node.decorator_list):
                count = len(node.args.args)
                assert count == MORE[name] if name in MORE else count <= MOST, name


def test_no_loop_is_unrolled_by_request() -> None:
    """Where its end lies before its start it runs: docs/experiments/defects.md."""
    files = [path for path in sorted(KERNELS.rglob("*.py")) if "loop_unroll_factor" in path.read_text("utf-8")]
    assert files == []
