"""What a person at a terminal sees: a progress bar with the time left, and the tables.

Tables go to standard output. Progress goes to standard error: a bar on a terminal, a line for each
cell elsewhere.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table as RichTable

from specserve.bench.plan import Cell, Estimate

_UNBOUNDED = 1000


class Screen:
    """Shows the progress of a benchmark for the length of a `with` block.

    Args:
        total: Cells of the plan.
        quiet: Show no progress.
    """

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begins(self, cell: Cell, estimate: Estimate) -> None:
        """Show which cell is measured now."""
        self._bar.update(
            self._task,
            description=f"{cell.level} in flight, {cell.arm.name}",
            left=left_text(estimate.seconds_left()),
        )

    def ends(self, cell: Cell, brought: str, estimate: Estimate) -> None:
        """Show what a visit brought."""
        self._bar.update(self._task, advance=1, left=left_text(estimate.seconds_left()))
        self._console.print(
            f"{cell.level:>5} in flight  {cell.arm.name:<8} {brought}", highlight=False
        )


def left_text(seconds: float | None) -> str:
    """A time that is left, in words."""
    if seconds is None:
        return "time left is not known yet"
    minutes, rest = divmod(round(seconds), 60)
    return f"about {minutes}:{rest:02d} left"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to standard output; columns of numbers are set flush right.

    It gets the width that it needs: a narrow terminal breaks its lines, but loses no digit.
    """
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, title in enumerate(header):
        numbers = all(_is_number(row[index]) for row in rows)
        table.add_column(title, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(width=_UNBOUNDED)).maximum
    console.width = max(console.width, needed)
    console.print(table)


def print_line(text: str) -> None:
    """Print a line to standard output."""
    Console(highlight=False, soft_wrap=True).print(text, markup=False)


def _is_number(text: str) -> bool:
    return not text or text.replace(",", "").replace(".", "").isdigit()
