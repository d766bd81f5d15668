"""Options that several commands share, and how their errors are shown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from fa2tune.spec.mask import Mask, sides_of
from fa2tune.spec.mask import checked as checked_mask
from fa2tune.spec.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from fa2tune.spec.score import NONE, Score
from fa2tune.spec.score import checked as checked_score

Command = TypeVar("Command", bound=Callable[..., Any])
Term = TypeVar("Term")

#: Exit status of a wrong call, such as one that names a file that cannot be read. 1 is an answer: there is something to do.
CALLED_WRONGLY = 2


class CannotUseError(click.ClickException):
    """Something that the command names or needs cannot be used."""

    exit_code = CALLED_WRONGLY


#: What a wrong name causes. Any other error of the operating system (a full disk, a lost connection) stops the work.
WRONG_NAMES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


@contextmanager
def shown_errors(after: str = "") -> Iterator[None]:
    """An error becomes a message: with exit status 2 for a wrong argument or file, with 1 for what stopped the work (a full
    disk, a database or GPU that is gone). ``after``: appended, what to do about it."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit):
        raise
    except (*WRONG_NAMES, ValueError) as error:
        raise CannotUseError(f"{said(error)}{after}") from error
    except (OSError, RuntimeError) as error:
        raise click.ClickException(f"{said(error)}{after}") from error


def said(error: Exception) -> str:
    """The message of an error; for one of the operating system the file and the reason, without the error number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


NO_MASK = "no mask"


class OneCall(click.Command):
    """A command about one call: an option with a value may come once. click takes the last, and `fa2tune bench` takes each."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = Counter(self.make_parser(ctx).parse_args([*args])[2])
        for option, times in given.items():
            valued = isinstance(option, click.Option) and not (option.is_flag or option.multiple)
            if valued and times > 1:
                raise click.UsageError(f"{option.opts[0]}: got it {times} times, once is allowed", ctx)
        return super().parse_args(ctx, args)


def masks(neither: str) -> Callable[[Command], Command]:
    """Options --causal and --full; a command gets ``mask``: "causal", "full", or None for neither. ``neither``: what None
    means to it. Both at once is an error."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def checked(*arguments: Any, causal: bool, full: bool, **others: Any) -> Any:
            if causal and full:
                raise click.UsageError(
                    f"--causal and --full: got both, one at most is allowed; leave both options out for {neither}"
                )
            return command(*arguments, mask="causal" if causal else "full" if full else None, **others)

        default = "default" if neither == NO_MASK else f"default: {neither}"
        made: Any = click.option("--full", is_flag=True, help=f"No mask.  [{default}]")(checked)
        return click.option("--causal", is_flag=True, help="The causal mask.")(made)

    return decorate


def window(context: click.Context, option: click.Parameter, given: Any) -> Any:
    """A callback: ``LEFT,RIGHT`` -> (left, right), as ``attention(window=...)`` takes it; None where nothing came. With
    ``multiple=True`` a list."""
    if not isinstance(given, str):
        return given and [window(context, option, text) for text in given]
    try:
        left, right = map(int, given.split(","))
        sides_of((left, right))
    except ValueError:
        raise click.BadParameter(f"got {given!r}, expected LEFT,RIGHT: two integers from -1 to 2^63 - 1") from None
    return left, right


def _as_typed(text: str) -> str:
    """``fa2tune.Mask('chunked', chunk)`` -> ``'chunked,chunk'``, as the option takes it."""
    return re.sub(r"(?:fa2tune\.)?(?:Mask|Score)\((.+?)\)", lambda of: repr(re.sub("[' ]", "", of[1])), text)


def _named(given: str | None, argument: str, number: Callable[[str], Any], made: Callable[..., Term]) -> Term | None:
    """``NAME[,VALUE...]`` -> what ``attention`` takes as ``argument``; None where nothing came."""
    if given is None:
        return None
    name, *values = given.split(",")
    try:
        numbers = [number(value) for value in values]
    except ValueError:
        what = "integers" if number is int else "numbers"
        raise click.BadParameter(f"got {given!r:.80}, expected NAME or NAME,VALUE,...: {what}") from None
    try:
        return made(name, *numbers)
    except ValueError as error:
        raise click.BadParameter(_as_typed(str(error).removeprefix(f"{argument}: "))) from None


def named_mask(context: click.Context, option: click.Parameter, given: Any) -> Any:
    """A callback: ``NAME[,VALUE...]`` -> the mask, as ``attention(mask=...)`` takes it; None where nothing came. With
    ``multiple=True`` a list."""
    if isinstance(given, tuple):
        return [named_mask(context, option, text) for text in given]
    return _named(given, "mask", int, lambda *named: checked_mask(Mask(*named)))


def named_score(context: click.Context, option: click.Parameter, given: Any) -> Any:
    """A callback: ``NAME[,VALUE...]`` -> the score term, as ``attention(score=...)`` takes it; none where nothing came. With
    ``multiple=True`` a list."""
    if isinstance(given, tuple):
        return [named_score(context, option, text) for text in given]
    return _named(given, "score", float, lambda *named: checked_score(Score(*named))) or NONE


def comma_separated(convert: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], list[Any] | None]:
    """A callback for an option that takes several values: "64,128", in an option with ``multiple=True`` also given more than
    once. Each value once, converted; None where nothing came."""

    def parse(
        context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...] | None
    ) -> list[Any] | None:
        if not value:
            return None
        text = value if isinstance(value, str) else ",".join(value)
        try:
            return list(dict.fromkeys(convert(part.strip()) for part in text.split(",")))
        except ValueError:
            raise click.BadParameter(f"got {text!r}, expected numbers with commas between") from None

    return parse


def at_least_one(text: str) -> int:
    """For ``comma_separated``: a number of 1 or more."""
    value = int(text)
    if value < 1:
        raise click.BadParameter(f"got {value}, must be at least 1")
    return value


def head_dim(context: click.Context, option: click.Parameter, value: int | None) -> int | None:
    """A callback: a head dim that the kernels support."""
    if value is not None and value not in range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP):
        raise click.BadParameter(
            f"got {value}, allowed are {MIN_HEAD_DIM} to {MAX_HEAD_DIM} in steps of {HEAD_DIM_STEP}"
        )
    return value


def head_dim_list(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[int] | None:
    """A callback of an option with ``multiple=True``: head dims that the kernels support, with commas or repeated. None: none
    came."""
    found = comma_separated(int)(context, option, values)
    for value in found or ():
        head_dim(context, option, value)
    return found


def check_folder(path: Path, hint: str) -> None:
    """The folder of an output file must exist: a missing one is most likely a typo."""
    if not path.parent.is_dir():
        raise click.BadParameter(f"got {path}, but {path.parent} is not a folder", param_hint=hint)
