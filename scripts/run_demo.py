"""Sets up the environment and samples the demo picture in it (the body of scripts/demo)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from environment import ROOT, become, prepare
from steps import exit_on_setup_error


def parse_options() -> argparse.Namespace:
    """Parses the command line of scripts/demo."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Sample one small picture on several processes and on one, in a real ComfyUI, and compare.",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="GPUs, or CPU processes without GPUs (default 2)"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "demo_output", help="folder for pictures and log"
    )
    parser.add_argument(
        "--comfyui", type=Path, help="ComfyUI to use (default: COMFYUI_PATH, then the usual places)"
    )
    parser.add_argument("--keep-open", action="store_true", help="leave ComfyUI's UI running until Ctrl+C")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks: two or more, so that there is something to compare with one")
    return options


def main() -> NoReturn:
    """Replaces this process by the demo and does not return."""
    options = parse_options()
    environment = prepare(options.comfyui)
    become(environment, Path(__file__).with_name("sample_demo.py"), *sys.argv[1:])


if __name__ == "__main__":
    exit_on_setup_error(main)
