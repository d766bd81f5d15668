"""Times calls whose rows begin inside a sector of memory, beside the same calls with rows farther apart.

    python benchmarks/ahead.py benchmarks/row_starts.py                      # compiles on all cores; no GPU
    python benchmarks/row_starts.py --out row_starts.json [--seconds 200]    # resumes from the file

Where a head dim is no multiple of 16, rows of 16-bit elements begin at multiples of 16 bytes, and every second one in the midst
of a sector of 32. Each call runs with dense tensors (batch, seqlen, heads, dim), and with rows of K and V, or of all tensors,
that begin at multiples of 32, 64 or 128 bytes. Both passes, as CUDA graphs, interleaved; microseconds a call.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import side_by_side
import torch
import workloads

from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem


def _call(batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_k: int, dim: int, mask: Any) -> Problem:
    return Problem("bf16", batch, heads_q, heads_kv, seqlen_q, seqlen_k, dim, dim, mask)


CALLS = {
    "d24": _call(6, 12, 4, 2607, 2607, 24, CAUSAL),
    "d40, grouped": _call(8, 51, 1, 204, 204, 40, CAUSAL),
    "d40": _call(1, 61, 61, 1099, 1099, 40, FULL),
    "d48": _call(10, 45, 3, 629, 629, 48, FULL),
    "d56": _call(1, 16, 16, 4096, 4096, 56, FULL),
    "d72": _call(1, 28, 1, 1735, 1735, 72, FULL),
    "d72, even heads": _call(2, 16, 16, 4096, 4096, 72, CAUSAL),
    "d80": _call(8, 2, 2, 10842, 3342, 80, FULL),
    "d88": _call(2, 21, 21, 12744, 5977, 88, CAUSAL),
    "d96": _call(41, 5, 5, 2624, 2624, 96, FULL),
    "d104": _call(2, 41, 41, 1862, 1862, 104, FULL),
    "d152": _call(4, 6, 6, 2385, 2385, 152, FULL),
    "d168": _call(8, 3, 3, 5015, 5015, 168, FULL),
    "d168, short": _call(29, 60, 3, 392, 392, 168, FULL),
    "d232": _call(4, 28, 28, 1017, 1017, 232, FULL),
}
STARTS = (32, 64, 128)  #: bytes


def spread(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """The same values (batch, seqlen, heads, dim), every row beginning at a multiple of so many bytes."""
    each = start // tensor.element_size()
    wide = -(-tensor.shape[3] // each) * each
    held = torch.full((*tensor.shape[:3], wide), float("nan"), dtype=tensor.dtype, device=tensor.device)
    held[..., : tensor.shape[3]] = tensor
    return held[..., : tensor.shape[3]]


def measured(problem: Problem) -> dict[str, dict[str, float]]:
    """Pass -> form -> microseconds."""
    inputs, do, check, _ = workloads.posed(problem)
    forms: dict[str, tuple[Any, Any]] = {"dense": (inputs, do)}
    for start in STARTS:
        q, k, v = (spread(one, start) for one in inputs)
        forms[f"K, V {start}"] = (inputs[0], k, v), do
        forms[f"all {start}"] = (q, k, v), spread(do, start)
    attention = workloads.PEERS[side_by_side.SUBJECT].make(problem)
    stream = torch.cuda.Stream()
    graphs: dict[str, dict[str, Any]] = {"fwd": {}, "bwd": {}}
    kept = []
    for name, (tensors, incoming) in forms.items():
        leaves = [one.detach().requires_grad_() for one in tensors]
        with torch.no_grad():
            if wrong := check({"o": attention(*tensors)}):
                raise SystemExit(f"{name}: {wrong}")
            graphs["fwd"][name] = side_by_side.graphed(functools.partial(attention, *tensors), stream)
        with torch.cuda.stream(stream):
            back = functools.partial(torch.autograd.grad, attention(*leaves), leaves, incoming, retain_graph=True)
        if wrong := check(dict(zip(("dq", "dk", "dv"), back(), strict=True))):
            raise SystemExit(f"{name}: {wrong}")
        graphs["bwd"][name] = side_by_side.graphed(back, stream)
        kept.append((tensors, incoming, leaves, back))
    found = {}
    for pass_, its in graphs.items():
        samples = side_by_side.raced(its)
        found[pass_] = {name: round(1e3 * statistics.median(times), 2) for name, times in samples.items()}
    return found


def line(name: str, call: Mapping[str, Any]) -> str:
    passes_ = (f"{pass_} {', '.join(f'{form} {us}' for form, us in call[pass_].items())}" for pass_ in ("fwd", "bwd"))
    return "\n    ".join((f"{name} {call['call']}", *passes_))


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--only", multiple=True, help="The call of this name, and no others.")
@click.option("--seconds", type=float, default=200.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again.")
def main(only: tuple[str, ...], seconds: float, out: Path | None) -> None:
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    asked = {name: problem for name, problem in CALLS.items() if not only or name in only}

    def one(problem: Problem) -> dict[str, Any]:
        return {"call": workloads.described(problem), **measured(problem)}

    side_by_side.fill(record, asked, one, seconds, out, line)


if __name__ == "__main__":
    main()
