"""`resend` sends each prompt once, whatever stops it on the way. A stand-in for ComfyUI fails on request."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from parallel_backend.__main__ import main
from parallel_backend.observability.logs.queue_log import Entry, QueueLogFolder

IDS = ("a", "b", "c")


class Target(ThreadingHTTPServer):
    """Accepts prompts. `fail`: by prompt id, a status for its next request, or `silent`: accepted without an answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken: list[dict] = []
        self.tokens: list[str | None] = []
        self.fail: dict[str, int | str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Target

    def do_GET(self) -> None:
        known = [body["prompt_id"] for body in self.server.taken]
        if self.path == "/queue":
            self._answer({"queue_running": [], "queue_pending": [[0, name] for name in known[1:]]})
        else:
            name = self.path.rpartition("/")[2]
            self._answer({name: {}} if name in known[:1] else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.tokens.append(self.headers["Authorization"])
        fault = self.server.fail.pop(body["prompt_id"], None)
        if isinstance(fault, int):
            return self._answer({"error": {"message": "it cannot"}}, fault)
        self.server.taken.append(body)
        if fault is None:
            self._answer({"prompt_id": body["prompt_id"]})
        return None  # silent: the connection closes without an answer

    def _answer(self, said: dict, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Retry-After", "0")
        self.send_header("Set-Cookie", "COMFYUI=a; Path=/")
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def target():
    with Target() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def queue_log(tmp_path):
    log = QueueLogFolder(tmp_path / "queue")
    for number, name in enumerate(IDS):
        request = {"prompt": {"1": {}}, "client_id": "page", "extra_data": {}}
        log.write(Entry(name, float(number), request, ("api_key_comfy_org",) if name == "b" else ()))
    log.close()
    return log.path


def _taken(target: Target) -> list[str]:
    return [body["prompt_id"] for body in target.taken]


def test_what_is_open_is_sent_once_under_its_own_id(queue_log, target, capsys):
    assert main(["resend", str(queue_log)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a  1 nodes",
        "b  1 nodes, without api_key_comfy_org",
        "c  1 nodes",
    ]
    token = queue_log.with_name("token")
    token.write_text("a token\n")
    assert main(["resend", str(queue_log), "--to", target.url, "--token-file", str(token)]) == 0
    assert _taken(target) == list(IDS) and target.taken[0]["client_id"] == "page"
    assert target.tokens == ["Bearer a token"] * 3
    assert capsys.readouterr().out.endswith("3 prompts sent, 0 left\n")
    assert main(["resend", str(queue_log), "--to", target.url]) == 0
    assert _taken(target) == list(IDS)


@pytest.mark.parametrize(
    ("fault", "session", "order"),
    [("silent", "a", ["a", "b", "c"]), (400, None, ["a", "c", "b"]), (503, None, ["a", "c", "b"])],
    ids=["its answer was lost", "refused", "not now"],
)
def test_one_that_fails_stays_in_the_log_for_the_next_time_and_is_sent_once(
    queue_log, target, capsys, fault, session, order
):
    target.fail["b"] = fault
    assert main(["resend", str(queue_log), "--to", target.url]) == 1
    assert "b  " in capsys.readouterr().err
    log = QueueLogFolder(queue_log)
    assert {name: entry.sending for name, entry in log.read_open().items()} == {"b": session}
    log.close()
    assert main(["resend", str(queue_log), "--to", target.url]) == 0
    assert _taken(target) == order


def test_a_limit_is_waited_for(queue_log, target):
    target.fail["b"] = 429
    assert main(["resend", str(queue_log), "--to", target.url]) == 0
    assert _taken(target) == list(IDS)


def test_what_two_logs_have_is_sent_once(queue_log, target, tmp_path):
    copy = shutil.copytree(queue_log, tmp_path / "copy")
    assert main(["resend", str(queue_log), str(copy), "--to", target.url]) == 0
    assert _taken(target) == list(IDS)


def test_files_and_addresses_that_make_no_sense_are_refused(queue_log, target, tmp_path, capsys):
    def refusal(*arguments: str) -> str:
        assert main(["resend", *arguments]) == 2
        return capsys.readouterr().err

    assert "must begin with http" in refusal(str(queue_log), "--to", "127.0.0.1:8188")
    assert "cannot be used: No such file" in refusal(str(tmp_path / "none"), "--to", target.url)
    assert "cannot be read" in refusal(
        str(queue_log), "--to", target.url, "--token-file", str(tmp_path / "none")
    )
    held = QueueLogFolder(queue_log)
    assert "belongs to a ComfyUI that is running" in refusal(str(queue_log), "--to", target.url)
    held.close()
    assert target.taken == []
