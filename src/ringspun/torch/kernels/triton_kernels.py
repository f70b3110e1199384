"""What `triton` launches. Imported where Triton is installed, when the kernel is first used.

State of a row, in base 2: ``m``, the largest score so far; ``l``, the sum of ``2^(score - m)``; ``acc``, the sum of
``2^(score - m) * v``. Where m is -inf the row has met no key yet and `acc` holds nothing, not even zeros.

Every program owns one block of rows of one head and goes through that block's tiles (`block_lists`): no atomics, so
the same inputs give the same bits. The other side comes in blocks at multiples of their size, ascending, whatever the
tile: so a row's sums are made in one order, wherever it lies in its own block. What no row of a block sees is never
loaded: it may be NaN. One loop takes all blocks and masks those that the band cuts; a loop of its own for the others,
without a mask, was compiled too: three times the code, and more registers spilled.

q ``[B, H, T, D]``, k ``[B, K, S, D]``, v ``[B, K, S, Dv]`` have their strides of dimensions 0, 1, 2 as a tuple `_step`,
and 1 in the last. Score in base 2: ``outer * q.k``, or ``outer * tanh(inner * q.k)`` where `SOFTCAP`. `ROWS`, `KEYS`:
of a block; `D`, `E`: head sizes of q and v, and padded to powers of two `WIDE_D`, `WIDE_E`; `GROUP`: H / K.

Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
DOT = tl.constexpr("ieee")  # float32 products are float32's, not TF32's
LENGTHS = ["tokens", "rows", "hull_first", "hull_last"]
"""Plain numbers to the compiler, which would make variants of a kernel for those that are 1 or divide by 16."""


@triton.jit
def _tanh(x):
    """To float32's last digits on both sides: near 0 a continued fraction, where ``1 - e`` would cancel."""
    square = x * x
    near = x * (105.0 + 10.0 * square) / (105.0 + square * (45.0 + square))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def _load(at, step, inside, N: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """N rows from `at` on, padded to WIDE columns; zeros there and in rows that are not `inside`."""
    column = tl.arange(0, WIDE)
    address = at + tl.arange(0, N)[:, None] * step + column[None, :]
    if SIZE < WIDE:
        return tl.load(address, mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)
    return tl.load(address, mask=inside[:, None], other=0.0)


@triton.jit
def _of_head(x, step, batch, head):
    return x + batch * step[0] + head * step[1]


@triton.jit
def _tile(at, start, batch, SIZE: tl.constexpr, N: tl.constexpr):
    """A tile as the block of SIZE rows from `start` on meets it: ``r0, r1`` rows of it, ``lo, hi`` its band, ``first,
    last`` what one of them sees of the other side, gone through from `begin` on in blocks of N. All of the blocks from
    `clear` to `cut` is seen by all rows. Nothing is left of a tile for batch rows that it is not of."""
    b0, b1, r0, r1 = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    c0, c1, lo, hi = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    a, b = tl.maximum(start, r0), tl.minimum(start + SIZE, r1)
    first, last = tl.maximum(c0, a - hi), tl.minimum(c1, b - lo)
    clear, cut = tl.maximum(c0, b - 1 - hi), tl.minimum(c1, a - lo + 1)
    cut = tl.where((r0 <= start) & (start + SIZE <= r1), cut - N, -1)  # the last block that is seen whole
    mine = (batch >= b0) & ((b1 < 0) | (batch < b1))
    begin = tl.where(mine, first // N * N, last)
    return r0, r1, lo, hi, first, last, begin, clear, cut


@triton.jit
def _allowed(row, other, inside, r0, r1, lo, hi):
    """Pairs of a tile, ``[rows, others]``; of the others those that are `inside`."""
    behind = row[:, None] - other[None, :]
    return (behind >= lo) & (behind <= hi) & ((row >= r0) & (row < r1))[:, None] & inside[None, :]


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    q, q_step, k, k_step, v, v_step, acc, m, l, state_step, tiles, blocks, offsets, order, tokens, inner, outer,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, SOFTCAP: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Keys of one step, taken into the state. Grid of blocks, heads, batch rows. `outer` is positive, for the largest
    score is found before it is scaled; SIGN is that of the scale."""
    n, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = tl.load(blocks + n) * ROWS
    row = start + tl.arange(0, ROWS)
    here = row < tokens
    at = batch * state_step[0] + head.to(tl.int64) * state_step[1] + start
    m_at, l_at = m + at + tl.arange(0, ROWS), l + at + tl.arange(0, ROWS)
    top, total = tl.load(m_at, mask=here, other=float("-inf")), tl.load(l_at, mask=here, other=0.0)
    column = tl.arange(0, WIDE_E)
    acc_at = acc + at * E + tl.arange(0, ROWS)[:, None] * E + column[None, :]
    fits = (column < E)[None, :]
    found = tl.load(acc_at, mask=(top > float("-inf"))[:, None] & fits, other=0.0)
    q_at = _of_head(q, q_step, batch, head.to(tl.int64)) + start.to(tl.int64) * q_step[2]
    mine = _load(q_at, q_step[2], here, ROWS, D, WIDE_D)
    if SIGN != 1:
        mine = (mine * SIGN).to(mine.dtype)
    kv_head = (head // GROUP).to(tl.int64)
    k_at, v_at = _of_head(k, k_step, batch, kv_head), _of_head(v, v_step, batch, kv_head)
    for i in range(tl.load(offsets + n), tl.load(offsets + n + 1)):
        tile = tiles + tl.load(order + i) * 8
        r0, r1, lo, hi, first, last, begin, clear, cut = _tile(tile, start, batch, ROWS, KEYS)
        k_here, v_here = k_at + begin.to(tl.int64) * k_step[2], v_at + begin.to(tl.int64) * v_step[2]
        for other in range(begin, last, KEYS):
            key = other + tl.arange(0, KEYS)
            inside = (key >= first) & (key < last)
            their_k = _load(k_here, k_step[2], inside, KEYS, D, WIDE_D)
            score = tl.dot(mine, tl.trans(their_k), input_precision=DOT)
            if SOFTCAP:
                score = _tanh(score * inner)
            if (other < clear) | (other > cut):
                score = tl.where(_allowed(row, key, inside, r0, r1, lo, hi), score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1) * outer)
            base = tl.where(higher == float("-inf"), 0.0, higher)  # or -inf - -inf in rows that have met no key
            p = tl.exp2(score * outer - base[:, None])
            keep = tl.exp2(top - base)
            total = total * keep + tl.sum(p, 1)
            their_v = _load(v_here, v_step[2], inside, KEYS, E, WIDE_E)
            found = tl.dot(p.to(their_v.dtype), their_v, found * keep[:, None], input_precision=DOT)
            top = higher
            k_here += KEYS * k_step[2]
            v_here += KEYS * v_step[2]
    tl.store(m_at, top, mask=here)
    tl.store(l_at, total, mask=here)
    tl.store(acc_at, found, mask=here[:, None] & fits)


@triton.jit(do_not_specialize=LENGTHS)
def finish(
    acc, m, l, sinks, out, rows, tokens, heads,
    ROWS: tl.constexpr, E: tl.constexpr, WIDE_E: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The state as out, in its dtype (it may lie where `acc` does), and as lse, where `m` was. Grid of blocks of all
    rows ``[B * H * T]``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    old, total = tl.load(m + row, mask=here, other=float("-inf")), tl.load(l + row, mask=here, other=0.0)
    column = tl.arange(0, WIDE_E)
    at = row[:, None] * E + column[None, :]
    fits = (column < E)[None, :]
    found = tl.load(acc + at, mask=(old > float("-inf"))[:, None] & fits, other=0.0)
    base = tl.where(old == float("-inf"), 0.0, old)
    if SINKS:
        sink = tl.load(sinks + row // tokens % heads, mask=here, other=float("-inf")).to(tl.float32) * LOG2_E
        top = tl.maximum(old, sink)
        base = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp2(old - base)
        total = total * keep + tl.exp2(sink - base)
        found = found * keep[:, None]
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    tl.store(out + at, (found / total[:, None]).to(out.dtype.element_ty), mask=here[:, None] & fits)
    tl.store(m + row, tl.where(seen, (base + tl.log2(total)) * LN_2, float("-inf")), mask=here)


@triton.jit
def _weights(score, lse, dp, delta, inner, outer, SOFTCAP: tl.constexpr):
    """The weights of pairs, and the gradient of their scores over the scale; `lse` and `delta` broadcast."""
    slope = 1.0
    if SOFTCAP:
        score = _tanh(score * inner)
        slope = 1.0 - score * score
    p = tl.exp2(score * outer - lse * LOG2_E)
    return p, p * (dp - delta) * slope


@triton.jit(do_not_specialize=LENGTHS)
def backward_of_queries(
    q, q_step, k, k_step, v, v_step, dout, dout_step, lse, lse_step, delta, delta_step, dq, hull_first, hull_last,
    tiles, blocks, offsets, order, tokens, inner, outer, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dq of the rows ``[hull_first, hull_last)`` of `tokens`, ``[B, H, rows, D]``. Grid of blocks, heads, batch."""
    n, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.load(blocks + n) * ROWS
    far, local = start.to(tl.int64), tl.arange(0, ROWS)
    row = start + local
    here = row < tokens
    q_at = _of_head(q, q_step, batch, head) + far * q_step[2]
    dout_at = _of_head(dout, dout_step, batch, head) + far * dout_step[2]
    lse_at = _of_head(lse, lse_step, batch, head) + far * lse_step[2]
    delta_at = _of_head(delta, delta_step, batch, head) + far * delta_step[2]
    mine = _load(q_at, q_step[2], here, ROWS, D, WIDE_D)
    given = _load(dout_at, dout_step[2], here, ROWS, E, WIDE_E)
    my_lse = tl.load(lse_at + local * lse_step[2], mask=here, other=0.0)
    my_delta = tl.load(delta_at + local * delta_step[2], mask=here, other=0.0)
    kv_head = (tl.program_id(1) // GROUP).to(tl.int64)
    k_at, v_at = _of_head(k, k_step, batch, kv_head), _of_head(v, v_step, batch, kv_head)
    found = tl.zeros([ROWS, WIDE_D], tl.float32)
    for i in range(tl.load(offsets + n), tl.load(offsets + n + 1)):
        tile = tiles + tl.load(order + i) * 8
        r0, r1, lo, hi, first, last, begin, clear, cut = _tile(tile, start, batch, ROWS, KEYS)
        k_here, v_here = k_at + begin.to(tl.int64) * k_step[2], v_at + begin.to(tl.int64) * v_step[2]
        for other in range(begin, last, KEYS):
            key = other + tl.arange(0, KEYS)
            inside = (key >= first) & (key < last)
            their_k = _load(k_here, k_step[2], inside, KEYS, D, WIDE_D)
            their_v = _load(v_here, v_step[2], inside, KEYS, E, WIDE_E)
            score = tl.dot(mine, tl.trans(their_k), input_precision=DOT)
            dp = tl.dot(given, tl.trans(their_v), input_precision=DOT)
            _, ds = _weights(score, my_lse[:, None], dp, my_delta[:, None], inner, outer, SOFTCAP)
            if (other < clear) | (other > cut):  # selected, not multiplied: rows without keys have an lse of -inf
                ds = tl.where(_allowed(row, key, inside, r0, r1, lo, hi), ds, 0.0)
            found = tl.dot(ds.to(their_k.dtype), their_k, found, input_precision=DOT)
            k_here += KEYS * k_step[2]
            v_here += KEYS * v_step[2]
    column = tl.arange(0, WIDE_D)
    first_row = (batch * tl.num_programs(1) + head) * (hull_last - hull_first) + far - hull_first
    kept = ((row >= hull_first) & (row < hull_last))[:, None] & (column < D)[None, :]
    tl.store(dq + first_row * D + local[:, None] * D + column[None, :], found * scale, mask=kept)


@triton.jit(do_not_specialize=LENGTHS)
def backward_of_keys(
    q, q_step, k, k_step, v, v_step, dout, dout_step, lse, lse_step, delta, delta_step, dk, dv, hull_first, hull_last,
    tiles, blocks, offsets, order, tokens, inner, outer, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dk and dv of the keys ``[hull_first, hull_last)`` of `tokens`, ``[B, K, keys, D]`` and ``[.., Dv]``, by turned
    tiles. Grid of blocks, KV heads, batch rows. Pairs are keys times queries; all query heads are summed here."""
    n, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.load(blocks + n) * KEYS
    far, local, count = start.to(tl.int64), tl.arange(0, KEYS), tl.arange(0, ROWS)
    key = start + local
    here = key < tokens
    my_k = _load(_of_head(k, k_step, batch, head) + far * k_step[2], k_step[2], here, KEYS, D, WIDE_D)
    my_v = _load(_of_head(v, v_step, batch, head) + far * v_step[2], v_step[2], here, KEYS, E, WIDE_E)
    of_k, of_v = tl.zeros([KEYS, WIDE_D], tl.float32), tl.zeros([KEYS, WIDE_E], tl.float32)
    for g in range(GROUP):
        q_head = head * GROUP + g
        q_at, dout_at = _of_head(q, q_step, batch, q_head), _of_head(dout, dout_step, batch, q_head)
        lse_at, delta_at = _of_head(lse, lse_step, batch, q_head), _of_head(delta, delta_step, batch, q_head)
        for i in range(tl.load(offsets + n), tl.load(offsets + n + 1)):
            tile = tiles + tl.load(order + i) * 8
            r0, r1, lo, hi, first, last, begin, clear, cut = _tile(tile, start, batch, KEYS, ROWS)
            ahead = begin.to(tl.int64)
            q_here, dout_here = q_at + ahead * q_step[2], dout_at + ahead * dout_step[2]
            lse_here, delta_here = lse_at + ahead * lse_step[2], delta_at + ahead * delta_step[2]
            for other in range(begin, last, ROWS):
                row = other + count
                inside = (row >= first) & (row < last)
                their_q = _load(q_here, q_step[2], inside, ROWS, D, WIDE_D)
                given = _load(dout_here, dout_step[2], inside, ROWS, E, WIDE_E)
                their_lse = tl.load(lse_here + count * lse_step[2], mask=inside, other=0.0)
                their_delta = tl.load(delta_here + count * delta_step[2], mask=inside, other=0.0)
                score = tl.dot(my_k, tl.trans(their_q), input_precision=DOT)
                dp = tl.dot(my_v, tl.trans(given), input_precision=DOT)
                p, ds = _weights(score, their_lse[None, :], dp, their_delta[None, :], inner, outer, SOFTCAP)
                if (other < clear) | (other > cut):
                    allowed = _allowed(key, row, inside, r0, r1, lo, hi)
                    p, ds = tl.where(allowed, p, 0.0), tl.where(allowed, ds, 0.0)
                of_v = tl.dot(p.to(given.dtype), given, of_v, input_precision=DOT)
                of_k = tl.dot(ds.to(their_q.dtype), their_q, of_k, input_precision=DOT)
                q_here += ROWS * q_step[2]
                dout_here += ROWS * dout_step[2]
                lse_here += ROWS * lse_step[2]
                delta_here += ROWS * delta_step[2]
    first_row = (batch * tl.num_programs(1) + head) * (hull_last - hull_first) + far - hull_first
    kept = ((key >= hull_first) & (key < hull_last))[:, None]
    column, value_column = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    of_k_at = dk + first_row * D + local[:, None] * D + column[None, :]
    of_v_at = dv + first_row * E + local[:, None] * E + value_column[None, :]
    tl.store(of_k_at, of_k * scale, mask=kept & (column < D)[None, :])
    tl.store(of_v_at, of_v, mask=kept & (value_column < E)[None, :])
