"""`python -m parallel_backend doctor`: examines installation and machine, and says what to do about what is wrong."""

from __future__ import annotations

import argparse
import json
import shutil
import sys

_WIDTHS = (80, 100)  # columns: a bug report shows as many without a scroll bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        default="",
        help="'0,1', 'all' or 'cpu:2'; all GPUs if not given, or two ranks on the CPU",
    )
    # Of who starts it with itself: ComfyUI's button. The ranks end with the doctor in the same way.
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 where something is broken, else 0. Raises DeviceError for devices that do not exist."""
    if args.parent:
        from ...wire.parent_death import die_with_parent

        die_with_parent(args.parent)
    from .examine import examine

    devices: tuple[str, ...] = ()
    if args.devices:
        from ...devices import resolve_devices

        devices = resolve_devices(args.devices)
    report = examine(devices, on_phase=_report_progress)
    if args.json:
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")
    else:
        width = min(max(shutil.get_terminal_size().columns, _WIDTHS[0]), _WIDTHS[1])
        sys.stdout.write(report.as_text(width) + "\n")
    return report.exit_status


def _report_progress(text: str) -> None:
    """Writes it beside the report, not into it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{text} …\n")
