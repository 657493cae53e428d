"""The worker of a rank on a machine of a cluster: as any other, but that files are this machine's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NoReturn

from ...cluster.model_files import find_model
from ...engine.comm.groups import World
from ...errors import RequestError
from ...requests import ComfyUISource, LoadInfo, ModelSpec
from ...wire.payloads import Tensors
from ...wire.protocol import Load, LoadVae, Setup
from ..outcome.errors import PeerFailed
from ..vae_worker import VaeWorker
from ..work.worker import RankWorker


@dataclass(frozen=True)
class OwnFiles:
    """What a machine has: the folders of its models, and ComfyUI's, None where nobody said."""

    machine: str
    models: tuple[Path, ...]
    comfyui: Path | None

    def source(self, source: ComfyUISource | None) -> ComfyUISource | None:
        """As the head has it, with this machine's folder."""
        if source is None:
            return None
        missing = f"(machine {self.machine} was started without --comfyui)"
        return replace(source, root=str(self.comfyui or missing))


class JoinedWorker(RankWorker):
    def __init__(self, setup: Setup, own: OwnFiles) -> None:
        super().__init__(setup)
        self._own = own
        self.vae = _JoinedVae(self.world, self._all_good, own)

    def run_job(self, *args: object, **kwargs: object) -> NoReturn:
        """Reads no pickles: its head is another machine's ComfyUI."""
        raise RequestError(
            "A machine of a cluster runs no jobs that are shipped whole; choose other devices."
        )

    def _locate(self, message: Load) -> ModelSpec:
        """All ranks find the file or none goes on: what comes next they do together."""
        spec, error = message.spec, None
        try:
            assert message.content is not None, "a head says it to ranks of other machines"
            found = find_model(self._own.models, PurePosixPath(spec.path), message.content, self._own.machine)
            spec = replace(spec, path=str(found), comfyui=self._own.source(spec.comfyui))
        except Exception as failure:
            error = failure
        if not self._all_good(error):
            raise error or PeerFailed("another machine does not have the model")
        return spec


class _JoinedVae(VaeWorker):
    def __init__(self, world: World, all_good: Callable[[Exception | None], bool], own: OwnFiles) -> None:
        super().__init__(world, all_good)
        self._own = own

    def load(self, message: LoadVae, tensors: Tensors) -> LoadInfo:
        return super().load(replace(message, comfyui=self._own.source(message.comfyui)), tensors)
