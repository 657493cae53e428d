"""A client of a running ComfyUI that uses its HTTP API as ComfyUI's own frontend does."""

from __future__ import annotations

import json
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Prompt = dict[str, dict[str, Any]]

# Seconds.
_HTTP_TIMEOUT = 60
_POLL_INTERVAL = 0.03
_LAST_EVENT_TIMEOUT = 60
_TELL_INTERVAL = 30

# ComfyUI's binary websocket events that carry a preview image (protocol.py).
_PREVIEW_EVENTS = (1, 4)


class PromptError(Exception):
    """ComfyUI did not run the prompt to its end."""


class PromptRejected(PromptError):
    """The prompt was refused before it ran; ``node_errors`` is ComfyUI's own report, by node."""

    def __init__(self, message: str, node_errors: dict[str, Any]) -> None:
        super().__init__(message)
        self.node_errors = node_errors


class PromptFailed(PromptError):
    """A node raised; the message is its type, the exception and the exception's message."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.node_id: str = report["node_id"]
        self.node_type: str = report["node_type"]
        self.exception_type: str = report["exception_type"]
        self.exception_message: str = report["exception_message"]
        self.traceback: str = "".join(report["traceback"])
        super().__init__(
            f"{self.node_type}: {self.exception_type}: {self.exception_message}\n{self.traceback}"
        )


class PromptInterrupted(PromptError):
    """The prompt was cancelled."""


@dataclass
class Events:
    """Messages of ComfyUI to its frontend while :meth:`ComfyUIClient.listen` was open."""

    progress: list[tuple[str, int, int]] = field(default_factory=list)  # (node id, value, maximum)
    previews: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of the messages, in seconds, time.monotonic()

    def of_node(self, node_id: str) -> list[int]:
        """Returns the progress values of one node, in order."""
        return [value for node, value, _ in self.progress if node == node_id]


class ComfyUIClient:
    """One frontend's connection to the ComfyUI at ``url``; used from one thread at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client_id = uuid.uuid4().hex
        self._listener: _Listener | None = None

    def object_info(self) -> dict[str, Any]:
        """Returns every node class by id, with its inputs and outputs."""
        return self._request("/object_info")

    def queue(self, prompt: Prompt) -> str:
        """Queues a prompt in API format and returns its id.

        Raises:
            PromptRejected: ComfyUI refuses the prompt or any of its output nodes (the others would run silently).
        """
        body = {"prompt": prompt, "client_id": self.client_id}
        try:
            answer = self._request("/prompt", body)
        except urllib.error.HTTPError as error:
            answer = json.loads(error.read() or b"{}")
            if "error" not in answer:
                raise
        if answer.get("error") or answer.get("node_errors"):
            raise PromptRejected(_rejection(answer), answer.get("node_errors", {}))
        return answer["prompt_id"]

    def wait(
        self, prompt_id: str, timeout: float = 120, tell: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Waits for a queued prompt and returns its history entry (``outputs`` by node id).

        ``tell`` is called every half minute with what the wait is for.

        Raises:
            PromptFailed, PromptInterrupted: a node raised, or the prompt was cancelled.
            TimeoutError: the prompt did not end within ``timeout`` seconds and was interrupted, or ComfyUI did not
                send its last event to :meth:`listen`.
        """
        started = told = time.monotonic()
        while prompt_id not in (history := self._request(f"/history/{prompt_id}")):
            now = time.monotonic()
            if now > started + timeout:
                self.interrupt()
                raise TimeoutError(f"the prompt did not end within {timeout} s")
            if tell is not None and now > told + _TELL_INTERVAL:
                told = now
                tell(f"{now - started:.0f} s so far: {self._where(prompt_id)}")
            time.sleep(_POLL_INTERVAL)
        if self._listener is not None:
            self._listener.wait_for_end_of(prompt_id)
        entry = history[prompt_id]
        for kind, data in entry["status"]["messages"]:
            if kind == "execution_error":
                raise PromptFailed(data)
            if kind == "execution_interrupted":
                raise PromptInterrupted(f"interrupted in {data['node_type']}")
        return entry

    def _where(self, prompt_id: str) -> str:
        """Says in words where a prompt that has not ended is."""
        queue = self._request("/queue")
        if any(prompt_id in entry for entry in queue["queue_running"]):
            return "ComfyUI runs the prompt"
        waiting = [entry[1] for entry in sorted(queue["queue_pending"])]
        if prompt_id not in waiting:
            return "ComfyUI has no such prompt in its queue"
        return f"the prompt waits behind {waiting.index(prompt_id) + len(queue['queue_running'])} others"

    def run(
        self, prompt: Prompt, timeout: float = 120, tell: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Queues a prompt and waits for it, see :meth:`queue` and :meth:`wait`."""
        return self.wait(self.queue(prompt), timeout, tell)

    def interrupt(self) -> None:
        """Cancels the running prompt, as the UI's cross does."""
        self._request("/interrupt", {})

    def free(self) -> None:
        """Asks for memory, as the UI's "free model and node cache" does; ComfyUI acts when its queue is idle."""
        self._request("/free", {"unload_models": True, "free_memory": True})

    def clear_history(self) -> None:
        """Makes ComfyUI forget the prompts that have ended."""
        self._request("/history", {"clear": True})

    @contextmanager
    def listen(self) -> Iterator[Events]:
        """Collects progress, previews and messages of prompts that are queued inside the block."""
        listener = _Listener(self.url, self.client_id)
        self._listener = listener
        try:
            yield listener.events
        finally:
            self._listener = None
            listener.close()

    def view(self, image: dict[str, str]) -> bytes:
        """Returns the bytes of a saved file, named as in a history entry (``filename``, ``subfolder``, ``type``)."""
        query = urllib.parse.urlencode({key: image[key] for key in ("filename", "subfolder", "type")})
        with urllib.request.urlopen(f"{self.url}/view?{query}", timeout=_HTTP_TIMEOUT) as answer:
            return answer.read()

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT) as answer:
            content = answer.read()
        return json.loads(content) if content else {}


class _Listener:
    """The websocket of a client and the thread that reads it."""

    def __init__(self, url: str, client_id: str) -> None:
        import websocket  # a test tool; the demo does without it

        self.events = Events()
        self._ended: set[str] = set()
        self._changed = threading.Condition()
        address = url.replace("http://", "ws://")
        self._socket = websocket.create_connection(
            f"{address}/ws?clientId={client_id}", timeout=_HTTP_TIMEOUT
        )
        self._socket.settimeout(None)
        self._closed_errors = (websocket.WebSocketException, OSError)
        self._thread = threading.Thread(target=self._read, name="comfyui-events", daemon=True)
        self._thread.start()

    def wait_for_end_of(self, prompt_id: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: prompt_id in self._ended, timeout=_LAST_EVENT_TIMEOUT):
                raise TimeoutError(f"the prompt's last event did not come within {_LAST_EVENT_TIMEOUT} s")

    def close(self) -> None:
        self._socket.abort()  # wakes the thread; closing the socket would not
        self._thread.join(_LAST_EVENT_TIMEOUT)
        self._socket.shutdown()

    def _read(self) -> None:
        while True:
            try:
                frame = self._socket.recv()
            except self._closed_errors:
                return
            if not frame:
                return
            with self._changed:
                self._take(frame)
                self._changed.notify_all()

    def _take(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes):
            if struct.unpack(">I", frame[:4])[0] in _PREVIEW_EVENTS:
                self.events.previews += 1
            return
        message = json.loads(frame)
        self.events.messages.append(message)
        self.events.times.append(time.monotonic())
        data = message.get("data", {})
        if message["type"] == "progress":
            self.events.progress.append((data["node"], data["value"], data["max"]))
        elif message["type"] in ("execution_success", "execution_error", "execution_interrupted"):
            self._ended.add(data["prompt_id"])


def _rejection(answer: dict[str, Any]) -> str:
    """Returns ComfyUI's report as one text: what it says about the prompt, then about each node."""
    lines = []
    if answer.get("error"):
        error = answer["error"]
        lines.append(error if isinstance(error, str) else f"{error['message']}: {error['details']}")
    for node_id, report in answer.get("node_errors", {}).items():
        for error in report["errors"]:
            lines.append(f"node {node_id} ({report['class_type']}): {error['message']}: {error['details']}")
    return "\n".join(lines)
