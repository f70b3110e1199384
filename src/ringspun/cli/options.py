"""Option values that several commands read alike."""

from __future__ import annotations


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


def integers(name: str, text: str, *, least: int) -> list[int]:
    """A comma list of integers.

    Raises:
        ValueError: an item that is no integer or too small; names the option.
    """
    values = []
    for item in split_list(text):
        try:
            value = int(item)
        except ValueError:
            raise ValueError(f"{name} must be a comma list of integers; got {item!r}.") from None
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}.")
        values.append(value)
    return values
