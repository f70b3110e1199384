"""Pictures as a value: a page in a notebook, text in a terminal."""

from __future__ import annotations

import html
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console

from ringspun.errors import ConfigError
from ringspun.pictures import save as files
from ringspun.pictures import terminal
from ringspun.pictures.figures import OF_SCENE, Figure
from ringspun.pictures.page import page
from ringspun.pictures.scene import Scene

HEIGHT = 780
"""Pixels of a page in a notebook."""


@dataclass(frozen=True, repr=False)
class Pictures:
    """Some figures. A notebook shows them as one page with a slider, `str` and `print` as text of 80 columns.

    Args:
        figures: the numbers of each.
    """

    figures: tuple[Figure, ...]

    def save(self, path: Path) -> None:
        """Write them to a file, see `ringspun.pictures.save.save`."""
        files.save(self.figures, path)

    def __str__(self) -> str:
        text = StringIO()
        out = Console(file=text, width=80, color_system=None)
        for i, figure in enumerate(self.figures):
            out.print("\n" * (i > 0), end="")
            terminal.show(figure, out)
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        text = html.escape(page(self.figures), quote=True)
        return f'<iframe srcdoc="{text}" title="pictures" style="width:100%;height:{HEIGHT}px;border:0"></iframe>'


def pictures_of(scene: Scene, *names: str) -> Pictures:
    """Pictures of a scene.

    Args:
        names: of `OF_SCENE`; default all.
    Raises:
        ConfigError: another name.
    """
    for name in names:
        if name not in OF_SCENE:
            raise ConfigError(f"pictures must be of {', '.join(OF_SCENE)}; got {name!r}.")
    return Pictures(tuple(OF_SCENE[name](scene) for name in names or OF_SCENE))
