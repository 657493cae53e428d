"""The events that become toasts, each of them only once."""

from parallel_backend.observability import toasts as module
from parallel_backend.observability.toasts import Notifier
from parallel_backend.sidecar.group.events import Changed, Recovering, RequestEnded, RequestFailed, Started
from parallel_backend.sidecar.group.failures import FailingDevices

DEVICES = ("cuda:0", "cuda:1")
DONE = RequestEnded(DEVICES, "sample", "done", 1.0, None, None, strategy=None, images=1)


def failed(broken=False):
    return RequestFailed(DEVICES, 1, "killed by signal 9", crashed=True, broken=broken, reason="signal")


def test_starts_failures_and_left_out_devices_are_shown_once(monkeypatch):
    toasts, failing = [], FailingDevices()
    monkeypatch.setattr(module, "FAILING", failing)
    notifier = Notifier(toasts.append)

    def shown_after(*events):
        toasts.clear()
        for event in events:
            notifier.on_event(event)
        return [(toast.severity, toast.summary, toast.life is None) for toast in toasts]

    assert shown_after(Changed(DEVICES), Started(DEVICES, 2.5, ""), DONE, DONE) == [
        ("success", "Processes started", False)
    ]
    assert toasts[0].detail == "On cuda:0, cuda:1, in 2.5 s"
    failing.add("cuda:1")
    assert shown_after(failed(), Started(DEVICES, 2.5, "process 1 failed: killed"), DONE) == [
        ("warn", "Processes started again", False)
    ]
    assert "process 1 failed: killed" in toasts[0].detail
    failing.add("cuda:1")
    assert shown_after(failed(), DONE, DONE) == [("warn", "A device is left out", False)]
    assert "cuda:1 left out" in toasts[0].detail
    assert shown_after(failed(broken=True), DONE) == [("error", "The processes failed too often", True)]
    assert "Allow restarts" in toasts[0].detail
    assert "process 1 on cuda:1: killed by signal 9" in toasts[0].detail
    failing.clear()
    assert shown_after(DONE) == []
    failing.add("cuda:1", 2)
    assert shown_after(DONE) == [("warn", "A device is left out", False)]


def test_a_failure_is_told_at_once_and_the_start_that_follows_takes_its_place():
    toasts = []
    notifier = Notifier(toasts.append)
    words = "process 1 on cuda:1 failed (killed); the job goes on after step 52 on processes started anew"
    for event in (failed(), Recovering(DEVICES, words), Started(DEVICES, 2.5, "process 1 failed: killed")):
        notifier.on_event(event)
    for event in (failed(broken=True), Started(("cpu:0",), 1.0, ""), Started(DEVICES, 2.5, "")):
        notifier.on_event(event)
    died, again, broken, others, started = toasts
    assert (died.severity, died.detail, died.life) == ("warn", words, None)
    assert died.about == again.about and died.summary == "A process died; starting again"
    assert broken.about == started.about != others.about and broken.about
