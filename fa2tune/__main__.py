"""The command ``fa2tune``, and ``python -m fa2tune``, also from a bare checkout.

Imports only the standard library, so that Ctrl-C while click is imported ends as it does later: one line, no traceback.
"""

from __future__ import annotations

import sys
from contextlib import suppress

INTERRUPTED = 130  # 128 + SIGINT, as fa2tune.cli._output has it


def main() -> None:
    """Run the command line; exits with its status."""
    try:
        from fa2tune.cli import main as command

        command(prog_name="fa2tune")
    except KeyboardInterrupt:  # before the command line could catch it
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed, or None
            closed = "\n" if sys.stderr.isatty() else ""  # the line on which the terminal shows ^C
            sys.stderr.write(f"{closed}fa2tune: interrupted\n")
            sys.stderr.flush()
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
