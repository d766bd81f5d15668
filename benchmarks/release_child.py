"""What release_check.py asks of a fresh process: first calls, results, errors. Needs only torch and fa2tune.

    python benchmarks/release_child.py start|checked|forward|results [--hidden]

--hidden: as if Triton were not installed. Prints one line, RESULT and JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from typing import Any

SHAPE = (1, 16, 4096, 128)  #: of the timed first call: batch, heads, length, head dim; bf16, causal
RESULTS = [(dim, causal) for dim in (64, 128, 256) for causal in (False, True)]
LENGTHS = {"": (2048, 2048), " decoding": (4, 8192)}  #: of queries and keys; of few queries, keys are split on Hopper


def _tensors(torch: Any, shape: tuple[int, ...], seed: int = 0, queries: int | None = None) -> list[Any]:
    """q, k, v and the gradient of the output; ``queries``: their number, None for as many as keys."""
    batch, heads, keys, dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = [queries or keys, keys, keys, queries or keys]
    made = [torch.randn(batch, heads, n, dim, device="cuda", generator=generator).to(torch.bfloat16) for n in rows]
    return [one.requires_grad_(index < 3) for index, one in enumerate(made)]


def first_call(checked: bool) -> dict[str, Any]:
    """Seconds of: import torch; tensors; import fa2tune; the first forward; the first backward. And what came with them."""
    clock, programs = time.perf_counter, list[str]()

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            programs.append(str(arguments[0]))

    sys.addaudithook(on_event)
    times = [clock()]
    import torch

    times.append(clock())
    q, k, v, do = _tensors(torch, SHAPE)
    torch.cuda.synchronize()
    programs.clear()
    times.append(clock())
    import fa2tune

    attention = fa2tune.attention
    times.append(clock())
    o = attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    times.append(clock())
    (o * do).sum().backward()  # a gradient handed to autograd would have torch import sympy, 0.6 to 3 s, for its shape
    torch.cuda.synchronize()
    times.append(clock())
    found: dict[str, Any] = {
        "seconds": [b - a for a, b in itertools.pairwise(times)], "programs": programs,
        "triton": getattr(sys.modules.get("triton"), "__file__", None),
        "from": fa2tune.__file__,
    }  # fmt: skip
    if checked:
        found["errors"] = _errors(torch, q, k, v, do, o, True)
        found["explained"] = _explained(fa2tune, q, k, v, True)
    return found


def _errors(
    torch: Any, q: Any, k: Any, v: Any, do: Any, o: Any, causal: bool, backward: bool = True
) -> dict[str, float]:
    """Of o and the gradients that q, k and v hold, relative to float32."""
    inputs = [one.detach().float().requires_grad_() for one in (q, k, v)]
    scores = (inputs[0] @ inputs[1].transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        rows, columns = (torch.arange(one.shape[-2], device="cuda") for one in (q, k))
        scores = scores.masked_fill(columns[None, :] > rows[:, None] + (len(columns) - len(rows)), -torch.inf)
    reference = scores.softmax(-1) @ inputs[2]
    pairs = {"o": (o, reference)}
    if backward:
        (reference * do.float()).sum().backward()
        pairs |= {f"d{name}": (x.grad, y.grad) for name, x, y in zip("qkv", (q, k, v), inputs, strict=True)}
    return {name: float((x.detach().float() - y.detach()).norm() / y.detach().norm()) for name, (x, y) in pairs.items()}


def _explained(fa2tune: Any, q: Any, k: Any, v: Any, causal: bool, backward: bool = True) -> dict[str, str]:
    said: dict[str, str] = {}
    for served in fa2tune.explain(q, k, v, causal=causal, backward=backward).as_dict()["kernels"]:
        said |= served["binaries"]
    return said


def one_forward() -> dict[str, Any]:
    import torch

    import fa2tune

    q, k, v, do = _tensors(torch, SHAPE)
    o = fa2tune.attention(q, k, v, causal=True)
    errors = _errors(torch, *(one.detach() for one in (q, k, v, do, o)), True, backward=False)
    return {"errors": errors, "explained": _explained(fa2tune, q, k, v, True, backward=False)}


def all_results() -> dict[str, Any]:
    """Errors and hashes of every head dim, mask and kind of lengths: o, lse, and the gradients of a deterministic backward."""
    import torch

    import fa2tune

    found: dict[str, Any] = {}
    for (dim, causal), (name, (queries, keys)) in itertools.product(RESULTS, LENGTHS.items()):
        q, k, v, do = _tensors(torch, (2, 2048 // dim, keys, dim), dim, queries)
        poison = torch.full((64 << 20,), torch.nan, device="cuda", dtype=torch.bfloat16)
        del poison  # what comes next lies where NaN stands
        o, lse = fa2tune.attention(q, k, v, causal=causal, return_lse=True, deterministic=True)
        (o * do).sum().backward()
        digest = hashlib.sha256()
        for one in (o, lse, q.grad, k.grad, v.grad):
            digest.update(one.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        found[f"{dim} {'causal' if causal else 'full'}{name}"] = {
            "errors": _errors(torch, q, k, v, do, o, causal), "sha256": digest.hexdigest(),
            "explained": _explained(fa2tune, q, k, v, causal),
        }  # fmt: skip
    return {"results": found, "triton": getattr(sys.modules.get("triton"), "__file__", None)}


def child(what: str, hidden: bool) -> None:
    if hidden:
        sys.modules["triton"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        asked = {"results": all_results, "forward": one_forward}
        found = asked[what]() if what in asked else first_call(what == "checked")
    except Exception as error:  # for the parent to judge
        found = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    child(sys.argv[1], "--hidden" in sys.argv)
