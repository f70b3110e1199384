"""`ringspun plan`: will it fit, will it hide, how fast, which way. No framework is loaded, and nothing is run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspun.cli.options import told

if TYPE_CHECKING:
    from ringspun.planner.hardware import Cluster

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

ModelName = Annotated[str, typer.Option("--model", help="Name (llama-3-8b), or a Hugging Face config.json.")]
DeviceName = Annotated[str, typer.Option("--device", help="Name (H100); `plan list` shows all.")]
Count = Annotated[int, typer.Option("--devices", help="How many.")]
Node = Annotated[int | None, typer.Option(help="Devices of a node.", show_default="the device's")]
Near = Annotated[str | None, typer.Option(help="Link inside a node.", show_default="the device's")]
Far = Annotated[str | None, typer.Option(help="Link between nodes.", show_default="the device's")]
Measured = Annotated[Path | None, typer.Option("--links", help="A file of `ringspun bench links` instead of both.")]
DeviceFile = Annotated[Path | None, typer.Option(help="TOML file with [devices.NAME] and [links.NAME] of your own.")]
MOST_SIMULATED = 64
"""Ranks; more would take minutes."""
MOST_SIMULATED_TOKENS = 1 << 28
"""Of a sequence; striped shares are checked token by token."""
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def _plan() -> None:
    """Plan long contexts: what fits, what hides, how fast, and whether to ring at all.

    Answers come from formulas and published figures, not from a run; `plan accuracy` says how far to trust them.
    """


@app.command()
def train(
    model: ModelName,
    device: DeviceName,
    devices: Count,
    seq_len: Annotated[
        str | None, typer.Option(help="Tokens of a sequence (131072, 128K, 1M).", show_default="the longest")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a step.", show_default="4 million tokens' worth")
    ] = None,
    mask: Annotated[str, typer.Option(help="Mask of the layers that see all keys.")] = "causal",
    node: Node = None,
    near: Near = None,
    far: Far = None,
    links: Measured = None,
    device_file: DeviceFile = None,
    max_tp: Annotated[int | None, typer.Option(help="Largest tensor parallel degree.", show_default="a node")] = None,
    loss_chunk: Annotated[
        int | None, typer.Option(help="Tokens of a chunk of the loss, computed again in backward.", show_default="all")
    ] = None,
    ring_only: Annotated[bool, typer.Option("--ring-only", help="Rings and replicas alone, no split heads.")] = False,
    price: Annotated[float | None, typer.Option(help="Of a device and hour.")] = None,
    keep: Annotated[int, typer.Option(help="Plans to show.")] = 5,
    export: Annotated[Path | None, typer.Option(help="Write the best as a config for `ringspun train`.")] = None,
    as_json: AsJson = False,
) -> None:
    """The quickest ways to train a model at a length on a cluster, or the longest length; and why."""
    with told("plan"):
        from ringspun.cli.options import bounded, tokens
        from ringspun.cli.plan_tables import show_answer
        from ringspun.core.text import parse_mask
        from ringspun.planner.explain import verdict
        from ringspun.planner.export import answer_data, train_config
        from ringspun.planner.memory import TORCH, advice
        from ringspun.planner.models import model as model_of
        from ringspun.planner.search import Question, search

        bounded("keep", keep, least=1)
        chunk = None if loss_chunk is None else bounded("loss-chunk", loss_chunk, least=1)
        question = Question(
            model_of(model),
            _cluster(device, devices, node, near, far, links, device_file),
            None if seq_len is None else tokens(seq_len),
            batch,
            parse_mask(mask),
            TORCH.model_copy(update={"logit_chunk": chunk}),
            price,
            max_tp,
        )
        plans = search(question, keep=keep, only=(lambda s: s.tp == s.ulysses == 1) if ring_only else None)
        why = verdict(question, plans)
        best = plans[0]
        hints = advice(best.memory, question.model, best.job.tokens, question.recipe)
        if as_json:
            _print(answer_data(question, plans, why, hints))
        else:
            show_answer(question, plans, why, hints)
        if export is not None:
            _write(export, train_config(best))


@app.command()
def infer(
    model: ModelName,
    device: DeviceName,
    devices: Annotated[int, typer.Option("--devices", help="Ranks of the ring, each of --tp devices.")],
    new: Annotated[str, typer.Option(help="New tokens of a prompt (8192, 128K).")],
    cached: Annotated[str, typer.Option(help="Tokens in the cache already.")] = "0",
    tp: Annotated[int, typer.Option(help="Devices that share the heads of one rank.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences that decode together.")] = 1,
    node: Node = None,
    near: Near = None,
    far: Far = None,
    links: Measured = None,
    device_file: DeviceFile = None,
    as_json: AsJson = False,
) -> None:
    """Prefill over a ring (do keys travel, or queries?), decode (do not ring), and the cache."""
    with told("plan"):
        from ringspun.cli.options import bounded, tokens
        from ringspun.cli.plan_tables import show_lines
        from ringspun.planner.export import inference_data
        from ringspun.planner.models import model as model_of

        for name, value in (("tp", tp), ("batch", batch), ("devices", devices)):
            bounded(name, value, least=1)
        found = _cluster(device, devices * tp, node, near, far, links, device_file)
        data = inference_data(
            model_of(model), found, devices, new=tokens(new), cached=tokens(cached, least=0), tp=tp, batch=batch
        )
        if as_json:
            _print(data)
        else:
            show_lines(data["told"])


@app.command(name="links")
def slices(
    model: ModelName,
    device: Annotated[str | None, typer.Option(help="Name.", show_default="all")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    device_file: DeviceFile = None,
    as_json: AsJson = False,
) -> None:
    """From which slice on a hop hides, per device and link: by peaks, and by the rates that are reached."""
    with told("plan"):
        from ringspun.cli.options import bounded
        from ringspun.cli.plan_tables import show_slices
        from ringspun.planner.export import slice_rows
        from ringspun.planner.hardware import Hardware
        from ringspun.planner.models import model as model_of

        bounded("batch", batch, least=1)
        known = Hardware.load(device_file)
        wanted = list(known.devices) if device is None else [known.device(device).name]
        rows = slice_rows(model_of(model), known, wanted, batch)
        if as_json:
            _print({"rows": rows})
        else:
            show_slices(rows)


@app.command()
def shares(
    model: ModelName,
    device: DeviceName,
    seq_len: Annotated[str, typer.Option(help="Tokens of a sequence (131072, 128K, 1M).")],
    speeds: Annotated[str, typer.Option(help="Of each rank's compute, comma list; only ratios count: 1,1,0.5,0.5.")],
    mask: Annotated[str, typer.Option(help="Mask.")] = "causal",
    keep: Annotated[int, typer.Option(help="Ways to show.")] = 5,
    node: Node = None,
    near: Near = None,
    far: Far = None,
    links: Measured = None,
    device_file: DeviceFile = None,
    as_json: AsJson = False,
) -> None:
    """Ranks of unequal speed: which shares, layout and route are done first, simulated message by message."""
    with told("plan"):
        from ringspun.cli.options import bounded, split_list, tokens
        from ringspun.cli.plan_tables import show_ways
        from ringspun.core.text import parse_mask
        from ringspun.planner.export import way_rows
        from ringspun.planner.models import model as model_of

        paces = [_pace(text) for text in split_list(speeds)]
        bounded("speeds", len(paces), least=2, most=MOST_SIMULATED)
        bounded("keep", keep, least=1)
        found = _cluster(device, len(paces), node, near, far, links, device_file)
        length = bounded("seq-len", tokens(seq_len), least=len(paces), most=MOST_SIMULATED_TOKENS)
        rows = way_rows(model_of(model), found, length, parse_mask(mask), paces)[:keep]
        if as_json:
            _print({"ways": rows})
        else:
            show_ways(rows)


@app.command()
def accuracy(as_json: AsJson = False) -> None:
    """How well the formulas meet published figures, beside what knows less."""
    with told("plan"):
        from ringspun.cli.plan_tables import show_accuracy
        from ringspun.planner.export import accuracy_data

        data = accuracy_data()
        if as_json:
            _print(data)
        else:
            show_accuracy(data)


@app.command(name="list")
def known(device_file: DeviceFile = None, as_json: AsJson = False) -> None:
    """Devices, links and models that are known, with their sources."""
    with told("plan"):
        from ringspun.cli.plan_tables import show_known
        from ringspun.planner.hardware import Hardware
        from ringspun.planner.models import known_models

        hardware = Hardware.load(device_file)
        if as_json:
            tables = {"devices": hardware.devices, "links": hardware.links, "models": known_models()}
            _print({kind: {n: entry.model_dump() for n, entry in table.items()} for kind, table in tables.items()})
        else:
            show_known(hardware, known_models())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        typer.echo(f"ringspun plan: export must be a place for a file; {problem}.", err=True)
        raise typer.Exit(1) from None


def _cluster(
    device: str, count: int, node: int | None, near: str | None, far: str | None, links: Path | None, own: Path | None
) -> Cluster:
    from ringspun.core.links import Links
    from ringspun.planner.hardware import Hardware, cluster

    if links is not None and (near is not None or far is not None):
        raise ValueError("links must not be given with near or far, which it replaces. Leave one out.")
    measured = None if links is None else Links.load(links)
    return cluster(device, count, node=node, near=near, far=far, measured=measured, hardware=Hardware.load(own))


def _pace(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"speeds must be a comma list of positive numbers; got {text[:80]!r}.")
    return value


def _print(data: Any) -> None:
    try:
        text = json.dumps(data, indent=1, allow_nan=False)
    except ValueError:
        raise ValueError(
            "figures must be finite for --json; got some beyond the largest float. "
            "Ask with smaller sizes, rates or prices."
        ) from None
    typer.echo(text)
