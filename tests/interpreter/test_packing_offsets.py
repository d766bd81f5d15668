"""``cu_seqlens`` from position ids and document ids: offsets, refusals, graphs; masks count inside documents."""

from __future__ import annotations

import itertools

import pytest
import torch

import fa2tune
from fa2tune.spec.mask import Mask

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
DOCUMENTS = torch.tensor([[7, 7, 7, 3, 3, 7, 7, 7], [7, 7, 9, 9, 9, 9, 9, 9]], dtype=torch.int32)
ENDS = [0, 3, 5, 8, 10, 16]


@pytest.mark.parametrize("given", [{"position_ids": POSITIONS}, {"document_ids": DOCUMENTS}], ids=str)
def test_offsets(given):
    waited = fa2tune.cu_seqlens(**given)
    assert waited.dtype == torch.int32 and waited.tolist() == [*ENDS, 16, 16, 16]  # up to a power of two
    assert fa2tune.cu_seqlens(**given, sequences=5).tolist() == ENDS
    assert fa2tune.cu_seqlens(**given, sequences=9).tolist() == [*ENDS, 16, 16, 16, 16]
    with pytest.raises(RuntimeError, match="sequences: got 4, there are more documents"):
        fa2tune.cu_seqlens(**given, sequences=4)
    ((name, numbers),) = given.items()
    assert fa2tune.cu_seqlens(**{name: numbers[0]}, sequences=3).tolist() == [0, 3, 5, 8]
    assert fa2tune.cu_seqlens(**{name: numbers[0, :0]}, sequences=2).tolist() == [0, 0, 0]
    assert fa2tune.cu_seqlens(**{name: numbers[:, :0]}).tolist()[-1] == 0


def test_numbers_of_a_narrow_type_do_not_wrap():
    positions = torch.cat([torch.arange(256), torch.arange(4)]).to(torch.uint8)
    assert fa2tune.cu_seqlens(position_ids=positions).tolist() == [0, 256, 260]


def test_one_graph_for_every_length_and_number_of_documents():
    torch._dynamo.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(
        lambda ids: fa2tune.cu_seqlens(position_ids=ids, sequences=6), fullgraph=True, dynamic=True, backend=counted
    )
    waiting = torch.compile(
        lambda ids: fa2tune.cu_seqlens(position_ids=ids), fullgraph=True, dynamic=True, backend="eager"
    )
    for length in (8, 5, 3):
        ids = POSITIONS[:, :length].clone()
        assert torch.equal(run(ids), fa2tune.cu_seqlens(position_ids=ids, sequences=6))
        assert torch.equal(waiting(ids), fa2tune.cu_seqlens(position_ids=ids))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (2, 0)}, {"window": (1, 1)}, {"mask": Mask("chunked", 2)}], ids=str
)
def test_masks_count_inside_documents(options):
    """As each document alone has it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 1, 16) for _ in range(3))
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    o = fa2tune.attention_varlen(*flat, fa2tune.cu_seqlens(position_ids=POSITIONS, sequences=8), **options)
    for first, end in itertools.pairwise(ENDS):
        one = fa2tune.attention(*(t[None, first:end] for t in flat), layout="bshd", **options)
        torch.testing.assert_close(o[first:end], one[0])


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({}, TypeError, "got neither, takes one of position_ids and document_ids"),
        ({"position_ids": POSITIONS, "document_ids": DOCUMENTS}, TypeError, "got position_ids and document_ids, takes one"),
        ({"position_ids": [0, 1]}, TypeError, "position_ids: got list, must be a torch.Tensor"),
        ({"document_ids": POSITIONS.float()}, TypeError, "document_ids: got dtype torch.float32, must be integers"),
        ({"document_ids": POSITIONS > 0}, TypeError, "document_ids: got dtype torch.bool"),
        ({"position_ids": POSITIONS[None]}, ValueError, r"position_ids: got shape \(1, 2, 8\), must be \(batch, length\)"),
        ({"position_ids": POSITIONS, "sequences": 0}, ValueError, "sequences: got 0, must be from 1 to 2"),
        ({"position_ids": POSITIONS, "sequences": 2.0}, TypeError, "sequences: got 2.0, must be an integer or None"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given, error, said):
    with pytest.raises(error, match=said):
        fa2tune.cu_seqlens(**given)
