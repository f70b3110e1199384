"""Numbers as people read them."""

from __future__ import annotations


def n_bytes(count: float) -> str:
    """Bytes: 1,536 are ``1.5 KiB``."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def count(number: float) -> str:
    """Things: 8,400,000 are ``8.4 M``."""
    return _scaled(number, 1000, ("", "k", "M", "G", "T", "P")).strip()


def seconds(time: float) -> str:
    """Time: 0.0042 s are ``4.2 ms``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(time) * factor >= 1 or unit == "us":
            return f"{time * factor:.3g} {unit}"
    raise AssertionError  # the last unit returns


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    place = 0
    while abs(number) >= step and place < len(units) - 1:
        number, place = number / step, place + 1
    digits = 0 if place == 0 or abs(number) >= 100 else 1
    return f"{number:.{digits}f} {units[place]}"
