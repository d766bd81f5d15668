"""The public call: argument checks, the torch.library operators, autograd.

Eager calls on plain tensors take the short path: a dictionary look-up by everything that the checks depend on, then the launch.
Calls that torch has to trace (torch.compile, fake tensors, dispatch modes, torch.func) go through the operators.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, overload

import torch
from torch.autograd import forward_ad

from fa2tune.calling import arguments, asked, dispatch, distributed
from fa2tune.calling.arguments import MISSING
from fa2tune.compiling.compiler import interpreted
from fa2tune.launching.cuda import NoAddressError
from fa2tune.launching.launch import TORCH_DTYPES
from fa2tune.launching.passes import empty_gradients, empty_ordered, lse_of, lse_shape
from fa2tune.spec import score as scores
from fa2tune.spec.combinations import TRANSFORMS
from fa2tune.spec.mask import Mask, Window, for_operator, mask_of, of_operator
from fa2tune.spec.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from fa2tune.spec.score import NO_VALUE, Score, score_of
from fa2tune.spec.score import of_operator as score_of_operator

Layout = Literal["bhsd", "bshd"]
LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd")
LARGEST_SCALE = 2e38  #: times log2(e) it is still a float32
Pair = tuple[torch.Tensor, torch.Tensor]  #: output and lse


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = ..., softmax_scale: float | None = ...,
    layout: Layout = ..., return_lse: Literal[False] = ..., deterministic: bool | None = ...,
    window: Window | None = ..., mask: str | Mask | None = ..., softcap: float | None = ...,
    score: str | Score | None = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = ..., softmax_scale: float | None = ...,
    layout: Layout = ..., return_lse: Literal[True], deterministic: bool | None = ...,
    window: Window | None = ..., mask: str | Mask | None = ..., softcap: float | None = ...,
    score: str | Score | None = ...,
) -> Pair: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = ..., softmax_scale: float | None = ...,
    layout: Layout = ..., return_lse: bool, deterministic: bool | None = ...,
    window: Window | None = ..., mask: str | Mask | None = ..., softcap: float | None = ...,
    score: str | Score | None = ...,
) -> torch.Tensor | Pair: ...  # fmt: skip
def attention(
    q: torch.Tensor = MISSING,
    k: torch.Tensor = MISSING,
    v: torch.Tensor = MISSING,
    *extra: Any,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    window: Window | None = None,
    mask: str | Mask | None = None,
    softcap: float | None = None,
    score: str | Score | None = None,
    **unknown: Any,
) -> torch.Tensor | Pair:
    """Exact attention, ``softmax(softmax_scale * q @ k^T) @ v``, by the kernel tuned for this GPU and problem.

    FlashAttention-2 (Dao 2023, algorithms 1 and 2): no N x N matrix is ever stored. Differentiable once in q, k and v,
    through the output and through lse.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim); float16, bfloat16 or float32, on one CUDA device.
        k: (batch, heads_kv, seqlen_k, head_dim), dtype and device of q. heads_q must be a multiple of heads_kv
            (grouped-query and multi-query attention): query head h reads key head h // (heads_q // heads_kv).
        v: (batch, heads_kv, seqlen_k, head_dim_v). Head dims are multiples of 8 from 16 to 256. Any strides, as long as
            the last dimension is contiguous. Tensors that TMA cannot address (a base or stride that is no multiple of 16 bytes,
            or expanded rows) are copied where that is expected to save time: ``explain`` says which.
        causal: query i sees keys 0 .. i + seqlen_k - seqlen_q (aligned bottom-right). A query that sees no key gives a
            zero output, lse -inf and zero gradients.
        softmax_scale: up to 2e38 in magnitude; default 1 / sqrt(head_dim).
        layout: "bhsd" as above, or "bshd" for (batch, seqlen, heads, head_dim) inputs and output, as flash-attn has them.
            Tensors that look like "bshd" and come as "bhsd" (64 heads or more of few tokens, a shape that no known model has)
            get a warning, once per process.
        return_lse: also return lse, the natural log of the sum of exponentials of each row of scaled scores.
        deterministic: True: gradients are the same bits on every run. False: sums in any order are allowed where they are
            faster. None: follows torch.are_deterministic_algorithms_enabled(). The forward is always deterministic.
        window: (left, right): query i sees keys i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right, both
            inclusive (flash-attn's window_size). None or -1: that side is unbounded. With causal=True right is 0, whatever the
            window says, as in flash-attn. Key blocks outside the window are not visited.
        mask: in place of causal and window: the name of a mask, which is a file of kernels/masks/, or a ``fa2tune.Mask``
            with its values.
        softcap: softmax is taken of ``softcap * tanh(softmax_scale * q @ k^T / softcap)``, as Gemma 2 has it; from 1e-3 to 1e6.
            None or 0: of the scores as they are.
        score: in place of softcap: the name of a score term, which is a file of kernels/scores/, or a ``fa2tune.Score``
            with its values.

    Returns:
        The output, shape of q with head_dim_v, dtype of q; with return_lse also lse, (batch, heads_q, seqlen_q) float32,
        contiguous.

    Raises:
        TypeError: q, k or v is missing or no dense tensor, or its dtype is not supported or differs from q's; causal or
            deterministic is not a bool; mask is neither a str nor a Mask, score neither a str nor a Score; a positional
            argument after v; an argument of another library (is_causal, scale, attn_mask, dropout_p, window_size, ...): the
            message names the one to use here, or says that there is none yet.
        ValueError: shapes, strides, devices, head dims, layout or scale are not as above; there is no such mask or score
            term, its values are not what it takes, or causal or window comes with a mask, softcap with a score term.
        RuntimeError: the GPU's compute capability is below 8.0; a kernel is not loaded yet while a CUDA graph is captured.
        NotImplementedError: under torch.vmap, in forward-mode differentiation, or when differentiated twice.

    Under torch.autocast the inputs are cast to the autocast dtype first. With ``TRITON_INTERPRET=1`` the kernels run on
    CPU tensors in Triton's interpreter. The first call of a problem compiles; ``fa2tune.explain`` says with which config.
    """
    if unknown or extra:
        arguments.refuse(unknown, extra, q, k, v, layout)
    if compiling() or not plain(q, k, v):
        return _general(q, k, v, causal, softmax_scale, layout, return_lse, deterministic, window, mask, softcap, score)
    try:
        key = dispatch.forward_key(q, k, v, causal, softmax_scale, layout, window, mask, softcap, score)
        plan = dispatch.FORWARD_PLANS.get(key)
    except (RuntimeError, TypeError):  # sparse and nested tensors have no address or strides, a list has no hash
        check(q, k, v, causal, softmax_scale, layout, deterministic, window, mask, softcap, score)
        raise
    if plan is None:
        check(q, k, v, causal, softmax_scale, layout, deterministic, window, mask, softcap, score)
        arguments.doubt_layout(q, k, layout, stacklevel=3)
        terms = mask_of(bool(causal), window, mask), scale_of(q, softmax_scale), score_of(softcap, score)
        plan = dispatch.forward_plan(key, *_bhsd(q, k, v, layout), *terms)
    records = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if layout == "bshd" and (records or not plan.by_address):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if records:
        o, lse = _recorded(q, k, v, plan, deterministic, return_lse)
    else:
        o, lse = plan(q, k, v)
    if layout == "bshd":
        o = o.transpose(1, 2)
    return (o, lse_of(lse).contiguous()) if return_lse else o


_NO_VMAP = f"attention: torch.vmap is not supported; {TRANSFORMS['torch.vmap']}"
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active


def plain(q: Any, k: Any, v: Any) -> bool:
    """Whether a launch may take these tensors as they are: no subclass, mode, transform or autocast."""
    return (
        type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES
        and not _modes() and not _transforms() and not torch.is_autocast_enabled("cuda") and forward_ad._current_level < 0
    )  # fmt: skip


def _batched(tensor: Any) -> bool:
    """Whether this tensor belongs to a vmap: torch.func's, or the older one of batched gradients."""
    functorch = torch._C._functorch
    return isinstance(tensor, torch.Tensor) and (
        functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


def _has_tangent(tensor: Any) -> bool:
    if forward_ad._current_level < 0 or not isinstance(tensor, torch.Tensor):
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def refuse_transforms(q: Any, k: Any, v: Any) -> None:
    if any(_batched(t) for t in (q, k, v)):
        raise NotImplementedError(_NO_VMAP)
    if any(_has_tangent(t) for t in (q, k, v)):
        kind = "forward-mode differentiation"
        raise NotImplementedError(f"attention: {kind} is not supported; {TRANSFORMS[kind]}")
    if any(isinstance(t, torch.Tensor) and torch._C._functorch.is_gradtrackingtensor(t) for t in (q, k, v)):
        kind = "torch.func.grad"
        raise NotImplementedError(f"attention: {kind} is not supported; {TRANSFORMS[kind]}")


def checked(
    q: Any, k: Any, v: Any, causal: Any, softmax_scale: Any, layout: Any, deterministic: Any, window: Any = None,
    mask: Any = None, softcap: Any = None, score: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(batch, heads, seqlen, dim) tensors as a call would pass them on, or the error that it would raise. Under autocast they
    have the shape and dtype that a launch gets, not the values."""
    q, k, v = as_cast(*distributed.local_parts(q, k, v, layout, score))
    check(q, k, v, causal, softmax_scale, layout, deterministic, window, mask, softcap, score)
    return _bhsd(q, k, v, layout)


def as_cast(*tensors: Any) -> tuple[Any, ...]:
    """Tensors of the shape and dtype that a launch gets, not of the values, or an error where a transform is active."""
    refuse_transforms(*tensors)
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(
        torch.empty_like(t, dtype=dtype)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != dtype
        else t
        for t in tensors
    )


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors cast as autocast asks."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors)


def _general(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None, layout: str,
    return_lse: bool, deterministic: bool | None, window: Window | None, mask: str | Mask | None,
    softcap: float | None, score: str | Score | None,
) -> torch.Tensor | Pair:  # fmt: skip
    """The path through the operators."""
    if distributed.given(q, k, v):
        call = (causal, softmax_scale, layout, return_lse, deterministic, window, mask, softcap, score)
        return distributed.by_parts(_general, q, k, v, layout, call, score)
    if not compiling():
        refuse_transforms(q, k, v)
    q, k, v = autocast(q, k, v)
    check(q, k, v, causal, softmax_scale, layout, deterministic, window, mask, softcap, score)
    if not compiling():
        arguments.doubt_layout(q, k, layout, stacklevel=4)
    rest = for_operators(q, causal, softmax_scale, deterministic, window, mask, softcap, score)
    o, lse = torch.ops.fa2tune.attention(*_bhsd(q, k, v, layout), *rest)
    if layout == "bshd":
        o = o.transpose(1, 2)
    return (o, lse_of(lse)) if return_lse else o


def for_operators(
    q: torch.Tensor, causal: bool, softmax_scale: float | None, deterministic: bool | None, window: Window | None,
    mask: str | Mask | None, softcap: float | None, score: str | Score | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments as operators take them: up to softcap, and those of a score term."""
    exact = torch.are_deterministic_algorithms_enabled() if deterministic is None else bool(deterministic)
    name, first, second = asked.mask_for_operator(causal, window, mask)
    return first, second, scale_of(q, softmax_scale), exact, name, *asked.score_for_operator(softcap, score)


def scale_of(q: torch.Tensor, softmax_scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)


def _bhsd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if layout == "bshd":
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def check(
    q: Any, k: Any, v: Any, causal: Any, softmax_scale: Any, layout: Any, deterministic: Any, window: Any, mask: Any,
    softcap: Any, score: Any,
) -> None:  # fmt: skip
    """TypeError or ValueError that names the argument, what came and what is allowed. Nothing is launched before this passes.
    The device is checked last, so that one run on a machine without a GPU shows every other error."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r:.80}, allowed are {' and '.join(map(repr, LAYOUTS))}")
    arguments.check_among("deterministic", deterministic, (True, False, None))
    asked.check_mask(causal, window, mask)
    asked.check_score(softcap, score)
    if q is MISSING or k is MISSING or v is MISSING:
        arguments.refuse({}, (), q, k, v, layout)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        arguments.check_dense(name, tensor)
        if tensor.dtype not in TORCH_DTYPES:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, allowed are {', '.join(map(str, TORCH_DTYPES))}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, q has {q.dtype}; all three must agree")
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, must have 4 dimensions, {layout}")
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            raise ValueError(
                f"{name}: got strides {tuple(tensor.stride())}, the last dimension must be contiguous (stride 1)"
            )
    heads, rows = (1, 2) if layout == "bhsd" else (2, 1)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: got batch {tensor.shape[0]}, q has {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k: got head dim {k.shape[3]}, q has {q.shape[3]}")
    if v.shape[heads] != k.shape[heads]:
        raise ValueError(f"v: got {v.shape[heads]} heads, k has {k.shape[heads]}")
    if v.shape[rows] != k.shape[rows]:
        raise ValueError(f"v: got sequence length {v.shape[rows]}, k has {k.shape[rows]}")
    heads_q, heads_kv = q.shape[heads], k.shape[heads]
    if (heads_kv == 0 and heads_q != 0) or (heads_kv != 0 and heads_q % heads_kv != 0):
        hint = "" if layout == "bshd" or heads_q > heads_kv else '; for (batch, seqlen, heads, dim) say layout="bshd"'
        raise ValueError(f"q: got {heads_q} heads, must be a multiple of the {heads_kv} heads of k and v{hint}")
    for name, tensor in (("q", q), ("v", v)):
        dim = tensor.shape[3]
        if dim % HEAD_DIM_STEP or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: got head dim {dim}, must be a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            )
    real = isinstance(softmax_scale, numbers.Real)
    if softmax_scale is not None and not (real and -LARGEST_SCALE <= softmax_scale <= LARGEST_SCALE):
        long = isinstance(softmax_scale, int) and softmax_scale.bit_length() > 1000  # Python may refuse its digits
        got = "an integer beyond 2^1000" if long else repr(softmax_scale)
        raise ValueError(
            f"softmax_scale: got {got:.80}, must be a number from {-LARGEST_SCALE:g} to {LARGEST_SCALE:g} or None"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.device != q.device:
            raise ValueError(f"{name}: got device {tensor.device}, q is on {q.device}; all three must be on one")
        if tensor.device.type != "cuda" and not (tensor.device.type == "cpu" and interpreted()):
            raise ValueError(
                f"{name}: got device {tensor.device}, must be a CUDA device (CPU tensors only with TRITON_INTERPRET=1)"
            )


class _Attention(torch.autograd.Function):
    """The short path with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Any,
        deterministic: bool | None,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, lse = plan(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.plan = plan
        ctx.deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        ctx.set_materialize_grads(False)  # an unused lse costs nothing
        return o, lse if with_lse else None  # an unused output costs 2 us

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        plan, posed = ctx.plan, ctx.plan.problem
        call = (do, dlse, q, k, v, o, lse, posed.mask, plan.softmax_scale, ctx.deterministic, posed.score)
        try:
            if torch.is_grad_enabled():  # create_graph: keep a node that raises if it is differentiated again
                return (*_Gradients.apply(*call), *_NO_GRADIENT)  # type: ignore[no-untyped-call]
            return (*dispatch.backward(*call), *_NO_GRADIENT)
        except NoAddressError:  # a subclass's gradient, or a tensor that a hook made: the operators unwrap it
            *tensors, mask, scale, exact, score = call
            name, *values = for_operator(mask)
            terms = (*values, scale, exact, name, 0.0, *scores.for_operator(score))
            return (*torch.ops.fa2tune.attention_backward(*tensors, *terms), *_NO_GRADIENT)
        except RuntimeError:
            if _batched(do) or _batched(dlse):  # is_grads_batched, jacobian(vectorize=True): they have no address
                raise NotImplementedError(_NO_VMAP) from None
            raise


#: ``_Attention.apply`` without the checks for transforms in torch.autograd.Function (3 to 5 us): ``plain`` has made sure
#: that none is active
_recorded: Any = super(torch.autograd.Function, _Attention).apply
_NO_GRADIENT = (None, None, None)  #: of the other arguments of _Attention.forward
_ONCE = "attention: differentiating twice is not supported"


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return dispatch.backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(_ONCE)


# The operators, for torch.compile, fake tensors and dispatch modes. q, k, v are (batch, heads, seqlen, dim) views; lse
# is of passes.lse_shape. The mask is as spec.mask.for_operator has it: window_left and window_right are the sides of a
# band (-1: unbounded), which causal and full are, too, and the values of another mask (spec.mask.ABSENT: it has no such). The
# score term is softcap, or, where score is not None, as spec.score.for_operator has it.
TERM = f"str? score=None, float score_first={NO_VALUE}, float score_second={NO_VALUE}"
_LIBRARY = torch.library.Library("fa2tune", "DEF")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, SymInt window_left, SymInt window_right, float softmax_scale, "
    f'bool deterministic, str mask="band", float softcap=0.0, {TERM}) -> (Tensor, Tensor)',
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_LIBRARY.define(
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    'SymInt window_left, SymInt window_right, float softmax_scale, bool deterministic, str mask="band", '
    f"float softcap=0.0, {TERM}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window_left: int, window_right: int, softmax_scale: float,
    deterministic: bool, mask: str = "band", softcap: float = 0.0, score: str | None = None,
    score_first: float = NO_VALUE, score_second: float = NO_VALUE,
) -> Pair:  # fmt: skip
    term = score_of_operator(softcap, score, score_first, score_second)
    o, lse = dispatch.forward(q, k, v, of_operator(mask, window_left, window_right), softmax_scale, term)
    return o, lse.contiguous()  # as the fake one is


def _backward_op(
    do: torch.Tensor | None, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, lse: torch.Tensor, window_left: int, window_right: int, softmax_scale: float,
    deterministic: bool, mask: str = "band", softcap: float = 0.0, score: str | None = None,
    score_first: float = NO_VALUE, score_second: float = NO_VALUE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    seen = of_operator(mask, window_left, window_right)
    term = score_of_operator(softcap, score, score_first, score_second)
    return dispatch.backward(do, dlse, q, k, v, o, lse, seen, softmax_scale, deterministic, term)


def _attention_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Pair:
    return empty_ordered(q, v.shape[3]), q.new_empty(lse_shape(q), dtype=torch.float32)


def _backward_fake(
    do: torch.Tensor | None, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_gradients(q, k, v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, *ctx.call = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return (*torch.ops.fa2tune.attention_backward(do, dlse, *ctx.saved_tensors, *ctx.call), *[None] * len(ctx.call))


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(_ONCE)


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("attention", _attention_op, _key)
    _LIBRARY.impl("attention_backward", _backward_op, _key)
torch.library.register_fake("fa2tune::attention", _attention_fake, lib=_LIBRARY)
torch.library.register_fake("fa2tune::attention_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd("fa2tune::attention", _backward, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd("fa2tune::attention_backward", _refuse, lib=_LIBRARY)
