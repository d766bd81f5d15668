"""Masks that a call names: the portable kernels by the error rule, gradients included; the errors; torch.compile."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from cache_rows import stale_here
from test_kernels import check_options, problem

import fa2tune
from fa2tune import gpus
from fa2tune.calling import explanation, serving
from fa2tune.compiling import support
from fa2tune.compiling.registry import portable_of
from fa2tune.launching import passes
from fa2tune.measuring import reference, verify
from fa2tune.spec import maskfile
from fa2tune.spec.mask import ABSENT, Mask, band
from fa2tune.spec.problem import STRATEGIES
from fa2tune.spec.variant import DESCRIPTOR, POINTER

#: Chunks within a tile, of a tile, of several, and none that ends; rows that see no key.
CASES = (
    (70, 90, 16), (90, 70, 16), (130, 130, 64), (130, 200, 100), (33, 200, 7), (150, 150, 3), (1, 77, 50), (60, 60, 59),
)  # fmt: skip


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "chunk"), CASES)
def test_chunks(seqlen_q, seqlen_k, chunk):
    mask = Mask("chunked", chunk)
    check_options(problem("fp16", seqlen_q, seqlen_k, heads=(4, 2)), mask, mask=mask)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_chunks_in_other_dtypes(dtype):
    check_options(problem(dtype, 100, 130, 64), Mask("chunked", 40), mask=Mask("chunked", 40))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 90), (90, 70), (64, 64), (5, 50), (130, 33)])
def test_causal_from_the_top_left_is_that_of_sdpa(seqlen_q, seqlen_k):
    mask = Mask("causal_top_left")
    check_options(problem("fp16", seqlen_q, seqlen_k, heads=(4, 2)), mask, mask=mask)
    q, k = torch.randn(1, 2, seqlen_q, 16), torch.randn(1, 2, seqlen_k, 16)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    torch.testing.assert_close(fa2tune.attention(q, k, k, mask="causal_top_left"), theirs, atol=1e-5, rtol=1e-5)


def test_causal_from_the_top_left_of_packed_sequences():
    q, k = torch.randn(12, 1, 16), torch.randn(12, 1, 16)  # as many in all, not in each
    starts = [torch.tensor(side, dtype=torch.int32) for side in ([0, 9, 9, 12], [0, 4, 7, 12])]
    o = fa2tune.attention_varlen(q, k, k, *starts, mask="causal_top_left")
    parts = ((q[:9], k[:4]), (q[9:], k[7:]))
    right = [fa2tune.attention(*(t.transpose(0, 1)[None] for t in (a, b, b)), mask="causal_top_left") for a, b in parts]
    torch.testing.assert_close(o, torch.cat([one[0].transpose(0, 1) for one in right]))


@pytest.mark.parametrize("name", ["full", "causal"])
def test_a_name_is_a_mask(name):
    check_options(problem("fp16", 70, 90), Mask(name), mask=name)


def configs(kernel, spec):
    """One config of each load variant and place of the masked tiles."""
    base = portable_of(kernel).space.default(spec, 80)
    space = portable_of(kernel).space.dimensions
    for loads, masked in itertools.product((POINTER, DESCRIPTOR), space["MASKED"]):
        config = {**base, "LOADS": loads, "MASKED": masked, "BLOCK_M": 32, "BLOCK_N": 32}
        yield {name: value for name, value in config.items() if name in space}


@pytest.mark.parametrize(
    "mask",
    [
        *(Mask("chunked", chunk) for chunk in (24, 64, 150)),
        Mask("causal_top_left"),
        Mask("causal_stacked", 3),
        band(40, 0),
        band(10, 20),
    ],
    ids=str,
)
def test_every_place_of_the_masked_tiles(mask):
    asked = problem("fp16", 150, 190, 32)
    inputs = reference.make_inputs(asked, "cpu")
    options = {"mask": mask, "softmax_scale": 32**-0.5}
    oracle, same = reference.oracle_and_reference(inputs, **options)
    spec = replace(asked.specialization, mask=mask.name)
    for config in configs("fwd", spec):
        o, lse = passes.forward(inputs.q, inputs.k, inputs.v, **options, config=config)
        verify.compare({"o": o, "lse": passes.lse_of(lse)}, oracle, same)
    for strategy, kernels in STRATEGIES.items():
        first = {kernel: list(configs(kernel, spec)) for kernel in kernels}
        for choice in zip(*first.values(), strict=True):
            chosen = dict(zip(kernels, choice, strict=True))
            found = passes.backward(
                inputs.do, None, inputs.q, inputs.k, inputs.v, o, lse, **options, strategy=strategy, configs=chosen
            )
            verify.compare(dict(zip(("dq", "dk", "dv"), found, strict=True)), oracle, same)


def test_key_blocks_of_other_chunks_are_not_visited():
    """NaN in keys that no query sees reaches nothing, not even through a product with 0."""
    q, k, v = (torch.randn(1, 1, 256, 32, dtype=torch.float16) for _ in range(3))
    k[:, :, :128] = float("nan")
    v[:, :, :128] = float("nan")
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    o = fa2tune.attention(q[:, :, 128:], k, v, mask=Mask("chunked", 128))
    dq, dk, dv = torch.autograd.grad(o.float().sum(), (q, k, v))
    assert not o.isnan().any() and not dq.isnan().any()
    assert not dk[:, :, 128:].isnan().any() and not dv[:, :, 128:].isnan().any()


def test_query_blocks_of_other_chunks_are_not_visited():
    q, k, v, do = (torch.randn(1, 1, 256, 32, dtype=torch.float16) for _ in range(4))
    q[:, :, 128:] = float("nan")
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    o = fa2tune.attention(q, k, v, mask=Mask("chunked", 128))
    _, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    assert not o[:, :, :128].isnan().any()
    assert not dk[:, :, :128].isnan().any() and not dv[:, :, :128].isnan().any()


def test_one_graph_serves_every_value_and_a_name_is_its_own():
    q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.float16) for _ in range(3))
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, chunk: fa2tune.attention(q, k, v, mask=Mask("chunked", chunk)), fullgraph=True, backend=count
    )
    for chunk in (16, 24, 33, 50, 63):
        mask = Mask("chunked", chunk)
        assert torch.equal(compiled(q, k, v, chunk), fa2tune.attention(q, k, v, mask=mask))
    assert len(graphs) <= 2  # the first value as a constant, then any
    graphs.clear()
    outside = torch.compile(lambda q, k, v, mask: fa2tune.attention(q, k, v, mask=mask), fullgraph=True, backend=count)
    for chunk in (16, 24, 33, 50, 63):
        mask = Mask("chunked", chunk)
        assert torch.equal(outside(q, k, v, mask), fa2tune.attention(q, k, v, mask=mask))
    assert len(graphs) <= 2
    assert torch.equal(outside(q, k, v, "causal"), fa2tune.attention(q, k, v, causal=True))


def test_compiled_gradients_and_a_wrong_value():
    q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.float16, requires_grad=True) for _ in range(3))
    compiled = torch.compile(
        lambda q, k, v, mask: fa2tune.attention(q, k, v, mask=mask), fullgraph=True, backend="aot_eager"
    )
    mask = Mask("chunked", 20)
    found, plain = (torch.autograd.grad(f(q, k, v, mask=mask).sum(), (q, k, v)) for f in (compiled, fa2tune.attention))
    assert all(map(torch.equal, found, plain))
    with pytest.raises(ValueError, match="chunk must be from 1"):
        compiled(q, k, v, mask=Mask("chunked", 0))


def test_operators_are_as_torch_wants_them():
    q, k, v = (torch.randn(1, 2, 40, 32, dtype=torch.float16, requires_grad=True) for _ in range(3))
    torch.library.opcheck(torch.ops.fa2tune.attention.default, (q, k, v, 16, ABSENT, 0.2, False, "chunked"))
    older = torch.ops.fa2tune.attention(q, k, v, 16, 0, 0.2, False)[0]  # a call from before there were names
    assert torch.equal(older, fa2tune.attention(q, k, v, window=(16, 0), softmax_scale=0.2))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"mask": "caussal"}, ValueError, "mask: got 'caussal', allowed are " + ", ".join(maskfile.offered())),
        ({"mask": Mask("causal_stacked", 4)}, ValueError, "mask: got 'causal_stacked', allowed are band, causal, "),
        ({"mask": "chunked"}, ValueError, "chunked has 1 value: fa2tune.Mask\\('chunked', chunk\\)"),
        ({"mask": Mask("chunked", -3)}, ValueError, "chunk must be from 1"),
        ({"mask": 3}, TypeError, "mask: got 3, must be a name or a fa2tune.Mask"),
        ({"mask": [1]}, TypeError, "mask: got \\[1\\], must be"),
        ({"mask": torch.Tensor}, TypeError, "mask: got <class .*>, must be a name or"),
        ({"mask": torch.ones(64, 64)}, TypeError, "mask: got Tensor of shape \\(64, 64\\), must be a name or"),
        ({"mask": torch.ones(64, 64), "causal": True}, ValueError, "mask: got Tensor of shape \\(64, 64\\) and causal"),
        ({"mask": "full", "causal": True}, ValueError, "mask: got 'full' and causal=True, a call takes one of"),
        ({"mask": "full", "window": (3, 0)}, ValueError, "mask: got 'full' and window=\\(3, 0\\), a call takes one of"),
        ({"mask": "full", "window": (3, 0), "causal": True}, ValueError, "mask: got 'full' and window=\\(3, 0\\)"),
    ],
)
def test_a_wrong_mask_is_named(options, error, said):
    q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.float16) for _ in range(3))
    for ask in (fa2tune.attention, fa2tune.explain):
        with pytest.raises(error, match=said):
            ask(q, k, v, **options)
    assert not fa2tune.is_supported(q, k, v, **options)


def test_rows_of_the_causal_mask_serve_chunks(monkeypatch):
    monkeypatch.setattr(support, "interpreted", lambda: False)  # what an H200 would take
    asked = replace(problem("bf16", 4096, 4096, 128, heads=(16, 16), batch=4), mask=Mask("chunked", 1000))
    found = serving.explain_problem(asked, gpus.named("h200"), present=False)
    assert found.status == explanation.NEAR and "tuned without the mask chunked" in found.verdict
    age = "stale" if stale_here(found.kernels[0].stale) else "fresh"
    assert f"without the mask chunked, {age}" in found.kernels[0].evidence
    assert {served.row.implementation for served in found.kernels} == {"warp_specialized"}
    assert found.next == "nothing to do"


def test_explain_and_is_supported_take_a_mask():
    q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.float16) for _ in range(3))
    found = fa2tune.explain(q, k, v, mask=Mask("chunked", 16), backward=True)
    assert found.problem.mask == Mask("chunked", 16)
    assert found.as_dict()["problem"]["mask"] == "chunked 16"
    assert fa2tune.is_supported(q, k, v, mask=Mask("chunked", 16))
    rows_of = found.kernels[0].key
    assert (rows_of.mask, rows_of.bucket) == ("causal", 512)
    assert fa2tune.explain(q, k, v, mask=Mask("chunked", 64)).problem.mask == Mask("causal")
