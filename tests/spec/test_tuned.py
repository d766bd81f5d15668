"""What a kernel's file says that brings a name of its own: the rest is in tests/test_extending.py."""

from __future__ import annotations

from dataclasses import fields

import pytest

from fa2tune.compiling import registry
from fa2tune.spec import stated, tuned
from fa2tune.spec.problem import KERNELS, PRODUCTS, STRATEGIES
from fa2tune.spec.variant import SIGNATURES, Variant

WHERE = "kernels/portable/rows.py"
GOOD = {
    "serves": '"bwd_rows"', "products": "(2, 1)", "strategy": '("rows", "bwd_rows", "bwd_dkdv")', "loop": '"bwd_dq"',
    "title": '"rows"',
}  # fmt: skip


@pytest.fixture
def brings(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The table of a tree whose files are these, besides none."""

    def brings(*files: dict[str, str]) -> dict[str, tuned.Tuned]:
        texts = {
            f"portable/rows{number or ''}": f"VARIANT = Variant({', '.join(f'{k}={v}' for k, v in said.items())})\n"
            for number, said in enumerate(files)
        }
        monkeypatch.setattr(tuned, "kernel_texts", lambda: texts)
        return dict(tuned.tuned.__wrapped__())

    return brings


def test_a_file_brings_a_name(brings) -> None:  # type: ignore[no-untyped-def]
    strategy, like = ("rows", "bwd_rows", "bwd_dkdv"), tuned.SHIPPED["bwd_dq"]
    read = ("q", "k", "v", "do", "lse")
    assert brings(GOOD) == {
        **tuned.SHIPPED,
        "bwd_rows": tuned.Tuned((2, 1), "rows", "bwd_dq", like.moved, ("q",), strategy),
    }
    short = {name: GOOD[name] for name in ("serves", "products", "strategy")}
    assert brings(short)["bwd_rows"] == tuned.Tuned((2, 1), "bwd_rows", "", read, (), strategy), "timed only"
    assert brings({"serves": '"bwd_rows"'}) == tuned.SHIPPED, "another one implements it"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"serves": '"bwd_dq"'}, "serves: got 'bwd_dq', allowed is a name that begins with"),
        ({"serves": '"rows"'}, "serves: got 'rows', allowed is"),
        ({"serves": "NAME"}, "serves: got NAME, allowed is a name"),
        ({"products": "3"}, "products: got 3, allowed is two numbers of matrix products"),
        ({"products": "(2, -1)"}, r"products: got \(2, -1\)"),
        ({"products": "products=PRODUCTS".partition("=")[2]}, "products: got PRODUCTS, .* written out"),
        ({"strategy": '("rows", "bwd_dq")'}, "strategy: got .*, allowed is the name of a strategy .* bwd_rows among them"),
        ({"strategy": '("split", "bwd_rows")'}, r"bwd_rows: strategy: got \('split', 'bwd_rows'\), and there is \('split'"),
        ({"strategy": '("rows", "bwd_rows", "bwd_dk")'}, "strategy: got the kernel 'bwd_dk', known are bwd_dkdv, bwd_dq"),
        ({"strategy": '("rows", "bwd_rows", "fwd")'}, "strategy: got the kernel 'fwd'"),
        ({"loop": '"bwd_x"'}, 'loop: got \'bwd_x\', allowed is "" or one of fwd'),
        ({"title": "3"}, "title: got 3, allowed is a text"),
    ],
)  # fmt: skip
def test_what_is_not_allowed(brings, changed: dict[str, str], why: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=why):
        brings({**GOOD, **changed})


def test_two_files_bring_no_name_twice(brings) -> None:  # type: ignore[no-untyped-def]
    assert "bwd_rows" in brings(GOOD, GOOD)
    with pytest.raises(ValueError, match="got 'bwd_rows', which another file brings"):
        brings(GOOD, {**GOOD, "title": '"other"'})


def test_what_is_lacking_is_named(brings) -> None:  # type: ignore[no-untyped-def]
    for name in ("serves", "products", "strategy"):
        said = {"products": "(2, 1)"} | {key: value for key, value in GOOD.items() if key != name}
        if name != "products":
            with pytest.raises(ValueError, match=f"{WHERE}: {name}: got nothing"):
                brings(said)


def test_the_shipped_ones() -> None:
    assert KERNELS == tuple(tuned.SHIPPED) == tuple(PRODUCTS)
    assert STRATEGIES == {"split": ("bwd_dq", "bwd_dkdv"), "fused": ("bwd_fused",)}
    assert {registry.stated(text, name).serves for name, text in stated.kernel_texts().items()} == {"", *KERNELS}


def test_a_kernel_that_is_not_in_the_table_moves_no_bytes_but_is_an_error() -> None:
    assert tuned.moved("fwd") == ("q", "k", "v", "o", "lse") and "dq" in tuned.moved("bwd")
    with pytest.raises(ValueError, match=r"kernel: got 'bwd_rows', known are fwd, bwd_dkdv, bwd_dq, bwd_fused, bwd$"):
        tuned.moved("bwd_rows")


def test_the_signature_of_every_callback_of_a_variant_is_checked() -> None:
    callbacks = {one.name for one in fields(Variant) if str(one.type).startswith("Callable")}
    assert callbacks == SIGNATURES.keys()
