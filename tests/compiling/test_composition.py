"""What makes a row stale: an edit of the source that its binary is composed of, and of nothing else."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from fa2tune.compiling import composition, fingerprint, registry
from fa2tune.spec import maskfile

Edit = Callable[[str, str, str], dict[tuple[str, str], str]]


def hashes_now() -> dict[tuple[str, str], str]:
    """(kernel, mask) -> hash, of the sources as they are now."""
    return {
        (name, mask): fingerprint._hashed(variant, mask)
        for name, variant in registry.variants().items()
        for mask in maskfile.names()
    }


@functools.cache
def hashes() -> dict[tuple[str, str], str]:
    """Those of the sources as they stand."""
    return hashes_now()


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edit:
    """(module, text in it, what replaces it) -> hashes after that edit alone."""
    real, others = composition.file_of, composition._module  # what is not edited is not read again

    def edited(module: str, old: str, new: str) -> dict[tuple[str, str], str]:
        name = f"fa2tune.{module}"
        text = real(name).read_text(encoding="utf-8")
        assert text.count(old) >= 1, old
        copy = tmp_path / f"{module}.py"
        copy.write_text(text.replace(old, new), encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(composition, "file_of", lambda asked: copy if asked == name else real(asked))
            one = composition._Module(name)
            patch.setattr(composition, "_module", lambda asked: one if asked == name else others(asked))
            return hashes_now()

    return edited


PORTABLE = {"portable/fwd", "portable/fwd_split", "portable/bwd_dq", "portable/bwd_dkdv", "portable/bwd_fused"}
FUSED_HOPPER = {"sm90/bwd_fused", "sm90/bwd_prepare_overlapped"}
FUSED_AMPERE = {"sm80/bwd_fused", "sm80/bwd_ordered"}
#: Backwards that ask a score term's hooks.
SCORED_HOPPER = {
    f"sm90/bwd_{name}" for name in ("fused", "dq", "dq_split", "dkdv", "dkdv_ds", "one_tile", "query_tiles")
}  # fmt: skip
HOPPER = {
    "sm90/fwd",
    "sm90/fwd_split",
    "sm90/fwd_grouped",
    *FUSED_HOPPER,
    "sm90/bwd_prepare",
    "sm90/bwd_dq",
    "sm90/bwd_dq_split",
    "sm90/bwd_dkdv",
    "sm90/bwd_dkdv_ds",
    "sm90/bwd_one_tile",
    "sm90/bwd_query_tiles",
}
#: Those that no edit below reaches but by their neighbours.
HELPERS = {
    *(f"portable/{name}" for name in ("fwd_norms", "fwd_combine", "bwd_delta", "bwd_dq_combine", "bwd_gather")),
    *(f"portable/{name}" for name in ("bwd_spread", "packed_order", "packed_orders")),
    *(f"sm80/bwd_{name}" for name in ("prepare", "finish", "ordered_zero", "ordered_finish")),
    *(f"sm90/bwd_{name}" for name in ("finish", "dq_ds")),
}
#: A kernel that is added needs no entry in any of these.
LISTED = {*PORTABLE, "sm80/fwd", *FUSED_AMPERE, *HOPPER, *HELPERS}


def test_kernels_that_are_listed_are_there() -> None:
    assert {*registry.variants()} >= LISTED


@pytest.mark.parametrize(
    ("module", "old", "new", "kernels", "masks"),
    [
        # device code of one kernel
        ("kernels.portable.fwd", "seqlen_k - seqlen_q", "seqlen_q - seqlen_k", {"portable/fwd"}, None),
        # one mask's hooks, and which sides it bounds
        ("kernels.masks.causal", "columns <= rows + offset)", "columns < rows + offset)", PORTABLE, {"causal"}),
        ("kernels.masks.band", "left=True, right=True", "left=True, right=False",
         PORTABLE | HOPPER | {"sm80/fwd", *FUSED_AMPERE}, {"band"}),
        ("kernels.masks.causal", "constant <= last[:, None]", "constant < last[:, None]",
         {"sm90/fwd", "sm90/fwd_split", "sm90/fwd_grouped", "sm90/bwd_dq", "sm90/bwd_dq_split",
          "sm90/bwd_query_tiles", "sm80/fwd", *FUSED_AMPERE}, {"causal"}),
        ("kernels.masks.causal", "keys - offset - row", "keys - offset",
         {"sm90/bwd_fused", "sm90/bwd_dkdv", "sm90/bwd_dkdv_ds", "sm90/bwd_one_tile", *FUSED_AMPERE}, {"causal"}),
        # the hooks of no score term, and of one that rows are not measured with
        ("kernels.scores.none", "return ds", "return 2 * ds",
         PORTABLE - {"portable/fwd", "portable/fwd_split"} | FUSED_AMPERE | SCORED_HOPPER, None),
        ("kernels.scores.none", "    return scores\n\n\n@", "    return 2 * scores\n\n\n@",
         PORTABLE | {"sm80/fwd", "sm90/fwd", "sm90/fwd_split", "sm90/fwd_grouped", *FUSED_AMPERE, *SCORED_HOPPER},
         None),
        ("kernels.scores.softcap", "1.0 - tanh", "2.0 - tanh", set(), set()),
        # what a mask's or a score term's file says to the host alone
        ("kernels.masks.causal", 'row_mask="causal"', 'row_mask="full"', set(), set()),
        ("kernels.scores.none", "transformed=transformed", "transformed=None", set(), set()),
        # constants of a search space: taken by a kernel's file, by a file that it imports, by a kernel that runs before it
        ("search_spaces.sm90.fwd", "PRODUCER_REGISTERS = 24", "PRODUCER_REGISTERS = 32",
         {"sm90/fwd", "sm90/fwd_split", "sm90/fwd_grouped"}, None),
        ("search_spaces.portable.fwd_norms", "PARTS = 32", "PARTS = 64", {"portable/fwd_norms", "sm90/fwd"}, None),
        # what decides which calls a config is chosen for, which points are searched, what is tried first
        ("search_spaces.sm90.fwd", "LEAST_QUERIES = 1024", "LEAST_QUERIES = 2048", set(), set()),
        ("search_spaces.portable.fwd", "64: (64, 128, 4, 2)", "64: (64, 64, 4, 2)", set(), set()),
        ("search_spaces.lib.common", "REGISTER_CAP_BINDS,", "", set(), set()),
        ("kernels.sm90.fwd", "suited=space.suited,", "suited=space.other,", set(), set()),
        # the launch of a kernel
        ("kernels.portable.fwd_norms", "math.prod(space.norms_shape(problem))", "space.norms_shape(problem)[0]",
         {"portable/fwd_norms", "sm90/fwd"}, None),
    ],
)  # fmt: skip
def test_an_edit_changes_the_hashes_of_what_is_composed_of_it(
    edit: Edit, module: str, old: str, new: str, kernels: set[str], masks: set[str] | None
) -> None:
    before, after = hashes(), edit(module, old, new)
    changed = {which for which in before if before[which] != after[which] and which[0] in LISTED}
    assert changed == {(name, mask) for name in kernels for mask in masks or maskfile.names()}


def test_the_one_config_of_a_kernel_that_is_not_searched_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before, space = hashes(), registry.variant_named("portable/fwd_norms").space
    monkeypatch.setitem(space.dimensions, "BLOCK_R", (32,))  # type: ignore[arg-type]
    after = hashes_now()
    changed = {name for name, mask in before if after[name, mask] != before[name, mask]}
    assert changed & LISTED == {"portable/fwd_norms", "sm90/fwd"}


def test_a_shared_constant_reaches_every_kernel_that_uses_it(edit: Edit) -> None:
    before, after = hashes(), edit("search_spaces.sm90.bwd_fused", "PIECE = 64", "PIECE = 32")
    changed = {name for name, _ in before if before[name, "full"] != after[name, "full"]}
    assert "sm90/bwd_fused" in changed and not changed & {*PORTABLE, "sm90/fwd"}


def test_a_function_that_no_kernel_calls_changes_nothing(edit: Edit) -> None:
    before = hashes()
    assert (
        edit(
            "kernels.lib.common",
            "@triton.jit\ndef dot(",
            "@triton.jit\ndef spare(x):\n    return x\n\n\n@triton.jit\ndef dot(",
        )
        == before
    )


def test_comments_docstrings_and_layout_do_not_count(edit: Edit) -> None:
    before = hashes()
    assert edit("kernels.portable.fwd", "import triton\n", "import triton  # the compiler\n\n\n") == before
    assert edit("kernels.lib.common", '"""What the kernels share', '"""What they share') == before


def test_a_parameter_that_a_callback_does_not_use_does_not_count(edit: Edit) -> None:
    before = hashes()
    assert edit("kernels.portable.fwd", "constants=lambda spec, _config:", "constants=lambda spec:") == before
    assert edit("kernels.portable.fwd", "_sm_count, _early:", "_sm_count, _early, _more:") == before
    assert edit("kernels.sm90.fwd", "sm_count: int, _early: bool)", "sm_count: int)") == before
    assert (
        edit("kernels.lib.bwd_keys", "def _grid(problem, config, _sm_count, _early)", "def _grid(problem, config)")
        == before
    )
    device = edit("kernels.lib.common", "def dot(a, b,", "def dot(a, b, _c,")
    assert device["portable/fwd", "full"] != before["portable/fwd", "full"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("VARIANT = described(SPACE, serves='fwd')", "VARIANT = described(SPACE)"),
        ("VARIANT = described(space=SPACE, serves='fwd')", "VARIANT = described()"),
        ("VARIANT: Variant = Variant(kernel, serves='fwd')", "VARIANT: Variant = Variant(kernel)"),
        ("VARIANT = described(SPACE, role='fwd_combine', ordered_form_of='sm80/one')", "VARIANT = described(SPACE)"),
        ("VARIANT = Variant(kernel, role='fwd_combine', ordered_form_of='sm80/one')", "VARIANT = Variant(kernel)"),
        ("OTHER = table(serves='fwd')", None),
        ("@triton.jit\ndef one(x, _y):\n    return dot(x, serves=2)", None),
        ("@triton.jit\ndef one(x, serves):\n    return dot(x, serves)", None),
        ("def one(x, serves):\n    return {'A': serves}", None),
        ("def one(x, serves):\n    return Variant(x, serves=serves)", "def one(x):\n    return Variant(x)"),
        ("f = lambda x, _y: g(lambda: _y)", None),
        ("f = lambda x, _y: x", "f = lambda x: x"),
    ],
)
def test_what_is_left_out_of_a_source(text: str, kept: str | None) -> None:
    assert ast.unparse(composition._Code().visit(ast.parse(text))) == (kept or text)


def test_every_definition_that_a_kernel_file_imports_exists() -> None:
    """``composed`` follows every name; one that is nowhere would be left out of the hash."""
    for variant in registry.variants().values():
        texts = list(composition.composed([(variant.module, "VARIANT")]))
        assert any(f"def {variant.kernel.fn.__name__}" in text for text in texts)
    with pytest.raises(NameError, match=r"fa2tune\.kernels\.portable\.fwd does not define no_such"):
        list(composition.composed([("fa2tune.kernels.portable.fwd", "no_such")]))
