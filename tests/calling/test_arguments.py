"""Other libraries' arguments and tensor order, the public names: what needs no GPU and no interpreter."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fa2tune
from fa2tune.calling import arguments, dispatch, ops
from fa2tune.spec.combinations import LACKING

Q = torch.zeros(1, 4, 32, 64)
#: Of torch.nn.functional.scaled_dot_product_attention, as its documentation begins.
SDPA = str(torch.nn.functional.scaled_dot_product_attention.__doc__).split("(", 1)[1].split(")")[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"is_causal": True}, "got is_causal=, use causal= instead"),
        ({"scale": 0.1}, "got scale=, use softmax_scale= instead"),
        ({"return_attn_probs": True}, "use return_lse=True"),
        ({"attn_mask": Q}, "got attn_mask=, which is not supported yet (masks as tensors)"),
        (
            {"dropout_p": 0.0},
            "got dropout_p=, which is not supported yet (attention dropout); dropout_p=0.0 can be left out",
        ),
        ({"dropout_p": 0.1}, "got dropout_p=, which is not supported yet (attention dropout)"),
        ({"window_size": (128, 0)}, "got window_size=, use window=(left, right) instead"),
        ({"sliding_window": 128}, "use window=(sliding_window - 1, 0)"),
        ({"alibi_slopes": Q}, "ALiBi"),
        ({"cu_seqlens_q": Q}, "packed sequences"),
        ({"enable_gqa": True}, "leave it out: k and v may have fewer heads than q without it"),
        (
            {"bias": 3},
            "unknown argument bias=, allowed are causal=, softmax_scale=, layout=, return_lse=, deterministic=, "
            "window=, mask=, softcap=, score=",
        ),
        ({"scale": 0.1, "alibi_slopes": 1.0}, "use softmax_scale= instead; got alibi_slopes="),
    ],
    ids=str,
)
def test_an_argument_of_another_library_is_an_error_that_names_ours(given: dict[str, object], says: str) -> None:
    with pytest.raises(TypeError) as caught:
        fa2tune.attention(Q, Q, Q, **given)  # type: ignore[call-overload]
    assert says in str(caught.value)
    if given == {"dropout_p": 0.1}:
        assert "left out" not in str(caught.value)
    for other in (fa2tune.explain, fa2tune.is_supported):
        with pytest.raises(TypeError) as theirs:
            other(Q, Q, Q, **given)  # type: ignore[operator]
        assert str(theirs.value) == str(caught.value)


ORDER = (
    "the tensors are q, k, v; everything after v is keyword-only: "
    "causal=, softmax_scale=, layout=, return_lse=, deterministic=, window=, mask=, softcap=, score="
)


@pytest.mark.parametrize(
    ("positional", "named", "says"),
    [
        ((Q, Q, Q, True), {}, "got 4 positional arguments, takes 3"),
        ((Q, Q, Q, None, 0.0), {"is_causal": True}, "got is_causal=, use causal= instead; got 5 positional arguments, takes 3"),
        (
            (), {"query": Q, "key": Q, "value": Q},
            "got query=, use q= instead; got key=, use k= instead; got value=, use v= instead",
        ),
        ((), {"query": Q, "key": Q}, "got query=, use q= instead; got key=, use k= instead; v is missing"),
        ((Q, Q), {}, "v is missing"),
        ((Q,), {"causal": True}, "k and v are missing"),
        ((), {"q": Q, "value_states": Q}, "got value_states=, use v= instead; k is missing"),
    ],
)  # fmt: skip
def test_missing_tensors_and_positional_extras_are_named(
    positional: tuple[object, ...], named: dict[str, object], says: str
) -> None:
    with pytest.raises(TypeError) as caught:
        fa2tune.attention(*positional, **named)  # type: ignore[call-overload]
    assert str(caught.value) == f"attention: {says}; {ORDER}"


def test_a_warm_call_refuses_positional_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dispatch, "FORWARD_PLANS", {dispatch.forward_key(Q, Q, Q, False, None, "bhsd"): lambda *_: (Q, Q)}
    )
    assert fa2tune.attention(Q, Q, Q) is Q
    with pytest.raises(TypeError, match="got 4 positional arguments"):
        fa2tune.attention(Q, Q, Q, True)  # type: ignore[call-overload]
    for other in (fa2tune.explain, fa2tune.is_supported):
        with pytest.raises(TypeError, match="got 4 positional arguments"):
            other(Q, Q, Q, True)  # type: ignore[operator]
        with pytest.raises(TypeError, match="unknown argument casual="):
            other(Q, Q, Q, casual=True)  # type: ignore[operator]
        with pytest.raises(TypeError, match="v is missing"):
            other(Q, Q)  # type: ignore[operator]


def test_every_argument_of_sdpa_is_known() -> None:
    names = set(re.findall(r"[a-z]\w*(?==)", SDPA))
    assert {"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"} <= names
    known = {*arguments.INSTEAD, *LACKING, *arguments.NEEDLESS}
    assert names <= known
    assert not known & set(arguments.ALLOWED)


def test_is_causal_says_how_the_masks_differ_where_the_lengths_do() -> None:
    longer = torch.zeros(1, 4, 48, 64)
    with pytest.raises(TypeError, match=r"top left.*bottom right.*0 to i \+ 48 - 32"):
        fa2tune.attention(Q, longer, longer, is_causal=True)  # type: ignore[call-overload]
    q, k = (tensor.transpose(1, 2) for tensor in (Q, longer))
    with pytest.raises(TypeError, match="32 queries and 48 keys"):
        fa2tune.attention(q, k, k, layout="bshd", is_causal=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError) as caught:
        fa2tune.attention(Q, Q, Q, is_causal=True)  # type: ignore[call-overload]
    assert "top left" not in str(caught.value)


def test_the_allowed_names_are_the_signatures() -> None:
    parameters = inspect.signature(fa2tune.attention).parameters.values()
    assert tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) == arguments.ALLOWED
    packed = inspect.signature(fa2tune.attention_varlen).parameters
    assert {*packed} - {"q", "k", "v", "extra", "unknown"} == {*arguments.ALLOWED_PACKED}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cu_seqlens": None}, "got cu_seqlens=, use cu_seqlens_q= instead; cu_seqlens_q is missing"),
        ({"cu_seqlens_q": None, "max_seqlen": 8}, "got max_seqlen=, use max_seqlen_q= instead"),
        ({"cu_seq_q": None, "cu_seq_k": None}, "use cu_seqlens_q= instead; got cu_seq_k=, use cu_seqlens_k= instead"),
        ({"cu_seqlens_q": None, "max_q": 8, "max_k": 8}, "use max_seqlen_q= instead; got max_k=, use max_seqlen_k= instead"),
        ({"cu_seqlens_q": None, "casual": True}, "argument casual=, allowed are cu_seqlens_q=, cu_seqlens_k=, max_seqlen_q="),
        ({"cu_seqlens_q": None, "casual": True}, "max_seqlen_k=, causal=, softmax_scale=, return_lse="),
    ],
    ids=str,
)  # fmt: skip
def test_attention_varlen_names_its_own_arguments(given: dict[str, object], says: str) -> None:
    with pytest.raises(TypeError) as caught:
        fa2tune.attention_varlen(Q, Q, Q, **given)  # type: ignore[call-overload]
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("q", "k", "layout", "warned"),
    [
        ((2, 2048, 16, 128), None, "bhsd", True),  # flash-attn's order
        ((2, 2048, 32, 128), (2, 2048, 8, 128), "bhsd", True),  # the same with grouped queries
        ((1, 256, 128, 64), None, "bhsd", True),
        ((2, 2048, 16, 128), None, "bshd", False),
        ((8, 32, 1, 128), (8, 32, 4096, 128), "bhsd", False),  # decoding
        ((1, 128, 16, 128), None, "bhsd", False),  # a short prompt
        ((1, 232, 1, 64), (1, 8, 2048, 64), "bhsd", False),  # Falcon 180B
        ((1, 512, 64, 64), (1, 512, 2048, 64), "bhsd", False),  # many heads, long keys
        ((2, 512, 512, 64), None, "bhsd", False),
        ((4, 64, 8, 64), None, "bhsd", True),
        ((1, 64, 32, 128), (1, 64, 8, 128), "bhsd", True),  # grouped queries, a short sequence
        ((1, 128, 4, 32), None, "bhsd", True),
        ((1, 32, 8, 64), None, "bhsd", False),  # too few heads to tell
        ((1, 64, 32, 64), None, "bhsd", False),
        ((8, 64, 8, 64), (8, 64, 4096, 64), "bhsd", False),  # speculative decoding
        ((8, 128, 8, 128), (8, 8, 4096, 128), "bhsd", False),
        ((1, 64, 8, 128), (1, 8, 8, 128), "bhsd", False),  # a prompt of 8 tokens, grouped queries
        ((1, 128, 8, 192), None, "bhsd", False),  # the same, DeepSeek-V3
        ((1, 64, 8, 128), None, "bhsd", False),  # the same, Llama 65B
        ((4, 64, 1, 64), None, "bhsd", False),  # a first token
        ((4, 64, 0, 64), None, "bhsd", False),
    ],
)  # fmt: skip
def test_tensors_in_flash_attns_order_are_doubted_once(
    monkeypatch: pytest.MonkeyPatch, q: tuple[int, ...], k: tuple[int, ...] | None, layout: str, warned: bool
) -> None:
    monkeypatch.setattr(arguments, "_doubted", False)
    tensors = torch.empty(q, device="meta"), torch.empty(k or q, device="meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            arguments.doubt_layout(*tensors, layout, stacklevel=2)
    assert len(caught) == warned
    for one in caught:
        assert 'layout="bshd"' in str(one.message) and one.filename == __file__
        assert f"{q[1]} heads of {q[2]} tokens" in str(one.message)


def test_heads_that_do_not_divide_name_the_other_layout() -> None:
    q, k = torch.zeros(1, 1, 32, 64), torch.zeros(1, 128, 32, 64)
    with pytest.raises(ValueError, match=r'got 1 heads, must be a multiple of the 128 heads.*layout="bshd"'):
        fa2tune.attention(q, k, k)
    with pytest.raises(ValueError, match=r"got 6 heads, must be a multiple of the 4 heads of k and v$"):
        fa2tune.attention(torch.zeros(1, 6, 8, 64), Q, Q)


def test_dir_shows_the_public_names_before_and_after_they_are_used() -> None:
    probe = "import fa2tune, sys; before = dir(fa2tune); fa2tune.attention, fa2tune.explain, fa2tune.manifest\n"
    probe += "assert before == dir(fa2tune), dir(fa2tune); print(*before)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=root)
    assert done.stdout.split() == [
        "Mask",
        "Score",
        "__version__",
        "attention",
        "attention_varlen",
        "cu_seqlens",
        "explain",
        "is_supported",
        "manifest",
        "varlen_schedule",
    ], done.stderr


@pytest.mark.parametrize(
    ("q", "more"),
    [(Q, {}), (None, {}), (3, {}), (Q.long(), {}), (Q.to_sparse(), {}), (Q[0], {}), (Q, {"layout": "BSHD"}),
     (Q, {"causal": []}), (torch.zeros(1, 4, 32, 20), {}), (Q.to("meta"), {}), (Q, {"softmax_scale": "1"})],
)  # fmt: skip
def test_is_supported_does_not_raise_for_values(q: object, more: dict[str, object]) -> None:
    """On the CPU, without the interpreter, nothing is."""
    assert fa2tune.is_supported(q, q, q, **more) is False


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = SimpleNamespace(name="Tesla T4", major=7, minor=5, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: turing)
    on_it = SimpleNamespace(get_device=lambda: 1)
    monkeypatch.setattr(ops, "checked", lambda *given, **named: (on_it, on_it, on_it))
    dispatch.gpu_of.cache_clear()
    said = r"^attention: cuda:1 \(Tesla T4\) has compute capability 7\.5, 8\.0 or higher is needed$"
    try:
        with pytest.raises(RuntimeError, match=said):
            dispatch.gpu_of(1)
        assert not fa2tune.is_supported(Q, Q, Q)
        turing.major, turing.minor = 8, 0
        assert fa2tune.is_supported(Q, Q, Q)
    finally:
        dispatch.gpu_of.cache_clear()


@pytest.mark.parametrize("name", ["attn_bias", "attn_mask", "alibi_slopes"])
def test_an_array_for_what_is_lacking_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"got {name}=, which is not supported yet"):
        fa2tune.attention(Q, Q, Q, **{name: np.zeros((2, 2))})
