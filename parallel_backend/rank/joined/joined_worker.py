"""The worker of a rank on a machine of a cluster: it uses this machine's files in place of the head's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ...cluster.model_files import find_model
from ...errors import RequestError
from ...job.payload import Head, ProcessFacts, digest_of_code
from ...models.proof.installed import version_in
from ...requests import ComfyUISource, FileContent, ModelSpec
from ...wire.protocol import Setup
from ..work.worker import RankWorker

if TYPE_CHECKING:
    from ..jobs.reader import JobReader


@dataclass(frozen=True)
class MachineFiles:
    """The folders of a machine: those with models, and ComfyUI's, None if none was given."""

    machine: str
    models: tuple[Path, ...]
    comfyui: Path | None

    def source(self, source: ComfyUISource) -> ComfyUISource:
        """Returns the head's `source` with this machine's ComfyUI folder."""
        missing = f"(machine {self.machine} was started without --comfyui)"
        return replace(source, root=str(self.comfyui or missing))

    def facts(self, there: ProcessFacts) -> ProcessFacts:
        """Returns the head's facts `there` with this machine's paths. Raises RequestError without the same ComfyUI."""
        if self.comfyui is None:
            raise RequestError(
                f"Machine {self.machine} was started without --comfyui, which a job needs; start it with ComfyUI's "
                f"folder."
            )
        version = version_in(self.comfyui)
        if version != there.version:
            raise RequestError(
                f"Machine {self.machine} has ComfyUI {version}, and the job comes from {there.version}; install the "
                f"same version on both."
            )
        packs = {
            name: (self._file(there, file), is_package) for name, (file, is_package) in there.packs.items()
        }
        return replace(there, comfyui=str(self.comfyui), packs=packs, search_path=(), folders={})

    def _file(self, there: ProcessFacts, file: str) -> str:
        """Returns the path of a pack's file at the same place in this machine's ComfyUI, or in its custom_nodes."""
        path, root = Path(file), Path(there.comfyui)
        if path.is_relative_to(root):
            return str(Path(self.comfyui or "") / path.relative_to(root))
        return str(Path(self.comfyui or "") / "custom_nodes" / path.parent.name / path.name)

    def check_packs(self, facts: ProcessFacts, head: Head) -> None:
        """Raises RequestError for a pack that this machine lacks, or has in another version."""
        for name in head.packs:
            file, is_package = facts.packs[name]
            if not Path(file).is_file():
                problem = "does not have"
            elif digest_of_code(file, is_package) != head.digests.get(name):
                problem = "has another version of"
            else:
                continue
            raise RequestError(
                f"Machine {self.machine} {problem} the pack {Path(name).name}, whose code this job runs; install the "
                f"same version there, or choose devices of this computer."
            )


class JoinedWorker(RankWorker):
    def __init__(self, setup: Setup, files: MachineFiles) -> None:
        super().__init__(setup)
        self._files = files

    @cached_property
    def _reader(self) -> JobReader:
        from ..jobs.reader import JobReader

        return JobReader(self.world, self._files.facts, self._files.check_packs)

    def _import_comfyui(self, source: ComfyUISource) -> None:
        super()._import_comfyui(self._files.source(source))

    def _locate(self, spec: ModelSpec, content: FileContent | None) -> ModelSpec:
        """Returns the model's spec with its path here. Raises an error on all ranks if one does not find the file."""

        def here() -> ModelSpec:
            assert content is not None, "a head says it to processes of other machines"
            found = find_model(self._files.models, PurePosixPath(spec.path), content, self._files.machine)
            return replace(spec, path=str(found), comfyui=spec.comfyui and self._files.source(spec.comfyui))

        return self._on_all(here, "another machine does not have the model")
