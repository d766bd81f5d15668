"""The query heads of a key head as one head of as many more queries, without a mask, or causal: the same sums, by tiles whose
rows may be of two heads, so that those of few queries are full. Nothing is copied: rows of several heads that lie at one stride
are those of one.

FlashAttention-3 (Shah et al. 2024) gathers such rows inside its kernel ("PackGQA"), for any mask. Which calls:
``calling/merging.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from fa2tune.spec.mask import CAUSAL, FULL, STACKED, Mask
from fa2tune.spec.problem import HEADS_FIRST, QUERIES_FIRST, Problem
from fa2tune.spec.score import NONE


def merged(problem: Problem) -> Problem:
    """The problem with one query head a key head."""
    mask = Mask(STACKED, problem.group) if problem.mask == CAUSAL else problem.mask
    return replace(
        problem, heads_q=problem.heads_kv, seqlen_q=problem.group * problem.seqlen_q, mask=mask, stacked=""
    )  # fmt: skip


def can(problem: Problem) -> bool:
    """Whether its kernels compute the same: no pair is masked, or it is causal and rows of a query come one after the other."""
    masks = (FULL, CAUSAL) if problem.stacked == QUERIES_FIRST else (FULL,)
    return (
        problem.stacked != ""
        and problem.mask in masks
        and problem.score == NONE
        and problem.dtype != "fp32"  # whose lse has a second plane
        and not problem.is_empty
    )


def lies(tensor: torch.Tensor, order: str) -> bool:
    """Whether rows of the heads of (batch, heads, seqlen, ...) lie at one stride so, HEADS_FIRST or QUERIES_FIRST."""
    _, heads, rows = tensor.shape[:3]
    _, of_heads, of_rows = tensor.stride()[:3]
    if rows == 1:  # whose stride says nothing
        return of_heads > 0
    return of_heads == rows * of_rows if order == HEADS_FIRST else of_rows == heads * of_heads


def stacked(tensors: Sequence[torch.Tensor], heads_kv: int) -> str:
    """``Problem.stacked`` of (batch, heads_q, seqlen_q, ...) tensors."""
    heads_q = tensors[0].shape[1]
    if heads_q == heads_kv or 0 in tensors[0].shape:
        return ""
    for order in (HEADS_FIRST, QUERIES_FIRST) if heads_kv == 1 else (HEADS_FIRST,):
        if all(map(partial(lies, order=order), tensors)):
            return order
    return ""


def view(tensor: torch.Tensor, heads_kv: int, order: str) -> torch.Tensor:
    """(batch, heads_kv, group * seqlen_q[, dim]) of a tensor with query heads whose rows lie so, the same memory."""
    batch, heads, rows, *dim = tensor.shape
    entry, of_heads, of_rows, *last = tensor.stride()
    step = of_rows if order == HEADS_FIRST and rows > 1 else of_heads
    group = heads // heads_kv
    sizes, strides = (batch, heads_kv, group * rows, *dim), (entry, group * of_heads, step, *last)
    return tensor.as_strided(sizes, strides, tensor.storage_offset())


def lse_ordered(lse: torch.Tensor, order: str) -> torch.Tensor:
    """(batch, heads, seqlen) with rows one after the other in memory as ``order`` has them; itself, where they lie so."""
    if order == QUERIES_FIRST:
        return lse.transpose(1, 2).contiguous().transpose(1, 2)
    return lse.contiguous()
