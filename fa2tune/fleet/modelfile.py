"""A model's ``config.json``: read, checked, and handed to Transformers' own class for its model type.

The file is data from elsewhere. It is checked before a class sees it; ``auto_map`` code is never run, nothing is downloaded.
Importing this module imports neither Transformers nor torch. ``transformers()`` imports Transformers, whose config classes
import torch where that is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from fa2tune.text import plain

MAX_FILE = 1 << 20  #: bytes; configs have a few thousand
MOST_LAYERS = 1 << 12  #: Transformers makes lists of this length
MAX_DEPTH, MAX_ITEMS, MAX_NAME = 16, 1 << 16, 128  #: of the JSON tree, of one list or object, of a field's name
OLDEST = (5, 17)  #: version of Transformers; 4.57 reads ModernBERT without its windows, 5.0 misses some model types
INSTALL = "pip install 'fa2tune[models]'"
#: Names of fields from which lists of that length are made.
_LENGTHS = re.compile(r"layer|depth|block|stage|types|period|interval", re.IGNORECASE)
#: Fields that a class divides by.
_HEADS = re.compile(r"(n|num|(.*_)?attention|(.*_)?key_value)_heads?")
#: Fields that a class would act on, and on which no attention depends: code, other files, tables of labels; and scales of Q,
#: which Llama 4's files have as another type than the class takes.
DROPPED = frozenset((
    "auto_map", "_name_or_path", "name_or_path", "_commit_hash", "custom_pipelines", "id2label", "label2id", "num_labels",
    "problem_type", "backbone", "backbone_config", "use_timm_backbone", "backbone_kwargs", "quantization_config",
    "generation_config", "time_step_limit", "task_specific_params", "output_attentions", "attn_implementation",
    "_attn_implementation", "_attn_implementation_internal", "experts_implementation", "_experts_implementation_internal",
    "per_layer_config", "dtype", "torch_dtype", "attn_temperature_tuning", "attn_scale", "floor_scale",
))  # fmt: skip


class ModelConfigError(ValueError):
    """A config that cannot be read. The message names the file or field, what came, and what is allowed."""


class NoTransformersError(ModelConfigError):
    """Transformers, which reads the configs, cannot be imported. The message says how to install it."""


def text(value: object) -> str:
    """Text from elsewhere as one short line without control characters."""
    return plain(" ".join(str(value).split()), 200)


def short(value: object) -> str:
    """A value from elsewhere, as Python writes it."""
    return plain(ascii(value), 60)


def read(path: Path) -> dict[str, Any]:
    """The JSON object of a config file; ModelConfigError."""
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise ModelConfigError(f"model: the folder {text(path.parent)} holds no config.json")
    try:
        if not path.exists():
            raise ModelConfigError(
                f"model: {text(path)}: there is no such file or folder; give the path of a config.json or of its folder "
                "(models are not downloaded by name)"
            )
        if not path.is_file():
            raise ModelConfigError(f"model: {text(path)} is not a regular file")
        if path.stat().st_size > MAX_FILE:
            raise ModelConfigError(f"model: {text(path)} is larger than {MAX_FILE >> 20} MiB")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelConfigError):
            raise
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise ModelConfigError(f"model: {text(path)} cannot be read: {why}"[:300]) from error
    if not isinstance(found, dict):
        raise ModelConfigError(f"model: {text(path)} holds no JSON object")
    return found


def check_values(value: Any, name: str = "", depth: int = 0) -> None:
    """ModelConfigError if a value is absurd: deep, long, or a count that would fill the memory."""
    if depth > MAX_DEPTH:
        raise ModelConfigError(f"{text(name)}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping | list | tuple) and len(value) > MAX_ITEMS:
        raise ModelConfigError(f"{text(name)}: {len(value)} entries, at most {MAX_ITEMS} are allowed")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str) or len(key) > MAX_NAME:
                raise ModelConfigError(
                    f"got a field named {short(key)}, names are text of at most {MAX_NAME} characters"
                )
            check_values(inner, key, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_values(inner, name, depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        least = 1 if _HEADS.fullmatch(name) else -(1 << 62)
        most = MOST_LAYERS if _LENGTHS.search(name) and "size" not in name else 1 << 62
        if not max(least, -most) <= value <= most:
            allowed = "of at least 1" if value < least else f"of at most {most}"
            raise ModelConfigError(f"{text(name)}: got {short(value)}, must be an integer {allowed}")


def model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """The model type of a config and those of its parts, as far as the file names them."""
    for key, value in config.items():
        if key == "model_type" and isinstance(value, str) and value:
            yield value
        elif key.endswith("_config") and isinstance(value, Mapping) and key not in DROPPED:
            yield from (one for one in model_types(value) if (key, one) != ("attn_config", "mpt"))


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _cleaned(inner) for key, inner in value.items() if key not in DROPPED}
    return [_cleaned(inner) for inner in value] if isinstance(value, list | tuple) else value


def transformers() -> ModuleType:
    """The library; NoTransformersError where it is not installed or too old."""
    oldest = ".".join(map(str, OLDEST))
    needs = f"model: reading a config.json needs Transformers {oldest} or newer"
    try:
        library = import_module("transformers")  # without a type checker's walk through all of it
    except ImportError as error:
        raise NoTransformersError(
            f"{needs}, which cannot be imported ({text(error)}). Install it: {INSTALL}"
        ) from error
    numbers = re.match(r"(\d+)\.(\d+)", library.__version__)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        raise NoTransformersError(f"{needs}, found {text(library.__version__)}. Install it: {INSTALL}")
    return library


def instance(library: ModuleType, config: Mapping[str, Any]) -> Any:
    """The config as Transformers' class reads it. Its warnings would print text of the file: they are off meanwhile."""
    said = library.logging.get_verbosity()
    library.logging.set_verbosity(60)  # above CRITICAL
    try:
        return library.CONFIG_MAPPING[config["model_type"]].from_dict(_cleaned(config))
    except Exception as error:  # whatever a class makes of wrong data
        raise ModelConfigError(f"model: Transformers cannot read this config: {text(error)}") from error
    finally:
        library.logging.set_verbosity(said)
