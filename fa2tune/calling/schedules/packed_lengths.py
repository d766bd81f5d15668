"""What lengths the sequences of a packed call are taken to have, for arithmetic on the host, which knows their number, all rows
together and the bucket of the longest at most."""

from __future__ import annotations

import math
from functools import lru_cache

from fa2tune.spec.problem import BUCKETS, Problem

#: Lengths that stand for those of all sequences.
KINDS = 8
MOST_KINDS = 32  #: where each sequence has one
GOLDEN = (math.sqrt(5) - 1) / 2
#: The longest over the mean, where it is not known: of documents rather than of equal sequences.
TOP = 4.0


@lru_cache(maxsize=1024)
def _shares(top: float, kinds: int = KINDS) -> tuple[float, ...]:
    """Numbers of mean 1, the largest near ``top``: at even distances up to 2, else by the same ratio."""
    if top <= 2:
        return tuple(1 + (top - 1) * ((2 * nth + 1) / kinds - 1) for nth in range(kinds))
    low, high = 0.0, 1.0
    for _ in range(40):
        ratio = (low + high) / 2
        over = sum(top * ratio**nth for nth in range(kinds)) > kinds
        low, high = (low, ratio) if over else (ratio, high)
    found = [top * low**nth for nth in range(kinds)]
    return tuple(share * kinds / sum(found) for share in found)


def unlike(problem: Problem) -> tuple[float, tuple[tuple[int, int], ...]]:
    """(sequences of each kind, (queries, keys) of each kind): lengths on both sides of the mean, so that what a tile reaches
    past a sequence's end counts as for lengths that are no multiple of anything. Of other totals, the fewer queries or keys
    vary, and each sequence has as many more of the others."""
    given = max(1, problem.extent.given)
    queries, keys = problem.seqlen_q, problem.seqlen_k
    if given == 1:
        return 1.0, ((queries, keys),)
    fewer = min(queries, keys)
    known = problem.extent.longest and queries == keys
    shares = _shares(min(max(1.0, problem.extent.longest * given / fewer if known else TOP), given, KINDS))
    more_q, more_k = (queries - fewer) / given, (keys - fewer) / given
    varied = [fewer * share / given for share in shares]
    return given / KINDS, tuple((round(own + more_q), round(own + more_k)) for own in varied)


@lru_cache(maxsize=1024)
def each(problem: Problem) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of every sequence, where the longest one matters: it has the middle of its bucket, by ratio. Longer and
    shorter ones are mixed, as their order is not known either."""
    given = max(1, problem.extent.given)
    fewer = min(problem.seqlen_q, problem.seqlen_k)
    more_q, more_k = ((total - fewer) / given for total in (problem.seqlen_q, problem.seqlen_k))
    top = min(TOP, math.sqrt(given))
    if bucket := problem.extent.longest:
        longest = (bucket / math.sqrt(2) - max(more_q, more_k)) * given / max(1, fewer)
        top = max(1.0, longest if bucket > BUCKETS[0] else min(longest, top))  # the first one has all shorter ones, too
    kinds = min(given, MOST_KINDS)
    shares = _shares(min(top, kinds), kinds)
    # the golden section, by which any run of neighbours has lengths of all kinds
    mixed = sorted(range(given), key=lambda nth: nth * GOLDEN % 1)
    found = [shares[nth * kinds // given] for nth in mixed]
    unit = fewer / sum(found)
    own = [unit * share for share in found]
    return tuple((max(1, math.ceil(length + more_q)), max(1, math.ceil(length + more_k))) for length in own)
