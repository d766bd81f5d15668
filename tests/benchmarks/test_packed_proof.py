"""benchmarks/packed_proof.py on the CPU: plans that compute by the reference, right or not, in place of kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmark_scripts import script

from fa2tune.launching import passes
from fa2tune.measuring import reference

proof, guarded = script("packed_proof"), script("guarded_memory")
LENGTHS = ((5, 9), (0, 3), (7, 4), (3, 0))


def sequences() -> Any:
    return list(proof.spans(LENGTHS))


class Plan:
    """In place of a ForwardPlan or BackwardPlan. ``harm``: what is done to the results."""

    def __init__(self, outputs: list[torch.Tensor], mask: Any, harm: Callable[..., None]) -> None:
        self.fresh = passes.Fresh(torch.device("cpu"), *outputs)
        self.mask, self.harm = mask, harm
        self.chain = self.kernels = self

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        q, k, v = tensors[:3]
        backward = len(tensors) > 7  # o, do, lse, then the results
        found = tensors[6:9] if backward else (passes.in_one_batch(tensors[3]), tensors[4])
        for tensor in found:
            tensor.fill_(0)
        if not backward:
            found[1].fill_(-torch.inf)
        for of_q, of_k in sequences():
            one = reference.Inputs(
                q[:, :, of_q], k[:, :, of_k], v[:, :, of_k], tensors[4][:, :, of_q] if backward else q
            )
            right = reference.evaluate(
                one, torch.float64, mask=self.mask, softmax_scale=proof.SCALE, gradients=backward
            )
            names = {"dq": of_q, "dk": of_k, "dv": of_k} if backward else {"o": of_q, "lse": of_q}
            for (name, rows), tensor in zip(names.items(), found, strict=True):
                tensor[:, :, rows] = right[name].to(tensor.dtype)
        self.harm(*found)


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What becomes of a case whose results are harmed so."""

    def found(kernel: str, harm: Callable[..., None] = lambda *_: None) -> str:
        monkeypatch.setattr(proof, "PACKINGS", {"few": LENGTHS})
        monkeypatch.setattr(guarded, "ARENA_BYTES", 1 << 19)
        monkeypatch.setattr(guarded, "APART", 1 << 12)
        monkeypatch.setattr(guarded, "PAGE", 1 << 12)

        def forward(problem: Any, q: torch.Tensor, *_: Any) -> Plan:
            return Plan([passes.without_batch(q), torch.empty(q.shape[:3])], problem.mask, harm)

        def backward(problem: Any, do: Any, dlse: Any, q: Any, k: Any, v: Any, *_: Any) -> Plan:
            return Plan([q, k, v], problem.mask, harm)

        monkeypatch.setattr(passes, "ForwardPlan", forward)
        monkeypatch.setattr(passes, "BackwardPlan", backward)
        case = proof.Case(f"{kernel}, pretended", (2, 1), (64, 64), "fp16", packings=("few",))
        return str(proof.child(case, "cpu"))

    return found


def test_right_results_pass(outcome: Callable[..., str]) -> None:
    assert outcome("forward") == outcome("backward") == outcome("split") == "PASS 3 runs"


def test_what_is_wrong_is_named(outcome: Callable[..., str]) -> None:
    def behind(first: torch.Tensor, *_: torch.Tensor) -> None:
        first[:, :, -1] = 1

    def off(first: torch.Tensor, *_: torch.Tensor) -> None:
        first[0, 0, 2] += 1

    def stray(first: torch.Tensor, *_: torch.Tensor) -> None:
        torch.as_strided(first, (1,), (1,), first.storage_offset() - 8).fill_(1)

    def fault(*_: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

    runs: list[int] = []

    def differs(_: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        runs.append(1)
        dk[0, 0, 0] *= 1 + 2**-9 * (len(runs) % 2)

    assert outcome("split", differs) == "WRONG dk differ from one run to the next"
    assert outcome("backward", behind) == "WRONG dq behind the last sequence"
    assert outcome("forward", off).startswith("WRONG o: max error")
    assert outcome("forward", stray).startswith("STRAY 2 bytes, the first 16 before o, ")
    assert outcome("forward", fault) == "FAULT RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_case_that_does_not_come_back() -> None:
    def asked(code: str) -> str:
        return str(proof.one("x", 2.0, command=(sys.executable, "-c", code))[0])

    assert asked("print('at a, b', flush=True); import time; time.sleep(30)") == "HANG after 2 s [a, b]"
    assert asked("print('at a'); print('PASS 3 runs'); print('a warning')") == "PASS 3 runs"
    assert asked("print('gone'); raise SystemExit(3)") == "ERROR exit 3: gone"


def test_a_fault_is_run_again_to_name_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, seconds: float, blocking: bool = False) -> tuple[str, float]:
        return ("FAULT launching k: illegal" if blocking else "FAULT illegal"), 1.0

    assert not proof.report("a case", 5, run)
    assert capsys.readouterr().out == "FAULT a case: illegal; blocking: FAULT launching k: illegal, 2.0 s\n"


def test_cases_are_forms_that_there_are() -> None:
    assert len({case.name for case in proof.CASES}) == len(proof.CASES)
    assert all(len(list(case.binaries())) >= 2 for case in proof.CASES)
    for case in proof.CASES[:2]:
        assert case.heads[0] > case.heads[1] and case.packings == ("unequal",)
