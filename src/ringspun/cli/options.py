"""Option values that several commands read alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from ringspun.errors import RingspunError

FRAMEWORKS = ("torch", "jax")


def split_list(text: str) -> list[str]:
    """A comma list whose items may hold commas inside brackets: ``causal,documents([3, 5])`` is two.

    Raises:
        ValueError: nothing in it.
    """
    items, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += character in "(["
        depth -= character in ")]"
        if character == "," and depth == 0:
            items.append(text[start:i])
            start = i + 1
    items = [item.strip() for item in [*items, text[start:]] if item.strip()]
    if not items:
        raise ValueError(f"a list must hold at least one item; got {text!r}.")
    return items


def integers(name: str, text: str, *, least: int, most: int | None = None) -> list[int]:
    """A comma list of integers.

    Raises:
        ValueError: an item that is no integer, too small or too large; names the option.
    """
    values = []
    for item in split_list(text):
        try:
            value = int(item)
        except ValueError:
            raise ValueError(f"{name} must be a comma list of integers; got {item[:80]!r}.") from None
        values.append(bounded(name, value, least=least, most=most))
    return values


def bounded(name: str, value: int, *, least: int, most: int | None = None) -> int:
    """`value`, if it lies within its bounds.

    Raises:
        ValueError: it does not; names the option.
    """
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}.")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}; got {value}.")
    return value


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    """`value`, if it is one of `known`.

    Raises:
        ValueError: it is not; names the option and all of `known`.
    """
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}.")
    return value


def tokens(text: str, *, least: int = 1) -> int:
    """A number of tokens as people write it: K is 1,024, M its square.

    Raises:
        ValueError: none, or too few.
    """
    factors = {"k": 1 << 10, "m": 1 << 20}
    digits = text.strip()
    factor = factors.get(digits[-1:].lower(), 1)
    if factor > 1:
        digits = digits[:-1]
    if re.fullmatch(r"\d{1,3}(,\d{3})+", digits):  # 1,5 may be one and a half
        digits = digits.replace(",", "")
    try:
        value = float(digits) * factor
    except ValueError:
        value = math.nan
    if not (least <= value < 1 << 48) or value != int(value):
        raise ValueError(f"tokens must be a whole number from {least} on (131072, 128K, 1M); got {text[:80]!r}.")
    return int(value)


def refuse_with_jax(options: Mapping[str, object]) -> None:
    """Refuse options that jax does not know."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} must be left out with --framework jax; got {value}.")


@contextmanager
def told(command: str, *, output: str | None = None) -> Iterator[None]:
    """What cannot be is told, not raised.

    Args:
        command: whose words they are. output: the option that names the file it writes, where there is one.
    """
    try:
        yield
    except (RingspunError, ValueError) as problem:
        for line in str(problem).splitlines():
            typer.echo(f"ringspun {command}: {line}", err=True)
        raise typer.Exit(2) from None
    except OSError as problem:
        if output is None:
            raise
        typer.echo(f"ringspun {command}: {output} must be a place for a file; {problem}.", err=True)
        raise typer.Exit(1) from None
