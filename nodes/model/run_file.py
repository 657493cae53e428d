"""The weights file of a sampling run: pinned when the run begins, and compared with its path when it ends."""

from __future__ import annotations

from ...parallel_backend.wire.file_identity import FileIdentity, read_identity, result_note


class RunFile:
    """The file at `path` for one run after the other. `identity`: the running one's, None between runs."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.identity: FileIdentity | None = None

    def begin(self) -> None:
        """Pins the file that is there now. Raises CheckpointError where there is none."""
        self.identity = read_identity(self._path)

    def end(self) -> tuple[str, ...]:
        """Lets the file go; says what a change of it means for the run's result."""
        identity, self.identity = self.identity, None
        note = "" if identity is None else result_note(self._path, identity)
        return (note,) if note else ()
