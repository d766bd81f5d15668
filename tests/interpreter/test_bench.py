"""The peers of fa2tune bench that are our own kernels, and the example, in the interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fa2tune.bench.comparison import BENCHED, Stand
from fa2tune.bench.peers import PEERS
from fa2tune.spec.mask import CAUSAL, Mask, band
from fa2tune.spec.problem import Problem

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "gpt.py"


@pytest.mark.parametrize("mask", [CAUSAL, band(24, 0), band(7, 40), band(None, 3)], ids=str)
@pytest.mark.parametrize("name", ["fa2tune", "triton-plain", "standard"])
def test_our_peers_are_right(name: str, mask: Mask) -> None:
    stand = Stand(Problem("fp16", 1, 2, 2, 70, 70, 16, 16, mask), PEERS, "cpu")
    for pass_ in BENCHED:
        assert stand.error(name, pass_, stand.call(name, pass_)()) < 0.005, pass_


def test_the_gpt_example_learns() -> None:
    spec = importlib.util.spec_from_file_location("example_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)
    sizes = "--layers 1 --heads 1 --head-dim 16 --length 24 --batch 2 --steps 6 --lr 0.02"
    losses = gpt.train(gpt.parser().parse_args(sizes.split()))
    assert len(losses) == 6 and losses[-1] < losses[0]
