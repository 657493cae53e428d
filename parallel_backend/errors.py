"""The errors of the pack, a small hierarchy a caller can catch; each message says what, the limit, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ParallelError(Exception):
    """Base of every error this pack raises on purpose."""

    def __init_subclass__(cls) -> None:
        # ComfyUI names a pack's modules by the folder they lie in, and shows an error with its module's name.
        _, package, module = cls.__module__.rpartition("parallel_backend.")
        cls.__module__ = package + module


class PlatformError(ParallelError):
    """This operating system or installation cannot run the ranks (Windows and macOS: use WSL2 or Linux)."""


# Failures of a rank, in one word for those who count: its process was ended by a signal, exited, or by the system for
# memory; it gave no sign of life; its device or the link to its peers failed; its code raised; it closed its own link;
# it is of another version.
FAILURES = ("signal", "exit", "out_of_memory", "hang", "device", "error", "link", "version")


Nearest = tuple[tuple[str, "int | bool | str"], ...]  # (input, value) of what must change


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what a person set, in words. `inputs`: those of Strategy Selector it lies in;
    `nearest`: the changes that lead to the nearest settings that can run, empty where nobody knows."""

    message: str
    inputs: tuple[str, ...] = ()
    nearest: Nearest = ()


class SettingsError(ParallelError):
    """Settings of a person that cannot run. `problems`: each wrong thing, for those who show it where it was set."""

    inputs: tuple[str, ...] = ()  # where it lies, unless told otherwise

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
    """A device was named that does not exist, or is named twice. `device`: the one that a rank did not find, None where
    the settings name them wrongly."""

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
    """A rank died, stopped answering, or raised something unforeseen.

    `rank` is the one that failed first (not its victims), `cause` says how in words. `crashed`: its process, device or
    link failed, which may go well the next time; False for an error that the code raised and would raise again.
    `reason`: one of FAILURES. `rank` is None where all failed together and none is known to have been first.
    """

    def __init__(self, rank: int | None, cause: str, *, crashed: bool = False, reason: str = "error") -> None:
        super().__init__(f"{'the processes' if rank is None else f'process {rank}'} failed: {cause}")
        self.rank = rank
        self.cause = cause
        self.crashed = crashed
        self.reason = reason

    @property
    def summary(self) -> str:
        """The first line of `cause`: other lines are the traceback of a process."""
        return self.cause.split("\n", 1)[0]

    def device_of(self, devices: Sequence[str]) -> str | None:
        """The device of the rank that failed first, among those of all ranks."""
        return None if self.rank is None else devices[self.rank]

    def who(self, device: str | None) -> str:
        """In words. `device`: device_of."""
        return "all processes" if device is None else f"process {self.rank} on {device}"


# Under which a rank reports that its device or the link to its peers failed.
RANK_CRASHED = "RankCrashed"

# Errors a rank may report over the link by name; anything else arrives as RankFailed.
_WIRE_ERRORS: dict[str, type[ParallelError]] = {
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


def to_wire(error: BaseException) -> tuple[str, str]:
    """Name and message under which a rank reports `error`."""
    name = type(error).__name__
    if name in _WIRE_ERRORS:
        return name, str(error)
    return "RankFailed", f"{name}: {error}"


def from_wire(kind: str, message: str, rank: int, device: str | None = None) -> ParallelError:
    """The error a rank reported, as the type the caller can catch; `device`: of a DeviceError."""
    if kind == DeviceError.__name__:
        return DeviceError(message, device=device)
    if kind in _WIRE_ERRORS:
        return _WIRE_ERRORS[kind](message)
    crashed = kind == RANK_CRASHED
    return RankFailed(rank, message, crashed=crashed, reason="device" if crashed else "error")
