"""Who steers the live server: the benchmark itself, or `specserve local`, in turn.

The plugin obeys one holder at a time, for a lease. The benchmark goes under the name of the local
loop, which is that of its state folder, so neither waits for the lease of the other to run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from specserve import names
from specserve.local.session import holder_of
from tests.engine.client import Lost, ranks_of, until
from tests.gpu import plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from tests.engine.client import Engine

SPARE_SECONDS = 5
FIRST_ORDER_SECONDS = 15.0
END_SECONDS = 10.0
LOOK_SECONDS = 0.25
NAME = "regret"


class Hand:
    """What steers one engine."""

    def __init__(self, home: Path, specification: Mapping[str, Any], engine: Engine) -> None:
        self.engine = engine
        self.decisions = home / "decisions.jsonl"
        self.said = home / "local.txt"
        self._state = home / "state"
        self._token = home / "credentials" / names.KEY_PLUGIN_TOKEN
        self._document = home / "cr.yaml"
        # Every JSON text is YAML.
        self._document.write_text(
            json.dumps(
                {
                    "apiVersion": names.API_VERSION,
                    "kind": names.KIND,
                    "metadata": {"name": NAME, "namespace": "gpu"},
                    "spec": dict(specification),
                },
                indent=1,
            )
        )

    def command(self) -> Sequence[str]:
        address = self.engine.address
        return (
            *(sys.executable, "-m", "specserve.local", "-f", str(self._document)),
            *("--engine", address.url, "--admin-url", address.admin_url),
            *("--token-file", str(self._token)),
            *("--state", str(self._state), "--log", str(self.decisions)),
        )

    async def hold(self, setting: Mapping[str, Any], seconds: float) -> None:
        """Have the engine do as it is told for the length of some windows."""
        await self.engine.order(
            holder=holder_of(self._state),
            leaseSeconds=min(600, math.ceil(seconds) + SPARE_SECONDS),
            fallback=dict(setting),
            **setting,
        )

    @contextlib.asynccontextmanager
    async def local(self) -> AsyncIterator[None]:
        """Leave the engine to `specserve local`, which knows nothing yet, once it has settled."""
        shutil.rmtree(self._state, ignore_errors=True)
        await self._start()
        try:
            await self._settle()
            yield
        finally:
            await self._end()

    async def _settle(self) -> None:
        began = since = time.monotonic()
        steps: object = None
        while (now := time.monotonic()) - began < plan.MOST_SECONDS:
            state = await self.engine.read()
            running = [rank["activeSteps"] for rank in ranks_of(state)]
            if running != steps:
                steps, since = running, now
            quiet = now - began >= plan.LEAST_SECONDS and now - since >= plan.QUIET_SECONDS
            if quiet and self._last_code() not in plan.WAITING:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _start(self) -> None:
        """Start it; returns once the engine has taken its first order.

        Raises:
            Lost: It ended, or gave no order.
        """
        before = await self.engine.read()
        with self.said.open("ab") as said:
            self._process = await asyncio.create_subprocess_exec(
                *self.command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )

        async def steered() -> bool:
            if self._process.returncode is not None:
                raise Lost(f"specserve local ended: {self.last_words()}")
            state = await self.engine.read()
            # Where the engine does already what it is to do, the lease alone is renewed.
            return _remaining(state) > max(_remaining(before), SPARE_SECONDS) or (
                state["epoch"] > before["epoch"] and _remaining(state) > 0
            )

        try:
            await until(steered, FIRST_ORDER_SECONDS)
        except TimeoutError:
            await self._end()
            raise Lost(f"specserve local gave no order: {self.last_words()}") from None
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _last_code(self) -> str:
        """Why it does what it does, by the code of its last decision."""
        # It may be writing the next one.
        whole = self.decisions.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        return str(json.loads(whole[-1])["code"]) if whole else ""

    def last_words(self) -> str:
        """The end of what it said."""
        return self.said.read_text(errors="replace")[-1500:]


def _remaining(state: Mapping[str, Any]) -> float:
    """Seconds left of the lease in force, 0 without one."""
    return float((state.get("lease") or {}).get("remainingSeconds") or 0.0)
