"""Compiles FlashAttention-4's kernels for the calls of a drawing, on all cores and without a GPU, into its own cache on disk.

    python benchmarks/fa4_ahead.py DIR random_calls --seed HASH
    python benchmarks/fa4_ahead.py DIR random_packings --seed HASH
    python benchmarks/fa4_ahead.py DIR workloads

Needs flash-attn-4, for the Python of the GPU's host. There, with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 and
FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=DIR, the same calls find what is in DIR: a call of its own takes 4 to 10 s otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click

TARGET = {
    "FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
}  # fmt: skip
#: Of a drawing: name -> what is called.
Drawing = Mapping[str, Any]


def drawing(name: str, seed: str) -> Drawing:
    import random_calls
    import random_packings
    import workloads

    return {
        "random_calls": lambda: random_calls.drawn(seed),
        "random_packings": lambda: random_packings.drawn(seed),
        "workloads": workloads.named,
    }[name]()  # fmt: skip


class Context:
    """Stands in for what autograd gives a function: its engine takes no tensors without a GPU."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, _: bool) -> None: ...

    def mark_non_differentiable(self, *_: Any) -> None: ...


@contextmanager
def without_autograd() -> Iterator[None]:
    """Its functions run backward right after forward, where a tensor requires gradients."""
    import torch
    from flash_attn.cute import interface

    def applied(function: Any) -> Any:
        def apply(*inputs: Any) -> Any:
            context: Any = Context()
            out, lse = function.forward(context, *inputs)
            if inputs[0].requires_grad:
                function.backward(context, torch.empty_like(out), None)
            return out, lse

        return apply

    functions = interface.FlashAttnFunc, interface.FlashAttnVarlenFunc
    forms = [mock.patch.object(function, "apply", applied(function)) for function in functions]
    with forms[0], forms[1]:
        yield


def on_the_gpu(sides: Any) -> Any:
    """Offsets of packed sequences, which are made on the CPU where there is no GPU."""

    def moved(packing: Any) -> tuple[Any, ...]:
        of_q, of_k, *longest = sides(packing)
        return of_q.to("cuda"), of_k.to("cuda"), *longest

    return moved


def compile_one(name: str, what: str, seed: str) -> str | None:
    """In a process of the pool: a call's kernels; or why there are none."""
    import random_packings
    import torch
    import workloads
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = drawing(what, seed)[name]
    offsets = random_packings._sides
    try:
        with FakeTensorMode(), without_autograd(), mock.patch.object(random_packings, "_sides", on_the_gpu(offsets)):
            if isinstance(call, random_packings.Packing):
                attention = random_packings.PEERS["fa4"].make(call)
                queries, keys = (sum(call.of_q),), (sum(call.of_k),)
                dims = call.head_dim, call.head_dim
            else:
                attention = workloads.PEERS["fa4"].make(call)
                queries, keys = (call.batch, call.seqlen_q), (call.batch, call.seqlen_k)
                dims = call.head_dim, call.head_dim_v
            q = torch.empty(*queries, call.heads_q, dims[0], device="cuda", dtype=torch.bfloat16)
            k = torch.empty(*keys, call.heads_kv, dims[0], device="cuda", dtype=torch.bfloat16)
            v = torch.empty(*keys, call.heads_kv, dims[1], device="cuda", dtype=torch.bfloat16)
            attention(q, k, v)  # without gradients it is another kernel, which writes no sums
            attention(*(tensor.requires_grad_() for tensor in (q, k, v)))
    except Exception as error:  # what it cannot run, it cannot run on the GPU either
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]
    return None


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("what", type=click.Choice(("random_calls", "random_packings", "workloads")))
@click.option("--seed", default="", help="The commit's hash, of a random drawing.")
def main(folder: Path, what: str, seed: str) -> None:
    if what != "workloads" and not seed:
        raise click.BadParameter("is missing: the hash of the commit that is measured", param_hint="--seed")
    os.environ |= {**TARGET, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder)}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(compile_one, name, what, seed): name for name in drawing(what, seed)}
        failed = {jobs[job]: why for job in as_completed(jobs) if (why := job.result()) is not None}
    for name, why in failed.items():
        click.echo(f"{name}: {why}")
    click.echo(f"{len(jobs) - len(failed)} of {len(jobs)} calls: {len(list(folder.rglob('*.o')))} files in {folder}")


if __name__ == "__main__":
    main()
