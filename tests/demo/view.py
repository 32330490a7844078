"""What a run looks like while it goes on: a live screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rich import box
from rich.bar import Bar
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tests.demo.plan import SPECSERVE, TITLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from tests.demo.plan import ArmKey, Plan
    from tests.demo.record import PodState, Record

REFRESH_SECONDS = 0.5
LINE_SECONDS = 5.0
EVENTS_SHOWN = 3
WIDTH = 104

STYLES: dict[ArmKey, str] = {
    "specserve": "bold green",
    "alwaysOn": "dark_orange",
    "alwaysOff": "deep_sky_blue1",
}
_BLOCKS = " ▁▂▃▄▅▆▇█"


async def follow(record: Record, now: Callable[[], float], console: Console | None = None) -> None:
    """Shows a run until cancelled; `now` gives the seconds since it began."""
    console = console or Console()
    if console.is_terminal:
        await _follow_live(record, now, console)
    else:
        await _follow_lines(record, now, console)


async def _follow_live(record: Record, now: Callable[[], float], console: Console) -> None:
    record.at = now()

    def shown() -> RenderableType:
        return screen(record, min(WIDTH, console.width))

    with Live(shown(), console=console, auto_refresh=False) as live:
        try:
            while True:
                record.at = now()
                live.update(shown(), refresh=True)
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            live.update(shown(), refresh=True)


async def _follow_lines(record: Record, now: Callable[[], float], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    told, due = 0, 0.0
    while True:
        record.at = now()
        for event in record.events[told:]:
            say(f"{event.at:4.0f} s  {event.message}")
        told = len(record.events)
        if record.at >= due:
            say(line(record))
            due += LINE_SECONDS
        await asyncio.sleep(REFRESH_SECONDS)


def about(plan: Plan) -> str:
    """What is shown, in one sentence that hides nothing."""
    pods = len(plan.arms[0].pods)
    return (
        f"Simulated engines with round times measured on an H200, {plan.slow_motion:g} times"
        f" slower; {len(plan.arms)} SpecServes of {pods} pods take the same load for"
        f" {plan.curve.seconds:.0f} s. A peak of load comes and goes; then, from"
        f" {plan.curve.drop[0]:.0f} to {plan.curve.drop[1]:.0f} s, prompts that the draft guesses"
        " badly. SpecServe weighs the acceptance against the break-even at the batch."
    )


def line(record: Record) -> str:
    """The state of a run in one plain line."""
    pods = [pod for pod in record.pods if pod.arm == SPECSERVE]
    modes = " ".join(f"{pod.mode}({_known(pod.in_flight)})" for pod in pods)
    rates = ", ".join(f"{TITLES[key]} {record.recent(key):,.0f}" for key in record.ledgers)
    return (
        f"{record.at:4.0f} s  {record.plan.curve.at(record.at):3d} in flight per pod"
        f" | SpecServe pods {modes}, {weighed(record)} | tok/s: {rates} | {left(record)}"
    )


def weighed(record: Record) -> str:
    """What the operator weighs."""
    if not record.weighed:
        return "acceptance not known yet"
    seen = record.weighed[-1]
    return f"acceptance {seen.acceptance:.2f} to break-even {seen.break_even:.2f}"


def left(record: Record) -> str:
    """How long the run still takes."""
    seconds = record.plan.curve.seconds - record.at
    if seconds > 0:
        return f"{seconds:.0f} s left"
    waiting = sum(ledger.open for ledger in record.ledgers.values())
    return f"waiting for the last {waiting} answers" if waiting else "done"


def screen(record: Record, width: int = WIDTH) -> RenderableType:
    """The state of a run on a terminal of so many columns, 80 at least."""
    room = width - 4
    return Panel(
        Group(
            _load(record, room - 40),
            _pods(record, narrow=width < WIDTH),
            _rates(record, room - 48),
            _events(record),
        ),
        title="[bold]SpecServe demo[/] · [yellow]simulated engines[/], real Kubernetes",
        subtitle=f"engines {record.plan.slow_motion:g}x slower than the measured H200",
        box=box.ROUNDED,
        width=width,
        padding=(0, 1),
    )


def _load(record: Record, width: int) -> RenderableType:
    curve = record.plan.curve
    shape = Text()
    for column in range(width):
        at = column * curve.seconds / width
        level = _BLOCKS[1 + round(7 * curve.at(at) / max(1, curve.high))]
        shape.append(level, "cyan" if at <= record.at else "bright_black")
    shape.append(f"  {curve.at(record.at)} in flight per pod", "bold")
    progress = Table.grid(padding=(0, 2))
    bar = ProgressBar(curve.seconds, min(record.at, curve.seconds), width=width)
    progress.add_row(bar, Text(left(record), "bold"))
    policy = Text(f"SpecServe weighs {weighed(record)}", "bold", no_wrap=True)
    return Group(shape, progress, policy, Text(record.verdict, "bright_black", no_wrap=True))


def _pods(record: Record, *, narrow: bool) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=True)
    table.add_column("SpecServe", min_width=10, no_wrap=True)
    table.add_column("pod", ratio=1, no_wrap=True, overflow="ellipsis")
    for title in ("in flight", "mode", "steps", "accept", "tok/s", "flips"):
        table.add_column(title, justify="right", no_wrap=True)
    arm: ArmKey | None = None
    for pod in record.pods:
        first = pod.arm != arm
        arm = pod.arm
        # Of a long name its end tells pods apart.
        name = f"…{pod.name[-6:]}" if narrow else pod.name
        table.add_row(Text(TITLES[arm] if first else "", STYLES[arm]), name, *_pod(pod))
    return table


def _pod(pod: PodState) -> list[RenderableType]:
    if pod.problem:
        return [Text("not read", "red"), "", "", "", "", ""]
    mode = Text(
        pod.mode.upper(),
        {"on": "bold green", "off": "bold blue", "probe": "bold magenta"}.get(pod.mode, "yellow"),
    )
    accept = "-" if pod.acceptance is None else f"{pod.acceptance:.2f}"
    flips = str(len(pod.flips.seen))
    rate = f"{pod.tokens_per_second:,.0f}"
    return [_known(pod.in_flight), mode, _known(pod.steps), accept, rate, flips]


def _rates(record: Record, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=10)
    table.add_column(width=width)
    table.add_column(justify="right", min_width=12, no_wrap=True)
    table.add_column(justify="right", min_width=14, no_wrap=True)
    rates = {key: record.recent(key) for key in record.ledgers}
    most = max(1.0, *rates.values())
    for key, rate in rates.items():
        style = STYLES[key]
        table.add_row(
            Text(TITLES[key], style),
            Bar(most, 0, rate, width=width, color=style.split()[-1]),
            Text(f"{rate:,.0f} tok/s", "bold"),
            Text(f"{record.so_far(key):,.0f} so far", "bright_black"),
        )
    return table


def _events(record: Record) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="bright_black", min_width=5)
    table.add_column(no_wrap=True)
    shown = record.events[-EVENTS_SHOWN:]
    for event in shown:
        table.add_row(f"{event.at:.0f} s", Text(event.message, no_wrap=True))
    for _ in range(EVENTS_SHOWN - len(shown)):
        table.add_row("", "")
    return Group(Text("Decisions", "bold"), table)


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)
