"""Notes for the user on how ranks computed a request, which its report shows."""

from __future__ import annotations

from collections.abc import Iterator

SCALES = (
    "quantised layers scale what they compute on by its largest value, and each device has its own rows and tokens, "
    "so the result is close to one device's, not equal"
)
INSEPARABLE_ROWS = (
    "this model takes the rows of a call by their place among all, so one device computes the whole images and prompts "
    "that cfg_degree and data_degree would share out; ulysses_degree and ring_degree share out tokens"
)
JOINT_ROWS = (
    "this model gets values that may be about several images of a batch, so one device computes the whole images and "
    "prompts that cfg_degree and data_degree would share out"
)
PROJECTED = "devices exchanged queries, keys and values, and not tokens: {reason}"
EAGER = "blocks ran uncompiled: code of a node takes part within them"
QUERIES = "{why}, so devices share out the queries of attention (with {keys} keys or more) and compute all else alike"
ROUNDED = (
    "what devices sent each other for attention was rounded to 8 bits (exchange_dtype fp8), so the result is close to "
    "one device's, not equal{drift}"
)
STAGE_REPEATS = (
    "the devices of a stage computed the same: with these inputs the model looks at whole images between its blocks, "
    "so ulysses_degree and ring_degree shared out nothing"
)
UNDESCRIBED = "the blocks of this model are not described"
BY_CODE = "code of a node takes part in the network"
BANDS = "each of {ranks} devices computes a band of the image's rows"
HEADS = "attention is another pack's: devices share out its heads"
JOINT_HEADS = (
    "attention is another pack's, which may not compute head by head, so each device computes all of it"
)
RING = (
    "the ring attends by {kernel} and not by {own}, which ComfyUI chose: partial results merge by log-sum-exp, which "
    "that gives. Ulysses attends by {own}."
)


class Notes:
    """The notes on a request: those that hold for every request, and those on its own calls."""

    def __init__(self) -> None:
        self._lasting: list[str] = []
        self._of_request: list[str] = []

    def __iter__(self) -> Iterator[str]:
        yield from self._lasting
        yield from self._of_request

    def begin(self) -> None:
        """Begins a request, without the notes on the calls of the one before it."""
        self._of_request.clear()

    def add(self, note: str) -> None:
        """Adds a note on this request."""
        if note not in self:
            self._of_request.append(note)

    def add_lasting(self, *notes: str) -> None:
        """Adds notes on this request and all later ones."""
        self._lasting += [note for note in dict.fromkeys(notes) if note not in self._lasting]
