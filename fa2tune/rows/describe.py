"""A config, and what a row launches, in words on half a line."""

from __future__ import annotations

from fa2tune.rows.row import Row
from fa2tune.spec.problem import BACKWARD, Config
from fa2tune.spec.variant import OPTIONS, WARP_SPECIALIZED, implementation_of

#: Kernel whose row a pass is filed under -> the pass, for people.
PASSES = {"fwd": "forward", BACKWARD: "backward"}


def describe(config: Config) -> str:
    """A config on half a line: "128x64 pointer first w8 s3 r168 heads-per-wave=4"."""
    both = "BLOCK_M" in config and "BLOCK_N" in config
    parts = [f"{config['BLOCK_M']}x{config['BLOCK_N']}"] if both else []
    if "num_warps" in config and implementation_of(config) == WARP_SPECIALIZED:
        parts.append(WARP_SPECIALIZED)
    parts += [value for value in config.values() if isinstance(value, str)]
    parts += [short + str(config[name]) for name, short in zip(OPTIONS, "wsr", strict=True) if config.get(name)]
    for name, value in sorted(config.items(), reverse=True):
        said = name in OPTIONS or (both and name in ("BLOCK_M", "BLOCK_N")) or isinstance(value, str) or value is False
        if not said:
            word = name.lower().replace("_", "-")
            parts.append(word if value is True else f"{word}={value}")
    return " ".join(parts)


def described_row(row: Row) -> str:
    """What a row launches, on half a line: its config; of a whole backward the strategy and its kernels' implementations."""
    if row.key.kernel != BACKWARD:
        return describe(row.config) or row.implementation
    implementations = ", ".join(f"{kernel} {name}" for kernel, name in row.config.items())
    return f"{row.strategy}: {implementations}" if implementations else row.filed_as
