"""The run itself: load, watch and view, in the network of the pods.

Started by the demo as a process of its own, `python -m tests.demo.stage PLAN RECORD`, because
pods of a node cluster are reached from its network namespace alone.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from specserve.names import PORT_SERVING
from tests.demo.load import Crowd, Load, client_session
from tests.demo.plan import plan_from
from tests.demo.record import new_record
from tests.demo.view import follow
from tests.demo.watch import PodsOutOfReach, Watch, engine_client

if TYPE_CHECKING:
    from tests.demo.plan import Plan
    from tests.demo.record import Record

OUT_OF_REACH = 3
"""Exit status when the pods could not be reached."""


def main(arguments: list[str]) -> int:
    """Runs a plan and writes its record; returns the exit status."""
    plan_file, record_file = map(Path, arguments)
    plan = plan_from(json.loads(plan_file.read_text()))
    try:
        record = asyncio.run(_run(plan))
    except PodsOutOfReach as error:
        sys.stderr.write(f"{error}\n")
        return OUT_OF_REACH
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 128 + signal.SIGINT
    record_file.write_text(json.dumps(record.to_json()))
    return 0


async def _run(plan: Plan) -> Record:
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    record = new_record(plan)
    async with (
        client_session() as session,
        engine_client() as engines,
    ):
        crowds = [
            Crowd(f"http://{pod.ip}:{PORT_SERVING}", record.ledgers[arm.key], Random(number))
            for arm in plan.arms
            for number, pod in enumerate(arm.pods)
        ]
        watch = Watch(record, engines, session)
        await watch.reach()
        load = Load(session, crowds, plan.curve)
        watching = asyncio.create_task(watch.follow(lambda: load.at))
        viewing = asyncio.create_task(follow(record, lambda: load.at))
        running = asyncio.create_task(load.run())
        try:
            # A view or a watch that fails ends the run: its record would not be whole.
            await asyncio.wait({running, watching, viewing}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await asyncio.gather(watching, viewing)
            await running
            record.drained_in = load.at - plan.curve.seconds
            await watch.look(load.at)
        finally:
            for task in (running, watching, viewing):
                task.cancel()
            await asyncio.gather(running, watching, viewing, return_exceptions=True)
    return record


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
