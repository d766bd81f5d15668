"""Models of Transformers that attend by themselves, whatever ``attn_implementation`` says (Bloom, MPT, CodeGen, RoFormer).

They still ask the named implementation for a mask, and would read ``mask``'s (batch, length) as one of scores, or None as one
that hides nothing: their results would be wrong, silently.

And those that choose keys by scores of their own (DeepSeek V3.2, Doge), of which a mask has to have 4 dimensions; and those
whose layers say something else than their masks, where ``"eager"`` follows the masks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from fa2tune.spec.combinations import LACKING

MODELS = "transformers.models."
#: What a file of a model imports to look an implementation up.
LOOKED_UP = "ALL_ATTENTION_FUNCTIONS"
#: In the configuration of a model that chooses keys: how many.
CHOSEN = ("index_topk", "keep_window_size")
#: Types of models whose masks are causal and whose layers say that they are not.
DENIED = (
    "bigbird_pegasus",
    "pegasus_x",
    "nllb-moe",
    "informer",
    "aimv2_text_model",
    "videoprism_text_model",
)
#: Types of models whose masks look both ways and whose layers say that they are causal.
BIDIRECTIONAL = ("phi4_multimodal_vision", "lightglue")

#: Types of models whose masks have a window that their layers do not pass.
WINDOW_UNSAID = ("phimoe", "qwen2_moe")


@torch.compiler.assume_constant_result
def _attends_by_itself(module: str, name: str) -> bool:
    """Whether no loaded file of a model, whose configuration is this class, looks implementations up. Strings, since
    torch.compile takes no other arguments of what it does not trace."""
    package = module.rpartition(".")[0]
    parts = getattr(getattr(sys.modules.get(module), name, None), "sub_configs", {})
    # one of several models says nothing of each
    if not package.startswith(MODELS) or any(part.__module__ != module for part in parts.values()):
        return False
    files = [file for path, file in list(sys.modules.items()) if path.startswith(f"{package}.modeling_")]
    return bool(files) and not any(hasattr(file, LOOKED_UP) for file in files)


def refuse(name: str, config: Any) -> None:
    """NotImplementedError: the model of this configuration attends by itself, chooses keys, or denies its masks."""
    for setting in CHOSEN:
        if asked := getattr(getattr(config, "text_config", config), setting, None):
            raise NotImplementedError(
                f"{name}: {setting}: got {asked!r:.80} in the configuration of a model of type "
                f"{getattr(config, 'model_type', None)!r}, allowed are models without it: fa2tune does not support "
                f"{LACKING['indices'].what}"
            )
    if getattr(config, "model_type", None) in DENIED:
        raise NotImplementedError(
            f"{name}: attn_implementation: got {name!r} for a model of type {config.model_type!r}, allowed is 'eager': this "
            "model's masks are causal, and its layers say that they are not"
        )
    if config is None or not _attends_by_itself(type(config).__module__, type(config).__name__):
        return
    raise NotImplementedError(
        f"{name}: attn_implementation: got {name!r} for a model of type {getattr(config, 'model_type', None)!r}, allowed is "
        "'eager': this model attends by itself, and does not look up attn_implementation"
    )


def is_causal(module: torch.nn.Module) -> bool:
    """What a layer says of itself, but for those of ``BIDIRECTIONAL``. A layer of Transformers that says nothing looks both
    ways (Splinter, LayoutLM, the text models of ALIGN and CLAP); another one is causal, as it is to Transformers' own
    attention."""
    if getattr(getattr(module, "config", None), "model_type", None) in BIDIRECTIONAL:
        return False
    if hasattr(module, "is_causal"):
        return module.is_causal  # type: ignore[return-value]
    return not type(module).__module__.startswith(MODELS)


def window_of(module: torch.nn.Module) -> int | None:
    """The window of a layer of ``WINDOW_UNSAID``, as in its mask; None: it has none, or passes it."""
    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in WINDOW_UNSAID:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        return None
    return config.sliding_window  # type: ignore[union-attr]
