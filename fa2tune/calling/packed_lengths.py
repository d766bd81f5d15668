"""What lengths the sequences of a packed call are taken to have, for arithmetic on the host, which knows their number, all rows
together and the bucket of the longest at most."""

from __future__ import annotations

from functools import lru_cache

from fa2tune.spec.problem import Problem, bucket_of

#: Lengths that stand for those of all sequences.
KINDS = 8
#: The longest over the mean, where it is not known: of documents rather than of equal sequences.
TOP = 4.0


def alike(problem: Problem) -> tuple[int, int, int]:
    """(sequences, queries of each, keys of each) of equal sequences that have as many rows in all, or nearly: of the mean
    length; where the longest is known and is of a longer bucket, fewer of ``Extent.length`` rows, as most of the work is that
    of longer ones."""
    totals, count = (problem.seqlen_q, problem.seqlen_k), max(1, problem.extent.given)
    if problem.extent.longest > bucket_of(-(-max(totals) // count), 0):
        count = min(count, max(1, round(max(totals) / problem.extent.length(max(totals)))))
    queries, keys = (-(-total // count) for total in totals)
    return count, queries, keys


@lru_cache(maxsize=1024)
def _shares(top: float) -> tuple[float, ...]:
    """KINDS numbers of mean 1, the largest near ``top``: at even distances up to 2, else each by the same ratio below the one
    before."""
    if top <= 2:
        return tuple(1 + (top - 1) * ((2 * nth + 1) / KINDS - 1) for nth in range(KINDS))
    low, high = 0.0, 1.0
    for _ in range(40):
        ratio = (low + high) / 2
        over = sum(top * ratio**nth for nth in range(KINDS)) > KINDS
        low, high = (low, ratio) if over else (ratio, high)
    found = [top * low**nth for nth in range(KINDS)]
    return tuple(share * KINDS / sum(found) for share in found)


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
