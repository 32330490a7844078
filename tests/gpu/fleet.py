"""The servers that are compared, all on one GPU, and idle but for one.

Idle servers launch nothing: they share the memory of the GPU and leave its time alone. So all are
started at once, and arms can be interleaved that one server cannot have. They outlive the process
that started them, if it is asked for, for the next command on the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve import names
from specserve.api import SpecServeSpec
from specserve.workload import Owner, desired
from tests.engine.client import Address, connected
from tests.engine.server import DidNotStart, Server
from tests.gpu import plan
from tests.gpu.host import ADMIN_PORT, PORT, TOKEN, Host
from tests.gpu.load import PROMPT, TOKENS
from tests.gpu.plugins import simulated_acceptance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SERVERS = (plan.LIVE, plan.BASE, plan.DEFAULT)
STEPS = (0, 3)
TABLE_STEPS = (0, 1, 3, 7)
"""All that the engine's own table names; the largest must be the first."""
CAPACITY = 256
CACHE_TOKENS = 160_000
"""Room for 256 requests of 128 and 256 tokens, and for what is reserved; all servers fit beside
one another on 141 GB: 16 GB of weights and 21 GB of cache each."""
START_SECONDS = 240.0


def specification(bundle: Path, steps: Sequence[int], tensor_parallel: int) -> dict[str, Any]:
    """The SpecServe that is steered; without step counts the one without a draft."""
    target, draft = bundle / "target", bundle / "draft"
    return {
        "model": {
            "source": f"path://{target}",
            "servedName": "llama-8b-shape",
            "contextLength": 4096,
        },
        "draft": {"method": "EAGLE3", "source": f"path://{draft}", "steps": list(steps)}
        if steps
        else {"method": "None"},
        "policy": {"strategy": "BreakEven"},
        "engine": {
            "image": "none",
            "tensorParallel": tensor_parallel,
            "maxRunningRequests": CAPACITY,
            # Of what is free when a server starts; the cache is bounded by its tokens.
            "memFractionStatic": "0.9",
            "resources": {},
            "args": [
                *("--load-format=dummy", "--skip-tokenizer-init", "--sampling-backend=pytorch"),
                *("--grammar-backend=none", "--cuda-graph-backend-prefill=disabled"),
                *(f"--max-total-tokens={CACHE_TOKENS}", "--sleep-on-idle"),
                *(PARALLEL_FLAGS if tensor_parallel > 1 else ()),
            ],
        },
    }


PARALLEL_FLAGS = ("--enforce-disable-flashinfer-allreduce-fusion", "--disable-custom-all-reduce")
"""Both ask for NVLink multicast otherwise, which shared hosts cannot bear."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one server is started.

    Attributes:
        command: Its command line.
        environ: Its environment.
        address: Where it is then.
        admin: Whether its plugin says that it is ready; otherwise its log does.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    address: Address
    admin: bool


def rendered(
    host: Host,
    name: str,
    tensor_parallel: int = 1,
    variables: Mapping[str, str] | None = None,
    offset: int = 0,
) -> Launch:
    """A server by the command line that the operator renders, with what this host needs.

    Left out is the file of keys; another is the port of all but the live server; and the engine's
    own table is what an engine has without the file of the operator's.

    Args:
        host: Where it is started.
        name: Which of the servers.
        tensor_parallel: On how many GPUs.
        variables: Further ones of its environment.
        offset: Of its ports: another for each fleet of a host.
    """
    number = offset + SERVERS.index(name)
    steps = {plan.LIVE: STEPS, plan.DEFAULT: TABLE_STEPS}.get(name, ())
    spec = SpecServeSpec.model_validate(specification(host.bundle, steps, tensor_parallel))
    [template] = [
        manifest["spec"]["template"]
        for manifest in desired(Owner("regret", "gpu", "gpu-host"), spec)
        if manifest["kind"] == "Deployment"
    ]
    [container] = template["spec"]["containers"]
    adaptive = host.home / names.ADAPTIVE_FILE
    if name == plan.LIVE:
        adaptive.write_text(template["metadata"]["annotations"][names.ANNOTATION_ADAPTIVE])
    words: list[str] = []
    for word in container["args"]:
        if word in ("--config", names.ENGINE_CONFIG):
            continue
        if name == plan.DEFAULT and word.startswith("--speculative-adaptive-config"):
            words.append(f"--speculative-num-draft-tokens={max(TABLE_STEPS) + 1}")
            continue
        word = word.replace(names.ADAPTIVE_CONFIG, str(adaptive))  # noqa: PLW2901
        words.append(f"--port={PORT + number}" if word.startswith("--port=") else word)
    given = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    return Launch(
        (sys.executable, "-m", "sglang.launch_server", *words),
        host.environ(
            live=name == plan.LIVE,
            acceptance=name != plan.BASE,
            **{
                **given,
                names.ENV_CREDENTIALS_DIR: str(host.credentials),
                names.ENV_ADMIN_PORT: str(ADMIN_PORT + number),
                "SGLANG_SIMULATE_ACC_LEN": "-1" if name == plan.BASE else "1",
                simulated_acceptance.VARIABLE: str(host.home / "acceptance"),
                "TVM_FFI_CACHE_DIR": str(host.kernels(f"tvm-{name}")),
                # Servers that start together take memory of two GPUs at different moments.
                "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
                **(variables or {}),
            },
        ),
        Address(PORT + number, ADMIN_PORT + number, TOKEN),
        admin=name == plan.LIVE,
    )


def simulated(home: Path, name: str, profile: str, offset: int = 0) -> Launch:
    """A simulated engine in a server's place: for trying out this benchmark, and nothing else."""
    number = offset + SERVERS.index(name)
    steps = {plan.LIVE: STEPS, plan.DEFAULT: TABLE_STEPS}.get(name, ())
    draft = ("--speculative-algorithm=EAGLE3", f"--speculative-num-steps={max(steps, default=0)}")
    return Launch(
        (
            *(str(Path(sys.executable).with_name("specserve-sim")), "serve"),
            *(f"--port={PORT + number}", f"--max-running-requests={CAPACITY}"),
            *(f"--sim-profile={profile}", *(draft if steps else ())),
        ),
        {
            "PATH": os.environ["PATH"],
            names.ENV_POD_UID: f"simulated-{name}",
            names.ENV_ADMIN_PORT: str(ADMIN_PORT + number),
            names.ENV_CREDENTIALS_DIR: str(home / "credentials"),
            names.ENV_STEPS: ",".join(map(str, steps or (0,))),
            names.ENV_REQUIRE_LIVE: "0",
        },
        Address(PORT + number, ADMIN_PORT + number, TOKEN),
        admin=True,
    )


@dataclass
class Fleet:
    """The servers that run.

    Attributes:
        home: Keeps what the next command needs to know of them, and their logs.
        launches: How each is started, by its name.
        id: Another at each start.
        started: Seconds that each took, by name, and why it did not, for those that did not.
    """

    home: Path
    launches: Mapping[str, Launch]
    id: str = ""
    started: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.home / "fleet.json"

    def log(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    def has(self, name: str) -> bool:
        return name in self.pids

    async def take_over(self) -> bool:
        """Take over the servers of an earlier command; whether all of them are well."""
        try:
            known = json.loads(self.file.read_text())
        except FileNotFoundError:
            return False
        self.id, self.started, self.failed = known["id"], known["started"], known["failed"]
        self.pids = known["pids"]
        if set(self.started) | set(self.failed) >= set(self.launches):
            well = await asyncio.gather(*(self._well(name) for name in self.pids))
            if all(well):
                return True
        self.stop()
        return False

    async def _well(self, name: str) -> bool:
        try:
            async with connected(self.launches[name].address) as engine:
                await engine.get(names.PATH_LOADS)
        except (OSError, ValueError, KeyError, TimeoutError):
            return False
        return True

    async def start(self, seconds: float = START_SECONDS) -> None:
        """Start all at once; those that do not start are left out.

        Raises:
            DidNotStart: The live one did not.
        """
        self.id = uuid.uuid4().hex[:12]
        self.started, self.failed, self.pids = {}, {}, {}
        began = time.monotonic()
        servers = {
            name: Server(launch.command, launch.environ, launch.address, self.log(name))
            for name, launch in self.launches.items()
        }

        async def ready(name: str, server: Server) -> None:
            try:
                await server.ready(admin=self.launches[name].admin, seconds=seconds)
            except DidNotStart as error:
                server.kill()
                self.failed[name] = str(error)
                print(f"{name} did not start: {error}", flush=True)
                return
            self.started[name] = round(time.monotonic() - began, 1)
            self.pids[name] = server.process.pid
            print(f"{name}: ready after {self.started[name]} s", flush=True)

        await asyncio.gather(*(ready(name, server) for name, server in servers.items()))
        self.file.write_text(
            json.dumps(
                {
                    "id": self.id,
                    "started": self.started,
                    "failed": self.failed,
                    "pids": self.pids,
                }
            )
        )
        if plan.LIVE in self.failed:
            self.stop()
            raise DidNotStart(self.failed[plan.LIVE])

    def stop(self) -> None:
        """End all of them at once."""
        for pid in self.pids.values():
            # Each is the first of a session of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.pids = {}
        self.file.unlink(missing_ok=True)


def traffic() -> dict[str, Any]:
    """What clients ask for."""
    return {"promptTokens": PROMPT, "answerTokens": TOKENS, "capacity": CAPACITY}
