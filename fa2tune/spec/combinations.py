"""What combines with what: the one table. Errors are worded from it, and docs/drop-ins.md prints it
(benchmarks/combinations_table.py). tests/interpreter/test_combinations.py runs every pair of features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Features of fa2tune's own calls -> how they are asked for. Any two combine, but for ``CONFLICTS``.
FEATURES: Mapping[str, str] = {
    "causal": "`causal=True`",
    "window": "`window=`",
    "mask": "`mask=`",
    "softcap": "`softcap=`",
    "score": "`score=`",
    "layout": '`layout="bshd"`',
    "packed sequences": "`cu_seqlens_q`, `cu_seqlens_k`",
    "used lengths": "`seqused_q`, `seqused_k`",
    "grouped heads": "fewer heads of k and v",
    "head dim of V": "another head dim of v",
    "lse": "`return_lse=True`, and gradients through lse",
    "deterministic": "`deterministic=True`",
    "torch.compile": "`torch.compile(fullgraph=True)`",
}


class Clash(NamedTuple):
    """Two features that do not combine."""

    one: str
    other: str
    why: str


_ONE_MASK = "a call takes one of mask=, causal= and window="
_PADDING = "allowed is padding in front of them and behind them: both count positions, and fa2tune leaves padding out"
#: Of ``FEATURES``.
CONFLICTS = (
    Clash("mask", "causal", _ONE_MASK),
    Clash("mask", "window", _ONE_MASK),
    Clash("score", "softcap", "a call takes one of score= and softcap="),
    Clash("packed sequences", "layout", "tensors are (total, heads, head_dim)"),
    Clash("used lengths", "layout", "tensors are (total, heads, head_dim)"),
)
#: What Transformers can ask for and its drop-in refuses.
IN_TRANSFORMERS = (
    Clash("a window", "padding between the tokens of a row", _PADDING),
    Clash("chunks", "padding between the tokens of a row", _PADDING),
    Clash("chunks", "packed sequences", "allowed are position_ids that restart, from Transformers 5.23 on"),
    Clash("chunks", "several queries behind a cache that has dropped keys", "allowed is one query behind a cache"),
    Clash("chunks", "torch.compile or a CUDA graph", "the mask's size is not known there"),
)


def why(one: str, other: str) -> str:
    """Why two features do not combine. KeyError: they do."""
    found = {frozenset(pair[:2]): pair.why for pair in (*CONFLICTS, *IN_TRANSFORMERS)}
    return found[frozenset((one, other))]


@dataclass(frozen=True)
class Absent:
    """A feature that fa2tune does not have. ``neutral``: values of its argument that ask for nothing."""

    what: str
    neutral: tuple[Any, ...] = (None,)
    instead: str = ""  #: what to do about it


#: Argument of another library -> what it would need.
LACKING: Mapping[str, Absent] = {
    "dropout_p": Absent("attention dropout", (0, None), "set it to 0"),
    "dropout": Absent("attention dropout", (0, None), "set the model's attention dropout to 0, or call model.eval()"),
    "alibi_slopes": Absent("ALiBi"),
    "learnable_sink": Absent("attention sinks"),
    "s_aux": Absent("attention sinks"),
    "sinks": Absent("attention sinks"),
    "attn_mask": Absent("masks as tensors"),
    "attention_mask": Absent("masks as tensors"),
    "attn_bias": Absent("a bias on the scores"),
    "position_bias": Absent("a bias on the scores"),
    "score_mod": Absent("functions of the scores", (None,), "write a file of kernels/scores/"),
    **dict.fromkeys(("score_mod_bwd", "aux_tensors", "aux_scalars"), Absent("functions of the scores")),
    "mask_mod": Absent("functions as masks", (None,), "write a file of kernels/masks/"),
    **dict.fromkeys(
        ("block_mask", "block_sparse_tensors", "block_sparse_tensors_bwd", "full_block_cnt", "full_block_idx",
         "mask_block_cnt", "mask_block_idx", "block_size"),
        Absent("block masks"),
    ),
    **dict.fromkeys(("cache_seqlens", "k_cache", "v_cache"), Absent("a key/value cache")),
    "block_table": Absent("a paged key/value cache"),
    "page_table": Absent("a paged key/value cache"),
    "cache": Absent("a paged key/value cache (continuous batching)"),
    "cu_total_m_blocks": Absent("schedules from outside"),
    "cu_total_n_blocks": Absent("schedules from outside"),
    "num_splits": Absent("a number of splits", (None, 0, 1)),
    "seqlen_k_per_split": Absent("a number of splits"),
    "qv": Absent("a second product in the scores (absorbed latent attention)"),
    "gather_kv_indices": Absent("keys chosen by a list"),
    **dict.fromkeys(("indices", "block_indices"), Absent("keys chosen by a list")),
    "gather_bwd_recompute_p": Absent("keys chosen by a list", (None, False)),
    "gather_bwd_token_chunk": Absent("keys chosen by a list"),
    "output_attentions": Absent("attention probabilities", (None, False), 'attn_implementation="eager" has them'),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), Absent("fp8")),
}  # fmt: skip
#: Of torch.func and autograd, which no call takes -> what to do.
TRANSFORMS: Mapping[str, str] = {
    "torch.vmap": "put the mapped dimension into the batch dimension of q, k and v",
    "torch.func.grad": "use torch.autograd.grad, and that for torch.func's vjp and jacrev, too",
    "forward-mode differentiation": "use the backward",
    "differentiating twice": "gradients are those of one backward",
}

#: Calls, and of each feature what they take.
CALLS = ("`attention`", "`attention_varlen`", "flash-attn 2", "FlashAttention-4", "`varlen_attn`", "Transformers")
_ALL, _NONE = ("yes",) * len(CALLS), "no argument"
TAKEN: Mapping[str, tuple[str, ...]] = {
    "causal, no mask": _ALL,
    "windows": _ALL,
    "chunks and other masks (`mask=`)": ("yes", "yes", _NONE, _NONE, _NONE, "Llama 4"),
    "soft cap": ("yes", "yes", "yes", "yes", _NONE, "yes"),
    "other score terms (`score=`)": ("yes", "yes", _NONE, _NONE, _NONE, _NONE),
    "packed sequences": (_NONE, *_ALL[1:]),
    "used lengths (`seqused_q`, `seqused_k`)": (_NONE, "yes", _NONE, "yes", "`seqused_k`", _NONE),
    "grouped-query heads": _ALL,
    "head dim of V differs": _ALL,
    "gradients, also through lse": (*_ALL[:-1], "no lse"),
}
