"""Runs the steps of deploy/Containerfile that need no root, in a clean folder and without a container daemon.

`python scripts/exercise_containerfile.py [FOLDER]`, with the environment's Python. The folder replaces /home/comfyui,
the local ComfyUI replaces its repository, and locally installed packages replace pip's downloads, so a required package
that is missing is an error. Then ComfyUI starts as the image starts it, on the CPU, until it is healthy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from comfyui_server import free_port
from comfyui_source import REPOSITORY, find_comfyui
from steps import SetupError, exit_on_setup_error, step

ROOT = Path(__file__).resolve().parent.parent
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
HOME = "/home/comfyui"  # in the image
_PORT = "8188"
_PATIENCE = 300  # s until ComfyUI is healthy; it takes 10 on an idle machine


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Containerfile, with its lines joined. `words`: all after its name."""

    name: str
    words: str


def read_instructions(text: str) -> list[Instruction]:
    """Returns every instruction in order, without comments."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def exercise(folder: Path) -> list[str]:
    """Runs the steps that can run in `folder`; returns in words the steps that cannot.

    Raises:
        SetupError: the folder is not empty, a step failed, or ComfyUI was not healthy in time.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SetupError(f"{folder} is not empty; name a new folder, or none for a temporary one.")
    comfyui = find_comfyui()
    if comfyui is None:
        raise SetupError("No ComfyUI found to stand for its repository; run scripts/environment.py first.")
    instructions = read_instructions(CONTAINERFILE.read_text())
    home, repository, context = folder / "home", folder / "repository", folder / "context"
    home.mkdir()
    arguments = dict(one.words.split("=", 1) for one in instructions if one.name == "ARG")
    _make_repository(comfyui, repository, f"v{arguments['COMFYUI_VERSION']}")
    _make_context(context)
    environment = {
        **os.environ,
        **arguments,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": _packages(folder / "packages"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{repository.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
    }
    left: list[str] = []
    is_root = True
    for one in instructions:
        words = one.words.replace(HOME, str(home))
        if one.name == "USER":
            is_root = False
        elif one.name == "RUN" and is_root:
            left.append(f"RUN {one.words}: needs root and a system of its own")
        elif one.name == "RUN":
            with step(f"RUN {one.words[:100]}"):
                _run(["/bin/sh", "-c", words], home, environment)
        elif one.name == "COPY":
            with step(f"COPY {one.words}"):
                copy(one.words, context, home)
    _start(instructions, home, environment)
    return [*left, "FROM: the base and its driver"]


def _start(instructions: list[Instruction], home: Path, environment: dict[str, str]) -> None:
    """Starts ComfyUI as the image does, but on the CPU and another port, and waits for the image's health check."""
    said = {one.name: one.words.replace(HOME, str(home)) for one in instructions}
    port = str(free_port())
    command = [*json.loads(said["ENTRYPOINT"]), *json.loads(said["CMD"].replace(_PORT, port)), "--cpu"]
    check = json.loads(said["HEALTHCHECK"].partition("CMD ")[2].replace(_PORT, port))
    with step("ENTRYPOINT, until HEALTHCHECK is content"), _running(command, home, environment) as process:
        deadline = time.monotonic() + _PATIENCE
        while subprocess.run(check, capture_output=True, env=environment).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (home / "comfyui.log").read_text(errors="replace").splitlines()[-30:]
                raise SetupError("ComfyUI did not become healthy:\n" + "\n".join(tail))
            time.sleep(0.2)


@contextlib.contextmanager
def _running(
    command: list[str], home: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with (home / "comfyui.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _make_repository(comfyui: Path, repository: Path, tag: str) -> None:
    """Makes a git repository of that ComfyUI with the tag that the image asks for."""
    shutil.copytree(comfyui, repository, ignore=shutil.ignore_patterns(".git", "__pycache__", "custom_nodes"))
    git = ["git", "-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-C", str(repository)]
    (repository / "custom_nodes").mkdir()
    (repository / "custom_nodes" / ".keep").touch()
    for words in (
        ["init", "--quiet"],
        ["config", "core.compression", "0"],  # a clone of it takes a fifth of the time
        ["config", "pack.window", "0"],
        ["add", "--all", "--force"],
        ["commit", "--quiet", "-m", tag],
        ["tag", tag],
    ):
        _run([*git, *words], repository, dict(os.environ))


def _packages(folder: Path) -> str:
    """Returns a PYTHONPATH with which every Python finds the packages installed here and runs their .pth files."""
    folder.mkdir()
    here = sysconfig.get_path("purelib")
    (folder / "sitecustomize.py").write_text(f"import site\n\nsite.addsitedir({here!r})\n")
    return os.pathsep.join((str(folder), here))


def _make_context(context: Path) -> None:
    """Copies the part of this checkout that the image's build may see."""
    patterns = (CONTAINERFILE.parent / "Containerfile.dockerignore").read_text().splitlines()
    context.mkdir()
    for line in patterns:
        if line.startswith("!"):
            _copy(ROOT / line[1:], context / line[1:])


def copy(words: str, context: Path, home: Path) -> None:
    """Copies from `context` into `home` as COPY does: a folder's content, or files into a folder, whose name then ends
    with a slash, or a file under another name. `words`: all after COPY."""
    *sources, target = (word for word in words.split() if not word.startswith("--"))
    for source in sources:
        is_into = target.endswith("/") and (context / source).is_file()
        _copy(context / source, home / target / source if is_into else home / target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(source, target)


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"{' '.join(command)} failed (exit {done.returncode}):\n{done.stdout}{done.stderr}")


def main() -> int:
    """Runs the steps and prints those that were left out."""
    with contextlib.ExitStack() as made:
        given = sys.argv[1:]
        folder = Path(given[0]) if given else Path(made.enter_context(tempfile.TemporaryDirectory()))
        for words in exercise(folder):
            print(f"-- not run: {words}")
    return 0


if __name__ == "__main__":
    exit_on_setup_error(main)
