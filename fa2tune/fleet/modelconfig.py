"""What attention a model asks for, read off its Hugging Face ``config.json``: head dims, heads, mask, dtype, lengths.

Llama, Qwen, Mistral, Gemma and whatever uses their field names; DeepSeek's multi-head latent attention as it is trained and
prefilled (keys and values expanded: head dim ``qk_nope_head_dim + qk_rope_head_dim``, V head dim ``v_head_dim``). The file is
data from somewhere else: every value is checked. Pure: no torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa2tune.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM

MAX_FILE = 1 << 20  #: bytes; configs have a few thousand
MOST = 1 << 24  #: of any count in a config
#: Where the language model of a model with several parts has its fields.
PARTS = ("text_config", "language_config", "llm_config")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_KIND = re.compile(r"[a-z_0-9]{1,64}")
#: model_type -> layers of which the last has full attention, where the file does not say (transformers' own defaults)
PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4}
#: model_type -> what its files leave to transformers' defaults
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 1 << 17,
    }
}


class ModelConfigError(ValueError):
    """A config that cannot be read. The message names the file or field, what came, and what is allowed."""


@dataclass(frozen=True)
class Attention:
    """One kind of attention of a model."""

    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str  #: "bf16", "fp16" or "fp32"
    longest: int  #: the longest sequence that the model, or its window, lets this kind have
    kind: str = FULL
    #: why no kernel of fa2tune computes it, beyond ``longest`` if that is a window's; "": one does
    not_covered: str = ""


def read(path: Path) -> dict[str, Any]:
    """The JSON object of a config file; ModelConfigError."""
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise ModelConfigError(f"model: the folder {path.parent} holds no config.json")
    try:
        if not path.exists():
            raise ModelConfigError(f"model: {path}: there is no file or folder of that name")
        if not path.is_file():
            raise ModelConfigError(f"model: {path} is not a regular file")
        if path.stat().st_size > MAX_FILE:
            raise ModelConfigError(f"model: {path} is larger than {MAX_FILE >> 20} MiB")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelConfigError):
            raise
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise ModelConfigError(f"model: {path} cannot be read: {why}"[:300]) from error
    if not isinstance(found, dict):
        raise ModelConfigError(f"model: {path} holds no JSON object")
    return found


class _Fields:
    """Checked access to a config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = config.get("model_type")
        self.config = {**(DEFAULTS.get(name, {}) if isinstance(name, str) else {}), **config}

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= MOST:
            came = "it is missing" if value is None else f"got {_short(value)}"
            raise ModelConfigError(f"{name}: {came}, must be an integer from {least} to {MOST}")
        return value

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            raise ModelConfigError(f"{name}: got {_short(value)}, must be true or false")
        return value

    def text(self, name: str) -> str:
        value = self.config.get(name)
        return value if isinstance(value, str) and value.isprintable() else ""


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for part in PARTS:
        inner = config.get(part)
        if isinstance(inner, dict):
            whole = {name: value for name, value in config.items() if name in ("torch_dtype", "dtype", "model_type")}
            return {**whole, **inner}
    return config


def _kinds(fields: _Fields, layers: int) -> Counter[str]:
    """How many layers have which kind of attention."""
    listed = fields.config.get("layer_types")
    if listed is not None:
        names = listed if isinstance(listed, list) else []
        if not names or not all(isinstance(kind, str) and _KIND.fullmatch(kind) for kind in names):
            raise ModelConfigError(f"layer_types: got {_short(listed)}, must be a list of names such as {FULL}")
        return Counter(names[:layers])
    window = SLIDING if fields.has("sliding_window") else CHUNKED if fields.has("attention_chunk_size") else ""
    if not window or not fields.flag("use_sliding_window", True):
        return Counter({FULL: layers})
    pattern = PATTERNS.get(fields.text("model_type"))
    if fields.has("sliding_window_pattern") or pattern:
        every = fields.count("sliding_window_pattern", pattern)
        return +Counter({FULL: layers // every, window: layers - layers // every})
    if fields.has("use_sliding_window") and fields.has("max_window_layers"):  # Qwen: the layers from there on slide
        full = min(layers, fields.count("max_window_layers", least=0))
        return +Counter({FULL: full, window: layers - full})
    return Counter({window: layers})


def _head_dims(fields: _Fields) -> tuple[int, int, int, int]:
    """Query heads, key heads, head dim, V head dim."""
    heads = fields.count("num_attention_heads")
    if fields.has("qk_nope_head_dim"):  # multi-head latent attention: every head has keys of its own
        dim = fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
        return heads, heads, dim, fields.count("v_head_dim")
    heads_kv = fields.count("num_key_value_heads", heads)
    if heads % heads_kv:
        raise ModelConfigError(f"num_key_value_heads: got {heads_kv}, must divide num_attention_heads {heads}")
    if fields.has("head_dim"):
        dim = fields.count("head_dim")
    else:
        hidden = fields.count("hidden_size")
        if hidden % heads:
            raise ModelConfigError(f"hidden_size: got {hidden}, must be a multiple of num_attention_heads {heads}")
        dim = hidden // heads
    return heads, heads_kv, dim, dim


def _beyond(fields: _Fields, dims: tuple[int, int]) -> str:
    """Why no kernel computes any of it, or ""."""
    for dim in dims:
        if dim not in range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP):
            return f"head dim {dim}: there are {MIN_HEAD_DIM} to {MAX_HEAD_DIM} in steps of {HEAD_DIM_STEP}"
    if fields.has("attn_logit_softcapping"):
        return "its scores are soft-capped (attn_logit_softcapping)"
    if fields.text("model_type") == "gpt_oss":
        return "its softmax has attention sinks"
    return ""


def attentions(config: Mapping[str, Any], dtype: str | None = None) -> list[Attention]:
    """The kinds of attention of a model; ``dtype`` instead of the one it names. ModelConfigError names field and value."""
    fields = _Fields(_language_model(config))
    if dtype is None:
        named = fields.text("dtype") or fields.text("torch_dtype") or "bfloat16"
        if named.removeprefix("torch.") not in DTYPES:
            raise ModelConfigError(f"torch_dtype: got {_short(named)}, allowed are {', '.join(DTYPES)}")
        dtype = DTYPES[named.removeprefix("torch.")]
    layers = fields.count("num_hidden_layers", 1)
    heads, heads_kv, dim, dim_v = _head_dims(fields)
    longest = fields.count("max_position_embeddings", MOST)
    beyond = _beyond(fields, (dim, dim_v))
    found = []
    for kind, count in _kinds(fields, layers).items():
        why, reach = beyond, longest
        if kind in (SLIDING, CHUNKED):
            name = "sliding_window" if kind == SLIDING else "attention_chunk_size"
            reach = min(longest, fields.count(name))
            if reach < longest:
                why = (
                    why
                    or f"{kind.partition('_')[0]} attention beyond {reach}, up to which it is plain causal attention"
                )
        elif kind != FULL:
            why = why or f"{kind} is no softmax attention over all keys"
            reach = 0
        found.append(Attention(count, heads, heads_kv, dim, dim_v, dtype, 0 if beyond else reach, kind, why))
    return found
