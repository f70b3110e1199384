"""Ring attention for JAX: inside the caller's own `jax.shard_map`, or on global arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from ringspun.core.layout import Contiguous, Layout
from ringspun.core.mask import Causal, Mask
from ringspun.core.softmax import checked_softcap
from ringspun.errors import PlanError, ShapeError
from ringspun.jax import inputs
from ringspun.jax.bias import Alibi
from ringspun.jax.kernels import Call, Kernel, Xla, choose
from ringspun.jax.plan import plan_of
from ringspun.jax.ring import AxisName, Job, Operands, attend
from ringspun.jax.sharding import deal_of, padded, place, ring_axis, unpadded

KERNELS: tuple[Kernel, ...] = (Xla(),)


def ring_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K Dv"],
    *,
    axis_name: AxisName,
    mask: Mask | None = None,
    layout: Layout | None = None,
    seq_len: int | None = None,
    key_len: int | None = None,
    query_start: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    bias: Alibi | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B s"] | None = None,
    return_lse: bool = False,
    kernel: Kernel | None = None,
    **unknown: object,
) -> Array | tuple[Array, Array]:
    """Exact attention over a sequence cut over a mesh axis; for use inside `jax.shard_map`. Differentiable.

    Every rank calls it with its shard, and gets the rows of its queries. Shards are of one size: where the length does
    not divide, `ringspun.jax.shard` fills them up, and what stands in rows that hold no token is never read.

    Args:
        q: ``[B, T, H, D]``, as `jax.nn.dot_product_attention`. k: ``[B, T, K, D]``. v: ``[B, T, K, Dv]``, H a multiple
            of K.
        axis_name: the mesh axis (or axes) that the ring runs along; None: no ring, this device holds the sequence.
        mask: default `Causal()`. layout: how tokens were dealt; default `Contiguous()`.
        seq_len: global length S (tokens); default ``T * R``. key_len: of the keys, where they are another sequence.
        query_start: position of the first query among such keys.
        scale: of the scores; default ``D ** -0.5``. softcap: ``softcap * tanh(score / softcap)``.
        sinks: ``[H]``, a logit in the denominator of every row. bias: `Alibi`, added to the scores.
        segment_ids: the document of each token ``[B, T]``, sharded as q; negative: padding, which sees nothing and
            is seen by nobody. For documents that differ between batch rows or are known on devices only; documents
            that the host knows belong into the mask, which then leaves out what is not needed.
        key_segment_ids: those of keys of another sequence.
        return_lse: also return the natural log of each row's sum of exponentials. kernel: default `Xla()`.
    Returns:
        ``out [B, T, H, Dv]`` in q's dtype, or ``(out, lse)`` with lse ``[B, T, H]`` in float32 (float64 for float64). A
        row that sees no key has out 0, lse -inf (with sinks: the sink) and no gradient.
    Raises:
        ShapeError, DtypeError: arrays that do not fit. PlanError, LayoutError, MaskError: mask, layout and lengths that
            do not go together. KernelRefused: no kernel can do the call. TypeError: an unknown argument.

    Source: Ring Attention (arXiv 2310.01889).
    """
    inputs.refuse(unknown)
    inputs.check_arrays(q, k, v)
    size = inputs.ring_size(axis_name)
    seq_len = q.shape[1] * size if seq_len is None else inputs.checked_length("seq_len", seq_len)
    plan = plan_of(
        Causal() if mask is None else mask,
        Contiguous() if layout is None else layout,
        size, seq_len, key_len=key_len, query_start=query_start,
    )  # fmt: skip
    inputs.check_rows(plan, q, k)
    inputs.check_terms(q.shape[2], sinks, bias)
    segments = inputs.checked_segments(q, k, segment_ids, key_segment_ids)
    call = Call(
        *(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype.name, q.shape[1], k.shape[1]),
        scale=inputs.checked_scale(scale, q.shape[3]),
        softcap=checked_softcap(softcap),
        bias="" if bias is None else "alibi",
        segments=segment_ids is not None,
    )
    kernel = choose(KERNELS if kernel is None else (kernel,), call)
    job = Job(size, plan.moves, plan.is_even, kernel, call, axis_name)
    tables = jax.tree.map(jnp.asarray, plan.tables)
    out, lse = attend(job, Operands(q, k, v, tables, sinks, None if bias is None else bias.slopes, *segments))
    return (out, lse) if return_lse else out


def sharded_attention(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K Dv"],
    *,
    mesh: Mesh,
    spec: PartitionSpec,
    layout: Layout | None = None,
    mask: Mask | None = None,
    seq_len: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    bias: Alibi | None = None,
    segment_ids: Int[Array, "B N"] | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """`ring_attention` on global arrays, of one process or many; also under `jax.jit`. Differentiable.

    Args:
        q, k, v: ``[B, N, H, D]``, tokens in the order that `ringspun.jax.shard` gives them: all ranks' shards one after
            the other, N rows. With `Contiguous()` that is the sequence's own order.
        mesh: of the devices. spec: of q: ``P(batch axes, ring axis, head axes)``; k and v alike.
        seq_len: global length S (tokens); default N. Shards as `shard` made them have ``N >= S`` rows; where N is S and
            does not divide, they are filled up inside, and S rows come back.
        layout, mask, sinks, bias, segment_ids, return_lse, options: as in `ring_attention`.
    Returns:
        as `ring_attention`, N rows.
    Raises:
        as `ring_attention`.
    """
    inputs.check_arrays(q, k, v)
    layout = Contiguous() if layout is None else layout
    rows, mask = q.shape[1], Causal() if mask is None else mask
    if k.shape[1] != rows:
        raise ShapeError(f"q and k must have as many tokens; got {rows} and {k.shape[1]}. Others: ring_attention.")
    seq_len = rows if seq_len is None else inputs.checked_length("seq_len", seq_len)
    axis, size = ring_axis(mesh, spec, 1)
    inputs.check_cuts(mesh, spec, {"q": q, "k": k})
    inputs.check_terms(q.shape[2], sinks, bias)
    for name, instead in (
        ("axis_name", "spec names it"),
        ("key_segment_ids", "keys have the documents of segment_ids"),
    ):
        if name in options:
            raise PlanError(f"{name} must be left out of sharded_attention; {instead}.")
    inputs.checked_segments(q, k, segment_ids, None)
    deal = deal_of(layout, size, seq_len, mask=mask)
    fill = rows != deal.rows  # S rows, one shard after the other, of different sizes
    if fill and rows != seq_len:
        raise ShapeError(
            f"q must have {deal.rows} rows, or {seq_len} in the order of ranks, for {seq_len} tokens on {size} ranks "
            f"by {layout}; got {rows}. Make shards by ringspun.jax.shard."
        )

    per_token, of_tokens, of_heads = PartitionSpec(*spec[:3]), PartitionSpec(*spec[:2]), PartitionSpec(*spec[2:3])
    slopes = None if bias is None else bias.slopes
    arrays = {"q": q, "k": k, "v": v, "segment_ids": segment_ids, "sinks": sinks, "slopes": slopes}
    specs = {**dict.fromkeys("qkv", per_token), "segment_ids": of_tokens, "sinks": of_heads, "slopes": of_heads}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    if fill:
        arrays = {name: padded(x, deal) if specs[name] != of_heads else x for name, x in arrays.items()}
    arrays = {name: place(x, mesh, specs[name]) for name, x in arrays.items()}
    options |= {"axis_name": axis, "mask": mask, "layout": layout, "seq_len": seq_len}
    try:
        on_ranks = _on_ranks(mesh, per_token, tuple((name, specs[name]) for name in arrays), **options)
    except TypeError:  # an option without a hash; ring_attention says what is wrong with it
        on_ranks = _on_ranks.__wrapped__(mesh, per_token, tuple((name, specs[name]) for name in arrays), **options)
    out, lse = on_ranks(arrays)
    if fill:
        out, lse = unpadded(out, deal), unpadded(lse, deal)
    return (out, lse) if return_lse else out


@lru_cache(maxsize=256, typed=True)
def _on_ranks(
    mesh: Mesh, per_token: PartitionSpec, specs: tuple[tuple[str, PartitionSpec], ...], **options: Any
) -> Callable[[dict[str, Array]], tuple[Array, Array]]:
    """`ring_attention` on the devices of a mesh. Kept, for without a jit around it each call would compile anew."""

    def attend_on_ranks(given: dict[str, Any]) -> Any:
        slopes = given.pop("slopes", None)
        return ring_attention(**given, bias=None if slopes is None else Alibi(slopes), return_lse=True, **options)

    run: Callable[[dict[str, Array]], tuple[Array, Array]] = jax.jit(
        jax.shard_map(attend_on_ranks, mesh=mesh, in_specs=(dict(specs),), out_specs=(per_token, per_token))
    )
    return run
