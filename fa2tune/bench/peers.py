"""What ``fa2tune bench`` compares: one Peer per implementation of exact attention, each a function of (q, k, v).

Importable without torch: a peer imports what it needs when it is built.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.maskfile import mask_named
from fa2tune.spec.problem import ITEMSIZE, Problem
from fa2tune.spec.score import NONE, Score
from fa2tune.spec.scorefile import Places, score_named

if TYPE_CHECKING:
    import torch

    Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: The peer that every ratio is taken against: this library.
SUBJECT = "fa2tune"

#: What people copy when they do not search (the tile sizes of the Triton tutorial on fused attention), at two stages, so
#: that it fits at head dim 256 too. One config for every GPU, head dim, mask and length: that is the point of it.
_PLAIN = {"LOADS": "pointer", "MASKED": "last", "HEADS_PER_WAVE": 1, "num_warps": 4, "num_stages": 2, "maxnreg": 0}
PLAIN_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "fwd": {"BLOCK_M": 128, "BLOCK_N": 64, **_PLAIN},
    "bwd_dkdv": {"BLOCK_M": 32, "BLOCK_N": 128, **_PLAIN},
    "bwd_dq": {"BLOCK_M": 128, "BLOCK_N": 32, **_PLAIN},
}


def _never(*_: object) -> None:
    """No objection, whatever is asked."""


@dataclass(frozen=True)
class Peer:
    """``make(problem)`` gives a differentiable function of q, k, v: (batch, heads, seqlen, dim) views where ``layout`` is
    "bhsd", (batch, seqlen, heads, dim) where it is "bshd"; its output has the same layout."""

    name: str  #: as --peers takes it
    label: str  #: as tables and plots show it
    make: Callable[[Problem], Attention]
    layout: str = "bhsd"
    #: why it cannot run on this machine, or None. Must not need a GPU.
    missing: Callable[[], str | None] = _never
    #: (problem, pass, free bytes of the GPU) -> why this problem is left out, or None
    unfit: Callable[[Problem, str, int], str | None] = _never
    #: (problem, pass) -> kernel -> its implementation, for the record; None: it does not say
    kernels: Callable[[Problem, str], dict[str, str]] | None = None


def kernels_of(problem: Problem, pass_: str) -> dict[str, str]:
    """Which implementation each of fa2tune's kernels is."""
    import torch

    from fa2tune.calling import dispatch, serving

    gpu = dispatch.gpu_of(0 if torch.cuda.is_available() else -1)
    found = serving.served_by(problem, gpu, False) if pass_ != "bwd" else {}
    return found | (serving.served_by(problem, gpu, True) if pass_ != "fwd" else {})


def refuse_masks(label: str, mask: Mask) -> None:
    """Of a peer that has windows and a causal mask. NotImplementedError: it lacks this one."""
    if mask.window is None and mask not in (FULL, CAUSAL):
        raise NotImplementedError(f"{label} has no mask {mask}")


def soft_cap(label: str, score: Score) -> float:
    """For a peer whose only score term is a soft cap; 0: none. NotImplementedError: it lacks this one."""
    if score.name not in (NONE.name, "softcap"):
        raise NotImplementedError(f"{label} has no score term {score}")
    return score.values[0] if score.values else 0.0


def refuse_scores(label: str, score: Score) -> None:
    """Of a peer without score terms. NotImplementedError: this is one."""
    if score != NONE:
        raise NotImplementedError(f"{label} has no score term {score}")


def _fa2tune(problem: Problem) -> Attention:
    import fa2tune

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = fa2tune.attention(q, k, v, mask=problem.mask, score=problem.score)
        assert not isinstance(out, tuple)  # return_lse was not asked for
        return out

    return attention


def _visible(problem: Problem, device: torch.device) -> torch.Tensor:
    """Which keys each query sees, [Sq, Sk] bool; lengths are equal."""
    import torch

    rows, columns = (torch.arange(length, device=device) for length in (problem.seqlen_q, problem.seqlen_k))
    return torch.as_tensor(problem.mask.visible(rows[:, None], columns, problem.seqlen_q, problem.seqlen_k))


def _places(problem: Problem, device: torch.device) -> Places:
    """Of scores (batch, heads, seqlen_q, seqlen_k)."""
    import torch

    b, h, rows, columns = (
        torch.arange(count, device=device)
        for count in (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    )
    return Places(rows[:, None], columns, problem.seqlen_k - problem.seqlen_q, b[:, None, None, None], h[:, None, None])


def _standard(problem: Problem) -> Attention:
    """softmax(q k^T * scale) v written out: three N x N matrices go through memory."""
    import torch

    scale = 1.0 / math.sqrt(problem.head_dim)

    @functools.cache  # the mask is part of the model, not of the call
    def hidden(device: torch.device) -> torch.Tensor:
        return ~_visible(problem, device)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = problem.score.transformed((q * scale) @ k.transpose(-2, -1), _places(problem, q.device))
        if problem.mask != FULL:
            scores = scores.masked_fill(hidden(q.device), float("-inf"))
        return torch.softmax(scores, -1) @ v

    return attention


def _standard_unfit(problem: Problem, pass_: str, free_bytes: int) -> str | None:
    # scores, masked scores and probabilities; the backward holds two of them and makes three more
    matrices = 3 if pass_ == "fwd" else 5
    pairs = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    needed = matrices * pairs * ITEMSIZE[problem.dtype]
    if needed <= 0.9 * free_bytes:
        return None
    return f"its N x N matrices need {needed / 2**30:.0f} GiB, {free_bytes / 2**30:.0f} are free"


def _sdpa(backend: str) -> Callable[[Problem], Attention]:
    def make(problem: Problem) -> Attention:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        refuse_scores("SDPA", problem.score)
        chosen, causal = getattr(SDPBackend, backend), problem.mask == CAUSAL

        @functools.cache
        def mask(device: torch.device) -> torch.Tensor | None:
            """SDPA has no masks but causal: their matrix, which not every backend takes."""
            return None if problem.mask in (FULL, CAUSAL) else _visible(problem, device)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(chosen):
                return scaled_dot_product_attention(q, k, v, attn_mask=mask(q.device), is_causal=causal)

        return attention

    return make


def _flex(problem: Problem) -> Attention:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Dynamo stops compiling after eight shapes of one function and would time eager mode: start afresh for each problem,
    # and let fullgraph turn any such fallback into an error.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    # found here: Dynamo cannot trace how a file is read
    sees, sides = mask_named(problem.mask.name).visible, problem.mask.values
    transformed, numbers = score_named(problem.score.name).transformed, problem.score.values
    lengths = problem.seqlen_q, problem.seqlen_k
    offset = problem.seqlen_k - problem.seqlen_q

    def with_term(scores: Any, b: Any, h: Any, row: Any, column: Any) -> Any:
        return transformed(scores, numbers, Places(row, column, offset, b, h))

    score_mod = None if problem.score == NONE else with_term

    @functools.cache
    def mask(device: torch.device) -> Any:
        def visible(b: Any, h: Any, row: Any, column: Any) -> Any:
            return sees(row, column, lengths, sides)

        # compiled too: eager, it writes out the N x N mask
        return torch.compile(create_block_mask)(visible, None, None, *lengths, device=str(device))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = compiled(q, k, v, score_mod=score_mod, block_mask=None if problem.mask == FULL else mask(q.device))
        assert not isinstance(out, tuple)  # neither lse nor auxiliary outputs were asked for
        return out

    return attention


def _triton_plain(problem: Problem) -> Attention:
    """fa2tune's own kernels at PLAIN_CONFIGS, no search."""
    import torch

    from fa2tune.launching import passes

    scale = 1.0 / math.sqrt(problem.head_dim)

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            o, lse = passes.forward(
                q, k, v, mask=problem.mask, softmax_scale=scale, config=PLAIN_CONFIGS["fwd"], score=problem.score
            )  # fmt: skip
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return passes.backward(
                gradients[0], None, *ctx.saved_tensors, mask=problem.mask, softmax_scale=scale, strategy="split",
                configs=PLAIN_CONFIGS, score=problem.score,
            )  # fmt: skip

    apply: Attention = Plain.apply
    return apply


def fa4_options(mask: Mask, score: Score) -> dict[str, Any]:
    """NotImplementedError: FlashAttention-4 lacks one of them."""
    refuse_masks("FlashAttention-4", mask)
    cap = soft_cap("FlashAttention-4", score)
    window = {} if mask.window is None else {"window_size": mask.window}
    return {"causal": mask == CAUSAL, **window, **({"softcap": cap} if cap else {})}


def _fa4(problem: Problem) -> Attention:
    from flash_attn.cute import flash_attn_func

    options = fa4_options(problem.mask, problem.score)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out  # some releases return lse beside it

    return attention


def _fa4_missing() -> str | None:
    try:
        found = importlib.util.find_spec("flash_attn.cute")
    except ImportError:  # no flash_attn at all, or a broken one
        found = None
    return None if found else "the package flash-attn-4 (flash_attn.cute) is not installed"


#: Names a library with the operator ``_vllm_fa2_C::varlen_fwd``: the flash-attn package's FlashAttention-2, forward only.
FLASH_ATTN_LIBRARY = "FA2_LIBRARY"


def window_sides(mask: Mask) -> tuple[int, int]:
    """Of a window as flash-attn counts them, -1 where one is unbounded; of a mask that is none both are."""
    left, right = mask.window or (None, None)
    return -1 if left is None else left, -1 if right is None else right


def flash_attn(problem: Problem) -> Attention:
    """The library's forward of (batch, seqlen, heads, dim) tensors, as sequences of equal lengths."""
    import torch

    refuse_masks("flash-attn", problem.mask)
    cap = soft_cap("flash-attn", problem.score)
    left, right = window_sides(problem.mask)
    torch.ops.load_library(os.environ[FLASH_ATTN_LIBRARY])
    operator = torch.ops._vllm_fa2_C.varlen_fwd.default
    given = {
        "dropout_p": 0.0, "p_dropout": 0.0, "softmax_scale": problem.head_dim**-0.5, "zero_tensors": False,
        "is_causal": problem.mask == CAUSAL, "window_size_left": left, "window_size_right": right, "softcap": cap,
        "return_softmax": False, "num_splits": 0, "max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k,
    }  # fmt: skip
    # releases differ in what stands where
    names = [one.name for one in operator._schema.arguments][3:]

    @functools.cache
    def offsets(device: torch.device) -> Mapping[str, torch.Tensor]:
        starts = torch.arange(problem.batch + 1, dtype=torch.int32, device=device)
        return {"cu_seqlens_q": starts * problem.seqlen_q, "cu_seqlens_k": starts * problem.seqlen_k}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        arguments = {**given, **offsets(q.device)}
        packed = (tensor.flatten(0, 1) for tensor in (q, k, v))
        out: torch.Tensor = operator(*packed, *(arguments.get(name) for name in names))[0]
        return out.unflatten(0, (problem.batch, problem.seqlen_q))

    return attention


def library_missing(variable: str, operator: str) -> str | None:
    """Why a peer cannot be had whose library an environment variable names; None: it can."""
    named = os.environ.get(variable)
    if not named:
        return f"{variable} names no library with {operator} (it is in vLLM's wheel)"
    return None if Path(named).is_file() else f"{variable}: got {named!r}, which is not a file"


def flash_attn_missing() -> str | None:
    return library_missing(FLASH_ATTN_LIBRARY, "_vllm_fa2_C::varlen_fwd")


def _flash_attn_unfit(_problem: Problem, pass_: str, _free_bytes: int) -> str | None:
    return None if pass_ == "fwd" else "the library has no backward"


#: In the order of tables and plots. The subject comes first.
PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(SUBJECT, "fa2tune", _fa2tune, kernels=kernels_of),
        Peer("fa4", "FlashAttention-4", _fa4, layout="bshd", missing=_fa4_missing),
        Peer("sdpa-cudnn", "SDPA cuDNN", _sdpa("CUDNN_ATTENTION")),
        Peer("sdpa-flash", "SDPA FlashAttention-2", _sdpa("FLASH_ATTENTION")),
        Peer(
            "flash-attn", "flash-attn", flash_attn, layout="bshd", missing=flash_attn_missing, unfit=_flash_attn_unfit
        ),
        Peer("flex", "FlexAttention", _flex),
        Peer("triton-plain", "Untuned Triton", _triton_plain),
        Peer("sdpa-efficient", "SDPA mem-efficient", _sdpa("EFFICIENT_ATTENTION")),
        Peer("standard", "Standard", _standard, unfit=_standard_unfit),
    )
}


#: Peers that multiply by mma.sync, too: what ported code is fairly compared with. The others use wgmma where it is there.
BY_MMA_SYNC = ("sdpa-flash", "flash-attn", "triton-plain")


def by_mma_sync() -> list[str]:
    """Those of ``BY_MMA_SYNC``; the library only where the environment names one, be it there or not."""
    return [name for name in BY_MMA_SYNC if name != "flash-attn" or os.environ.get(FLASH_ATTN_LIBRARY)]


def select(
    names: Sequence[str] | None, known: Mapping[str, Peer] = PEERS
) -> tuple[dict[str, Peer], dict[str, str]]:  # fmt: skip
    """The peers to measure, fa2tune always first, and those left out (name -> why).

    ``names`` None: every peer that is installed. ValueError for a name that is unknown, or named and not installed."""
    chosen = {name: peer for name, peer in known.items() if names is None or name in names or name == SUBJECT}
    for name in names or ():
        if name not in known:
            raise ValueError(f"peers: got {name!r}, known are {', '.join(known)}")
    absent = {name: why for name, peer in chosen.items() if (why := peer.missing())}
    if names is not None and absent:
        raise ValueError("peers: " + "; ".join(f"{name} cannot run: {why}" for name, why in absent.items()))
    return {name: peer for name, peer in chosen.items() if name not in absent}, absent
