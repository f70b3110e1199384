"""Answers for others to take: plain data for `--json`, and a config for `ringspun train`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ringspun.core.mask import Causal, Mask
from ringspun.errors import ConfigError
from ringspun.planner.accuracy import (
    CELLS,
    alst_errors,
    by_recipe,
    chosen,
    constant,
    held_out,
    scaling_law,
    score,
)
from ringspun.planner.adaptive import quickest
from ringspun.planner.explain import Verdict
from ringspun.planner.hardware import GIB, Cluster, Hardware
from ringspun.planner.inference import (
    cache_bytes,
    decode,
    first_token_seconds,
    least_new_fraction,
    least_new_tokens,
    travels,
)
from ringspun.planner.memory import JAX_2023
from ringspun.planner.models import Model
from ringspun.planner.overlap import NEVER, least_block, least_slice
from ringspun.planner.search import Plan, Question
from ringspun.planner.split import Split
from ringspun.planner.time import ELEMENT, Job


def plan_data(plan: Plan, price: float | None = None) -> dict[str, Any]:
    """A plan in seconds, bytes and tokens."""
    job, fits = plan.job, plan.longest
    return {
        "split": asdict(job.split),
        "layout": str(job.layout),
        "route": str(job.route),
        "checkpointing": job.checkpointing,
        "zero": job.zero,
        "seq_len": job.seq_len,
        "passes": plan.passes,
        "step_s": plan.seconds,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "pass_s": dict(plan.time.items),
        "memory_bytes": {
            "capacity": plan.memory.capacity,
            "total": plan.memory.total,
            "first_step": plan.memory.first_step,
            "left_for_attention": plan.memory.left_for_attention,
            "peak": plan.memory.peak_phase,
            "items": plan.memory.items,
        },
        "longest": {"tokens": fits.tokens, "low": fits.low, "high": fits.high, "limit": fits.limit},
        "cost_per_billion_tokens": None if price is None else plan.cost(price),
    }


def answer_data(question: Question, plans: list[Plan], told: Verdict, advice: list[str]) -> dict[str, Any]:
    """All that `ringspun plan train` knows."""
    return {
        "model": question.model.name,
        "parameters": question.model.parameters,
        "device": question.cluster.device.name,
        "devices": question.cluster.count,
        "node": question.cluster.node,
        "mask": str(question.mask),
        "verdict": asdict(told),
        "advice": advice,
        "plans": [plan_data(plan, question.price) for plan in plans],
    }


def train_config(plan: Plan, *, steps: int = 1000) -> str:
    """A TOML file that `ringspun train` takes: its sizes, length and batch, who shares what, and what is kept.

    Raises:
        ConfigError: a plan with what that command has not: tensor parallelism, another mask, another kind of model.
    """
    job = plan.job
    split, model = job.split, job.model
    if split.tp > 1:
        raise ConfigError(f"split must be without tp for `ringspun train`; got {split}. Ask with --max-tp 1.")
    if job.mask != Causal():
        raise ConfigError(f"mask must be causal for `ringspun train`; got {job.mask}. Take the JSON.")
    llama = model.gated and model.biases == "none" and not model.window and not model.qk_norm and model.norms == 2
    if not llama or model.head_size * model.heads != model.hidden or model.head_size % 2:
        raise ConfigError(f"model must be a Llama for `ringspun train`; got {model.name}. Take the JSON.")
    lines = [
        f"# {' '.join(model.name.split())} on {split}; {plan.seconds:.3g} s a step expected. Tokens are bytes, and all",
        f"# state is sharded (planned: ZeRO-{job.zero}). Not said here: vocabulary, theta of the rotary positions,",
        f"# route ({job.route}).",
        f"seq_len = {job.seq_len}",
        f"batch_size = {plan.passes * split.dp}",
        f"ranks = {split.ring * split.ulysses}",
        f"ulysses = {split.ulysses}",
        f"dp_shard = {split.dp}",
        f"shard = {json.dumps('fsdp' if split.devices > 1 else 'none')}",
        f"layout = {json.dumps(str(job.layout))}",
        f"checkpointing = {json.dumps(job.checkpointing)}",
        'dtype = "bfloat16"',
        f"steps = {steps}",
        "",
        "[model]",
        f"layers = {model.layers}",
        f"hidden_size = {model.hidden}",
        f"intermediate_size = {model.intermediate}",
        f"heads = {model.heads}",
        f"kv_heads = {model.kv_heads}",
    ]
    return "\n".join(lines) + "\n"


def inference_data(
    model: Model, cluster: Cluster, ranks: int, *, new: int, cached: int = 0, tp: int = 1, batch: int = 1
) -> dict[str, Any]:
    """Prefill, cache and decode of a ring of `ranks`, each of `tp` devices; with sentences, under `told`.

    Args:
        new, cached: tokens of each sequence. batch: sequences that decode together.
    """
    Split(ring=ranks, tp=tp).check(model)
    link = cluster.near if ranks * tp <= cluster.node else cluster.far
    device = cluster.device
    sent = math.ceil(2 * new / ranks * max(1, model.kv_heads // tp) * model.head_size * ELEMENT)
    rate = sent / link.seconds(sent)
    way = travels(model, new, cached, ranks=ranks, flops=device.attention, bytes_per_s=rate) if ranks > 1 else None
    seconds = first_token_seconds(model, new, ranks * tp, device.attention, cached)
    one = decode(device, link, model, new + cached, ranks, batch=batch, shared_heads=tp)
    kept = cache_bytes(model, new + cached, devices=ranks * min(tp, model.kv_heads), batch=batch)
    weights = ELEMENT * model.parameters / tp
    hidden = ranks == 1 or new >= least_new_tokens(model, ranks, device.attention, rate)
    travelling = (
        f"{'keys and values' if way == 'kv' else 'queries'} travel; keys hide from "
        f"{least_new_tokens(model, ranks, device.attention, rate):,.0f} new tokens on, and are more bytes than queries "
        f"where less than {least_new_fraction(model):.1%} of the tokens are new"
    )
    told = [
        f"prefill: {travelling if way else 'on one rank nothing travels'}",
        f"first token after {seconds:.3g} s, if transfers hide",
        f"weights {weights / GIB:.1f} GiB and cache {kept / GIB:.2f} GiB of {device.memory_gib:g} GiB a device"
        f"{'' if weights + kept <= device.memory_bytes else ': they do not fit'}",
    ]
    if ranks > 1:
        told.append(
            f"decode: do not ring. A layer's token takes {1e6 * one.ring:,.0f} us with keys going round, "
            f"{1e6 * one.pass_q:,.0f} us with queries, {1e6 * one.merge:,.0f} us with one merge of all ranks, "
            f"{1e6 * one.whole:,.0f} us with the whole cache on one rank"
            f"{'' if one.whole_fits else ', which it does not fit'}: take {one.best}, on devices of its own"
        )
    return {
        "travels": way,
        "hidden": hidden,
        "first_token_s": seconds,
        "weights_bytes": weights,
        "cache_bytes": kept,
        "decode_s": asdict(one) | {"best": one.best},
        "told": told,
    }


def slice_rows(model: Model, hardware: Hardware, devices: Sequence[str], batch: int = 1) -> list[dict[str, Any]]:
    """Shortest slices that hide a hop, per device and link; None: none does."""
    rows = []
    for name in devices:
        device = hardware.device(name)
        for link in filter(None, (device.near, device.far)):
            spec = hardware.link(link)
            peak = least_block(device.flops, spec.bytes_per_s, kv_per_query_head=model.kv_heads / model.heads)
            reached = least_slice(device, spec.link(), model, batch=batch)
            reached_or_none = None if reached == NEVER else reached
            rows.append({"device": name, "link": link, "peak": peak, "reached": reached_or_none})
    return rows


def way_rows(model: Model, cluster: Cluster, seq_len: int, mask: Mask, speeds: Sequence[float]) -> list[dict[str, Any]]:
    """Ways of a ring of unequal ranks, the first to be done first; seconds are of one layer's attention."""
    job = Job(model, cluster, Split(ring=len(speeds)), seq_len, mask=mask)
    return [
        {"layout": str(way.layout), "route": str(way.route), "tokens": list(way.tokens), "seconds": way.seconds}
        for way in quickest(mask, seq_len, speeds, job.work, job.place)
    ]


def accuracy_data() -> dict[str, Any]:
    """What `ringspun.planner.accuracy` finds."""
    ways = {
        "itemised memory, one recipe": score(by_recipe(JAX_2023)),
        "a constant per method": score(constant(CELLS)),
        "a scaling law, fitted": score(scaling_law(CELLS)),
        "left out: itemised memory": held_out(chosen),
        "left out: a constant": held_out(constant),
        "left out: a scaling law": held_out(scaling_law),
    }
    rows = [
        {
            "model": row.model,
            "devices": row.devices,
            "published": row.tokens,
            "predicted": row.tokens * (1 + error),
            "error": error,
            "fitted": row.calibrates,
        }
        for row, error in alst_errors().items()
    ]
    return {
        "max_context": {
            "what": "longest contexts, 36 cells of arXiv 2310.01889 table 3, in powers of two; left out: each group "
            "of hardware predicted from the others",
            "ways": {name: asdict(found) for name, found in ways.items()},
        },
        "offloaded": {"what": "longest contexts of arXiv 2506.13996, two constants fitted", "rows": rows},
    }
