"""Every pair of features of the table: computed as a float64 reference has it, or refused for the table's reason."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import fa2tune
from fa2tune.measuring import reference
from fa2tune.spec import combinations
from fa2tune.spec.mask import Mask, mask_of
from fa2tune.spec.score import Score, score_of

LENGTHS = (7, 11)  #: of queries; keys are 2 more
OPTIONS = {
    "causal": {"causal": True}, "window": {"window": (4, 2)}, "mask": {"mask": Mask("chunked", 4)},
    "softcap": {"softcap": 2.0}, "score": {"score": Score("softcap", 2.0)}, "layout": {"layout": "bshd"},
    "deterministic": {"deterministic": True},
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("no_rows")


def tensors(asked):
    """q, k, v of all sequences, (total, heads, dim)."""
    torch.manual_seed(0)
    heads, dim_v = 2 if "grouped heads" in asked else 1, 24 if "head dim of V" in asked else 16
    keys = sum(LENGTHS) + 2 * len(LENGTHS)
    shapes = ((sum(LENGTHS), heads, 16), (keys, 1, 16), (keys, 1, dim_v))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def found(asked, q, k, v):
    """(o (total, heads, dim), lse (heads, total)) of the public call, of one sequence for each or of packed ones."""
    options = {name: value for one in asked for name, value in OPTIONS.get(one, {}).items()}
    packed = {"packed sequences", "used lengths"} & set(asked)
    torch._dynamo.reset()  # it keeps a few graphs of a function
    call = fa2tune.attention_varlen if packed else fa2tune.attention
    run = torch.compile(call, fullgraph=True, backend="eager") if "torch.compile" in asked else call
    if packed:
        if "used lengths" in asked:
            options["seqused_k"] = torch.tensor([length + 1 for length in LENGTHS], dtype=torch.int32)
        of_keys = starts([length + 2 for length in LENGTHS])
        return run(q, k, v, starts(LENGTHS), of_keys, return_lse=True, **options)
    # all of it as one sequence
    one = [t[None] if "layout" in asked else t.transpose(0, 1)[None] for t in (q, k, v)]
    o, lse = run(*one, return_lse=True, **options)
    return (o[0] if "layout" in asked else o[0].transpose(0, 1)), lse[0]


def wanted(asked, q, k, v):
    given = {name: value for one in asked for name, value in OPTIONS.get(one, {}).items()}
    mask, score = (
        mask_of(given.get("causal", False), given.get("window"), given.get("mask")),
        score_of(given.get("softcap"), given.get("score")),
    )
    packed = {"packed sequences", "used lengths"} & set(asked)
    of_q, of_k = (LENGTHS, [length + 2 for length in LENGTHS]) if packed else ([len(q)], [len(k)])
    outs, lses = [], []
    for queries, keys, whole in zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True):
        if "used lengths" in asked:
            keys, whole = keys[:-1], whole[:-1]
        o, lse = reference.attention(*(t.transpose(0, 1)[None] for t in (queries, keys, whole)), mask=mask, score=score)
        outs.append(o[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def results(call, asked, q, k, v):
    o, lse = call(asked, q, k, v)
    if not {"lse", "deterministic", "softcap", "score"} & set(asked):  # other files have gradients of all
        return o, lse
    loss = o.double().square().sum() + (lse[lse.isfinite()].double().sum() if "lse" in asked else 0.0)
    return o, lse, *torch.autograd.grad(loss, (q, k, v))


@pytest.mark.parametrize("asked", itertools.combinations(combinations.FEATURES, 2), ids=" and ".join)
def test_a_pair(asked):
    given = tensors(asked)
    if "used lengths" in asked and "packed sequences" in asked:
        return  # the former are of the latter
    if frozenset(asked) in {frozenset(pair[:2]) for pair in combinations.CONFLICTS}:
        with pytest.raises((TypeError, ValueError), match=re.escape(combinations.why(*asked))):
            found(asked, *given)
        return
    right = results(wanted, asked, *(t.detach().double().requires_grad_() for t in given))
    for ours, theirs in zip(results(found, asked, *given), right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", combinations.LACKING)
def test_what_is_lacking_is_refused_by_name(name):
    q, k, v = (t[None] for t in tensors(()))
    if name == "num_splits":  # in the public call it can be left out
        return
    with pytest.raises(TypeError, match=f"got {name}=, which is not supported yet"):
        fa2tune.attention(q, k, v, **{name: torch.zeros(3)})


def test_pairs_that_combine_have_no_reason():
    with pytest.raises(KeyError):
        combinations.why("causal", "window")
    assert {name for pair in combinations.CONFLICTS for name in pair[:2]} <= set(combinations.FEATURES)
    assert {len(cells) for cells in combinations.TAKEN.values()} == {len(combinations.CALLS)}
