"""Races and numerics checks of code for GPUs without wgmma, on a Hopper GPU (``launching/ported.py``): what a tuning run's
measuring processes call where they would call ``measure`` and ``verify`` for a GPU that is there. They run nothing else.

Importing this changes the process: its kernels are ported from here on."""

from __future__ import annotations

from fa2tune.launching import ported
from fa2tune.measuring import measure, verify

ported.begin()

race = measure.race
check = verify.check
check_backward = verify.check_backward
