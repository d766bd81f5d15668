"""Chunked attention of Transformers (Llama 4's local layers): a query sees the keys up to its own in its own chunk, and chunks
count from a row's first token.

Several queries run the mask "chunked" of fa2tune. One query behind a cache, whose first keys may have been dropped, gets the
keys of its chunk as the row's only tokens.
"""

from __future__ import annotations

from typing import Any

import torch

KIND = "chunked_attention"  #: in a config's layer_types


def of_layer(module: torch.nn.Module) -> int | None:
    """The size of the chunks that an attention layer looks at; None: it is not chunked."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer is None or kinds[layer] != KIND:
        return None
    return int(config.attention_chunk_size)  # type: ignore[union-attr]


def asked(rest: dict[str, Any]) -> int | None:
    """The size of the chunks that a model's mask has; ``rest``: what Transformers passes to a mask besides its sizes."""
    config = rest.get("config")
    size = getattr(config, "attention_chunk_size", None)
    if size is None or rest.get("local_size") != size or size == getattr(config, "sliding_window", None):
        return None
    return int(size)


def of_last_key(chunk: int, tokens: torch.Tensor, kv_offset: int) -> torch.Tensor:
    """Which keys from ``kv_offset`` on the query at the last of ``tokens`` sees, (batch, keys) bool. ``tokens``: (batch, keys
    from the first one on) bool, of which those before a row's first token are left out of the count."""
    position = tokens.shape[1] - 1
    padding = (tokens.cumsum(1) == 0).sum(1, keepdim=True)  # (batch, 1)
    begin = padding + (position - padding) // chunk * chunk
    keys = torch.arange(kv_offset, position + 1, device=tokens.device)
    return tokens[:, kv_offset:] & (keys >= begin)
