"""Masks and layouts from strings: what reads, and what an error says of what does not."""

from __future__ import annotations

import pytest

from ringspun import (
    Anchors,
    Balanced,
    Band,
    Blocks,
    Causal,
    Contiguous,
    Documents,
    DocumentZigzag,
    Full,
    Prefix,
    Striped,
    Window,
    Zigzag,
    parse_layout,
    parse_mask,
)
from ringspun.errors import LayoutError, MaskError


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", Causal()),
        ("  Causal() ", Causal()),
        ("causal & window(4096)", Causal() & Window(4096)),
        ("causal & (window(64) | anchors(4))", Causal() & (Window(64) | Anchors(4))),
        ("causal & window(64) | anchors(4)", (Causal() & Window(64)) | Anchors(4)),
        ("window(size=3)", Window(3)),
        ("band(None, -2)", Band(None, -2)),
        ("documents([2, 3], starts=[1, 4])", Documents([2, 3], [1, 4])),
        ("documents((2, 3))", Documents([2, 3])),
        ("causal | prefix([1, 2], documents=documents([3, 4]))", Causal() | Prefix([1, 2], Documents([3, 4]))),
        ("full", Full()),
        ("blocks([[0], [0, 1]], size=64)", Blocks([[0], [0, 1]], 64)),
        ("causal & blocks([(), [2, 0]])", Causal() & Blocks([[], [0, 2]])),
    ],
)
def test_masks_read(text, mask):
    assert parse_mask(text) == mask


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("contiguous", Contiguous()),
        ("Zigzag()", Zigzag()),
        ("striped", Striped()),
        ("striped(1)", Striped()),
        ("striped(128)", Striped(128)),
        ("striped(block=256)", Striped(256)),
        ("zigzag(speeds=[1.0, 2.0])", Zigzag(speeds=[1, 2])),
        ("Contiguous(speeds=(1, 2))", Contiguous(speeds=[1, 2])),
        ("documentzigzag", DocumentZigzag()),
        ("balanced()", Balanced()),
        ("balanced(speeds=[0.1, 2e-9])", Balanced(speeds=[0.1, 2e-9])),
    ],
)
def test_layouts_read_and_print(text, layout):
    assert parse_layout(text) == layout
    assert parse_layout(str(layout)) == layout


def test_layouts_print_without_defaults():
    assert [str(x) for x in (Contiguous(), Zigzag(), Striped(), Striped(128))] == [
        "contiguous",
        "zigzag",
        "striped",
        "striped(128)",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("causal & windw(4)", r"mask must be readable; 'windw' is no mask; did you mean 'window'\? at column 10 of"),
        ("casual", r"'casual' is no mask; did you mean 'causal'\? at column 1 of 'casual'\."),
        ("  casual  ", r"at column 1 of 'casual'\."),
        (
            "xyz",
            r"'xyz' is no mask; known: anchors, band, blocks, causal, chunks, documentpairs, documents, full, keys, "
            r"prefix, window at column 1",
        ),
        ("zigzag", r"'zigzag' is no mask; "),
        ("causal & 3", r"expected a name at column 10 of"),
        ("causal + full", r"expected a name at column 1 of"),
        ("causal & (full | window(0))", r"window: Window size must be >= 1; got 0\. at column 18 of"),
        ("window", r"window: .*missing 1 required positional argument: 'size' at column 1"),
        ("causal & window(4, 5)", r"window: .* at column 10 of"),
        ("window(siz=4)", r"window: .*'siz'.* at column 1 of"),
        ("window('4')", r"window: Window size must be an integer; got '4'\. at column 1"),
        ("blocks(3)", r"blocks: Blocks keys must be a list of block numbers per query block; got 3\. at column 1"),
        ("blocks([[0], [1, -2]])", r"blocks: key blocks of query block 1 must be >= 0; got -2\. at column 1"),
        ("documents([1, 2.5])", r"documents: document lengths must be integers; got float64\. at column 1"),
        (
            "documents([2, 3], starts=[0, 1])",
            r"documents: documents must follow each other without overlap; .* at column 1",
        ),
        (
            "causal | prefix(2, documents=documnts([2]))",
            r"'documnts' is no mask; did you mean 'documents'\? at column 30 of",
        ),
        ("prefix(2, documents=[2])", r"prefix: Prefix documents must be Documents; got \[2\]\. .*at column 1"),
        ("documents(*[2])", r"expected a name at column 11 of"),
        ("window(**{'size': 4})", r"at column 1 of"),
        ("full(causal)", r"full: .* at column 1 of"),
        ("causal & ", r"at column \d+ of 'causal &'\."),
        ("causal & & full", r"invalid syntax at column 10 of"),
        ("causal)", r"at column 7 of"),
        ("", r"at column 1 of ''\."),
        ("__import__('os').system('true')", r"expected a name at column 1 of"),
        ("window(__import__('os'))", r"'__import__' is no mask; .* at column 8 of"),
        ("causal" + "&causal" * 3000, r"it is nested too deeply at column 1 of 'causal&causal"),
        ("window(" + "-" * 3000 + "1)", r"it is nested too deeply at column 1 of 'window\(---"),
        ("~" * 50_000 + "causal", r"it is nested too deeply at column 1 of '~~~"),
        ("causal(**{'a': 1})", r"causal: arguments must be written out; got \*\* at column 1 of"),
        ("window(size=1, size=2)", r"window: size is given twice at column 1 of"),
        ("causal # & window(3)", r"a comment cannot be part of it at column 8 of"),
        ("(causal &\n é & windw(3))", r"'é' is no mask; .* at column 12 of"),
        ("(causal &\n window('é') & windw(3))", r"window: .* at column 12 of"),
        ("causal & full('é') & é", r"full: .* at column 10 of"),
        ("caus\0al", r"null bytes at column 1 of"),
        ("caus\udce9", r"at column 1 of"),
        ("window(" + "9" * 40 + ")", r"window: Window size must lie within .* at column 1 of"),
    ],
)
def test_unreadable_masks_say_where(text, words):
    with pytest.raises(MaskError, match=words) as caught:
        parse_mask(text)
    assert str(caught.value).startswith("mask must be readable; ")
    assert str(caught.value).count(" at column ") == 1


@pytest.mark.parametrize("text", ["x" * 5000, "window('" + "x" * 5000 + "')", "causal & " * 2000 + "windw"])
def test_an_error_repeats_little_of_a_long_text(text):
    with pytest.raises(MaskError, match="at column") as caught:
        parse_mask(text)
    assert len(str(caught.value)) < 600


def test_the_text_around_the_column_is_shown():
    with pytest.raises(MaskError) as caught:
        parse_mask("causal &" + " " * 300 + "windw(4)" + " " * 300 + "& full")
    shown = "..." + " " * 40 + "windw(4)" + " " * 32 + "..."
    assert str(caught.value).endswith(f"at column 309 of {shown!r}.")


@pytest.mark.parametrize("text", [None, 3, b"causal", Causal()])
def test_only_strings_are_read(text):
    with pytest.raises(MaskError, match=r"mask must be readable; expected a string, got"):
        parse_mask(text)
    with pytest.raises(LayoutError, match=r"layout must be readable; expected a string, got"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("striped(True)", r"striped: Striped block must be an integer; got True\. at column 1"),
        ("striped(block=128, block=256)", r"striped: block is given twice at column 1"),
        ("striped(1" + "0" * 40 + ")", r"striped: Striped block must be at most 2\*\*48 tokens; got 10000"),
        (
            "zigzga",
            r"layout must be readable; 'zigzga' is no layout; did you mean 'zigzag'\? at column 1 of 'zigzga'\.",
        ),
        ("causal", r"'causal' is no layout; known: balanced, contiguous, documentzigzag, striped, zigzag at column 1"),
        ("striped(64)", r"striped: Striped block must be 1 or at least 128 tokens; got 64\. at column 1"),
        ("striped(128.5)", r"striped: Striped block must be an integer; got 128\.5\. at column 1"),
        ("zigzag(speeds=[1, -2])", r"zigzag: Zigzag speeds must be positive finite numbers; got -2\. at column 1 of"),
        ("zigzag([1, 2])", r"zigzag: .*positional.* at column 1 of"),
        ("zigzag & striped", r"a layout does not combine at column 1 of"),
        ("zigzag(3)", r"zigzag: .* at column 1"),
        ("striped(", r"at column \d+ of"),
    ],
)
def test_unreadable_layouts_say_where(text, words):
    with pytest.raises(LayoutError, match=words):
        parse_layout(text)
