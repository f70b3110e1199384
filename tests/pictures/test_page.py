"""Pages of figures, as text: what they hold, what they ask for, and the contrast of their colours."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from ringspun.errors import ConfigError
from ringspun.pictures.figures import layout, schedule
from ringspun.pictures.page import SCRIPTS, page, page_data
from tests.pictures.scenes import SCENES, all_figures

ASSETS = files("ringspun.pictures").joinpath("assets")
STYLE = ASSETS.joinpath("page.css").read_text(encoding="utf-8")
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
"""A name, not an address: nobody fetches it."""


class Parsed(HTMLParser):
    """Elements of a page with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        self.texts.append((attributes.get("id") or tag, data))

    def text(self, name: str) -> str:
        return "".join(text for where, text in self.texts if where == name)


def as_json(value: object) -> object:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("name", SCENES)
def test_a_page_holds_just_its_figures(name):
    figures = all_figures(SCENES[name])
    told = json.loads(Parsed(page(figures)).text("data"))
    assert told == as_json(page_data(figures))
    assert told["figures"] == as_json([figure.as_dict() for figure in figures])


def test_words_with_marks_of_html_stay_words():
    figure = layout.of(SCENES["zigzag"])
    evil = "</script><script>alert(1)</script><!-- & @DATA@ @SCRIPT@"
    hurt = layout.LayoutFigure(**{**vars(figure), "words": evil})
    parsed = Parsed(page([hurt], title=evil))
    assert json.loads(parsed.text("data"))["figures"][0]["words"] == evil
    assert parsed.text("h1").strip() == evil
    assert [tag for tag, _ in parsed.elements].count("script") == 2


def test_a_page_refers_to_nothing_and_forbids_every_request():
    text = page(all_figures(SCENES["zigzag"]))
    assert not re.search(r"(https?:)?//[a-z]", text.replace(SVG_NAMESPACE, ""), re.IGNORECASE)
    assert not re.search(r"\b(src|srcset|action)=|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    (policy,) = [a["content"] for _, a in Parsed(text).elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(None, 1) for rule in policy.split("; "))
    assert rules == {
        "default-src": "'none'", "style-src": "'unsafe-inline'", "script-src": "'unsafe-inline'", "img-src": "data:"
    }  # fmt: skip


def test_a_page_says_its_language_and_fits_a_phone_and_names_itself():
    parsed = Parsed(page([schedule.of(SCENES["zigzag"])], title="A ring"))
    tags = dict(parsed.elements)
    assert tags["html"]["lang"] == "en" and parsed.text("title").strip() == "A ring"
    assert any(a.get("name") == "viewport" and "width=device-width" in a["content"] for _, a in parsed.elements)
    assert [tag for tag, _ in parsed.elements if tag in ("h1", "header", "main", "footer", "noscript")] == [
        "header", "h1", "main", "noscript", "footer"
    ]  # fmt: skip


def test_every_script_is_drawn_with():
    """None is left out, and the package carries them all."""
    found = sorted(file.name for file in ASSETS.iterdir())
    assert found == sorted([*SCRIPTS, "page.css", "page.html"])


def test_a_page_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="figures must be at least one; got none"):
        page([])


def theme(dark: bool) -> dict[str, str]:
    """The colours of a theme, by name; dark ones replace light ones."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    assert len(blocks) == 2
    return dict(re.findall(r"--([\w-]+): (#\w{6});", "".join(blocks[: 1 + dark])))


def contrast(one: str, other: str) -> float:
    """Of two colours; WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


TEXTS = [("ink", "paper"), ("ink", "card"), ("soft", "paper"), ("soft", "card"), ("ink", "wash"),
         ("accent", "card"), ("on-accent", "accent")]  # fmt: skip
SHAPES = ["full", "causal", "anticausal", "band", "mixed", "compute", "wait", "message", "edge", "accent", "soft"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_that_meet_have_contrast(dark):
    """AA: 4.5 for letters, 3 for shapes and the borders of controls."""
    colours = theme(dark)
    low = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in TEXTS}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}
    low = {name: contrast(colours[name], colours["card"]) for name in SHAPES}
    assert {name: ratio for name, ratio in low.items() if ratio < 3} == {}


def test_contrast_is_what_the_standard_says():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
