"""`python -m parallel_backend <command>`: tools that run without ComfyUI, such as checks and benchmarks."""

from __future__ import annotations

import argparse
import os
import sys

from .commands import cluster, resend
from .commands import doctor_command as doctor
from .commands.bench import command as bench
from .errors import ParallelError

# Each command is a module with add_arguments(parser) and run(args) -> exit status.
COMMANDS = {
    "doctor": doctor,
    "bench": bench,
    "resend": resend,
    "cluster": cluster,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parallel_backend", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").partition(": ")[2]
        module.add_arguments(commands.add_parser(name, help=text, description=text))
    args = parser.parse_args(argv)
    try:
        status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return status
    except ParallelError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except BrokenPipeError:  # `… | head` has read enough; buffered output must not be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
