"""Errors of a config that does not compile or load on this GPU: another one is tried."""

from __future__ import annotations

from fa2tune.compiling.compiler import CompileError, HostTrouble, NoTritonError


def is_refusal(error: Exception) -> bool:
    """Whether a config does not compile or load here. By name, since Triton, whose OutOfResources it may be, need not be
    imported."""
    return isinstance(error, CompileError) or type(error).__name__ == "OutOfResources"


def cannot_be_had(error: Exception) -> bool:
    """Whether a kernel that another one may stand in for does not compile or load, or there is nothing to compile it with."""
    return is_refusal(error) or isinstance(error, NoTritonError | HostTrouble | OSError)


def without_frames(error: BaseException) -> BaseException:
    """The same error and its causes, without tracebacks: their frames hold tensors, and a frame that also holds the error makes
    a cycle that only the garbage collector frees."""
    error.__traceback__ = None
    for link in (error.__cause__, error.__context__):
        if link is not None and link.__traceback__ is not None:
            without_frames(link)
    return error
