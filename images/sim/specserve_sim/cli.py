"""The command `specserve-sim`: an engine that is started with SGLang's own options, or a fleet."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specserve_engine.environ import POD_UID, BadEnvironment, Settings, settings_from
from specserve_sim.engine import NAME, EngineConfig
from specserve_sim.launch import WILDCARD, addresses, running_engine, running_fleet
from specserve_sim.profile import REFERENCE_STEPS, ProfileError, load_profile, profile_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specserve_sim.engine import SimEngine

_log = logging.getLogger("specserve_sim")

COMMANDS = ("serve", "fleet", "profiles")


class BadCommandLine(ValueError):
    """Options that cannot be used; the message names them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given.pop(0) if given and given[0] in COMMANDS else "serve"
    try:
        if command == "profiles":
            return _profiles()
        environment = {POD_UID: "local", **os.environ}
        settings = settings_from(environment)
        if command == "fleet":
            return asyncio.run(_fleet(given, settings))
        return asyncio.run(_serve(given, settings))
    except (BadCommandLine, BadEnvironment, ProfileError, OSError) as error:
        _log.error("%s", error)
        return 2


def _profiles() -> int:
    for name in profile_names():
        profile = load_profile(name)
        print(f"{name}: {profile.title} ({profile.provenance.engine})")  # noqa: T201
        print("      B   t_off ms   r_3 (lowest, highest)   r_0 cold, warm")  # noqa: T201
        for size in profile.plain.sizes:
            even = profile.break_even
            print(  # noqa: T201
                f"  {size:5d} {profile.t_off(size) * 1e3:10.2f}"
                f"   {profile.r(size, 3):4.2f} ({even.lowest.logarithmic(size):.2f},"
                f" {even.highest.logarithmic(size):.2f})        "
                f"     {profile.r(size, 0, 'cold'):.2f}, {profile.r(size, 0, 'warm'):.2f}"
            )
        print(f"  modelled: {'; '.join(profile.modelled)}\n")  # noqa: T201
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options that the simulated engine understands."""
    options = argparse.ArgumentParser(
        prog="specserve-sim", description="A simulated engine.", allow_abbrev=False
    )
    add = options.add_argument
    add("--model-path", "--model", default="sim")
    add("--served-model-name")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    add("--dp-size", "--data-parallel-size", "--dp", type=int, default=1)
    add("--max-running-requests", type=int)
    add("--max-total-tokens", type=int, default=400_000)
    add("--context-length", type=int, default=131_072)
    add("--speculative-algorithm", type=str.upper)
    add("--speculative-num-steps", type=int)
    add("--speculative-eagle-topk", type=int, default=1)
    add("--speculative-draft-model-path", "--speculative-draft-model")
    add("--decode-log-interval", type=int, default=40)
    add("--enable-metrics", action="store_true")
    add("--api-key")
    add("--admin-api-key")
    add("--config", type=Path)
    add("--sim-profile", default="h200-a")
    add("--sim-accept-length", type=float, default=2.5)
    add("--sim-time-scale", type=float, default=1.0)
    add("--sim-startup-seconds", type=float, default=0.0)
    add("--sim-recovery-rounds", type=int, default=0)
    add("--sim-seed", type=int, default=0)
    return options


def _fleet_parser() -> argparse.ArgumentParser:
    options = parser()
    options.add_argument("--count", type=int, default=10)
    options.add_argument("--first-address", default="127.1.0.1")
    options.add_argument("--wildcard", action="store_true")
    return options


def parse(options: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace:
    """Read options; those of a `--config` file come before, so the command line wins.

    Options that SGLang may know and the simulated engine does not are named in the log, without
    their values.

    Raises:
        BadCommandLine: the file cannot be used.
    """
    first, _ = options.parse_known_args(given)
    from_file = _config_arguments(first.config) if first.config else []
    parsed, unknown = options.parse_known_args([*from_file, *given])
    ignored = sorted({word.split("=")[0] for word in unknown if word.startswith("--")})
    if ignored:
        _log.info("ignored, as nothing here depends on it: %s", " ".join(ignored))
    return parsed


def _config_arguments(path: Path) -> list[str]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise BadCommandLine(f"--config {path}: {type(error).__name__}") from error
    if not isinstance(document, dict):
        raise BadCommandLine(f"--config {path}: not a mapping of options")
    arguments: list[str] = []
    for key, value in document.items():
        option = f"--{str(key).replace('_', '-')}"
        if value is True:
            arguments.append(option)
        elif isinstance(value, list):
            arguments += [option, *map(str, value)]
        elif value is not None and value is not False:
            arguments.append(f"{option}={value}")
    return arguments


def config_from(options: argparse.Namespace, settings: Settings) -> EngineConfig:
    """Return an engine's configuration from its options and its pod's environment.

    Raises:
        BadCommandLine: no engine could be started so.
        ProfileError: there is no such profile.
    """
    load_profile(options.sim_profile)
    algorithm = options.speculative_algorithm
    try:
        return EngineConfig(
            served_model_name=options.served_model_name or options.model_path,
            model_path=options.model_path,
            profile=options.sim_profile,
            tensor_parallel=options.tp_size,
            data_parallel=options.dp_size,
            max_running_requests=options.max_running_requests,
            algorithm=None if algorithm in (None, "NONE") else algorithm,
            topk=options.speculative_eagle_topk,
            steps=settings.steps,
            initial_steps=options.speculative_num_steps or max(settings.steps) or REFERENCE_STEPS,
            accept_length=options.sim_accept_length,
            recovery_rounds=options.sim_recovery_rounds,
            time_scale=options.sim_time_scale,
            seed=options.sim_seed,
            startup_seconds=options.sim_startup_seconds,
            api_key=_secret(options.api_key),
            admin_api_key=_secret(options.admin_api_key),
            max_total_tokens=options.max_total_tokens,
            context_length=options.context_length,
            decode_log_interval=options.decode_log_interval,
            require_live=settings.require_live,
            metrics=options.enable_metrics,
        )
    except ValueError as error:
        raise BadCommandLine(str(error)) from error


def _secret(value: Any) -> str | None:
    return None if value is None else str(value)


async def _serve(given: Sequence[str], settings: Settings) -> int:
    options = parse(parser(), given)
    config = config_from(options, settings)
    everywhere = options.host in ("", "::", WILDCARD)
    host = "::" if everywhere else options.host
    ending = _ending()
    _log.info("%s: %s, profile %s", NAME, config.served_model_name, config.profile)
    async with running_engine(
        config,
        credentials=settings.credentials,
        pod_uid=settings.pod_uid,
        host=host,
        port=options.port,
        admin_port=settings.admin_port,
    ) as running:
        _log.info("serving at %s, admin at %s", running.url, running.admin_url)
        await ending.wait()
        await _drain({"": running.engine})
    return 0


async def _fleet(given: Sequence[str], settings: Settings) -> int:
    options = parse(_fleet_parser(), given)
    config = config_from(options, settings)
    ending = _ending()
    at = addresses(options.first_address, options.count)
    async with running_fleet(
        config,
        at,
        credentials=settings.credentials,
        port=options.port,
        admin_port=settings.admin_port,
        wildcard=options.wildcard,
    ) as fleet:
        ready = {
            "ready": len(at),
            "first": at[0],
            "last": at[-1],
            "port": fleet.port,
            "adminPort": fleet.admin_port,
        }
        print(json.dumps(ready), flush=True)  # noqa: T201
        await ending.wait()
        await _drain(fleet.engines)
    return 0


def _ending() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; a second signal ends the process at once."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        if ending.is_set():
            os._exit(1)
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    return ending


async def _drain(engines: Mapping[str, SimEngine]) -> None:
    for engine in engines.values():
        engine.drain()
    for engine in engines.values():
        await engine.drained()
