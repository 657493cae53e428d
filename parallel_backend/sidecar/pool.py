"""The live sidecars of this process, one per device set; node objects hold no processes, so this registry does.

They lock their GPUs against other processes. Bench, the doctor and the GPU check have sidecars of their own, which
lock none.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from functools import partial

from ..errors import Cancelled, ParallelError, RequestError
from ..requests import LoadInfo, ModelSpec
from ..strategy import ParallelStrategy
from .cluster import head as clusters
from .group.failures import FAILING
from .group.lease import State
from .sidecar import Sidecar

_RUNNING = (State.STARTING, State.READY, State.RUNNING, State.ASLEEP)

log = logging.getLogger(__name__)

_sidecars: dict[tuple[str, ...], Sidecar] = {}
_lock = threading.RLock()  # reentrant: a stop under it calls listeners, which may call all_sidecars
_owner = os.getpid()


def get_sidecar(devices: tuple[str, ...]) -> Sidecar:
    """Returns the sidecar of this device set and starts nothing. First stops others that use one of its devices."""
    devices = tuple(devices)
    with _lock:
        for other in [key for key in _sidecars if key != devices and set(key) & set(devices)]:
            _sidecars.pop(other).stop()
        if devices not in _sidecars:
            _sidecars[devices] = Sidecar(devices, exclusive=True)
        return _sidecars[devices]


def running_within(devices: tuple[str, ...]) -> Sidecar | None:
    """Returns the running sidecar with the most ranks among those that use no device outside `devices`, or None."""
    with _lock:
        within = [s for key, s in _sidecars.items() if set(key) <= set(devices) and s.state in _RUNNING]
    return max(within, key=lambda sidecar: len(sidecar.devices), default=None)


def preload(devices: tuple[str, ...], spec: ModelSpec, strategy: ParallelStrategy) -> LoadInfo:
    """Calls Sidecar.preload on these devices; starts their ranks if there are none. Raises RequestError if that would
    end other ranks on some of the devices."""
    with _lock:
        for key, other in _sidecars.items():
            if key != devices and set(key) & set(devices) and other.state in _RUNNING:
                raise RequestError(
                    f"Nothing was loaded: it belongs on {', '.join(devices)}, and processes on {', '.join(key)} would "
                    f"end for it. Stop those, or choose the same devices."
                )
        sidecar = get_sidecar(devices)
    return sidecar.preload(spec, strategy)


def leave_room_for(devices: tuple[str, ...], spec: ModelSpec, size: int) -> None:
    """Calls Sidecar.leave_room_for on these devices, unless other ranks run on one of them."""
    with _lock:
        if not any(key != devices for key in _running_on(devices)):
            get_sidecar(devices).leave_room_for(spec, size)


def prepare(devices: tuple[str, ...], spec: ModelSpec) -> None:
    """Calls Sidecar.prepare on these devices, unless ranks run, or have failed, on one of them."""
    with _lock:
        if _running_on(devices):
            return
        sidecar = get_sidecar(devices)
    sidecar.prepare(spec)


def _running_on(devices: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the devices of each sidecar that has started, or tried to, on one of these."""
    return [
        key for key, other in _sidecars.items() if set(key) & set(devices) and other.state is not State.DOWN
    ]


def all_sidecars() -> tuple[Sidecar, ...]:
    """Returns every sidecar of the registry, started or not."""
    with _lock:
        return tuple(_sidecars.values())


def put_to_sleep(spec: ModelSpec) -> None:
    """Discards `spec` on idle ranks that hold it; the ranks and their other models stay. The next request for `spec`
    loads it again."""
    for sidecar in all_sidecars():
        if spec in sidecar.models and sidecar.state is State.READY:
            alone = set(sidecar.models) == {spec}
            _let_go(sidecar, sidecar.sleep if alone else partial(sidecar.drop, spec))


def give_back(spec: ModelSpec, device: str) -> None:
    """Frees what `spec` takes of `device` if its ranks are idle. Ranks on other devices keep their parts."""
    for sidecar in all_sidecars():
        if device in sidecar.devices and spec in sidecar.models and sidecar.state is State.READY:
            _let_go(sidecar, partial(sidecar.give_back, spec, device))


def drop_modules() -> None:
    """Makes idle ranks drop the text encoders and VAEs that they hold on GPUs."""
    for sidecar in all_sidecars():
        if sidecar.held.has_modules_on_devices and sidecar.state is State.READY:
            _let_go(sidecar, sidecar.drop_modules)


def module_bytes(device: str, number: int | None = None) -> int:
    """Returns the bytes of `device` that text encoders and VAEs occupy now. `number`: counts this one alone."""
    return sum(sidecar.held.module_bytes(device, number) for sidecar in all_sidecars())


def _let_go(sidecar: Sidecar, ask: Callable[[], object]) -> None:
    try:
        ask()
    except Cancelled:  # the ranks were stopped, or serve another request
        log.info("parallel sampling: the processes on %s keep their memory", ", ".join(sidecar.devices))
    except ParallelError:
        log.warning("parallel sampling: processes did not give their memory back", exc_info=True)


def bytes_on(spec: ModelSpec, device: str) -> int:
    """Returns the bytes of `device` memory that ranks hold for `spec` now."""
    return sum(sidecar.held.bytes_on(spec, device) for sidecar in all_sidecars())


def reset() -> None:
    """Lets groups that failed too often start again, and uses devices again that were left out."""
    FAILING.clear()
    clusters.drop_departed()
    for sidecar in all_sidecars():
        if sidecar.state is State.BROKEN:
            sidecar.stop()  # clears its failures


def stop_all() -> None:
    """Ends every rank of this process and empties the registry."""
    with _lock:
        while _sidecars:
            _sidecars.popitem()[1].stop()


def _at_exit() -> None:
    if os.getpid() == _owner:  # a forked child must leave its parent's ranks alone
        stop_all()


atexit.register(_at_exit)
