"""Sets a rank up for a job, undoes that afterwards, and collects what the job has changed for later ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ...job.payload import PickledJob
from ...job.restore import make_changes, set_replaced
from ...job.state_changes import (
    UNSENT,
    StateChanges,
    Variables,
    global_generators,
    set_generators,
    variables_by_number,
)
from ...job.torch_settings import computing_with
from ...wire.payloads import Tensors
from .reader import PatchedModel

# Returns what the job has changed for later jobs (StateChanges), and notes on what cannot be sent.
Collect = Callable[[], tuple[Tensors, tuple[str, ...]]]


@contextlib.contextmanager
def set_up(
    job: PickledJob,
    model: PatchedModel,
    find_module: Callable[[str], Any],
    prepare: Callable[[type], None] = lambda kind: None,
) -> Iterator[Collect]:
    """Within this context, random generators, torch's settings, and the modules of `model` and of packs are the job's.
    `prepare`: is called with each class that a module gets. The yielded function is called once, after the job."""
    device = model.patcher.load_device
    with contextlib.ExitStack() as undo:
        undo.callback(model.hold_loaded)
        set_generators(job.random_states, device)
        undo.enter_context(computing_with(job.settings))
        undo.enter_context(model.original.restored())
        set_replaced(job.replaced, find_module, undo)
        make_changes(model.base, job.changes, undo, prepare)
        variables = Variables(job.replaced)
        objects = job.objects | variables_by_number(job.replaced) | global_generators(device)
        state = StateChanges(objects, [one.value for one in job.changes if one.kind == "attribute"])
        undo.callback(lambda: variables.put_back(state.unsent))

        def collect() -> tuple[Tensors, tuple[str, ...]]:
            variables.note()
            changes = state.packed(model.original.attributes_set(job.changes))
            return changes, (UNSENT.format(names=", ".join(state.names)),) if state.names else ()

        yield collect
