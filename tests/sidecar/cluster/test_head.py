"""The head of a cluster: which machines may join, what hostile peers can do, and which machines it reports."""

import logging
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_machines import BareMachine, connect, make_cluster
from parallel_backend import devices
from parallel_backend.cluster import endpoint as endpoints
from parallel_backend.cluster.channel import HEADER, Kind
from parallel_backend.cluster.tls import make_certificate
from parallel_backend.errors import DeviceError, PlatformError
from parallel_backend.sidecar.cluster import head as clusters
from parallel_backend.sidecar.group.failures import FailingDevices, left_out
from parallel_backend.wire import deadlines
from parallel_backend.wire.protocol import Envelope, Progress, TakeBack, encode
from waiting import wait_until


@pytest.fixture
def secret(tmp_path, monkeypatch):
    monkeypatch.setenv(endpoints.VARIABLE, str(tmp_path))
    return make_cluster(tmp_path)


@pytest.fixture
def head(secret, no_leaks, monkeypatch):
    monkeypatch.setattr(devices, "_clusters", None)
    clusters.serve_known()
    yield clusters.open_head("lab")
    clusters.close_all()


@pytest.fixture
def join(head, secret):
    """A function that joins a machine to the cluster; its connection ends with the test."""
    with ExitStack() as joined:
        yield lambda **machine: joined.enter_context(closing(BareMachine(head, secret, **machine)))


def frame(kind, text=b"", rank=0, size=0):
    return HEADER.pack(kind, rank, len(text), size) + text


def is_at_peace(head):
    """Returns True if no connection waits for admission."""
    return not head._door


def test_a_machine_that_joined_is_a_device_set_by_name(head, join):
    machine = join(machine="b", devices=("cpu:0", "cpu:1"), memory=(0, 0))
    other = join(machine="a")
    assert machine.welcomed and other.welcomed
    wait_until(lambda: len(head.devices()) == 3)
    found = devices.resolve_devices("cluster:lab")
    assert found == ("cpu:0@lab/a", "cpu:0@lab/b", "cpu:1@lab/b")
    assert devices.resolve_devices(devices.name_devices(found[1:])) == found[1:]
    with pytest.raises(DeviceError, match="cluster:lab has no cpu:4@lab/a"):
        devices.resolve_devices("cpu:4@lab/a")


def test_an_intruder_with_another_certificate_never_joins(head, join, tmp_path, secret):
    key, certificate = make_certificate("lab machines")  # the right name, but not made for this cluster
    own = endpoints.read_endpoint(secret, endpoints.MACHINE)
    for stranger in (
        replace(own, key=key, certificate=certificate),  # another key
        replace(own, peer=certificate),  # expects another certificate of the head
    ):
        file = tmp_path / "stranger.json"
        endpoints.write_endpoint(file, stranger)
        with pytest.raises((OSError, ssl.SSLError)):
            BareMachine(head, file)
    for newest in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):  # no certificate at all; an older TLS
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = newest
        with pytest.raises(OSError), context.wrap_socket(connect(head)) as anonymous:
            anonymous.recv(1)
    wait_until(lambda: is_at_peace(head))
    assert head.devices() == ()
    assert join().welcomed  # control: the right certificate is admitted


def test_slow_clients_keep_nobody_out_and_are_sent_away(head, join, monkeypatch):
    slow = [connect(head, "127.0.0.9") for _ in range(clusters.MOST_FROM_ONE)]
    for sock in slow:
        sock.sendall(b"\x16\x03\x01")  # a TLS record that is never completed
    wait_until(lambda: head._door["127.0.0.9"] == clusters.MOST_FROM_ONE)
    with connect(head, "127.0.0.9") as one_more:
        one_more.settimeout(20)
        assert one_more.recv(1) == b""  # closed at once; the others still have ADMIT seconds
    assert join().welcomed
    assert head._door["127.0.0.9"] == clusters.MOST_FROM_ONE
    for sock in slow:
        sock.close()
    wait_until(lambda: is_at_peace(head))
    monkeypatch.setattr(deadlines, "ADMIT", 0.2)
    with connect(head) as sent_away:
        sent_away.settimeout(20)
        assert sent_away.recv(1) == b""


BAD = {
    "a kind that nobody knows": frame(77),
    "a kind that only a head sends": frame(Kind.START, b"{}"),
    "a text over the limit": HEADER.pack(Kind.MESSAGE, 0, 1 << 20, 0),
    "a payload over the limit": HEADER.pack(Kind.CARRYING, 0, 2, 1 << 60),
    "a payload where none may be": HEADER.pack(Kind.BEAT, 0, 0, 5),
    "a text that is no JSON": frame(Kind.MESSAGE, b"\x80\x04\x95."),
    "a message that nobody knows": frame(
        Kind.MESSAGE, encode(Envelope(1, 1, TakeBack())).replace(b"TakeBack", b"EvalBack")
    ),
    "a sign of life of another size": frame(Kind.BEAT, b"x" * 13),
    "a payload that never came": frame(Kind.AGAIN, encode(Envelope(1, 1, Progress(1, 1, 1.0)))),
}


@pytest.mark.parametrize("what", BAD)
def test_ten_thousand_bad_frames_end_the_machine_that_sent_them_and_no_other(what, head, join, caplog):
    caplog.set_level(logging.INFO)
    good, bad = join(machine="good"), join(machine="bad")
    try:
        for _ in range(100):
            bad.socket.sendall(BAD[what] * 100)
    except OSError:
        pass  # the head has closed it
    assert bad.is_ended()
    wait_until(lambda: set(head._machines) == {"good"})
    good.socket.sendall(frame(Kind.BEAT))
    assert join(machine="bad").welcomed
    assert len(caplog.records) < 20


def test_a_machine_that_says_nothing_is_cut_off_named_and_left_out_until_it_is_back(head, join, monkeypatch):
    monkeypatch.setattr(deadlines, "SILENCE", 1.0)
    silent = join(machine="silent")
    wait_until(lambda: head.departure_reason("silent"))
    monkeypatch.undo()
    assert silent.is_ended()
    join(machine="other")
    wait_until(lambda: len(head.devices()) == 2)
    both = ("cpu:0@lab/other", "cpu:0@lab/silent")
    assert head.devices() == both
    assert FailingDevices().among(both) == both[1:]
    assert "machine lab/silent left out until it is back: no word for 1 s" in left_out(both[1:])
    assert join(machine="silent").welcomed
    wait_until(lambda: FailingDevices().among(both) == ())


def test_a_machine_that_ended_is_waited_for_and_then_named(head, join, monkeypatch):
    join(machine="a").close()
    wait_until(lambda: not head._machines and head._gone)
    assert FailingDevices().among(("cpu:0@lab/a", "cpu:0")) == ()  # torchrun may restart it
    monkeypatch.setattr(deadlines, "MACHINES", 0.2)
    with pytest.raises(DeviceError, match=r"Machine a of the cluster lab is not there \(the connection"):
        head.wait_for(("cpu:0@lab/a",), lambda: False)
    wait_until(lambda: head.departure_reason("a"))
    clusters.drop_departed()
    assert head.devices() == ()


def test_the_machine_that_closed_first_is_named_not_one_that_ended_with_its_group(head, join, monkeypatch):
    a, b = (join(machine=name) for name in "ab")
    b.close()
    wait_until(lambda: "b" in head._gone)
    a.close()
    wait_until(lambda: "a" in head._gone)
    monkeypatch.setattr(deadlines, "MACHINES", 0.2)
    with pytest.raises(DeviceError, match=r"Machine b of the cluster lab is not there \(the connection"):
        head.wait_for(("cpu:0@lab/a", "cpu:0@lab/b"), lambda: False)


def test_machines_that_do_not_fit_are_told_why(head, join):
    join(machine="one")
    cases = [
        (join(machine="two", torch="1.0"), "torch 1.0, and ComfyUI runs"),
        (join(machine="Not A Name"), "its name"),
        (join(machine="two", devices=("tpu:0",)), "its devices"),
        (join(machine="two", devices=("cpu:\u0663",)), "its devices"),
        (join(machine="two", devices=("cpu:0", "cpu:0"), memory=(0, 0)), "it names a device twice"),
        (join(machine="two", memory=(-1,)), "a device's memory lies between 0 and"),
        (join(machine="two", memory=(2**80,)), "a device's memory lies between 0 and"),
        (join(machine="one"), "called one is there already"),
    ]
    for machine, words in cases:
        assert not machine.welcomed and words in machine.words
    assert set(head._machines) == {"one"}


class InStep:
    """Replaces a head's lock: after each use, one of two joining threads waits for the same use by the other."""

    def __init__(self, head):
        self._lock, self._check = head._changed, head._check
        self._joining, self._both = set(), threading.Barrier(2)
        head._changed, head._check = self, self._admitted

    def _admitted(self, join):
        self._joining.add(threading.get_ident())
        return self._check(join)

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        self._lock.__exit__(*error)
        if threading.get_ident() in self._joining:
            self._both.wait(20)

    def __getattr__(self, name):
        return getattr(self._lock, name)


def test_of_two_machines_of_one_name_that_join_at_once_one_is_served_and_the_other_ended(
    head, secret, monkeypatch
):
    monkeypatch.setattr(deadlines, "SILENCE", 600.0)  # the machines send nothing more
    InStep(head)  # both are admitted before either is registered
    with ThreadPoolExecutor(2) as together:
        sources = ("127.0.0.2", "127.0.0.3")
        joined = [together.submit(BareMachine, head, secret, source=source) for source in sources]
        machines = dict(zip(sources, (future.result() for future in joined), strict=True))
    assert all(machine.welcomed for machine in machines.values())
    wait_until(lambda: is_at_peace(head))
    served = machines.pop(head._machines["bare"].address)
    (other,) = machines.values()
    assert other.is_ended()
    served.socket.settimeout(20)
    assert served.socket.recv(1)  # a sign of life
    assert head.devices() == ("cpu:0@lab/bare",) and head.departure_reason("bare") == ""
    served.close()


def test_a_port_that_is_taken_is_named(head):
    endpoint = replace(head.endpoint, port=head.port)
    with pytest.raises(DeviceError, match=f"port {head.port} of 127.0.0.1 cannot be opened"):
        clusters.ClusterHead(endpoint)


@pytest.mark.parametrize("field", ["key", "certificate", "peer"])
@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_damaged_certificate_is_named_and_does_not_keep_the_pack_from_loading(secret, caplog, field, text):
    file = endpoints.head_file("lab")
    endpoint = endpoints.read_endpoint(file, endpoints.HEAD)
    endpoints.write_endpoint(file, replace(endpoint, **{field: text}))
    clusters.serve_known()
    assert "secret file of cluster lab is damaged" in caplog.text and clusters.served() == {}


def test_secret_files_that_others_can_read_or_that_are_none_are_refused(secret, tmp_path):
    with pytest.raises(PlatformError, match="is for a machine, and a head wants its own"):
        endpoints.read_endpoint(secret, endpoints.HEAD)
    secret.chmod(0o644)
    with pytest.raises(PlatformError, match=f"chmod 600 {secret}"):
        endpoints.read_endpoint(secret, endpoints.MACHINE)
    other = tmp_path / "other"
    other.write_text("{}")
    other.chmod(0o600)
    with pytest.raises(PlatformError, match="is no secret file"):
        endpoints.read_endpoint(other, endpoints.MACHINE)
    with pytest.raises(PlatformError, match="cannot be read"):
        endpoints.read_endpoint(Path("/nowhere"), endpoints.MACHINE)
