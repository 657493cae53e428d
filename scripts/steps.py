"""Messages about which step runs and how long it took, and subprocesses whose output is shown if they fail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_LOG_LINES_SHOWN = 25


class SetupError(Exception):
    """A step cannot be done; the message says what, why and what the user can do."""


@contextmanager
def step(title: str) -> Iterator[None]:
    """Prints ``title`` when the block starts, and its duration in seconds when it ends."""
    print(f"-- {title}", flush=True)
    started = time.monotonic()
    yield
    print(f"   done in {time.monotonic() - started:.1f} s", flush=True)


def run_logged(
    command: Sequence[str | Path], *, log: Path, remedy: str, timeout: float | None = None, **popen: object
) -> None:
    """Runs ``command`` with its output appended to ``log``.

    Raises:
        SetupError: the command failed (the message shows the end of its output), or ran longer than ``timeout``
            seconds. The message ends with ``remedy``.
    """
    words = [str(part) for part in command]
    with log.open("a") as output:
        output.write(f"\n$ {' '.join(words)}\n")
        output.flush()
        start_of_output = output.tell()
        try:
            code = subprocess.run(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=timeout,
                **popen,
            ).returncode
        except subprocess.TimeoutExpired:
            raise SetupError(f"'{words[0]}' did not finish within {timeout:.0f} s. {remedy}") from None
    if code:
        with log.open() as written:
            written.seek(start_of_output)
            tail = written.read().splitlines()[-_LOG_LINES_SHOWN:]
        shown = "\n".join(f"   | {line}" for line in tail)
        raise SetupError(
            f"A command failed (exit {code}): {' '.join(words)}\n{shown}\n{remedy}\nFull log: {log}"
        )


def exit_on_setup_error(main: object) -> None:
    """Runs ``main()`` and exits with its code; a :class:`SetupError` becomes a message, not a traceback."""
    try:
        sys.exit(main())
    except SetupError as error:
        print(f"\nERROR: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr, flush=True)
        sys.exit(130)
