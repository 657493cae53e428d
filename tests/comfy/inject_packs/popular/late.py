"""A module that a node imports only when it runs."""

shift_by = 0.0
SHIFTS: dict[str, float] = {}


def shift() -> float:
    return shift_by + SHIFTS.get("more", 0.0)
