"""Host time of calls without a GPU: tensors of the CPU pass for an H200's, and a launch is a foreign call that does nothing.

    python benchmarks/host_path.py [--only varlen]

For each kind of call the least microseconds of this thread for a warm one, and for a first call with each of a row of new
lengths, binaries loaded, the median. On the CPU memory comes from malloc, and autograd has no thread of its own, so these times
compare with one another alone, commit with commit. benchmarks/host_time.py has those beside SDPA's, on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import click
import torch

import fa2tune
from fa2tune import gpus
from fa2tune.calling import dispatch, ops
from fa2tune.compat import flash_attn, flash_attn_4
from fa2tune.compiling import compiler
from fa2tune.launching import cuda, launch, passes
from fa2tune.launching.image import Image, MapFormat

GPU = "h200"
CHUNKS, CALLS, LENGTHS = 25, 100, 60


class NullDriver:
    """libcuda's functions, as far as a call whose kernels are loaded makes them: they do nothing."""

    def __init__(self) -> None:
        nothing = ctypes.CDLL("libm.so.6").fegetround  # takes what it is given, and returns 0: "round to nearest"
        self.cuLaunchKernelEx = self.cuTensorMapEncodeTiled = nothing
        self.cuCtxGetCurrent = self.cuDevicePrimaryCtxRetain = self.cuCtxSetCurrent = nothing
        self.cuStreamGetPriority = self.cuStreamCreateWithPriority = self.cuThreadExchangeStreamCaptureMode = nothing
        self.cuEventCreate = self.cuEventRecord = self.cuStreamWaitEvent = nothing
        self.cuStreamDestroy_v2 = self.cuEventDestroy_v2 = nothing

    def cuDriverGetVersion(self, found: Any) -> int:
        found._obj.value = 13000
        return 0


def function_without_code(variant: Any, spec: Any, binary: tuple[Any, ...]) -> cuda.Function:
    """As ``launch.load`` has it, of a kernel that is not compiled."""
    config = dict(binary)
    described = compiler.described(variant, spec, config)
    blocks = [tuple(compiler.block_of(variant, spec, config, name)) for name in described]
    maps = tuple(MapFormat(3, 2, 9, block) for block in blocks)
    made = cuda.Function.__new__(cuda.Function)
    made.image = Image(variant.name, b"", 100_000, 12, 1, False, False, maps)
    made.handle, made.kinds, made.origin = ctypes.c_void_p(1), tuple(launch.kinds(variant, spec, config)), ""
    return made


@functools.cache
def _loaded(variant: Any, spec: Any, binary: tuple[Any, ...], device_index: int, measured: str = "") -> cuda.Function:
    return function_without_code(variant, spec, binary)


class _Fresh(passes.Fresh):
    """Takes the short way to memory, as on the current GPU."""

    def __init__(self, device: torch.device, *like: torch.Tensor) -> None:
        super().__init__(device, *like)
        self.index = 0


@contextmanager
def null_gpu() -> Iterator[None]:
    """Within it tensors of the CPU pass for an H200's, and nothing is said of kernels that are not there."""
    log = logging.getLogger("fa2tune")
    driver, gpu = NullDriver(), gpus.named(GPU)
    allocate = torch._C._dynamo.guards._empty_strided_cpu
    changed: list[tuple[Any, str, Any]] = [
        (cuda, "library", lambda: driver), (torch.cuda, "device", lambda index: nullcontext()),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.Tensor, "get_device", int),  # int() is 0, and a class is no method: as cheap as the real one
        (launch, "arch_of", lambda index: gpu.arch), (passes, "arch_of", lambda index: gpu.arch),
        (launch, "sm_count", lambda index: gpu.sm_count), (launch, "load", _loaded), (ops, "interpreted", lambda: True),
        (dispatch, "gpu_of", lambda index: gpu), (passes, "ALLOCATE", allocate), (passes, "Fresh", _Fresh),
    ]  # fmt: skip
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        for of, name, value in changed:
            stack.enter_context(mock.patch.object(of, name, value))
        for name, value in (("_cuda_getDevice", int), ("_cuda_getCurrentRawStream", abs)):
            stack.enter_context(mock.patch.object(torch._C, name, value, create=True))
        cuda.may_start_early.cache_clear()
        dispatch.reload()
        yield
    cuda.may_start_early.cache_clear()
    dispatch.reload()


def _new(*shape: int, gradients: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16).requires_grad_(gradients)


def _both(call: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Callable[[], object]:
    """Forward and backward."""
    do = torch.zeros_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, do)


def calls() -> dict[str, Callable[[], object]]:
    """Name -> a call of small tensors, which is warm from the second time on."""
    shapes = {"MHA": (8, 8), "GQA": (32, 8)}
    found: dict[str, Callable[[], object]] = {}
    causal = functools.partial(fa2tune.attention, causal=True)
    for name, heads in shapes.items():
        q, k, v = (_new(1, count, 128, 64) for count in (heads[0], heads[1], heads[1]))
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        found[f"{name}, forward"] = functools.partial(causal, q, k, v)
        found[f"{name}, forward + backward"] = _both(causal, *leaves)
    window = functools.partial(fa2tune.attention, window=(32, 0))
    q, k, v = (_new(1, 8, 128, 64, gradients=True) for _ in "qkv")
    found["window, forward + backward"] = _both(window, q, k, v)
    few, keys = _new(1, 32, 1, 128), _new(1, 8, 1024, 128)
    found["decode"] = functools.partial(fa2tune.attention, few, keys, keys)
    offsets = torch.tensor([0, 64, 128], dtype=torch.int32)
    packed = [_new(128, 8, 64) for _ in "qkv"]
    varlen = functools.partial(
        fa2tune.attention_varlen, cu_seqlens_q=offsets, max_seqlen_q=64, max_seqlen_k=64, causal=True
    )
    found["varlen, forward"] = functools.partial(varlen, *packed)
    found["varlen, forward + backward"] = _both(varlen, *(tensor.clone().requires_grad_() for tensor in packed))
    rows = [_new(1, 128, 8, 64) for _ in "qkv"]
    found["flash_attn_func"] = functools.partial(flash_attn.flash_attn_func, *rows, causal=True)
    found["flash_attn_varlen_func"] = functools.partial(
        flash_attn.flash_attn_varlen_func, *packed, offsets, offsets, 64, 64, causal=True
    )
    found["layout bshd"] = functools.partial(causal, *rows, layout="bshd")
    found["FlashAttention-4's"] = functools.partial(flash_attn_4.flash_attn_func, *rows, causal=True)
    return found | _in_transformers()


def _in_transformers() -> dict[str, Callable[[], object]]:
    """A layer's attention, as a Llama calls it; none, where Transformers is not installed."""
    try:
        from transformers import LlamaConfig

        from fa2tune.compat import transformers as drop_in
    except ImportError:
        return {}
    layer = torch.nn.Module()
    layer.is_causal, layer.layer_idx, layer.config = True, 0, LlamaConfig(num_hidden_layers=1)  # type: ignore[assignment]
    heads_first = [_new(1, 8, 128, 64) for _ in "qkv"]
    offsets = torch.tensor([0, 64, 128], dtype=torch.int32)
    forward = functools.partial(drop_in.forward, layer, *heads_first, None, scaling=0.125)
    of_documents = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 64, "max_length_k": 64}
    return {"Transformers": forward, "Transformers, packed": functools.partial(forward, **of_documents)}


def lengths() -> dict[str, Callable[[int], Callable[[], object]]]:
    """Name -> number of keys -> the call."""
    cache, queries, tokens = _new(1, 8, 4096, 128), _new(2, 32, 2048, 128), _new(4096, 8, 128)
    shared = _new(2, 8, 2048, 128)

    def packed(length: int) -> Callable[[], object]:
        offsets = torch.tensor([0, length // 2, length], dtype=torch.int32)
        varlen = functools.partial(fa2tune.attention_varlen, cu_seqlens_q=offsets, max_seqlen_q=700, causal=True)
        return functools.partial(varlen, *[tokens[:length]] * 3)

    def backward(length: int) -> Callable[[], object]:
        leaves = [tensor[:, :, :length].detach().requires_grad_() for tensor in (queries, shared, shared)]
        o = fa2tune.attention(*leaves, causal=True)
        return functools.partial(torch.autograd.grad, o, leaves, queries[:, :, :length])

    return {
        "decode": lambda n: functools.partial(fa2tune.attention, queries[:1, :, :1], cache[:, :, :n], cache[:, :, :n]),
        "prompt": lambda n: functools.partial(
            fa2tune.attention, queries[:, :, :n], shared[:, :, :n], shared[:, :, :n], causal=True
        ),
        "backward of grouped heads": backward,
        "varlen": packed,
    }


def warm_us(call: Callable[[], object], chunks: int = CHUNKS, count: int = CALLS) -> float:
    """The least over chunks."""
    for _ in range(3):
        call()
    found = []
    for _ in range(chunks):
        start = time.thread_time_ns()
        for _ in range(count):
            call()
        found.append((time.thread_time_ns() - start) / count / 1e3)
    return min(found)


def new_length_us(make: Callable[[int], Callable[[], object]], count: int = LENGTHS) -> float:
    """Of a first call, the median over lengths of one bucket, but for the very first."""
    make(1100)()
    found = []
    for length in range(1101, 1101 + count):
        call = make(length)
        start = time.thread_time_ns()
        call()
        found.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(found)


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--only", default="", help="Calls whose name has this text.")
def main(only: str) -> None:
    with null_gpu():
        measured: Mapping[str, Mapping[str, float]] = {
            "warm": {name: warm_us(call) for name, call in calls().items() if only in name},
            "new length": {name: new_length_us(make) for name, make in lengths().items() if only in name},
        }
    for kind, found in measured.items():
        for name, microseconds in found.items():
            click.echo(f"{kind:12}{name:32}{microseconds:8.1f} us")


if __name__ == "__main__":
    main()
