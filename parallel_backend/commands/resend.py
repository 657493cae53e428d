"""`python -m parallel_backend resend`: resends, each once, the prompts that a ComfyUI had not run when it ended."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any, TextIO

from ..errors import RequestError
from ..observability.logs.queue_log import VARIABLE, Entry, QueueLogFolder

_TIMEOUT = 150.0  # s; ComfyUI validates a prompt before it answers, and the front door waits 120
_COOKIE = "COMFYUI"  # with this cookie the front door keeps a session on one ComfyUI
_LONGEST_WAIT = 120.0  # s; upper bound for the Retry-After of an answer 429


class _Unreachable(Exception):
    """No ComfyUI has answered. `accepted`: True if one may have received the request nevertheless."""

    def __init__(self, why: str, *, accepted: bool) -> None:
        super().__init__(why)
        self.accepted = accepted


@dataclass(frozen=True)
class _Answer:
    status: int
    body: dict[str, Any]
    session: str  # the cookie's value, "" for none
    retry_after: float


@dataclass(frozen=True)
class _Target:
    """A ComfyUI, or the front door of several. `token`: the front door's, "" for none; `trust`: for its certificate."""

    url: str
    token: str
    trust: ssl.SSLContext | None

    def ask(self, path: str, session: str, body: dict[str, Any] | None = None) -> _Answer:
        """Sends a GET, or a POST of `body`, and returns the answer. Raises _Unreachable if no ComfyUI answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        if session:
            request.add_header("Cookie", f"{_COOKIE}={session}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT, context=self.trust) as answer:
                status, headers, content = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, headers, content = error.code, error.headers, error.read()
        except (OSError, ValueError, http.client.HTTPException) as error:
            refused = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
            raise _Unreachable(f"{self.url} does not answer: {error}", accepted=not refused) from None
        try:
            found = json.loads(content)
        except ValueError:
            found = {}
        known = found if isinstance(found, dict) else {}
        if status in (502, 503, 504):
            why = known.get("error", "nobody is behind it")
            raise _Unreachable(f"{self.url} answers {status}: {why}", accepted=status != 503)
        cookie = SimpleCookie("; ".join(headers.get_all("Set-Cookie") or ())).get(_COOKIE)
        wait = headers.get("Retry-After", "")
        seconds = float(wait) if wait.isdigit() else 1.0
        return _Answer(status, known, cookie.value if cookie else session, seconds)

    def knows(self, prompt_id: str, session: str) -> bool:
        """Returns True if the prompt waits, runs or has ended at the session's ComfyUI."""
        queue = self.look("/queue", session).body
        items = [*queue.get("queue_running", ()), *queue.get("queue_pending", ())]
        if any(item[1] == prompt_id for item in items):
            return True
        return prompt_id in self.look(f"/history/{prompt_id}", session).body

    def look(self, path: str, session: str) -> _Answer:
        answer = self.ask(path, session)
        if answer.status != 200:
            reason = _reason(answer) or "no ComfyUI is there"
            raise RequestError(f"{self.url}{path} answers {answer.status}: {reason}")
        return answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", nargs="+", type=Path, help=f"folders that {VARIABLE} named, of ComfyUIs that ended"
    )
    parser.add_argument("--to", metavar="URL", help="a ComfyUI or a front door; without it, a list")
    parser.add_argument("--token-file", type=Path, help="file with the front door's token for a program")
    parser.add_argument("--certificate", type=Path, help="a file: one to trust that no authority signed")


def run(args: argparse.Namespace) -> int:
    """Sends or lists the open prompts; returns 1 if some are left. Raises RequestError for a bad file or address."""
    target = None
    if args.to is not None:
        if not args.to.startswith(("http://", "https://")):
            raise RequestError(f"--to is {args.to}; it must begin with http:// or https://.")
        try:
            token = args.token_file.read_text().strip() if args.token_file else ""
            trust = ssl.create_default_context(cafile=args.certificate) if args.certificate else None
        except (OSError, ssl.SSLError) as error:
            raise RequestError(f"The token or the certificate cannot be read: {error}") from None
        target = _Target(args.to.rstrip("/"), token, trust)
    sent, left = set[str](), 0
    for path in args.logs:
        try:
            log = QueueLogFolder(path, create=False)
        except OSError as error:
            raise RequestError(f"{path} cannot be used: {error.strerror}.") from None
        try:
            left += _list(log) if target is None else _send_all(log, target, sent)
        finally:
            log.close()
    if target is not None:
        _tell(f"{len(sent)} prompts sent, {left} left")
    return 1 if left else 0


def _list(log: QueueLogFolder) -> int:
    for entry in (found := log.read_open()).values():
        nodes = len(entry.request["prompt"])
        doubt = ", may have been sent" if entry.sending is not None else ""
        _tell(f"{entry.prompt_id}  {nodes} nodes{_without(entry)}{doubt}")
    return len(found)


def _send_all(log: QueueLogFolder, target: _Target, sent: set[str]) -> int:
    """Sends and logs the open prompts, and returns the number of those left. `sent`: ids already sent in this run."""
    left = 0
    for entry in log.read_open().values():
        try:
            if entry.prompt_id in sent or _send(log, target, entry):
                log.remove([entry.prompt_id])
                sent.add(entry.prompt_id)
                _tell(f"{entry.prompt_id}  sent{_without(entry)}")
                continue
        except _Unreachable as error:
            again = "Run this again when it answers; a prompt that it has is not sent twice."
            _tell(f"{entry.prompt_id}  not sent: {error}. {again}", sys.stderr)
        left += 1
    return left


def _send(log: QueueLogFolder, target: _Target, entry: Entry) -> bool:
    """Sends the prompt unless the target already has it. Returns True if the target has it now."""
    if entry.sending is not None and target.knows(entry.prompt_id, entry.sending):
        return True
    # A new session: a front door chooses the ComfyUI that has least to do.
    session = target.look("/queue", "").session
    if target.knows(entry.prompt_id, session):
        return True
    log.write(replace(entry, sending=session))
    body = {**entry.request, "prompt_id": entry.prompt_id}
    try:
        while (answer := target.ask("/prompt", session, body)).status == 429:
            time.sleep(min(answer.retry_after, _LONGEST_WAIT))
    except _Unreachable as error:
        if not error.accepted:
            log.write(replace(entry, sending=None))
        raise
    if answer.status == 200:
        return True
    log.write(replace(entry, sending=None))
    _tell(f"{entry.prompt_id}  refused with {answer.status}: {_reason(answer)}", sys.stderr)
    return False


def _tell(words: str, stream: TextIO | None = None) -> None:
    (stream or sys.stdout).write(f"{words}\n")


def _reason(answer: _Answer) -> str:
    error = answer.body.get("error", "")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error)


def _without(entry: Entry) -> str:
    return f", without {', '.join(entry.left_out)}" if entry.left_out else ""
