"""What public calls run by Python start with (tests/public_gpu.py). A file's own fixture comes before one of its name here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from public_gpu import PublicGpu


@pytest.fixture
def poison() -> Iterator[None]:
    """torch.empty fills with NaN."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def gpu() -> Iterator[PublicGpu]:
    from public_gpu import public_gpu  # few files of this folder run kernels

    with public_gpu() as found:
        yield found
