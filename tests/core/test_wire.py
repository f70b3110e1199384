"""The wire: where the segments of a message lie, and what a header says of a message that is not the expected one."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun.core.wire import END_BYTES, END_MAGIC, HEADER_BYTES, MAGIC, Format, Header, Payload, aligned

SMALL = st.integers(1, 9)
FORMATS = st.builds(
    Format,
    batch=SMALL,
    heads=SMALL,
    kv_heads=SMALL,
    head_size=SMALL,
    value_size=SMALL,
    dtype=st.just("float16"),
    itemsize=st.sampled_from((2, 4, 8)),
    accumulator_itemsize=st.sampled_from((4, 8)),
)


@pytest.mark.parametrize(("n", "up"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (1 << 40, 1 << 40)])
def test_aligned(n, up):
    assert aligned(n) == up


@given(FORMATS, st.sampled_from([p for p in Payload if p not in (Payload.HEADS, Payload.HALO)]), st.integers(0, 50))
def test_segments_are_aligned_apart_and_inside(wire, payload, rows):
    b, h, k, d, dv = wire.batch, wire.heads, wire.kv_heads, wire.head_size, wire.value_size
    one, two = wire.itemsize, wire.accumulator_itemsize
    wanted = {
        Payload.KV: [((b, k, rows, d), one), ((b, k, rows, dv), one)],
        Payload.DKV: [((b, k, rows, d), two), ((b, k, rows, dv), two)],
        Payload.QUERIES: [((b, h, rows, d), one), ((b, h, rows, dv), one), ((b, h, rows), two), ((b, h, rows), two)],
        Payload.DQ: [((b, h, rows, d), two)],
    }[payload]
    segments = wire.segments(payload, rows)
    assert [shape for _, shape in segments] == [shape for shape, _ in wanted]
    assert [two if part.wide else one for part in wire.parts(payload)] == [size for _, size in wanted]
    offsets = [*(offset for offset, _ in segments), wire.message_bytes(payload, rows) - END_BYTES]
    assert offsets[0] == HEADER_BYTES and not any(offset % 64 for offset in offsets)
    for (shape, size), offset, then in zip(wanted, offsets, offsets[1:], strict=False):
        assert 0 <= then - (offset + prod(shape) * size) < 64


def test_messages_are_no_longer_than_they_must_be():
    wire = Format(2, 4, 2, 8, 16, "float32", 4, 8)
    assert wire.segments(Payload.KV, 3) == ((64, (2, 2, 3, 8)), (64 + 384, (2, 2, 3, 16)))
    assert wire.message_bytes(Payload.KV, 3) == 64 + 384 + 768 + 64
    assert wire.message_bytes(Payload.DKV, 3) == 64 + 768 + 1536 + 64
    assert wire.message_bytes(Payload.QUERIES, 3) == 64 + 768 + 1536 + 2 * 192 + 64
    assert wire.message_bytes(Payload.DQ, 3) == 64 + 1536 + 64
    assert wire.message_bytes(Payload.KV, 0) == 128, "a block of no rows is its header and its end mark"


HEADER = Header(plan=0xABCDEF, call=7, phase=1, payload=Payload.DKV, step=3, source=2, length=4096)


def test_a_header_is_eight_words():
    words = HEADER.pack()
    assert words.dtype == np.int64 and words.nbytes == HEADER_BYTES
    assert words.tolist() == [MAGIC, 0xABCDEF, 7, 1, 1, 3, 2, 4096]
    assert MAGIC.to_bytes(8, "big") == b"RINGSPUN"


def test_an_end_mark_is_the_header_s_words_but_the_first_and_the_last():
    words = HEADER.pack_end(-5)
    assert words.dtype == np.int64 and words.nbytes == END_BYTES
    assert words.tolist() == [END_MAGIC, *HEADER.pack().tolist()[1:-1], -5]
    assert END_MAGIC.to_bytes(8, "little") == b"RINGSPUN"


def test_equal_headers_do_not_differ():
    assert HEADER.differences(replace(HEADER).pack()) == []
    assert HEADER.end_differences(replace(HEADER, length=1).pack_end(-5), -5) == []


@pytest.mark.parametrize("name", [f.name for f in fields(Header)[:-1]])
def test_every_word_of_an_end_mark_that_differs_is_named(name):
    other = replace(HEADER, **{name: getattr(HEADER, name) + 1})
    (phrase,) = HEADER.end_differences(other.pack_end(7), 7)
    assert phrase.startswith(f"{name} ")


def test_a_wrong_checksum_is_shown_as_64_bits():
    assert HEADER.end_differences(HEADER.pack_end(-1), 16) == ["checksum 0xffffffffffffffff instead of 0x10"]
    assert HEADER.end_differences(HEADER.pack(), 0)[0] == f"magic {MAGIC:#x} instead of {END_MAGIC:#x}"


@pytest.mark.parametrize("name", [f.name for f in fields(Header)])
def test_every_field_that_differs_is_named_alone(name):
    other = replace(HEADER, **{name: getattr(HEADER, name) + 1})
    (phrase,) = HEADER.differences(other.pack())
    shown = [f"{getattr(h, name):#x}" if name == "plan" else str(int(getattr(h, name))) for h in (other, HEADER)]
    assert phrase == f"{name} {shown[0]} instead of {shown[1]}"


def test_foreign_bytes_are_told_by_the_magic_number():
    assert HEADER.differences(np.array([1, *HEADER.pack()[1:]]))[0] == f"magic 0x1 instead of {MAGIC:#x}"
    assert len(HEADER.differences(np.zeros(8, np.int64))) == 8


def test_several_differences_come_in_order():
    other = replace(HEADER, call=8, step=4)
    assert HEADER.differences(other.pack()) == ["call 8 instead of 7", "step 4 instead of 3"]
