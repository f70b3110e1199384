"""What `triton` launches. Imported where Triton is installed, when the kernel is first used.

State of a row, in base 2: ``m``, the largest score so far; ``l``, the sum of ``2^(score - m)``; ``acc``, the sum of
``2^(score - m) * v``. Where m is -inf the row has met no key yet and `acc` holds nothing, not even zeros.

Every program owns one block of rows of one head and goes through that block's tiles (`block_lists`): no atomics, so
the same inputs give the same bits. The other side comes in blocks at multiples of their size, ascending, whatever the
tile: so a row's sums are made in one order, wherever it lies in its own block. In a tile only blocks that the band
cuts are masked, those before and after the ones that it does not. What no row of a block sees is never loaded: it may
be NaN.

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


@triton.jit
def _tanh(x):
    """To float32's last digits on both sides: near 0 a continued fraction, where ``1 - e`` would cancel."""
    square = x * x
    near = x * (105.0 + 10.0 * square) / (105.0 + square * (45.0 + square))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def _load(at, step, inside, N: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):
    """N rows from `at` on, padded with zeros to WIDE columns; where MASKED, those not `inside` are zeros too."""
    column = tl.arange(0, WIDE)
    address = at + tl.arange(0, N)[:, None] * step + column[None, :]
    if MASKED:
        return tl.load(address, mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)
    if SIZE < WIDE:
        return tl.load(address, mask=(column < SIZE)[None, :], other=0.0)
    return tl.load(address)


@triton.jit
def _tile(at, start, batch, SIZE: tl.constexpr, N: tl.constexpr):
    """A tile as the block of SIZE rows from `start` on meets it: ``r0, r1`` rows of it, ``lo, hi`` its band,
    ``first, last`` of the other side that one of them sees. That is gone through in blocks of N: masked from `begin`
    to `clear` and from `cut` to `last`, unmasked in between. All are empty for a batch row that is not of the tile."""
    b0, b1, r0, r1 = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    c0, c1, lo, hi = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    a, b = tl.maximum(start, r0), tl.minimum(start + SIZE, r1)
    first, last = tl.maximum(c0, a - hi), tl.minimum(c1, b - lo)
    begin = first // N * N
    clear = (tl.maximum(c0, b - 1 - hi) + N - 1) // N * N
    cut = tl.minimum(c1, a - lo + 1) // N * N
    none = (cut <= clear) | (r0 > start) | (start + SIZE > r1)
    clear, cut = tl.where(none, last, clear), tl.where(none, last, cut)
    mine = (batch >= b0) & ((b1 < 0) | (batch < b1))
    begin, clear, cut = tl.where(mine, begin, last), tl.where(mine, clear, last), tl.where(mine, cut, last)
    return r0, r1, lo, hi, first, last, begin, clear, cut


@triton.jit
def _meet_keys(
    acc, m, l, q, k_at, k_step, v_at, v_step, row, r0, r1, lo, hi, first, last, begin, end, inner, outer,
    KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Forward of a block of queries over keys ``[begin, end)``."""
    k_here, v_here = k_at + begin.to(tl.int64) * k_step, v_at + begin.to(tl.int64) * v_step
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = (key >= first) & (key < last)
        k = _load(k_here, k_step, inside, KEYS, D, WIDE_D, MASKED)
        score = tl.dot(q, tl.trans(k), input_precision=DOT)
        if SOFTCAP:
            score = _tanh(score * inner)
        if MASKED:
            behind = row[:, None] - key[None, :]
            allowed = (behind >= lo) & (behind <= hi) & inside[None, :] & ((row >= r0) & (row < r1))[:, None]
            score = tl.where(allowed, score, float("-inf"))
        top = tl.maximum(m, tl.max(score, 1) * outer)
        base = tl.where(top == float("-inf"), 0.0, top)  # or -inf - -inf in rows that have met no key
        p = tl.exp2(score * outer - base[:, None])
        keep = tl.exp2(m - base)
        l = l * keep + tl.sum(p, 1)
        v = _load(v_here, v_step, inside, KEYS, E, WIDE_E, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=DOT)
        m = top
        k_here += KEYS * k_step
        v_here += KEYS * v_step
    return acc, m, l


@triton.jit
def forward(
    q, q_step, k, k_step, v, v_step, acc, m, l, state_step, tiles, blocks, offsets, order, tokens, inner, outer,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, SOFTCAP: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """One step of the state: grid of blocks, heads, batch rows. `outer` is positive: the sign of the scale is SIGN."""
    n, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.load(blocks + n) * ROWS
    row = start + tl.arange(0, ROWS)
    here = row < tokens
    at = batch * state_step[0] + head * state_step[1] + start
    m_at, l_at = m + at + tl.arange(0, ROWS), l + at + tl.arange(0, ROWS)
    top, total = tl.load(m_at, mask=here, other=float("-inf")), tl.load(l_at, mask=here, other=0.0)
    column = tl.arange(0, WIDE_E)
    acc_at = acc + at * E + tl.arange(0, ROWS)[:, None] * E + column[None, :]
    holds = (top > float("-inf"))[:, None] & (column < E)[None, :]
    found = tl.load(acc_at, mask=holds, other=0.0)
    q_at = q + batch * q_step[0] + head * q_step[1] + start.to(tl.int64) * q_step[2]
    mine = _load(q_at, q_step[2], here, ROWS, D, WIDE_D, True)
    if SIGN != 1:
        mine = (mine * SIGN).to(mine.dtype)
    k_at = k + batch * k_step[0] + head // GROUP * k_step[1]
    v_at = v + batch * v_step[0] + head // GROUP * v_step[1]
    for i in range(tl.load(offsets + n), tl.load(offsets + n + 1)):
        r0, r1, lo, hi, first, last, begin, clear, cut = _tile(
            tiles + tl.load(order + i) * 8, start, batch, ROWS, KEYS
        )
        found, top, total = _meet_keys(
            found, top, total, mine, k_at, k_step[2], v_at, v_step[2], row, r0, r1, lo, hi, first, last, begin, clear,
            inner, outer, KEYS, D, E, WIDE_D, WIDE_E, SOFTCAP, True,
        )  # fmt: skip
        found, top, total = _meet_keys(
            found, top, total, mine, k_at, k_step[2], v_at, v_step[2], row, r0, r1, lo, hi, first, last, clear, cut,
            inner, outer, KEYS, D, E, WIDE_D, WIDE_E, SOFTCAP, False,
        )  # fmt: skip
        found, top, total = _meet_keys(
            found, top, total, mine, k_at, k_step[2], v_at, v_step[2], row, r0, r1, lo, hi, first, last, cut, last,
            inner, outer, KEYS, D, E, WIDE_D, WIDE_E, SOFTCAP, True,
        )  # fmt: skip
    tl.store(m_at, top, mask=here)
    tl.store(l_at, total, mask=here)
    tl.store(acc_at, found, mask=here[:, None] & (column < E)[None, :])


@triton.jit
def finish(
    acc, m, l, sinks, out, rows, tokens, heads,
    ROWS: tl.constexpr, E: tl.constexpr, WIDE_E: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The state as out, in its dtype (it may lie where `acc` does), and lse where `m` was. Grid of blocks of all rows
    ``[B * H * T]``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    old = tl.load(m + row, mask=here, other=float("-inf"))
    total, top = tl.load(l + row, mask=here, other=0.0), old
    if SINKS:
        sink = tl.load(sinks + row // tokens % heads, mask=here, other=float("-inf")).to(tl.float32) * LOG2_E
        top = tl.maximum(old, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp2(old - base)
    if SINKS:
        total = total * keep + tl.exp2(sink - base)
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    column = tl.arange(0, WIDE_E)
    at = row[:, None] * E + column[None, :]
    fits = (column < E)[None, :]
    found = tl.load(acc + at, mask=(old > float("-inf"))[:, None] & fits, other=0.0)
    if SINKS:
        found = found * keep[:, None]
    found = found / total[:, None]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=here[:, None] & fits)
    tl.store(m + row, tl.where(seen, (base + tl.log2(total)) * LN_2, float("-inf")), mask=here)


@triton.jit
def _weights(score, lse, dp, delta, allowed, inner, outer, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """The weights of pairs, and the gradient of their scores over `scale`; `lse` and `delta` broadcast."""
    slope = 1.0
    if SOFTCAP:
        score = _tanh(score * inner)
        slope = 1.0 - score * score
    p = tl.exp2(score * outer - lse * LOG2_E)
    ds = p * (dp - delta) * slope
    if MASKED:  # selected, not multiplied: rows without keys have an lse of -inf
        p, ds = tl.where(allowed, p, 0.0), tl.where(allowed, ds, 0.0)
    return p, ds


@triton.jit
def _dq_of_keys(
    dq, q, dout, lse, delta, k_at, k_step, v_at, v_step, row, r0, r1, lo, hi, first, last, begin, end, inner, outer,
    KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq / scale of a block of queries from keys ``[begin, end)``."""
    k_here, v_here = k_at + begin.to(tl.int64) * k_step, v_at + begin.to(tl.int64) * v_step
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = (key >= first) & (key < last)
        behind = row[:, None] - key[None, :]
        allowed = (behind >= lo) & (behind <= hi) & inside[None, :] & ((row >= r0) & (row < r1))[:, None]
        k = _load(k_here, k_step, inside, KEYS, D, WIDE_D, MASKED)
        v = _load(v_here, v_step, inside, KEYS, E, WIDE_E, MASKED)
        score, dp = tl.dot(q, tl.trans(k), input_precision=DOT), tl.dot(dout, tl.trans(v), input_precision=DOT)
        _, ds = _weights(score, lse[:, None], dp, delta[:, None], allowed, inner, outer, SOFTCAP, MASKED)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=DOT)
        k_here += KEYS * k_step
        v_here += KEYS * v_step
    return dq


@triton.jit
def backward_of_queries(
    q, q_step, k, k_step, v, v_step, dout, dout_step, lse, lse_step, delta, delta_step, dq, hull_first, hull_last,
    tiles, blocks, offsets, order, tokens, inner, outer, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dq of the rows ``[hull_first, hull_last)``, ``[B, H, rows, D]``: grid of blocks, heads, batch rows."""
    n, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.load(blocks + n) * ROWS
    far = start.to(tl.int64)
    row = start + tl.arange(0, ROWS)
    here = row < tokens
    q_at = q + batch * q_step[0] + head * q_step[1] + far * q_step[2]
    dout_at = dout + batch * dout_step[0] + head * dout_step[1] + far * dout_step[2]
    lse_at = lse + batch * lse_step[0] + head * lse_step[1] + far * lse_step[2] + tl.arange(0, ROWS) * lse_step[2]
    delta_at = delta + batch * delta_step[0] + head * delta_step[1] + far * delta_step[2]
    mine = _load(q_at, q_step[2], here, ROWS, D, WIDE_D, True)
    given = _load(dout_at, dout_step[2], here, ROWS, E, WIDE_E, True)
    norm = tl.load(lse_at, mask=here, other=0.0)
    less = tl.load(delta_at + tl.arange(0, ROWS) * delta_step[2], mask=here, other=0.0)
    k_at = k + batch * k_step[0] + head // GROUP * k_step[1]
    v_at = v + batch * v_step[0] + head // GROUP * v_step[1]
    found = tl.zeros([ROWS, WIDE_D], tl.float32)
    for i in range(tl.load(offsets + n), tl.load(offsets + n + 1)):
        r0, r1, lo, hi, first, last, begin, clear, cut = _tile(
            tiles + tl.load(order + i) * 8, start, batch, ROWS, KEYS
        )
        found = _dq_of_keys(
            found, mine, given, norm, less, k_at, k_step[2], v_at, v_step[2], row, r0, r1, lo, hi, first, last,
            begin, clear, inner, outer, KEYS, D, E, WIDE_D, WIDE_E, SOFTCAP, True,
        )  # fmt: skip
        found = _dq_of_keys(
            found, mine, given, norm, less, k_at, k_step[2], v_at, v_step[2], row, r0, r1, lo, hi, first, last,
            clear, cut, inner, outer, KEYS, D, E, WIDE_D, WIDE_E, SOFTCAP, False,
        )  # fmt: skip
        found = _dq_of_keys(
            found, mine, given, norm, less, k_at, k_step[2], v_at, v_step[2], row, r0, r1, lo, hi, first, last,
            cut, last, inner, outer, KEYS, D, E, WIDE_D, WIDE_E, SOFTCAP, True,
        )  # fmt: skip
    column = tl.arange(0, WIDE_D)
    first_row = (batch * tl.num_programs(1) + head) * (hull_last - hull_first) + far - hull_first
    at = dq + first_row * D + tl.arange(0, ROWS)[:, None] * D + column[None, :]
    kept = ((row >= hull_first) & (row < hull_last))[:, None] & (column < D)[None, :]
    tl.store(at, found * scale, mask=kept)


@triton.jit
def _dkv_of_queries(
    dk, dv, k, v, q_at, q_step, dout_at, dout_step, lse_at, lse_step, delta_at, delta_step, key, r0, r1, lo, hi,
    first, last, begin, end, inner, outer,
    ROWS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk / scale and dv of a block of keys from queries ``[begin, end)``; pairs as keys times queries."""
    far = begin.to(tl.int64)
    q_here, dout_here = q_at + far * q_step, dout_at + far * dout_step
    lse_here, delta_here = lse_at + far * lse_step, delta_at + far * delta_step
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row >= first) & (row < last)
        behind = key[:, None] - row[None, :]
        allowed = (behind >= lo) & (behind <= hi) & inside[None, :] & ((key >= r0) & (key < r1))[:, None]
        q = _load(q_here, q_step, inside, ROWS, D, WIDE_D, MASKED)
        dout = _load(dout_here, dout_step, inside, ROWS, E, WIDE_E, MASKED)
        if MASKED:
            lse = tl.load(lse_here + tl.arange(0, ROWS) * lse_step, mask=inside, other=0.0)
            delta = tl.load(delta_here + tl.arange(0, ROWS) * delta_step, mask=inside, other=0.0)
        else:
            lse = tl.load(lse_here + tl.arange(0, ROWS) * lse_step)
            delta = tl.load(delta_here + tl.arange(0, ROWS) * delta_step)
        score, dp = tl.dot(k, tl.trans(q), input_precision=DOT), tl.dot(v, tl.trans(dout), input_precision=DOT)
        p, ds = _weights(score, lse[None, :], dp, delta[None, :], allowed, inner, outer, SOFTCAP, MASKED)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=DOT)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=DOT)
        q_here += ROWS * q_step
        dout_here += ROWS * dout_step
        lse_here += ROWS * lse_step
        delta_here += ROWS * delta_step
    return dk, dv


@triton.jit
def backward_of_keys(
    q, q_step, k, k_step, v, v_step, dout, dout_step, lse, lse_step, delta, delta_step, dk, dv, hull_first, hull_last,
    tiles, blocks, offsets, order, tokens, inner, outer, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dk and dv of the keys ``[hull_first, hull_last)`` of `tokens`, ``[B, K, keys, D]`` and ``[.., Dv]``, by turned
    tiles: grid of blocks, KV heads, batch rows. All query heads of a KV head are summed here."""
    n, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.load(blocks + n) * KEYS
    far = start.to(tl.int64)
    key = start + tl.arange(0, KEYS)
    here = key < tokens
    k_at = k + batch * k_step[0] + head * k_step[1] + far * k_step[2]
    v_at = v + batch * v_step[0] + head * v_step[1] + far * v_step[2]
    my_k = _load(k_at, k_step[2], here, KEYS, D, WIDE_D, True)
    my_v = _load(v_at, v_step[2], here, KEYS, E, WIDE_E, True)
    of_k, of_v = tl.zeros([KEYS, WIDE_D], tl.float32), tl.zeros([KEYS, WIDE_E], tl.float32)
    for g in range(GROUP):
        of_query = head * GROUP + g
        q_at = q + batch * q_step[0] + of_query * q_step[1]
        dout_at = dout + batch * dout_step[0] + of_query * dout_step[1]
        lse_at = lse + batch * lse_step[0] + of_query * lse_step[1]
        delta_at = delta + batch * delta_step[0] + of_query * delta_step[1]
        for i in range(tl.load(offsets + n), tl.load(offsets + n + 1)):
            r0, r1, lo, hi, first, last, begin, clear, cut = _tile(
                tiles + tl.load(order + i) * 8, start, batch, KEYS, ROWS
            )
            of_k, of_v = _dkv_of_queries(
                of_k, of_v, my_k, my_v, q_at, q_step[2], dout_at, dout_step[2], lse_at, lse_step[2], delta_at,
                delta_step[2], key, r0, r1, lo, hi, first, last, begin, clear, inner, outer,
                ROWS, D, E, WIDE_D, WIDE_E, SOFTCAP, True,
            )  # fmt: skip
            of_k, of_v = _dkv_of_queries(
                of_k, of_v, my_k, my_v, q_at, q_step[2], dout_at, dout_step[2], lse_at, lse_step[2], delta_at,
                delta_step[2], key, r0, r1, lo, hi, first, last, clear, cut, inner, outer,
                ROWS, D, E, WIDE_D, WIDE_E, SOFTCAP, False,
            )  # fmt: skip
            of_k, of_v = _dkv_of_queries(
                of_k, of_v, my_k, my_v, q_at, q_step[2], dout_at, dout_step[2], lse_at, lse_step[2], delta_at,
                delta_step[2], key, r0, r1, lo, hi, first, last, cut, last, inner, outer,
                ROWS, D, E, WIDE_D, WIDE_E, SOFTCAP, True,
            )  # fmt: skip
    first_row = (batch * tl.num_programs(1) + head) * (hull_last - hull_first) + far - hull_first
    local = tl.arange(0, KEYS)[:, None]
    kept = ((key >= hull_first) & (key < hull_last))[:, None]
    column, value_column = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    of_k_at = dk + first_row * D + local * D + column[None, :]
    of_v_at = dv + first_row * E + local * E + value_column[None, :]
    tl.store(of_k_at, of_k * scale, mask=kept & (column < D)[None, :])
    tl.store(of_v_at, of_v, mask=kept & (value_column < E)[None, :])
