"""What of a model's attention fa2tune computes; which tuning keys it needs on a GPU, which row serves each, and what closes
the gaps."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fa2tune.calling import choosing
from fa2tune.calling.advice import refresh_command
from fa2tune.fleet.modelconfig import Attention, Model
from fa2tune.gpus import Gpu
from fa2tune.rows import lookup
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import PREDICTED
from fa2tune.spec.key import TuningKey
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band, row_mask_named
from fa2tune.spec.problem import BACKWARD, BUCKETS, SPLIT, STRATEGIES, WORKLOAD_TOKENS, Problem, bucket_of
from fa2tune.spec.score import NONE, Score, score_of

OWN = "own row"  #: for this very key, made with this toolchain
STALE = "stale row"  #: for this very key, made with another
OTHER_ROW = "other row"  #: of another key, which serves it
NO_ROW = "default config"  #: no row serves
STANDINGS = (OWN, STALE, OTHER_ROW, NO_ROW)


COVERED, PARTLY, NOT_COVERED = "covered", "partly covered", "not covered"
UNKNOWN = "not known to be covered"  #: something that bears on attention is not understood
VERDICTS = (COVERED, PARTLY, NOT_COVERED, UNKNOWN)


@dataclass(frozen=True)
class Verdict:
    """Whether fa2tune computes a model's attention, whatever rows there are."""

    word: str  #: one of VERDICTS
    reasons: tuple[str, ...]  #: what is not covered, or not understood, and why

    @property
    def line(self) -> str:
        return f"{self.word}: {'; '.join(self.reasons)}" if self.reasons else self.word


def verdict(model: Model, asked: Iterable[int] = (), training: bool = True) -> Verdict:
    """Of a model at ``asked`` lengths, or at all that it allows; ``training``: forward and backward, with the config's
    dropout."""
    asked = list(asked)
    served = 0
    missing: Counter[tuple[str, str]] = Counter()  # (part, why) -> layers
    unknown = [f"{name} is not understood" for name in model.unknown]
    for attention in model.attentions:
        within = [length for length in asked if length <= attention.limit]
        if asked and not within:
            continue  # this part never has such lengths
        served += min(within, default=1) <= attention.longest
        if attention.not_covered and max(within, default=attention.limit) > attention.longest:
            if attention.known:
                missing[attention.part, attention.not_covered] += attention.layers
            elif not unknown:
                unknown.append(attention.not_covered)
        if training and attention.dropout and attention.longest:
            why = f"attention dropout {attention.dropout:g} in training is not computed; inference has none"
            missing[attention.part, why] += attention.layers
    grouped: dict[str, dict[str, int]] = {}  # why -> part -> layers: a reason that several parts share is said once
    for (part, why), count in missing.items():
        grouped.setdefault(why, {})[part] = count
    reasons = [*model.refused, *(f"{_parts(parts)}: {why}" for why, parts in grouped.items()), *model.partly]
    if unknown:
        return Verdict(UNKNOWN, (*unknown, *reasons))
    if not reasons and served:
        return Verdict(COVERED, ())
    return Verdict(PARTLY if served else NOT_COVERED, tuple(reasons) or ("it has no attention at these lengths",))


def _parts(parts: Mapping[str, int]) -> str:
    """Parts of a model and their layers: "encoder: 12 layers", "encoder (12 layers), decoder (12 layers)"."""
    if len(parts) == 1:
        ((part, count),) = parts.items()
        return f"{part}{': ' if part else ''}{layer_count(count)}"
    return ", ".join(f"{part} ({layer_count(count)})" if part else layer_count(count) for part, count in parts.items())


def shortfalls(found: Verdict, needed: Iterable[Need]) -> tuple[str, ...]:
    """What keeps a model from being served completely; empty: every layer is computed, and a row serves every key. A row that
    is stale, or of another key, serves."""
    needed = list(needed)
    without = sum(need.standing == NO_ROW for need in needed)
    said = {
        COVERED: "", PARTLY: "some of the attention is not computed", NOT_COVERED: "the attention is not computed",
        UNKNOWN: "something in the config is not understood",
    }[found.word]  # fmt: skip
    rows = f"no row serves {without} of {len(needed)} keys, so the default config does" if without else ""
    return tuple(filter(None, (said, rows)))


def layer_count(count: int) -> str:
    """A number of layers for people."""
    return f"{count} layer{'s' if count != 1 else ''}"


@dataclass(frozen=True)
class Need:
    """A tuning key that a model asks for, and how it would be served."""

    key: TuningKey
    answer: lookup.Answer | None
    mask: Mask = FULL  #: no row was measured with a window or chunks: rows without serve it
    score: Score = NONE  #: nor with a score term
    default_is_faster: bool = False  #: whether the documented default was measured to be faster than portable ones

    @property
    def standing(self) -> str:
        """One of STANDINGS."""
        if self.answer is None:
            return NO_ROW
        if self.answer.row.key != self.key or not self.measured:
            return OTHER_ROW
        return STALE if self.answer.stale else OWN

    @property
    def measured(self) -> bool:
        """Whether rows are measured with this mask and this score term."""
        return self.mask.measured and self.score == NONE

    @property
    def step(self) -> str:
        return self.answer.step if self.answer else "no row serves"


def lengths(attention: Attention, asked: Iterable[int] = ()) -> list[int]:
    """The length buckets that a kind of attention needs: those of ``asked`` lengths, else all that it may reach."""
    asked = list(asked)
    if attention.longest < 1:
        return []
    if asked:
        return sorted({bucket_of(length, length) for length in asked if length <= attention.longest})
    last = bucket_of(attention.longest, attention.longest)
    return [bucket for bucket in BUCKETS if bucket <= last]


def _problem(attention: Attention, bucket: int, mask: str) -> Problem:
    length = min(bucket, attention.longest)
    return Problem(
        attention.dtype, max(1, WORKLOAD_TOKENS // bucket), attention.heads_q, attention.heads_kv, length, length,
        attention.head_dim, attention.head_dim_v, _mask(attention, mask).fitted(length, length),
        score=score_of(attention.softcap),
    )  # fmt: skip


def _mask(attention: Attention, name: str) -> Mask:
    """Of this name, with the window or the chunks that the layer has; without the causal mask a window reaches as far to the
    right, and chunks are left out: no mask has them."""
    whole = row_mask_named(name)
    if attention.chunk and whole == CAUSAL:
        return Mask("chunked", attention.chunk)
    reach = attention.window - 1  # tokens beside the query's own
    return band(reach, 0 if whole == CAUSAL else reach) if attention.window else whole


def needs(
    attention: Attention, gpu: Gpu, layers: Sequence[Layer], toolchain: lookup.Toolchain, *,
    buckets: Iterable[int], mask: str | None = None, training: bool = True, deterministic: bool = False,
) -> list[Need]:  # fmt: skip
    """What one kind of attention needs at these lengths: the forward; for training the choice of the backward's strategy
    (where it is not settled by ``deterministic``) and the kernels of the strategy that would be taken. ``mask``: "full" or
    "causal"; None: as the attention is."""
    found = []
    for bucket in buckets:
        problem = _problem(attention, bucket, mask or attention.mask)
        chooser = choosing.Chooser(problem, gpu, layers, toolchain)
        answers = {"fwd": chooser.find("fwd")[0]}
        if training:
            split = deterministic and choosing.choose_in_order(chooser) is None
            strategy, kinds = (SPLIT, {}) if split else chooser.strategy(False)
            if not split:
                answers[BACKWARD] = chooser.find_backward(False)[0]
            answers |= {kernel: chooser.find(kernel, kinds.get(kernel))[0] for kernel in STRATEGIES[strategy]}
        for kernel, answer in answers.items():
            key, faster = choosing.key_of(problem, kernel, gpu), bool(chooser.better_default(kernel))
            found.append(Need(key, answer, problem.mask, problem.score, faster))
    return found


def commands(found: Iterable[Need], present: bool, cache: str | None = None) -> list[str]:
    """What to run so that every key has a fresh row of its own. ``present``: whether the GPU is in this machine; ``cache``: the
    file for new rows, None for the user's.

    A row that measured another key or a sibling GPU is better evidence than a prediction for the key itself, and lookup would
    prefer the prediction; and a default that was measured to be faster stands before predictions of portable kernels. So an
    absent GPU is only tuned from here where no row serves and the default is a portable one; the other commands say on which
    machine to run them."""
    found = list(found)
    measure = {
        _searched(need)
        for need in found
        if need.standing == OTHER_ROW or (need.standing == NO_ROW and need.default_is_faster)
    }
    gaps: dict[tuple[object, ...], tuple[set[str], set[int]]] = {}
    for need in found:
        # no tune measures windows, chunks and soft caps yet
        if need.standing == NO_ROW or (need.standing == OTHER_ROW and need.measured):
            key = need.key
            there = not present and _searched(need) in measure
            about = (key.gpu, key.head_dim, key.head_dim_v, key.dtype, key.mask, there)
            kernels, buckets = gaps.setdefault(about, (set(), set()))
            kernels.add(key.kernel)
            buckets.add(key.bucket)
    into = f" --cache {shlex.quote(cache)}" if cache else ""
    lines = []
    for (gpu, dim, dim_v, dtype, mask, elsewhere), (kernels, buckets) in gaps.items():
        pass_ = "fwd" if kernels == {"fwd"} else "bwd" if "fwd" not in kernels else "both"
        line = f"on a machine with {gpu}: fa2tune tune" if elsewhere else f"fa2tune tune --gpu {shlex.quote(str(gpu))}"
        line += f" --headdim {dim}"
        line += f" --headdim-v {dim_v}" if dim_v != dim else ""
        line += f" --dtype {dtype} --{mask} --pass {pass_}"
        if buckets != set(BUCKETS):
            line += f" --seqlen {','.join(map(str, sorted(buckets)))}"
        lines.append(line + into)
    for need in found:
        if need.answer and need.standing == STALE:
            timed = need.answer.row.obtained != PREDICTED  # what was predicted is checked anywhere
            where = f"on a machine with {need.key.gpu}: " if timed and not present else ""
            lines.append(where + refresh_command(need.answer.layer))
    return list(dict.fromkeys(lines))


def _searched(need: Need) -> tuple[object, ...]:
    """What one ``fa2tune tune`` command tunes together."""
    key = need.key
    return key.gpu, key.head_dim, key.head_dim_v, key.dtype, key.mask, key.kernel == "fwd"
