"""What files of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hopper_builds import Asked, Built, builder, chosen


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[Asked], Built]]:
    """The binaries of a file's cases, each by what its ``asked`` is."""
    with builder([case.asked for case in chosen(request)]) as build:
        yield build
