"""``cu_seqlens`` of documents that lie one after the other, from what data loaders give: positions or documents of tokens."""

from __future__ import annotations

from numbers import Integral

import torch

from fa2tune.calling.arguments import check_dense
from fa2tune.calling.distributed import whole

_LIBRARY = torch.library.Library("fa2tune", "FRAGMENT")
_LIBRARY.define("document_offsets(Tensor begins) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def cu_seqlens(
    *, position_ids: torch.Tensor | None = None, document_ids: torch.Tensor | None = None, sequences: int | None = None
) -> torch.Tensor:
    """Offsets of packed documents, as ``attention_varlen`` takes them; of tensors (batch, length, heads, head_dim) flatten the
    first two dimensions. Make them once a batch: all layers share them.

    Args:
        position_ids: (batch, length) or (total,) integers: a token whose position is not that of the one before it plus 1
            begins a document.
        document_ids: the same in place of it: a token whose number is not that of the one before it begins a document.
            Numbers may come back; such tokens are another document.
        sequences: how many documents there are at most. With it nothing waits for the GPU; more of them are an error, which a
            GPU reports later, as a failed assertion. None: the host waits for their number.

    Returns:
        int32, (sequences + 1,). Each row of a batch begins a document. Behind the last document the end is repeated, without
        ``sequences`` up to a power of two of documents, so that few numbers of them are met: each is a plan of its own.

    Raises:
        TypeError: not just one of position_ids and document_ids, or it is no tensor of integers; sequences is no integer.
        ValueError: it has not one or two dimensions; sequences is below 1.
        RuntimeError: on the CPU, there are more documents than ``sequences``.
    """
    given = {"position_ids": position_ids, "document_ids": document_ids}
    said = {name: tensor for name, tensor in given.items() if tensor is not None}
    if len(said) != 1:
        raise TypeError(f"cu_seqlens: got {' and '.join(said) or 'neither'}, takes one of {' and '.join(given)}")
    ((name, numbers),) = said.items()
    numbers = whole(name, numbers)
    check_dense(name, numbers)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {numbers.dtype}, must be integers")
    if numbers.dim() not in (1, 2):
        raise ValueError(f"{name}: got shape {tuple(numbers.shape)}, must be (batch, length) or (total,)")
    numbers = numbers.long()  # one more than the largest number of a narrow type is another document
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[..., 1:] = numbers[..., 1:] != numbers[..., :-1] + (1 if name == "position_ids" else 0)
    if sequences is None:
        offsets: torch.Tensor = torch.ops.fa2tune.document_offsets(begins)
        return offsets
    if isinstance(sequences, bool) or not isinstance(sequences, (Integral, torch.SymInt)):
        raise TypeError(f"sequences: got {sequences!r:.80}, must be an integer or None")
    if sequences < 1 or sequences >= 1 << 31:
        raise ValueError(f"sequences: got {sequences}, must be from 1 to 2^31 - 1")
    return _up_to(begins.flatten(), sequences)


def _up_to(begins: torch.Tensor, sequences: int) -> torch.Tensor:
    """Offsets of at most so many documents; (total,) bool. Nothing waits."""
    count = begins.cumsum(0)
    torch._assert_async((count <= sequences).all(), f"sequences: got {sequences}, there are more documents")
    ordinals = torch.arange(1, sequences + 2, device=begins.device)
    return torch.searchsorted(count, ordinals).to(torch.int32)  # the total, for those that are not there


def _document_offsets(begins: torch.Tensor) -> torch.Tensor:
    starts = begins.flatten().nonzero().squeeze(1)
    documents = 1 << max(0, len(starts) - 1).bit_length()
    spare = documents + 1 - len(starts)
    return torch.nn.functional.pad(starts, (0, spare), value=begins.numel()).to(torch.int32)


def _document_offsets_fake(begins: torch.Tensor) -> torch.Tensor:
    return begins.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32)


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("document_offsets", _document_offsets, _key)
torch.library.register_fake("fa2tune::document_offsets", _document_offsets_fake, lib=_LIBRARY)
