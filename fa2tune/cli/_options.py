"""What several commands ask for, and how they are told that it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from fa2tune.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM

Command = TypeVar("Command", bound=Callable[..., Any])

#: Exit code of a command that was called wrongly, one that names a file that cannot be read included. 1 is an answer: there is
#: something to do.
CALLED_WRONGLY = 2


class CannotUseError(click.ClickException):
    """Something that the command names, or needs, cannot be used."""

    exit_code = CALLED_WRONGLY


#: What a wrong name does; any other error of the operating system (a full disk, a connection cut) stops the work.
WRONG_NAMES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


@contextmanager
def told(after: str = "") -> Iterator[None]:
    """What is wrong with an argument or a file, as a message and exit code 2; what stopped the work (a full disk, a database
    that is away, a GPU that is gone), as a message and exit code 1. ``after``: what to do about it."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit):
        raise
    except (*WRONG_NAMES, ValueError) as error:
        raise CannotUseError(f"{said(error)}{after}") from error
    except (OSError, RuntimeError) as error:
        raise click.ClickException(f"{said(error)}{after}") from error


def said(error: Exception) -> str:
    """An error for people: of one of the operating system's the file and what is wrong, not its number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def masks(neither: str) -> Callable[[Command], Command]:
    """Options --causal and --full, of which a command gets ``causal``: True, False, or None for neither. ``neither``: what that
    means to it. Both is an error, not the last of the two."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def checked(*arguments: Any, causal: bool, full: bool, **others: Any) -> Any:
            if causal and full:
                raise click.UsageError(
                    f"--causal and --full: got both, one at most is allowed; leave both options out for {neither}"
                )
            return command(*arguments, causal=True if causal else False if full else None, **others)

        made: Any = click.option("--full", is_flag=True, help=f"No mask only.  [default: {neither}]")(checked)
        return click.option("--causal", is_flag=True, help="The causal mask only.")(made)

    return decorate


def head_dim(context: click.Context, option: click.Parameter, value: int | None) -> int | None:
    """A callback: one that a kernel can have."""
    if value is not None and value not in range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP):
        raise click.BadParameter(
            f"got {value}, allowed are {MIN_HEAD_DIM} to {MAX_HEAD_DIM} in steps of {HEAD_DIM_STEP}"
        )
    return value


def check_folder(path: Path, hint: str) -> None:
    """A file that is to be written needs a folder that is there: one that is not is a typo more often than a wish."""
    if not path.parent.is_dir():
        raise click.BadParameter(f"got {path}, but {path.parent} is no folder", param_hint=hint)
