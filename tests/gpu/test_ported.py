"""Code for GPUs without wgmma on a Hopper GPU, as a tuning run's processes race and check it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from fa2tune.calling.schedules.fused_schedule import IN_ORDER_FORM

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no GPU that runs the code of others",
)
PROGRAM = """
import json
from fa2tune import gpus
from fa2tune.compiling.registry import portable_of, variant_named
from fa2tune.measuring import ported
from fa2tune.spec.key import TuningKey
gpu = gpus.named({gpu!r})
key = TuningKey(gpu.name, gpu.sm_count, gpu.arch, {kernel!r}, "bf16", "ieee", 64, 64, "causal", 1024)
spec = key.specialization()
own = dict(variant_named("sm80/{kernel}").space.default(spec, gpu.arch))
errors = ported.check({kernel!r}, own, spec, 80, "cuda")
race = ported.race(key, [dict(portable_of({kernel!r}).space.default(spec, gpu.arch)), own], "screen")
print(json.dumps([list(errors), race.failures, [len(times) for times in race.times]]))
"""


@pytest.mark.parametrize("gpu", ["a100", "l4"])
@pytest.mark.parametrize(("kernel", "checked"), [("fwd", ["o", "lse"]), ("bwd_fused", ["dq", "dk", "dv"])])
def test_it_is_right_and_races(gpu: str, kernel: str, checked: list[str]) -> None:
    """In a process of its own: this one runs its GPU's own code."""
    program = PROGRAM.format(gpu=gpu, kernel=kernel)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    errors, failures, samples = json.loads(done.stdout.splitlines()[-1])
    assert (errors, failures) == (checked, {})
    assert min(samples) >= 4


IN_ORDER = """
import json
import logging
import torch
import fa2tune
from fa2tune import gpus
from fa2tune.compiling import registry
from fa2tune.launching import ported
ported.begin(gpus.named("a100"))
class NoOther(logging.Handler):
    def emit(self, record):
        if "failed on" in record.getMessage():  # another kernel would serve
            raise SystemExit(record.getMessage())
logging.getLogger("fa2tune").addHandler(NoOther())
torch.manual_seed(0)
found = []
for length, heads, heads_kv, dim in ((1024, 16, 16, 128), (4096, 8, 2, 64), (1500, 4, 4, 256)):
    q = torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, heads_kv, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    def gradients(deterministic):
        o = fa2tune.attention(q, k, v, causal=True, deterministic=deterministic)
        return torch.autograd.grad(o.float().square().sum(), (q, k, v))
    free, *equal = gradients(False), gradients(True), gradients(True), gradients(True)
    off = max(float((a.float() - b.float()).abs().max() / b.abs().max()) for a, b in zip(equal[0], free))
    said = fa2tune.explain(q, k, v, causal=True, deterministic=True)
    same = all(torch.equal(a, b) for one in equal[1:] for a, b in zip(one, equal[0]))
    found.append([same, off, said.kernels[-1].form, [*said.kernels[-1].binaries]])
print(json.dumps(found))
"""


def test_a_deterministic_call_is_fused_with_equal_bits() -> None:
    done = subprocess.run([sys.executable, "-c", IN_ORDER], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for same, off, form, kernels in json.loads(done.stdout.splitlines()[-1]):
        assert same and off < 0.02
        assert "sm80/bwd_ordered" in kernels or (form == IN_ORDER_FORM and "sm80/bwd_fused" in kernels)


SEEN = """
import json
import logging
import fa2tune
import test_softcap
import test_varlen
from fa2tune import gpus
from fa2tune.launching import passes, ported
from fa2tune.spec.mask import CAUSAL, FULL, band
ported.begin(gpus.named({gpu!r}))
class NoOther(logging.Handler):
    def emit(self, record):
        if "failed on" in record.getMessage():  # another kernel would serve
            raise SystemExit(record.getMessage())
logging.getLogger("fa2tune").addHandler(NoOther())
ran, runs = set(), passes.runs
def seen(kernel, spec, given, arch):
    found = runs(kernel, spec, given, arch)
    ran.update(variant.name for variant, _ in found)
    return found
passes.runs = seen
{calls}
print(json.dumps(sorted(ran)))
"""
PACKED = """
for packing in test_varlen.PACKINGS:
    for mask in (FULL, CAUSAL, band(65, 300)):
        test_varlen.compared("bf16", packing, mask)
for dims, heads, mask in (((64, 64), (8, 1), FULL), ((96, 96), (4, 4), CAUSAL), ((128, 64), (4, 2), CAUSAL)):
    test_varlen.compared("bf16", "unequal", mask, dims=dims, heads=heads)
test_varlen.compared("fp16", "odd", CAUSAL)
"""
CAPPED = """
for dim in (64, 96, 128, 256):
    for mask in (FULL, CAUSAL, band(128, 0)):
        for lengths in ((512, 512), (1000, 1300), (1300, 1000)):
            test_softcap.compared("bf16", dim, lengths, mask, 2.0)
test_softcap.compared("fp16", 128, (700, 900), CAUSAL, score=fa2tune.Score("softcap", 30.0), softmax_scale=-0.3)
"""


@pytest.mark.parametrize("gpu", ["a100", "l4"])
@pytest.mark.parametrize("calls", [PACKED, CAPPED], ids=["packed", "capped"])
def test_public_calls(gpu: str, calls: str) -> None:
    """By the kernels of kernels/sm80."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(["tests/gpu", "tests", os.environ.get("PYTHONPATH", "")]),
    }
    program = SEEN.format(gpu=gpu, calls=calls)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = {"sm80/fwd", "sm80/bwd_prepare", "sm80/bwd_fused", "sm80/bwd_finish"}
    assert set(json.loads(done.stdout.splitlines()[-1])) == kernels
