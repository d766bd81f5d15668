"""Transformers' attention: after ``import fa2tune.compat.transformers`` a model takes ``attn_implementation="fa2tune"``.

Both halves are registered: ``forward``, which attends, and ``mask``, without which a model would pass no padding. A mask is
(batch, length): bool, True for a token and False for padding, or integers, the documents of tokens. A batch without either
runs ``attention``; one with padding, or packed (position_ids that restart, or cu_seq_lens_q), runs ``attention_varlen``.
What a model asks for and fa2tune has not (``LACKING`` in fa2tune/spec/combinations.py; masks that are more than causal,
windows, padding and packing) raises NotImplementedError.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

import torch

from fa2tune.compat import chunks, documents, own_attention, terms
from fa2tune.spec.combinations import why
from fa2tune.spec.mask import Mask

try:
    from transformers import masking_utils as masks
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise ImportError(
        f"fa2tune.compat.transformers needs Transformers 5.17 or newer, which cannot be imported ({error}). Install it: "
        "pip install 'fa2tune[models]'",
        name=error.name,
    ) from error

NAME = "fa2tune"
#: Names of ``attention`` and ``attention_varlen`` -> names of ``forward``.
_NAMES = {
    "q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k",
    "max_seqlen_q": "max_length_q", "max_seqlen_k": "max_length_k", "causal": "is_causal", "softmax_scale": "scaling",
}  # fmt: skip
#: Makers of mask functions in transformers.masking_utils, with arguments to make one.
_MAKERS: dict[str, tuple[Any, ...]] = {
    "and_masks": (), "or_masks": (), "sliding_window_overlay": (1,), "sliding_window_bidirectional_overlay": (1,),
    "packed_sequence_mask_function": (None,), "remap_positions_for_packed_sequence": (None, None),
    "chunked_overlay": (1, None), "blockwise_overlay": (None,),
}  # fmt: skip
#: Those that are refused, by what they are.
_REFUSED = {
    "chunked_overlay": "chunked attention", "blockwise_overlay": "blocks that see both directions",
    "or_masks": "unions of masks",
}  # fmt: skip


def _codes() -> tuple[tuple[Any, str], ...]:
    """Code of a mask function, and what made it."""
    found = [(masks.causal_mask_function.__code__, ""), (masks.bidirectional_mask_function.__code__, "")]
    for name, arguments in _MAKERS.items():
        if (maker := getattr(masks, name, None)) is not None:
            with suppress(TypeError):  # a Transformers whose maker takes something else: its masks are refused
                found.append((maker(*arguments).__code__, name))
    return tuple(found)


_AND, _PACKED, _CHUNKED = "and_masks", "packed_sequence_mask_function", "chunked_overlay"
_BIDIRECTIONAL = "allow_is_bidirectional_skip"  #: what Transformers passes with masks that are not causal
_REMAPPED = "remap_positions_for_packed_sequence"  #: from Transformers 5.23 on
_CODES = _codes()


def _made_by(function: Callable[..., Any]) -> str | None:
    """What made a mask function: one of _MAKERS, "" for what it is itself, None for anything else. torch.compile reads
    neither its name nor what it captures, and compares code by identity alone."""
    for code, name in _CODES:
        if function.__code__ is code:
            return name
    return None


def _refuse(made_by: str | None) -> NoReturn:
    what = _REFUSED.get(made_by or "", "masks of the model's own")
    raise NotImplementedError(
        f"{NAME}: mask_function: got {what}, allowed are causal and bidirectional masks, sliding windows and packed sequences: "
        f"fa2tune does not support {what} in Transformers"
    )


def _refuse_chunks(argument: str, other: str) -> NoReturn:
    raise NotImplementedError(f"{NAME}: {argument}: got chunks with {other}: {why('chunks', other)}")


def _parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """What a mask function is the intersection of."""
    made_by = _made_by(function)
    if made_by == _AND:
        for part in _captured(function, "mask_functions"):
            yield from _parts(part)
    elif made_by == _REMAPPED:  # positions in a document: the distances of tokens that see each other stay
        yield from _parts(_captured(function, "mask_function"))
    else:
        yield function


def _counts_in_documents(function: Callable[..., Any]) -> bool:
    """Whether positions are those in a document."""
    made_by = _made_by(function)
    inner = _captured(function, "mask_functions") if made_by == _AND else ()
    return made_by == _REMAPPED or any(map(_counts_in_documents, inner))


def _captured(function: Callable[..., Any], name: str) -> Any:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)].cell_contents


def _packed(function: Callable[..., Any], chunked: bool) -> torch.Tensor | None:
    """The packed sequences that a mask function keeps apart, (batch, length); None: it does not. NotImplementedError: it is
    more than causal or bidirectional, a window or ``chunked``, and that."""
    found = None
    for part in _parts(function):
        made_by = _made_by(part)
        if made_by is None or (made_by in _REFUSED and not (chunked and made_by == _CHUNKED)):
            _refuse(made_by)
        if made_by == _PACKED:
            found = _captured(part, "packed_sequence_mask")
    return found


def _traced(
    function: Callable[..., Any], batch_size: int, length: int, device: Any, rest: dict[str, Any]
) -> torch.Tensor | None:
    """The same while torch.compile makes a graph, which cannot take a mask function apart: a token that does not see the one
    before it begins a document. Where there may be documents, none is not told from one."""
    made_by = _made_by(function)
    if made_by is None or made_by in _REFUSED or rest.get("use_vmap"):
        _refuse(made_by)
    plain = rest.get("allow_is_causal_skip") or rest.get("allow_is_bidirectional_skip")
    if made_by != _AND or plain or not length:
        return None
    batch = torch.arange(batch_size, device=device)[:, None]
    token = torch.arange(1, length, device=device)[None]
    begins = ~function(batch, batch * 0, token, token - 1).expand(batch_size, length - 1)
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: torch.Tensor | None = None, device: Any = None,
    **rest: Any,
) -> torch.Tensor | None:  # fmt: skip
    """What ``forward`` gets as attention_mask: None, or of the keys (batch, length) bool, False for padding, or int32, the
    documents of packed tokens; the last key is that of the last query. For a model that keeps a mask's last queries by itself,
    (batch, 1, 1, length). With a cache of fixed size, or where a window has left keys behind, (batch, 1, 1, length) uint8, of
    one query all keys of the cache: it sees those that are not 0. ``attention_mask``: (batch, length) bool, True is a token.

    Raises:
        NotImplementedError: mask_function says more than causal, a window, and packed sequences; several queries of a cache of
            fixed size without an attention_mask, or with one as long as the cache, while a graph is made; a model that
            attends by itself.
    """
    found = _numbers(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device, **rest
    )
    if found is None:
        return None
    if found.dtype is torch.bool and (kv_offset or not isinstance(q_offset, int)):
        # ``generate`` makes masks ahead. A model makes none anew of one with 4 dimensions; of one with 2 it would, and
        # leave out kv_offset keys a second time
        return found[:, None, None].to(documents.OF_FIXED_CACHE)
    return found[:, None, None] if _slices(rest.get("config")) else found


def _slices(config: Any) -> bool:
    """Whether a model indexes its masks as (batch, 1, queries, keys): Gemma 4, whose last layers share keys, does from
    Transformers 5.24 on, to compute no more than the last query there."""
    return bool(getattr(getattr(config, "text_config", config), "num_kv_shared_layers", 0))


def _flat(attention_mask: Any, module: torch.nn.Module) -> tuple[Any, bool]:
    """What ``mask`` gave, (batch, length), and whether one query is that of the last token."""
    four = (
        isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1:3] == (1, 1)
    )
    if four and attention_mask.dtype is documents.OF_FIXED_CACHE:
        return documents.flat(attention_mask, torch.bool), True
    if four and attention_mask.dtype in (torch.bool, torch.int32) and _slices(getattr(module, "config", None)):
        return documents.flat(attention_mask, attention_mask.dtype), False
    return attention_mask, False


def _numbers(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any, kv_offset: int,
    mask_function: Callable[..., Any] | None, attention_mask: torch.Tensor | None, device: Any, **rest: Any,
) -> torch.Tensor | None:  # fmt: skip
    """``mask``, (batch, length)."""
    own_attention.refuse(NAME, rest.get("config"))
    if attention_mask is not None and not (isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2):
        shape = tuple(getattr(attention_mask, "shape", ()))
        raise ValueError(
            f"{NAME}: attention_mask: got {type(attention_mask).__name__} of shape {shape}, must be None or (batch, length)"
        )
    packed = None
    chunk = chunks.asked(rest)
    if chunk is not None and (torch.compiler.is_compiling() or terms.capturing()):
        _refuse_chunks("mask_function", "torch.compile or a CUDA graph")
    if chunk is not None and mask_function is None:
        _refuse(_CHUNKED)
    if torch.compiler.is_compiling() and mask_function is not None:
        length = kv_length if attention_mask is None and q_length == kv_length else 0
        packed = _traced(mask_function, batch_size, length, device, rest)
    elif mask_function is not None:
        packed = _packed(mask_function, chunk is not None)
    whole = chunk is not None and packed is not None and q_length == kv_length
    if whole and mask_function is not None and _counts_in_documents(mask_function):
        chunk = None  # each document has chunks of its own, as ``forward`` asks for
    if chunk is not None:
        return _chunked(
            chunk, packed, batch_size, q_length, kv_length, int(q_offset), kv_offset, attention_mask, device
        )
    if packed is not None:
        return packed.to(torch.int32)
    blind = torch.compiler.is_compiling() or terms.capturing()
    tokens = attention_mask
    if _BIDIRECTIONAL in rest:  # every key is there: those of an encoder may be more than the queries
        return None if tokens is None else _seen(tokens[:, kv_offset : kv_offset + kv_length], kv_length, blind)
    if not isinstance(q_offset, int):  # of a cache of a fixed size
        if q_length == 1:
            return _so_far(q_offset, batch_size, kv_length, kv_offset, tokens, device)
        if not blind:
            q_offset = int(q_offset)
        elif tokens is None or tokens.shape[-1] >= kv_offset + kv_length:
            got = "None" if tokens is None else f"a mask of {tokens.shape[-1]} tokens, as many as the cache has,"
            raise NotImplementedError(
                f"{NAME}: attention_mask: got {got} with a cache of a fixed size while a graph is made, allowed is a mask "
                "of the tokens so far, (batch, length)"
            )
    if tokens is None:
        seen = q_offset + q_length - kv_offset
        return None if seen >= kv_length else torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    seen = q_offset + q_length if isinstance(q_offset, int) else tokens.shape[-1]
    return _seen(tokens[:, kv_offset : min(seen, kv_offset + kv_length)], kv_length, blind)


def _so_far(
    position: torch.Tensor, batch_size: int, kv_length: int, kv_offset: int, tokens: torch.Tensor | None, device: Any
) -> torch.Tensor:
    """Which of ``kv_length`` keys from ``kv_offset`` on one query at ``position`` may see, (batch, kv_length) bool. Nothing
    waits for the GPU."""
    keys = torch.arange(kv_length, device=device) + kv_offset
    found = (keys <= position)[None].expand(batch_size, kv_length)
    if tokens is None:
        return found
    tokens = tokens[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    return found & torch.nn.functional.pad(tokens, (0, kv_length - tokens.shape[1]))


def _seen(tokens: torch.Tensor, kv_length: int, blind: bool) -> torch.Tensor | None:
    """``tokens``, or None where they are all of ``kv_length`` keys, which is not read while a graph is made."""
    if not blind and tokens.shape[1] == kv_length and bool(tokens.all()):
        return None
    return tokens.to(torch.bool)


def _chunked(
    chunk: int, packed: torch.Tensor | None, batch_size: int, q_length: int, kv_length: int, q_offset: int,
    kv_offset: int, tokens: torch.Tensor | None, device: Any,
) -> torch.Tensor | None:  # fmt: skip
    """``mask`` of a layer with chunks of ``chunk`` keys."""
    if packed is not None:
        _refuse_chunks("mask_function", "packed sequences")
    if q_length > 1 and kv_offset:
        _refuse_chunks("mask_function", "several queries behind a cache that has dropped keys")
    seen = q_offset + q_length
    if tokens is None:
        tokens = torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    tokens = tokens[:, :seen].to(torch.bool)
    if q_length == 1:
        tokens = chunks.of_last_key(chunk, tokens, kv_offset)
    # a cache of a fixed size has room behind the tokens so far
    return None if seen - kv_offset >= kv_length and bool(tokens.all()) else tokens


def _window(sliding_window: int | None, causal: bool, config: Any) -> tuple[int, int] | None:
    """Transformers counts the query itself. Its masks that look both ways do not: models add 1 to the config's window for
    their layers (ModernBERT), but for those that pass it as it is (T5Gemma, a Mistral made an encoder)."""
    if sliding_window is None:
        return None
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{NAME}: sliding_window: got {sliding_window!r:.80}, must be an integer or None")
    if sliding_window < 1:
        raise ValueError(f"{NAME}: sliding_window: got {sliding_window}, must be 1 or more: it counts the query itself")
    if causal:
        return sliding_window - 1, 0
    side = sliding_window if sliding_window == getattr(config, "sliding_window", None) else sliding_window - 1
    return side, side


def _probabilities_asked() -> bool:
    """Whether a model is called with ``output_attentions``, which not every one passes on to its layers (GPT-2). Not known
    while torch.compile makes a graph."""
    if torch.compiler.is_compiling():
        return False
    # what the model that runs collects from its layers; not public, and may not be there
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    collected: Any = None if collector is None else collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


def _documents(module: torch.nn.Module, query: Any, key: Any, position_ids: Any) -> torch.Tensor | None:
    """The documents of the tokens of one row, (1, length) int32, by their positions: with a cache, or with a mask of ones, a
    model does not ask ``mask`` to keep them apart. None: it is one, or no positions say so, as to flash_attention_2."""
    length = terms.rows_of(query, 2)
    if length is None or length < 2 or query.shape[0] != 1 or terms.rows_of(key, 2) != length:
        return None
    if not isinstance(position_ids, torch.Tensor) or position_ids.shape != (1, length):
        return None
    return documents.by_positions(f"{NAME}: position_ids", position_ids, module)


def forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None, position_bias: torch.Tensor | None = None, cache: Any = None,
    output_attentions: bool | None = None, deterministic: bool | None = None, sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None, block_indices: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None, cu_seq_lens_k: torch.Tensor | None = None, max_length_q: Any = None,
    max_length_k: Any = None, position_ids: torch.Tensor | None = None, **rest: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """query (batch, heads, q_length, head_dim), key and value (batch, heads_kv, length, ...) -> (out, None), out (batch,
    q_length, heads, head_dim). ``attention_mask``: as ``mask`` gives it. Rows of padding are 0. ``position_ids``: (1, q_length)
    integers, which say where documents begin of one row without a mask and with as many keys as queries.

    Raises:
        NotImplementedError: what ``LACKING`` lists; a mask of 4 dimensions.
        TypeError, ValueError: as ``fa2tune.attention``.
    """
    terms.refuse_absent(
        NAME,
        dropout=dropout,
        s_aux=s_aux,
        position_bias=position_bias,
        cache=cache,
        output_attentions=output_attentions,
        sinks=sinks,
        indices=indices,
        block_indices=block_indices,
    )
    if _probabilities_asked():
        terms.refuse_absent(NAME, output_attentions=True)
    causal = own_attention.is_causal(module) if is_causal is None else is_causal
    causal = (
        terms.asked_for(NAME, "is_causal", causal)
        and getattr(getattr(module, "config", None), "is_causal", True) is not False
    )
    attention_mask, at_last_token = _flat(attention_mask, module)
    if attention_mask is None and cu_seq_lens_q is None and position_ids is not None:
        attention_mask = _documents(module, query, key, position_ids)
    if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2):
        shape = tuple(getattr(attention_mask, "shape", ()))
        raise NotImplementedError(
            f"{NAME}: attention_mask: got {type(attention_mask).__name__} of shape {shape}, allowed are None and (batch, "
            "length): fa2tune does not support masks as tensors of pairs"
        )
    if not getattr(query, "dtype", None) == getattr(key, "dtype", None) == getattr(value, "dtype", None):
        terms.check(NAME, {"query": query, "key": key, "value": value}, 4)
        query, key = query.to(value.dtype), key.to(value.dtype)
    sliding_window = own_attention.window_of(module) if sliding_window is None else sliding_window
    options: dict[str, Any] = {
        "softmax_scale": scaling, "deterministic": deterministic, "causal": causal, "softcap": softcap,
        "window": _window(sliding_window, causal, getattr(module, "config", None)),
    }  # fmt: skip
    chunk = chunks.of_layer(module)
    if chunk is not None and query.shape[2] > 1:
        if cu_seq_lens_q is not None:
            _refuse_chunks("cu_seq_lens_q", "packed sequences")
        options |= {"causal": False, "window": None, "mask": Mask("chunked", chunk)}
    try:
        if cu_seq_lens_q is not None:
            q, k, v = _rows_first(query, key, value)
            offsets = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
            out = documents.by_offsets(NAME, q, k, v, *offsets, max_length_q, max_length_k, **options)
        elif attention_mask is not None:
            q, k, v = _rows_first(query, key, value)
            out = documents.by_numbers(NAME, q, k, v, attention_mask, at_last_token, **options)
        else:
            heads_first, _ = terms.dense(NAME, query, key, value, layout="bhsd", return_lse=False, **options)
            out = heads_first.transpose(1, 2)
        return out.contiguous(), None  # models view it as (batch, length, heads * head_dim)
    except (TypeError, ValueError) as error:
        terms.rename(error, _NAMES)
        raise


def _rows_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(batch, heads, length, dim) as (batch, length, heads, dim). TypeError, ValueError: they are not that."""
    terms.check(NAME, {"query": q, "key": k, "value": v}, 4)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


ALL_ATTENTION_FUNCTIONS.register(NAME, forward)
masks.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
