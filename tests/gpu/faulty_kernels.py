"""What child processes run in tests/gpu/test_faults.py: the real race, with some contenders' launches replaced by kernels
that go wrong: those with an entry FAULT, and those of ``FA2TUNE_FAULTS``, a list of [config, fault] as JSON."""

from __future__ import annotations

import json
import os

import torch
import triton
import triton.language as tl

from fa2tune.measuring import measure


@triton.jit
def wild_store(pointer, offset):
    tl.store(pointer + offset, 1.0)


@triton.jit(debug=True)
def failing_assert(pointer):
    tl.device_assert(tl.load(pointer) > 0.0, "what was asserted")


@triton.jit
def endless(pointer):
    value = tl.load(pointer, volatile=True)
    while value == 0.0:
        value = tl.load(pointer, volatile=True)
    tl.store(pointer, value + 1.0)


def illegal():
    wild_store[(1,)](torch.zeros(1, device="cuda"), 1 << 40)


def asserts():
    failing_assert[(1,)](torch.zeros(1, device="cuda"))


def hangs():
    endless[(1,)](torch.zeros(1, device="cuda"))


def no_memory():
    torch.empty(1 << 50, dtype=torch.int8, device="cuda")


FAULTS = {"illegal": illegal, "asserts": asserts, "hangs": hangs, "no_memory": no_memory}

_runner = measure._runner


def _poisoned(key, contender, tensors):
    listed = [fault for config, fault in json.loads(os.environ["FA2TUNE_FAULTS"]) if config == contender]
    for fault in (contender.get("FAULT"), *listed):
        if fault is not None:
            return FAULTS[fault]
    return _runner(key, contender, tensors)


def race(*arguments):
    measure._runner = _poisoned
    return measure.race(*arguments)


def check(*arguments):
    """Numerics are other tests' business."""
    return {"o": {"max": 0.0, "max_allowed": 1.0, "rms": 0.0, "rms_allowed": 1.0}}
