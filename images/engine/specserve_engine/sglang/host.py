"""The plugin in SGLang's HTTP process: hosts the admin listener beside SGLang's own server.

The listener lives in the lifespan of SGLang's application, in the same event loop, on a port of
its own. It begins to answer when the schedulers have loaded, before SGLang serves, and goes on
all through a drain; signals stay SGLang's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import uuid
from typing import TYPE_CHECKING, Any, Final

from specserve_engine.auth import TokenFile
from specserve_engine.control import Capability, Control, Identity, Phase, Versions
from specserve_engine.listener import Listener, bind, serving
from specserve_engine.sglang import upstream
from specserve_engine.sglang.metrics import Metrics
from specserve_engine.sglang.ranks import NoPlugin, SglangRanks
from specserve_engine.sglang.redaction import Redaction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from multiprocessing.process import BaseProcess

    from specserve_engine.environ import Settings

TICK_SECONDS: Final = 0.25
"""Between looks at SGLang's state: how long a drain or a death can go unnoticed."""
READ_SECONDS: Final = 2.0
REFRESH_SECONDS: Final = 5.0
"""Age at which the metrics read the ranks themselves, if nobody else does."""

_log = logging.getLogger(__name__)


class Host:
    """The admin listener's life in one HTTP process."""

    def __init__(self, settings: Settings, versions: tuple[str, str], nonce: int) -> None:
        """Prepare the hook of the process that SGLang was started as."""
        self._settings = settings
        self._nonce = nonce
        self._control = Control(
            Identity(settings.pod_uid, str(uuid.uuid4())),
            Versions(*versions, proved=versions[0] in upstream.PROVED),
        )
        self._children: list[BaseProcess] = []

    def before_setup(
        self, server_args: Any, tokenizer_manager: Any, *_arguments: Any, **_named: Any
    ) -> None:
        """Plan the listener into the application, just before SGLang runs it.

        Raises:
            SystemExit: SGLang was started in a way that rules live control out.
        """
        _refuse_unsupported(server_args)
        self._children = multiprocessing.active_children()
        app = upstream.HTTP_APP.resolve()
        secrets = [getattr(server_args, name, None) for name in ("api_key", "admin_api_key")]
        app.add_middleware(Redaction, secrets=[*secrets, str(self._nonce)])
        try:
            listening = bind("::", self._settings.admin_port)
        except OSError as error:
            raise SystemExit(
                f"specserve: cannot listen on port {self._settings.admin_port}: {error}"
            ) from None
        inner = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(application: Any) -> AsyncIterator[Any]:
            ranks = SglangRanks(
                tokenizer_manager,
                upstream.SET_REQUEST.resolve(),
                self._nonce,
                _expected_layout(server_args),
            )
            listener = Listener(
                self._control,
                ranks,
                TokenFile(self._settings.credentials),
                require_live=self._settings.require_live,
            )
            metrics = (
                Metrics(str(getattr(server_args, "served_model_name", "") or ""))
                if getattr(server_args, "enable_metrics", False)
                else None
            )
            async with serving(listener.app, listening):
                following = asyncio.create_task(
                    self._follow(tokenizer_manager, ranks, metrics), name="specserve host"
                )
                try:
                    async with inner(application) as state:
                        yield state
                finally:
                    following.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await following

        app.router.lifespan_context = lifespan

    async def _follow(self, manager: Any, ranks: SglangRanks, metrics: Metrics | None) -> None:
        """Keep the control core's phase that of the engine, and the metrics up to date."""
        while True:
            try:
                await self._look(manager, ranks)
                if metrics is not None:
                    await self._measure(ranks, metrics)
            except Exception:  # noqa: BLE001 - the phase must not freeze after an error
                _log.exception("specserve: looking after the engine failed")
            await asyncio.sleep(TICK_SECONDS)

    async def _look(self, manager: Any, ranks: SglangRanks) -> None:
        control = self._control
        if control.phase is Phase.DEAD:
            return
        if dead := _ended(self._children):
            control.die(f"its process {dead} has ended")
            _log.critical("specserve: the engine's process %s has ended", dead)
        elif manager.gracefully_exit:
            control.drain()
        elif control.phase is Phase.LOADING and manager.server_status.name == "Up":
            deadline = asyncio.get_running_loop().time() + READ_SECONDS
            try:
                capability = await ranks.capability(deadline)
            except NoPlugin as error:
                control.die(str(error))
                _log.critical("specserve: %s", error)
                return
            if capability is not None:
                control.serve(capability)
                _log.warning("specserve: serving, %s", _described(capability))

    async def _measure(self, ranks: SglangRanks, metrics: Metrics) -> None:
        now = asyncio.get_running_loop().time()
        serves = self._control.phase in {Phase.SERVING, Phase.DRAINING}
        if serves and now - ranks.latest_at > REFRESH_SECONDS:
            await ranks.read(now + READ_SECONDS)
        metrics.show(self._control, ranks.latest)


def _refuse_unsupported(server_args: Any) -> None:
    """End the process if SGLang was started without what live control needs."""
    if getattr(server_args, "tokenizer_worker_num", 1) != 1:
        raise SystemExit(
            "specserve: --tokenizer-worker-num above 1 starts HTTP workers without keys and "
            "without the plugin"
        )
    for name in ("use_ray", "grpc_mode", "smg_grpc_mode"):
        if getattr(server_args, name, False):
            flag = name.replace("_", "-")
            raise SystemExit(
                f"specserve: --{flag} starts schedulers or servers without the plugin"
            )


def _expected_layout(server_args: Any) -> tuple[int, ...]:
    """Return the ranks per group that the arguments say; the first report has the last word."""
    return (int(server_args.tp_size),) * int(server_args.dp_size)


def _ended(children: Sequence[BaseProcess]) -> str:
    """Return the name of a child that has ended, or nothing."""
    # A look at the sentinels leaves the exit statuses to SGLang's own watchdog.
    ready = multiprocessing.connection.wait([child.sentinel for child in children], timeout=0)
    dead = next((child for child in children if child.sentinel in ready), None)
    return f"{dead.name} ({dead.pid})" if dead else ""


def _described(capability: Capability) -> str:
    if capability.controllable:
        return f"controllable, steps {', '.join(map(str, capability.available_steps))}"
    return f"not controllable: {capability.reason}"
