"""`ringspun show`: masks, layouts, schedules, balance, memory and time as pictures. No framework is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspun.cli.measured import BYTES
from ringspun.cli.options import bounded, integers, one_of, split_list, tokens, told

if TYPE_CHECKING:
    from ringspun.core.mask import Documents
    from ringspun.pictures.figures import Figure
    from ringspun.pictures.scene import Scene
    from ringspun.planner.hardware import Cluster

app = typer.Typer(add_completion=False, rich_markup_mode=None)
PICTURES = ("mask", "layout", "schedule", "balance", "memory", "timeline")
WIDTH = 80


@dataclass(frozen=True)
class Asked:
    """The options that say what is drawn."""

    mask: str | None
    layout: str
    route: str
    ranks: int
    seq_len: str | None
    documents: str | None
    data: Path | None
    heads: int
    kv_heads: int | None
    head_size: int
    batch: int
    dtype: str
    backward: str
    device: str
    node: int | None
    links: Path | None
    device_file: Path | None


@app.command(no_args_is_help=True)
def show(
    what: Annotated[
        str,
        typer.Argument(help="mask, layout, schedule, balance, memory, timeline; a comma list; all; compare; or run."),
    ],
    ways: Annotated[
        list[str] | None,
        typer.Argument(help="What to compare: zigzag, direct, striped/double_ring(4), ...; of run, its folder."),
    ] = None,
    mask: Annotated[str | None, typer.Option(help="Mask.", show_default="causal, within documents if given")] = None,
    layout: Annotated[str, typer.Option(help="Layout.")] = "zigzag",
    route: Annotated[str, typer.Option(help="Route.")] = "ring",
    ranks: Annotated[int, typer.Option(help="Ring size.")] = 4,
    seq_len: Annotated[
        str | None, typer.Option(help="Tokens of the sequence (16384, 1M).", show_default="all documents, or 64")
    ] = None,
    documents: Annotated[str | None, typer.Option(help="Lengths of packed documents, comma list.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Or documents as they lie in a file or folder, a byte a token, until it is full."),
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads of a rank.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.", show_default="as many")] = None,
    head_size: Annotated[int, typer.Option(help="Head size.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "bfloat16",
    backward: Annotated[str, typer.Option(help="What travels in backward: keys, queries, or auto.")] = "keys",
    device: Annotated[str, typer.Option(help="Whose time is predicted; `plan list` shows all.")] = "H100",
    node: Annotated[int | None, typer.Option(help="Devices of a node.", show_default="the device's")] = None,
    links: Annotated[Path | None, typer.Option(help="A file of `bench links` instead of the device's.")] = None,
    device_file: Annotated[Path | None, typer.Option(help="TOML file with devices and links of your own.")] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(help="timeline: step logs of a run's ranks, or folders of them; again for more."),
    ] = None,
    call: Annotated[int | None, typer.Option(help="timeline: which forward call.", show_default="the last")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write it to a file: .svg, .png, .html, .json, .trace.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
) -> None:
    """Draw who holds which tokens, what each rank computes and sends at each step, and how long it takes."""
    asked = Asked(
        mask, layout, route, ranks, seq_len, documents, data, heads, kv_heads, head_size, batch, dtype, backward,
        device, node, links, device_file,
    )  # fmt: skip
    with told("show", output="save"):
        if what == "run":
            _run(ways or [], save, as_json=as_json)
            return
        if ways and what != "compare":
            raise ValueError(f"{what} must be asked for alone; got {' '.join(ways)}. To compare: show compare A B.")
        names = () if what == "compare" else _named(what)
        if (log or call is not None) and "timeline" not in names:
            raise ValueError(f"log and call must come with timeline; got {what}. Leave them out.")
        if call is not None and not log:
            raise ValueError(f"call must come with log, whose call it is; got {call} alone. Give the run's step logs.")
        small = save is None and not as_json
        if what == "compare":
            figures = [_compared(asked, ways or [])]
        else:
            figures = [_figure(name, asked, log or [], call, small=small) for name in names]
        _out(figures, save, as_json=as_json)


def _run(folders: Sequence[str], save: Path | None, *, as_json: bool) -> None:
    """A training run; unless asked for otherwise its page is drawn anew, too."""
    from ringspun.train.reporting import run_page

    if len(folders) != 1:
        raise ValueError(
            f"run must come with one folder, a training run's output; got {len(folders)}. show run FOLDER."
        )
    folder = Path(folders[0])
    _out([run_page.figure_of(folder)], save, as_json=as_json)
    if save is None and not as_json:
        typer.echo(f"wrote {run_page.write_page(folder)}")


def _named(what: str) -> Sequence[str]:
    return PICTURES if what == "all" else [one_of("picture", name, PICTURES) for name in split_list(what)]


def _out(figures: Sequence[Figure], save: Path | None, *, as_json: bool) -> None:
    from rich.console import Console

    from ringspun.pictures import save as files
    from ringspun.pictures.terminal import show as on_terminal

    if save is not None:
        files.save(figures, save)
        typer.echo(f"wrote {save}", err=as_json)
    if as_json:
        typer.echo(files.as_json(figures))
    elif save is None:
        console = Console()
        if console.width > WIDTH or not console.is_terminal:
            console.width = WIDTH
        for i, figure in enumerate(figures):
            if i:
                console.print()
            on_terminal(figure, console)


def _figure(name: str, asked: Asked, log: list[Path], call: int | None, *, small: bool) -> Figure:
    """One picture; `small`: in as many cells as a terminal has room for."""
    from ringspun.pictures import terminal
    from ringspun.pictures.figures import OF_SCENE, layout, mask

    if name == "timeline":
        return _timeline(asked, log, call)
    scene = _scene(asked)
    if small and name == "mask":
        return mask.of(scene, terminal.ROWS)
    if small and name == "layout":
        return layout.of(scene, most_ranks=terminal.ROWS)
    return OF_SCENE[name](scene)


def _timeline(asked: Asked, log: list[Path], call: int | None) -> Figure:
    from ringspun.errors import ConfigError
    from ringspun.pictures.figures import timeline
    from ringspun.steplog.timeline import read

    files = [f for d in log for f in (sorted(d.glob("ringspun-*.json")) if d.is_dir() else [d])]
    if log and not files:
        raise ConfigError(f"log must be a step log or a folder of ringspun-*.json; got none in {log[0]}.")
    rings = read(files) if log else []
    if len(rings) > 1:
        raise ConfigError(
            f"log must be of one ring; got {', '.join(ring.name for ring in rings)}. Give its dumps alone."
        )
    scene = _scene(asked)
    return timeline.of(scene, *timeline.on(scene, _cluster(asked)), log=rings[0] if rings else None, call=call)


def _compared(asked: Asked, ways: Sequence[str]) -> Figure:
    from dataclasses import replace
    from difflib import get_close_matches

    from ringspun.core.text import LAYOUTS, ROUTES
    from ringspun.pictures.figures import compare, timeline

    scenes = []
    for way in ways or ("contiguous", "zigzag", "striped"):
        parts: dict[str, str] = {}
        for part in way.split("/"):
            name = part.split("(")[0].strip().lower()
            near = next(iter(get_close_matches(name, [*LAYOUTS, *ROUTES], 1)), "")  # also of a slip of the pen
            kind = "layout" if near in LAYOUTS else "route"
            if kind in parts:
                raise ValueError(f"a way must be one layout and one route at most; got {way!r}, which has two {kind}s.")
            parts[kind] = part
        scenes.append(
            _scene(replace(asked, layout=parts.get("layout", asked.layout), route=parts.get("route", asked.route)))
        )
    return compare.of(scenes, *timeline.on(scenes[0], _cluster(asked)))


def _scene(asked: Asked) -> Scene:
    from ringspun.core.text import parse_layout, parse_mask, parse_route
    from ringspun.core.ways import WANTED
    from ringspun.core.wire import Format
    from ringspun.pictures.scene import Scene

    bounded("ranks", asked.ranks, least=1)
    for name in ("heads", "head_size", "batch"):
        bounded(name.replace("_", "-"), getattr(asked, name), least=1)
    kv_heads = asked.heads if asked.kv_heads is None else bounded("kv-heads", asked.kv_heads, least=1)
    if asked.heads % kv_heads:
        raise ValueError(f"kv-heads must divide heads; got {kv_heads} and heads = {asked.heads}.")
    element = BYTES[one_of("dtype", asked.dtype, tuple(BYTES))]
    wire = Format(
        asked.batch, asked.heads, kv_heads, asked.head_size, asked.head_size, asked.dtype, element, max(4, element)
    )
    seq_len = None if asked.seq_len is None else tokens(asked.seq_len)
    found = _documents(asked, seq_len)
    mask = None if asked.mask is None else parse_mask(asked.mask)
    if found is not None and mask is not None:
        mask = mask & found
    if seq_len is None:
        seq_len = 64 if found is None else found.end
    layout, route = parse_layout(asked.layout), parse_route(asked.route)
    one_of("backward", asked.backward, WANTED)
    return Scene.of(seq_len, asked.ranks, mask, layout, route, documents=found, wire=wire, backward=asked.backward)


def _documents(asked: Asked, seq_len: int | None) -> Documents | None:
    from ringspun.core.mask import Documents

    if asked.documents is not None and asked.data is not None:
        raise ValueError("documents and data must not both be given. Leave one out.")
    if asked.documents is not None:
        return Documents(integers("documents", asked.documents, least=0))
    if asked.data is None:
        return None
    from ringspun.cli.lengths import packed_lengths

    return Documents(packed_lengths(asked.data, seq_len))


def _cluster(asked: Asked) -> Cluster:
    from ringspun.core.links import Links
    from ringspun.planner.hardware import Hardware, cluster

    measured = None if asked.links is None else Links.load(asked.links)
    known = Hardware.load(asked.device_file)
    return cluster(asked.device, asked.ranks, node=asked.node, measured=measured, hardware=known)
