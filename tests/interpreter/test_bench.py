"""The peers of fa2tune bench that are our own kernels, and the examples, in the interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from fa2tune.bench.comparison import BENCHED, Stand
from fa2tune.bench.packed import PACKED_PEERS, posed
from fa2tune.bench.peers import PEERS
from fa2tune.spec.mask import CAUSAL, Mask, band
from fa2tune.spec.problem import Problem

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.parametrize("mask", [CAUSAL, band(24, 0), band(7, 40), band(None, 3)], ids=str)
@pytest.mark.parametrize("name", ["fa2tune", "triton-plain", "standard"])
def test_our_peers_are_right(name: str, mask: Mask) -> None:
    stand = Stand(Problem("fp16", 1, 2, 2, 70, 70, 16, 16, mask), PEERS, "cpu")
    for pass_ in BENCHED:
        assert stand.error(name, pass_, stand.call(name, pass_)()) < 0.005, pass_


@pytest.mark.parametrize("mask", [CAUSAL, band(7, 40)], ids=str)
def test_our_packed_call_is_right(mask: Mask) -> None:
    stand = Stand(posed("fp16", 16, 2, mask, (33, 1, 20)), PACKED_PEERS, "cpu")
    for pass_ in BENCHED:
        assert stand.error("fa2tune", pass_, stand.call("fa2tune", pass_)()) < 0.005, pass_


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gpt_example_learns() -> None:
    gpt = example("gpt")
    sizes = "--layers 1 --heads 1 --head-dim 16 --length 24 --batch 2 --steps 6 --lr 0.02"
    losses = gpt.train(gpt.parser().parse_args(sizes.split()))
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_the_example_of_packed_documents_learns() -> None:
    losses = example("packed_documents").train(layers=1, heads=1, tokens=48, steps=4)
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_the_example_of_transformers_learns_and_continues_prompts() -> None:
    pytest.importorskip("transformers")
    losses, texts = example("transformers_model").train(hidden=32, layers=1, steps=4)
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert [text[:4] for text in texts] == ["To b", "that", "To d"] and all(len(text) > 4 for text in texts)
