"""What lengths the sequences of a packed call are taken to have, for arithmetic on the host, which knows their number, all rows
together and the bucket of the longest at most."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from fa2tune.spec.problem import BUCKETS, Problem

#: (queries, keys, sequences) of each length.
LengthKinds = tuple[np.ndarray, np.ndarray, np.ndarray]
MOST_KINDS = 32  #: lengths, where each sequence has one
NORMAL = NormalDist()
#: Shares of the sequences whose lengths are below the median, by length; the longer ones are half of those, and so on.
LOWER = (0.25, 0.25)
LEAST_SPREAD = 0.05  #: of logarithms, below which all have one length
GOLDEN = (math.sqrt(5) - 1) / 2
#: The longest over the mean, where it is not known: of documents rather than of equal sequences.
TOP = 4.0
#: A sequence that has so large a share of all rows, if it is as short as its bucket has it, is apart: no spread of all lengths
#: has it.
DOMINANT = 0.5


@lru_cache(maxsize=1024)
def _shares(top: float, kinds: int) -> tuple[float, ...]:
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


def _more(problem: Problem) -> tuple[int, float, float]:
    """Of other totals the fewer queries or keys vary, and each sequence has as many more of the others: (the fewer rows of all
    sequences; queries and keys that each has more)."""
    fewer = min(problem.seqlen_q, problem.seqlen_k)
    more_q, more_k = ((total - fewer) / max(1, problem.extent.given) for total in (problem.seqlen_q, problem.seqlen_k))
    return fewer, more_q, more_k


def _top(problem: Problem) -> float:
    """The longest over the mean: it has the middle of its bucket, by ratio."""
    given, (fewer, *more) = max(1, problem.extent.given), _more(problem)
    if not (bucket := problem.extent.longest):
        return min(TOP, math.sqrt(given))
    longest = (bucket / math.sqrt(2) - max(more)) * given / max(1, fewer)
    return max(
        1.0, longest if bucket > BUCKETS[0] else min(longest, TOP, math.sqrt(given))
    )  # that one has all shorter ones


@lru_cache(maxsize=1024)
def one_long(problem: Problem, longest: int) -> LengthKinds:
    """A sequence of so many queries or keys, whichever are more, as far as there are as many, and the others all alike."""
    given, (fewer, *more) = max(1, problem.extent.given), _more(problem)
    mean = fewer / given
    long = min(max(longest - max(more), mean), float(fewer))
    shares = np.array([long, (fewer - long) / (given - 1)] if given > 1 else [long])
    queries, keys = (np.rint(shares + one).astype(np.int64) for one in more)
    return queries, keys, np.array([1.0, given - 1.0][: len(shares)])


def bounds(problem: Problem) -> tuple[int, int] | None:
    """(least, most) rows of the longest sequence, by its bucket; None: the host does not know."""
    bucket, most = problem.extent.longest, max(problem.seqlen_q, problem.seqlen_k)
    least = bucket // 2 + 1
    # 0 is not known, the first one has all shorter ones, and more rows than there are is only what a caller allows for
    return None if bucket <= BUCKETS[0] or least > most else (least, min(bucket, most))


def _dominant(problem: Problem) -> int:
    """Rows of a sequence that has most of all; 0: none is known to."""
    known, most = bounds(problem), max(problem.seqlen_q, problem.seqlen_k)
    if known is None or problem.extent.given < 2 or known[0] < DOMINANT * most:
        return 0
    return round(math.sqrt(known[0] * known[1]))


def _spread(given: int, top: float) -> tuple[np.ndarray, np.ndarray]:
    """(lengths over the mean, sequences) of each kind, the longest near ``top``."""
    highest = NORMAL.inv_cdf((given - 0.375) / (given + 0.25))  # of so many
    spread = highest - math.sqrt(max(0.0, highest**2 - 2 * math.log(top)))
    if spread < LEAST_SPREAD:
        return np.ones(1), np.full(1, float(given))
    counts = given * np.array([*LOWER, *(0.5 ** (2 + nth) for nth in range(max(1, given.bit_length() - 2)))])
    counts[-1] += given - counts.sum()
    middles = (counts.cumsum() - counts / 2) / given
    shares = np.exp([spread * NORMAL.inv_cdf(middle) for middle in middles])
    return shares * given / (shares * counts).sum(), counts


@lru_cache(maxsize=1024)
def kinds(problem: Problem) -> LengthKinds:
    """The logarithms of lengths are spread as a normal distribution is, by the longest of so many; the longer, the fewer are
    taken to be of one length. Where one sequence has most of all rows it is apart, and the others are spread."""
    given, (fewer, *more) = max(1, problem.extent.given), _more(problem)
    lengths = np.zeros(0)
    if dominant := _dominant(problem):
        lengths = np.array([min(max(dominant - max(more), fewer / given), float(fewer))])
        given, fewer = given - 1, fewer - int(lengths[0])
        top = min(TOP, math.sqrt(given))
    else:
        top = min(_top(problem), given) if problem.seqlen_q == problem.seqlen_k else min(_top(problem), TOP, given)
    shares, counts = _spread(given, top)
    lengths, counts = np.append(shares * (fewer / given), lengths), np.append(counts, np.ones(len(lengths)))
    queries, keys = (np.rint(lengths + one).astype(np.int64) for one in more)
    return queries, keys, counts


@lru_cache(maxsize=1024)
def each(problem: Problem) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of every sequence. Longer and shorter ones are mixed, as their order is not known either."""
    given, (fewer, more_q, more_k) = max(1, problem.extent.given), _more(problem)
    kinds = min(given, MOST_KINDS)
    shares = _shares(min(_top(problem), kinds), kinds)
    # the golden section, by which any run of neighbours has lengths of all kinds
    mixed = sorted(range(given), key=lambda nth: nth * GOLDEN % 1)
    found = [shares[nth * kinds // given] for nth in mixed]
    unit = fewer / sum(found)
    own = [unit * share for share in found]
    return tuple((max(1, math.ceil(length + more_q)), max(1, math.ceil(length + more_k))) for length in own)
