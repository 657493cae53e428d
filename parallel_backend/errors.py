"""The errors of the pack, a small hierarchy a caller can catch; each message says what, the limit, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ParallelError(Exception):
    """Base of every error this pack raises on purpose."""

    def __init_subclass__(cls) -> None:
        # ComfyUI names a pack's modules by the pack's folder, and shows an error with its module's name.
        _, package, module = cls.__module__.rpartition("parallel_backend.")
        cls.__module__ = package + module


class PlatformError(ParallelError):
    """This operating system or installation cannot run the ranks (Windows and macOS: use WSL2 or Linux)."""


# Kinds of rank failure, for metrics and logs. signal: a signal ended the process; exit: it exited; out_of_memory: the
# system ended it to free memory; hang: it gave no sign of life; device: its device or the link to its peers failed;
# error: its code raised; link: it closed its control link; version: it runs another version of the pack.
FAILURES = ("signal", "exit", "out_of_memory", "hang", "device", "error", "link", "version")


Nearest = tuple[tuple[str, "int | bool | str"], ...]  # (input, new value) of each setting that must change


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a person's settings. `message`: the text to show; `inputs`: the inputs of Strategy
    Selector that cause it; `nearest`: the changes that give the nearest settings that can run, empty if unknown."""

    message: str
    inputs: tuple[str, ...] = ()
    nearest: Nearest = ()


class SettingsError(ParallelError):
    """A person's settings cannot run. `problems`: each thing that is wrong, so that it can be shown at its input."""

    inputs: tuple[str, ...] = ()  # the inputs at fault, unless the constructor gets others

    def __init__(
        self,
        message: str,
        *,
        inputs: tuple[str, ...] | None = None,
        nearest: Nearest = (),
        problems: tuple[Problem, ...] = (),
    ) -> None:
        super().__init__(message)
        self.problems = problems or (Problem(message, self.inputs if inputs is None else inputs, nearest),)


class DeviceError(SettingsError):
    """A device was named that does not exist, or was named twice. `device`: the one that a rank did not find; None if
    the settings are at fault."""

    inputs = ("devices",)

    def __init__(self, message: str, *, device: str | None = None, nearest: Nearest = ()) -> None:
        super().__init__(message, nearest=nearest)
        self.device = device


class StrategyError(SettingsError):
    """A strategy breaks one or more rules; the message lists each, with the nearest valid setting."""


class CheckpointError(ParallelError):
    """A weights file is refused; the message names the file and the reason. The group stays usable."""


class RequestError(ParallelError):
    """A request is malformed or asks for what the ranks cannot honour. The group stays usable."""


class Cancelled(ParallelError):
    """The caller cancelled the request. The group stays warm."""


class OutOfMemory(ParallelError):
    """A rank ran out of device or host memory."""


class TransportError(ParallelError):
    """A frame or tensor payload on the control link is not what the protocol allows."""


class RankFailed(ParallelError):
    """A rank died, stopped answering, or raised an unexpected error.

    `rank`: the one that failed first, not its victims; None if all failed and the first one is unknown. `cause`: the
    failure in words. `crashed`: True if its process, device or link failed, so that a retry may succeed; False if its
    code raised an error and would raise it again. `reason`: one of FAILURES.
    """

    def __init__(self, rank: int | None, cause: str, *, crashed: bool = False, reason: str = "error") -> None:
        super().__init__(f"{'the processes' if rank is None else f'process {rank}'} failed: {cause}")
        self.rank = rank
        self.cause = cause
        self.crashed = crashed
        self.reason = reason

    @property
    def summary(self) -> str:
        """The first line of `cause`; the other lines are a process's traceback."""
        return self.cause.split("\n", 1)[0]

    def device_of(self, devices: Sequence[str]) -> str | None:
        """Returns the device of the rank that failed first. `devices`: the devices of all ranks, in rank order."""
        return None if self.rank is None else devices[self.rank]

    def who(self, device: str | None) -> str:
        """Returns who failed, in words. `device`: the result of device_of."""
        return "all processes" if device is None else f"process {self.rank} on {device}"


# The error name under which a rank reports that its device or the link to its peers failed.
RANK_CRASHED = "RankCrashed"

# Errors that a rank may report over the link by name; any other error arrives as RankFailed.
WIRE_ERRORS: dict[str, type[ParallelError]] = {
    error.__name__: error
    for error in (
        PlatformError,
        DeviceError,
        StrategyError,
        CheckpointError,
        RequestError,
        Cancelled,
        OutOfMemory,
        TransportError,
    )
}


def from_wire(kind: str, message: str, rank: int, device: str | None = None) -> ParallelError:
    """Returns a rank's reported error as the type that callers catch. `device`: the device, for a DeviceError."""
    if kind == DeviceError.__name__:
        return DeviceError(message, device=device)
    if kind in WIRE_ERRORS:
        return WIRE_ERRORS[kind](message)
    crashed = kind == RANK_CRASHED
    return RankFailed(rank, message, crashed=crashed, reason="device" if crashed else "error")
