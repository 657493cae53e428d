"""How whole things (rows, tokens, blocks) are shared out over ranks, evenly or by weight. Pure functions."""

from __future__ import annotations


def share(total: int, parts: int, weights: tuple[float, ...] = ()) -> tuple[int, ...]:
    """Sizes of `parts` contiguous shares of `total`, as even as whole numbers allow; the first are the larger.

    With `weights`, in proportion to them (largest remainders), but at least 1 each while there is enough for all.
    """
    if not weights:
        return tuple(total // parts + (i < total % parts) for i in range(parts))
    exact = [total * weight / sum(weights) for weight in weights]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(parts), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    while total >= parts and 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return tuple(sizes)


def span(sizes: tuple[int, ...], i: int) -> slice:
    """The range of share `i`."""
    begin = sum(sizes[:i])
    return slice(begin, begin + sizes[i])
