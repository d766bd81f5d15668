"""What attention a model asks for, read from its Hugging Face ``config.json`` with Transformers' own config classes.

The file is data from elsewhere. It is checked before a class sees it; ``auto_map`` code is never run, nothing is downloaded,
and only the classes of the model types in ``families`` are used. Importing this module imports neither Transformers nor torch;
reading a model imports Transformers, which imports torch where that is installed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fa2tune.fleet import families
from fa2tune.fleet.families import (
    CAUSAL_LAYERS,
    CHUNKED,
    FULL_KIND,
    FULL_LAYERS,
    LAYER_KINDS,
    MODEL_FAMILIES,
    SLIDING,
    Stack,
)
from fa2tune.fleet.modelfile import (
    DROPPED,
    MOST_LAYERS,
    ModelConfigError,
    check_values,
    instance,
    model_types,
    short,
    text,
    transformers,
)
from fa2tune.fleet.modelfile import read as read
from fa2tune.spec.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from fa2tune.spec.score import score_of

MAX_COUNT = 1 << 24  #: of any count in a config
NAME_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PER_LAYER = "per_layer_config"  # no class gets it, and it bears on attention


@dataclass(frozen=True)
class Attention:
    """One kind of attention of a model."""

    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str  #: "bf16", "fp16" or "fp32"
    #: the longest sequence that fa2tune computes for it: 0 (none), the size of chunks that are not causal, or ``limit``
    longest: int
    kind: str = FULL_KIND
    not_covered: str = ""  #: why no kernel of fa2tune computes it beyond ``longest``; "": one does
    mask: str = CAUSAL_LAYERS  #: "causal" or "full"
    part: str = ""  #: of the model: "text", "vision", "encoder", "text cross attention"; "" where there is one only
    limit: int = MAX_COUNT  #: the longest sequence that the model allows; MAX_COUNT: the config names none
    dropout: float = 0.0  #: probability that a weight of the softmax is dropped in training
    window: int = 0  #: tokens of a sliding window, the query's own included; 0: none
    chunk: int = 0  #: keys of a chunk, of causal attention in chunks of the sequence; 0: none
    softcap: float = 0.0  #: tanh soft cap of the scores; 0: none
    known: bool = True  #: False: ``not_covered`` names what is not understood; it may be covered


@dataclass(frozen=True)
class Model:
    """What was read from a config."""

    model_type: str
    attentions: tuple[Attention, ...]
    unknown: tuple[str, ...] = ()  #: model types and fields that are not understood
    refused: tuple[str, ...] = ()  #: parts of which nothing is covered and nothing else was read, and why
    partly: tuple[str, ...] = ()  #: what is not covered beside what ``attentions`` say
    notes: tuple[str, ...] = ()
    transformers: str = ""  #: the version that read it


def attentions(config: Mapping[str, Any], dtype: str | None = None) -> list[Attention]:
    """The kinds of attention of a model; ``dtype`` instead of the one it names. ModelConfigError where the config is wrong, or
    its model type is one whose attention fa2tune does not know."""
    found = model(config, dtype)
    if not found.attentions:
        why = "; ".join((*found.refused, *(f"{name} is not understood" for name in found.unknown)))
        raise ModelConfigError(f"model_type {found.model_type}: {why}")
    return list(found.attentions)


def model(config: Mapping[str, Any], dtype: str | None = None) -> Model:
    """Everything that a config says about attention. ModelConfigError names field and value; NoTransformersError."""
    check_values(config)
    name = config.get("model_type")
    if not isinstance(name, str) or not _TYPE.fullmatch(name):
        came = "it is missing" if name is None else f"got {short(name)}"
        raise ModelConfigError(f"model_type: {came}; must be a name that Transformers knows, such as llama")
    library = transformers()
    version = str(library.__version__)
    types = list(model_types(config))
    for one in types:
        if one not in library.CONFIG_MAPPING:
            raise ModelConfigError(
                f"model_type: got {short(one)}, which Transformers {version} does not know. If it is newer than that: "
                "pip install -U transformers. If the model ships its own code: fa2tune does not run it; tune by head dim "
                "(fa2tune tune --headdim) and ask `fa2tune explain` about single calls"
            )
    if name in MODEL_FAMILIES and MODEL_FAMILIES[name].refused:
        return Model(name, (), refused=(MODEL_FAMILIES[name].refused,), transformers=version)
    strange = tuple(f"model_type {one}" for one in types if one not in MODEL_FAMILIES)
    if strange:
        return Model(name, (), strange, transformers=version)
    found = list(_parts(instance(library, config), config, config, dtype, ""))
    return Model(
        name,
        tuple(attention for part in found for attention in part.attentions),
        tuple(dict.fromkeys(one for part in found for one in part.unknown)),
        tuple(one for part in found for one in part.refused),
        tuple(one for part in found for one in part.partly),
        tuple(dict.fromkeys(one for part in found for one in part.notes)),
        version,
    )


# --- what the class made of it


class _Fields:
    """Checked access to a config class."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def get(self, name: str) -> Any:
        return getattr(self.config, name, None) if name else None

    def count(self, name: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= most:
            came = "it is missing" if value is None else f"got {short(value)}"
            raise ModelConfigError(f"{name}: {came}, must be an integer from 1 to {most}")
        return value

    def probability(self, names: tuple[str, ...]) -> float:
        """The largest of them, 0 where there is none."""
        found = 0.0
        for name in names:
            for holder in (self.config, self.get("attn_config")):
                value = getattr(holder, name, None)
                if value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                    raise ModelConfigError(f"{name}: got {short(value)}, must be a number from 0 to 1")
                found = max(found, float(value))
        return found


def _parts(
    config: Any, raw: Mapping[str, Any], whole: Mapping[str, Any], dtype: str | None, part: str
) -> Iterator[Model]:
    """A Model for each part that has attention."""
    name = str(config.model_type)
    family = MODEL_FAMILIES.get(name)
    where = f"{part}: " if part else ""
    if family is None:
        yield Model(name, (), (f"{where}model_type {name}",))
        return
    notes = [f"{where}{family.note}"] if family.note else []
    if "auto_map" in raw:
        notes.append(
            f"{where}the model's own code (auto_map) was not looked at; this holds for Transformers' own {name}"
        )
    if family.composite:
        unknown = _not_understood(config, raw, name, set(config.sub_configs))
        partly = (f"{where}{family.partly}",) if family.partly else ()
        yield Model(name, (), tuple(f"{where}{one}" for one in unknown), partly=partly, notes=tuple(notes))
        for key in sorted(config.sub_configs, key=lambda key: (key != "text_config", key)):
            inner = getattr(config, key, None)
            if inner is not None:
                below = raw.get(key)
                title = key.removesuffix("_config")
                yield from _parts(inner, below if isinstance(below, Mapping) else {}, whole, dtype, title)
        return
    if family.refused:
        yield Model(name, (), refused=(f"{where}{family.refused}",), notes=tuple(notes))
        return
    refused = all(stack.refused for stack in family.stacks)  # whatever its other fields say
    unknown = [] if refused else _not_understood(config, raw, name, set())
    found: list[Attention] = []
    for stack in family.stacks:
        found += _stack(_Fields(config), stack, name, _dtype(raw, whole, dtype), part, unknown)
    if not found:
        yield Model(name, (), refused=(f"{where}{families.NO_SOFTMAX}",), notes=tuple(notes))
        return
    if dtype is None and not any(_named_dtype(one) for one in (raw, whole)):
        notes.append("the config names no dtype, bf16 is taken; --dtype sets another")
    if dtype is None and _dtype(raw, whole, None) == "fp32":
        notes.append(
            "the config says float32, so fp32 is asked for; for a model that is served in 16 bit: --dtype bf16"
        )
    if all(one.kind == FULL_KIND for one in found) and raw.get("sliding_window") and _types(config) is None:
        notes.append(f"{where}sliding_window is not read: {_ignores(config)}")
    standard = dict(config.attribute_map)
    for field in (family.stacks[0].layers, family.stacks[0].heads):
        if field not in raw and standard.get(field, field) not in raw:
            notes.append(f"{where}the config has no {field}: {getattr(config, field)}, Transformers' default")
    without = _layers_without(config)
    if without:
        notes.append(f"{where}{without} more layers have no softmax attention")
    yield Model(name, tuple(found), tuple(f"{where}{one}" for one in unknown), notes=tuple(notes))


def _ignores(config: Any) -> str:
    """Why ``sliding_window`` of a file means nothing."""
    if config.model_type in families.WINDOW_WITHOUT_TYPES:
        return "use_sliding_window is not set"
    return f"Transformers' {config.model_type} ignores it"


def _not_understood(config: Any, raw: Mapping[str, Any], name: str, parts: set[str]) -> list[str]:
    """Fields of the file that bear on attention and are not understood, escaped."""
    also = set(parts)
    if name in families.DROPOUT_RATE:
        also |= families.REFUSED_WITH_FAMILY
    if name in families.MASK_SWITCH:
        also |= {"use_bidirectional_attention"}
    if "attn_config" in config.sub_configs:
        also |= {"attn_config"}
    standard = {own: general for general, own in config.attribute_map.items()}
    fields = [
        (key, value)
        for key, value in raw.items()
        if (key not in DROPPED or key == _PER_LAYER) and standard.get(key, key) not in families.UNDERSTOOD
    ]
    inner = raw.get("attn_config")
    if isinstance(inner, Mapping):
        fields += [(key, value) for key, value in inner.items() if key not in DROPPED]
    return [text(one) for one in families.not_understood(fields, also)]


def _named_dtype(config: Mapping[str, Any]) -> Any:
    return config.get("dtype") or config.get("torch_dtype")


def _dtype(raw: Mapping[str, Any], whole: Mapping[str, Any], asked: str | None) -> str:
    if asked is not None:
        return asked
    named = _named_dtype(raw) or _named_dtype(whole) or "bfloat16"
    bare = named.removeprefix("torch.") if isinstance(named, str) else ""
    if bare not in NAME_OF_DTYPE:
        raise ModelConfigError(
            f"torch_dtype: got {short(named)}, allowed are {', '.join(NAME_OF_DTYPE)}; --dtype sets another"
        )
    return NAME_OF_DTYPE[bare]


def _types(config: Any) -> list[str] | None:
    for name in families.LAYER_TYPES:
        listed = getattr(config, name, None)
        if listed is not None:
            if not isinstance(listed, list | tuple) or not listed or not all(isinstance(one, str) for one in listed):
                raise ModelConfigError(f"{name}: got {short(listed)}, must be a list of names such as {FULL_KIND}")
            return list(listed)
    return None


def _layers_without(config: Any) -> int:
    return sum(LAYER_KINDS.get(one, FULL_KIND) is None for one in _types(config) or ())


def _kinds(fields: _Fields, stack: Stack, name: str) -> Counter[str]:
    """How many layers have which kind of softmax attention; types that are not known keep their name."""
    layers = fields.count(stack.layers, most=MOST_LAYERS)
    listed = _types(fields.config) if not stack.name else None
    window = fields.get("sliding_window") is not None
    if listed is None:
        window = window and name in families.WINDOW_WITHOUT_TYPES
        chunks = fields.get("attention_chunk_size") is not None
        return Counter({SLIDING if window else CHUNKED if chunks else FULL_KIND: layers})
    if len(listed) < layers:
        raise ModelConfigError(f"layer_types: {len(listed)} entries for {layers} layers ({stack.layers})")
    kinds = Counter(LAYER_KINDS.get(one, one) for one in listed[:layers])
    kinds.pop(None, None)
    if window and name in families.WINDOW_ALWAYS:
        kinds[SLIDING] += kinds.pop(FULL_KIND, 0)
    return +Counter({str(kind): count for kind, count in kinds.items()})


def _heads(fields: _Fields, stack: Stack, name: str) -> tuple[int, int, int, int]:
    """Query heads, key heads, head dim, V head dim."""
    heads = fields.count(stack.heads)
    if fields.get("qk_nope_head_dim") is not None:  # multi-head latent attention: every head has keys of its own
        dim = fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
        return heads, heads, dim, fields.count("v_head_dim")
    heads_kv = heads
    if name == "falcon":
        grouped = fields.get("new_decoder_architecture") or not fields.get("multi_query")
        heads_kv = fields.count("num_kv_heads", heads) if grouped else 1
    elif stack.heads == "num_attention_heads":
        heads_kv = fields.count("num_key_value_heads", heads)
    if heads % heads_kv:
        raise ModelConfigError(f"num_key_value_heads: got {heads_kv}, must divide {stack.heads} {heads}")
    given = next((one for one in ("head_dim", "d_kv") if fields.get(one) is not None), None)
    if given:
        dim = fields.count(given)
    else:
        width = fields.count(stack.width)
        if width % heads:
            raise ModelConfigError(f"{stack.width}: got {width}, must be a multiple of {stack.heads} {heads}")
        dim = width // heads
    return heads, heads_kv, dim, dim


def _softcap(fields: _Fields, name: str) -> float:
    """The cap of the scores, 0 where there is none."""
    value = fields.get(families.SOFT_CAP) if name in families.SOFT_CAPPED else None
    if value is None:
        return 0.0
    try:
        score = score_of(value)
    except (TypeError, ValueError) as error:
        raise ModelConfigError(f"{families.SOFT_CAP}, which is {error}") from None
    return float(sum(score.values))


def _refusals(fields: _Fields, stack: Stack, name: str, dims: tuple[int, int]) -> Iterator[str]:
    """Why no kernel computes any of it."""
    for dim in dict.fromkeys(dims):
        if dim not in range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP):
            yield f"head dim {dim}: fa2tune has {MIN_HEAD_DIM} to {MAX_HEAD_DIM} in steps of {HEAD_DIM_STEP}"
    if stack.refused:
        yield stack.refused
    for switch, why in families.SWITCHES.items():
        if switch == families.SOFT_CAP and name in families.SOFT_CAPPED:
            continue
        values = (getattr(holder, switch, None) for holder in (fields.config, fields.get("attn_config")))
        if any(values):
            yield f"{why} ({switch})"
    for field in ("position_embedding_type", "position_embeddings_type"):
        positions = fields.get(field)
        if positions is not None and positions not in families.POSITIONS:
            yield f"{families.RELATIVE} ({field} {short(positions)})"


def _limit(fields: _Fields, stack: Stack) -> int:
    """The longest sequence that the model allows."""
    size, patch = fields.get("image_size"), fields.get("patch_size")
    if not stack.length:
        sizes = [one if isinstance(one, list | tuple) else (one, one) for one in (size, patch)]
        if all(len(pair) == 2 and all(type(one) is int and one > 0 for one in pair) for pair in sizes):
            (high, wide), (down, across) = sizes
            registers = fields.get("num_register_tokens")
            return min(MAX_COUNT, (high // down) * (wide // across) + 1 + (registers if type(registers) is int else 0))
        return MAX_COUNT
    names = (stack.length, "max_seq_len") if stack.length == "max_position_embeddings" else (stack.length,)
    name = next((one for one in names if fields.get(one) is not None), "")
    found = fields.count(name, MAX_COUNT)
    return max(1, found - stack.reserved) if found < MAX_COUNT else MAX_COUNT


def _stack(
    fields: _Fields, stack: Stack, name: str, dtype: str, part: str, unknown: list[str]
) -> Iterator[Attention]:  # fmt: skip
    heads, heads_kv, dim, dim_v = _heads(fields, stack, name)
    limit = _limit(fields, stack)
    mask = stack.mask
    if not stack.name and fields.get("is_decoder") is True:
        mask = CAUSAL_LAYERS
    if name in families.MASK_SWITCH and fields.get("use_bidirectional_attention"):
        mask = FULL_LAYERS
    names = (*families.DROPOUTS, "dropout_rate") if name in families.DROPOUT_RATE else families.DROPOUTS
    dropout = fields.probability(names)
    refused = " and ".join(_refusals(fields, stack, name, (dim, dim_v)))
    softcap = _softcap(fields, name)
    strange = f"not known to be covered: {', '.join(unknown)}" if unknown else ""
    title = " ".join(filter(None, (part, stack.name)))
    for kind, count in _kinds(fields, stack, name).items():
        why, reach, known = refused or strange, 0 if refused or strange else limit, bool(refused) or not strange
        window = chunk = 0
        if kind in (SLIDING, CHUNKED):
            window = fields.count(
                next((one for one in families.WINDOWS[kind] if fields.get(one) is not None), "window")
            )
            if kind == CHUNKED:
                window, chunk = 0, window if window < limit else 0
            if chunk and mask != CAUSAL_LAYERS:  # kernels/masks/chunked.py is causal
                reach = min(reach, chunk)
                why = why or f"attention in chunks without the causal mask, computed up to {chunk} tokens only"
        elif kind != FULL_KIND:
            why, reach, known = why or f"layer type {text(kind)} is not known", 0, bool(refused)
        yield Attention(
            count, heads, heads_kv, dim, dim_v, dtype, reach, kind, why, mask, title, limit, dropout,
            window, chunk, softcap, known,
        )  # fmt: skip
