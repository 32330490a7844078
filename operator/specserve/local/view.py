"""The live view on a terminal: news scroll by, and below them stands what each engine does."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specserve.local.news import News
from specserve.local.rows import HEADER, Row

#: Times a second that the table is drawn anew.
FRAMES: Final = 4
_COLOURS: Final = {
    "decides": "cyan",
    "switched": "green",
    "warning": "yellow",
    "well": "green",
    "note": "dim",
}
#: Columns of numbers, flush right.
_NUMBERS: Final = frozenset(HEADER[2:])


class View:
    """Draws on a terminal for the length of a `with` block.

    Args:
        title: One line about what is steered, as it is now.
        rows: What the engines do now.
        console: Where to draw.
    """

    def __init__(
        self,
        title: Callable[[], str],
        rows: Callable[[], Sequence[Row]],
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(highlight=False)
        self._title = title
        self._rows = rows
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=FRAMES,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def tell(self, news: News) -> None:
        """Print a line above the table."""
        who = f"{news.engine} " if news.engine else ""
        self._console.print(
            Text.assemble(
                (f"{news.clock()} ", "dim"),
                (who, "bold"),
                (f"{news.kind} ", _COLOURS[news.kind]),
                news.text,
            )
        )

    def _draw(self) -> RenderableType:
        return picture(self._title(), self._rows())


def picture(title: str, rows: Sequence[Row]) -> RenderableType:
    """The table of all engines, and below it why each does what it does."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row.cells, style=_style(row))
    reasons = [
        Padding(Text(f"{row.name}  {row.reason}", style="yellow" if row.trouble else ""), (0, 1))
        for row in rows
        if row.reason
    ]
    return Group(Text(title, style="bold"), table, *reasons)


def _style(row: Row) -> str:
    if row.trouble:
        return "yellow"
    return {True: "green", False: "blue", None: "dim"}[row.on]
