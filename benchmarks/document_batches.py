"""Batches of documents for fine-tuning: lengths as those of instruction data fall, padded micro-batches, one packed row."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

IGNORED = -100  #: the label of what is not predicted
SHORTEST, SPREAD = 4, 1.2  #: of documents: log-normal lengths

Inputs = dict[str, Any]  #: of a model's forward


def lengths(tokens: int | None, documents: int | None, longest: int, median: float, seed: int) -> list[int]:
    """Of the documents of a step: exactly ``documents``, or as many as have ``tokens``, to which the last is cut."""
    source, drawn = random.Random(seed), list[int]()
    while True:
        length = int(math.exp(source.gauss(math.log(median), SPREAD)))
        length = min(max(length, SHORTEST), longest)
        if tokens is None:
            drawn.append(length)
            if len(drawn) == documents:
                return drawn
            continue
        left = tokens - sum(drawn)
        if left - length >= SHORTEST:
            drawn.append(length)
        elif left <= longest:
            return [*drawn, left]
        else:
            return [*drawn, left - SHORTEST, SHORTEST]


def micro_batches(documents: Sequence[torch.Tensor], by_length: bool) -> list[list[torch.Tensor]]:
    """Documents that are padded together: as many as make no more positions than the step has tokens."""
    room, found = sum(map(len, documents)), list[list[torch.Tensor]]()
    longest = 0
    for text in sorted(documents, key=len) if by_length else documents:
        longest = max(longest, len(text))
        if found and (len(found[-1]) + 1) * longest <= room:
            found[-1].append(text)
        else:
            found.append([text])
            longest = len(text)
    return found


def padded(documents: Sequence[torch.Tensor]) -> Inputs:
    """One micro-batch. The first token of a document is never predicted: Transformers moves labels by one."""

    def filled(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)

    seen = [torch.ones_like(text) for text in documents]
    return {"input_ids": filled(documents, 0), "labels": filled(documents, IGNORED), "attention_mask": filled(seen, 0)}


def packed(documents: Sequence[torch.Tensor], offsets: bool) -> Inputs:
    """All documents in one row, as DataCollatorWithFlattening packs them; no document predicts the next one's first token."""
    row = torch.cat(list(documents))
    positions = torch.cat([torch.arange(len(text), device=row.device) for text in documents])
    labels = torch.where(positions == 0, IGNORED, row)
    inputs: Inputs = {"input_ids": row[None], "labels": labels[None], "position_ids": positions[None]}
    if offsets:
        sizes = torch.tensor([0, *map(len, documents)], dtype=torch.int32, device=row.device)
        starts, longest = sizes.cumsum(0, dtype=torch.int32), max(map(len, documents))
        inputs |= {f"cu_seq_lens_{side}": starts.clone() for side in "qk"}
        inputs |= {f"max_length_{side}": longest for side in "qk"}
    return inputs
