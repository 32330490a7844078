"""`specserve local` from its options to its exit status."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from importlib.util import find_spec
from urllib.parse import urlsplit

from specserve import api
from specserve.bench.command import fail, interruptible
from specserve.bench.connection import BadOption, Refused
from specserve.engine import EngineClient
from specserve.local import credentials, edits, news, session, start, state
from specserve.local.news import News
from specserve.local.plan import Plan, began, plan
from specserve.local.processes import Keeper, Records
from specserve.local.session import Session
from specserve.local.state import State
from specserve.regulate import Loads
from specserve.workload import UnusableSpec


def conduct(options: argparse.Namespace) -> int:
    """Do what the options ask for; returns the exit status."""
    try:
        asked, folder = began(options, os.environ)
        if options.print:
            for launch in plan(options, os.environ, asked, folder).launches:
                print(f"# {launch.place.name}\n{launch.shell()}")  # noqa: T201 - it prints
            return 0
        with state.held(folder) as held:
            planned = plan(options, os.environ, asked, folder)
            if planned.launches:
                start.runnable(planned.launches, os.environ)
            return interruptible(_steer(options, planned, held))
    except (BadOption, Refused, UnusableSpec, state.StateLocked) as error:
        return fail(error)
    except asyncio.CancelledError:
        return 0  # ended before anything was begun
    except BrokenPipeError:
        raise  # nobody reads what --print shows
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename else error)


async def _steer(options: argparse.Namespace, planned: Plan, held: State) -> int:
    wish = planned.wish
    _on_hangup()
    async with contextlib.AsyncExitStack() as stack:
        log = None if options.log is None else stack.enter_context(news.open_log(options.log))
        board = news.Board(time.time, _print, log)
        stack.enter_context(news.logged(board))
        kept = held.of(wish.key[1], wish.spec)
        for said in filter(None, (*planned.notes, kept.trouble)):
            board.say("warning" if said is kept.trouble else "note", "", said)
        client = await stack.enter_async_context(EngineClient(session.METRICS))
        renew = None
        if planned.launches:
            renew = partial(start.renew, kept.folder)
        else:
            await credentials.fit(client, planned.places, wish)
        loads = await stack.enter_async_context(_loads(wish.spec.policy))
        work = Session(client, planned.places, kept, wish, board, loads=loads, wall=time.time)
        folder, records = kept.folder / start.FOLDER, Records(kept.folder)
        keepers = [
            Keeper(launch, wish.key, client, records, folder, os.environ, board, work.show)
            for launch in planned.launches
        ]
        for place in planned.places:
            board.say("note", place.name, f"{place.serving}, admin {place.admin}")
            if not keepers:
                work.show(place.pod(wish.key))
        if not options.lines and sys.stdout.isatty() and find_spec("rich") is not None:
            from specserve.local.view import View  # noqa: PLC0415 - lines need no rich

            seen = stack.enter_context(View(lambda: _title(options, work), work.rows))
            board.tell = seen.tell
        try:
            followed = (
                edits.follow(options.file, planned.asked, work),
                credentials.follow(options, work, renew),
            )
            await work.run(*followed, *(keeper.run() for keeper in keepers))
        except asyncio.CancelledError:
            board.say("note", "", _ending(options))
        finally:
            work.save()
            well = await _leave(work, [] if options.keep else keepers)
        return 0 if well else 1


def _on_hangup() -> None:
    """Have the end of the terminal end this like SIGTERM, unless it is to be survived (nohup)."""
    task = asyncio.current_task()
    if task is not None and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGHUP, lambda: task.cancelling() or task.cancel()
        )


async def _leave(work: Session, keepers: list[Keeper]) -> bool:
    """End the engines that are to end, or put those that run on into their fallback.

    Returns:
        Whether all went well.
    """
    if not keepers:
        return await work.leave()
    hurry, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hurry.set)
    return all(await asyncio.gather(*(keeper.end(hurry) for keeper in keepers)))


@contextlib.asynccontextmanager
async def _loads(policy: api.Policy) -> AsyncIterator[Loads | None]:
    """Where loads come from that the engines are not asked for themselves."""
    if policy.source != "Prometheus" or policy.prometheus is None:
        yield None
        return
    # Only here: the library is not needed otherwise, and need not be installed then.
    from specserve.prometheus import PrometheusClient  # noqa: PLC0415

    host = urlsplit(policy.prometheus.url).hostname or ""
    async with PrometheusClient(session.METRICS, hosts=(host,)) as servers:
        yield servers


def _title(options: argparse.Namespace, work: Session) -> str:
    policy = work.target.policy
    how = policy.strategy if policy.mode in {"Auto", "Observe"} else f"pinned {policy.mode}"
    watching = ", observing only" if policy.mode == "Observe" else ""
    return f"{work.target.key[1]} ({options.file}): {how}{watching}. Ctrl-C ends it"


def _ending(options: argparse.Namespace) -> str:
    if not options.start:
        return "ending: every engine takes the fallback of its last order"
    if options.keep:
        return "ending: the engines run on, in the fallback of their last orders"
    return "ending: the engines finish their requests; once more ends them by force"


def _print(line: News) -> None:
    # Who read the lines may be gone; engines are steered all the same.
    with contextlib.suppress(BrokenPipeError):
        print(line.line(), flush=True)  # noqa: T201 - a command line prints
