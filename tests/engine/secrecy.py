"""Who learns a real engine's keys, and who can give it orders past the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve_engine.control import Order
from specserve_engine.sglang.message import Message, Verb, encode
from specserve_engine.wire import Mode, Setting

if TYPE_CHECKING:
    from tests.engine.client import Engine
    from tests.engine.launch import Launch
    from tests.engine.server import Server

INTERNAL = "/set_internal_state"


def read(path: Path) -> str:
    """Return a file's text; nothing if its process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


async def hidden(server: Server, engine: Engine, launch: Launch) -> None:
    """Make sure that keys and tokens stand in no command line, environment, log or answer."""
    secrets = {
        "admin key": launch.admin_key,
        "user's key": launch.address.api_key or "",
        "token": launch.address.token,
        "nonce": str(launch.nonce),
    }
    shown = {"log": read(server.log)}
    for pid in server.processes():
        for name in ("cmdline", "environ"):
            shown[f"{name} of {pid}"] = read(Path(f"/proc/{pid}/{name}"))
    for path in ("/server_info", "/get_server_info", "/metrics", "/v1/models"):
        shown[path] = await engine.text(path)
    shown["read-back"] = str(await engine.read())
    assert "admin_api_key" in shown["log"]  # else SGLang has changed and this proves nothing
    assert "admin_api_key" in shown["/server_info"]
    assert len(server.processes()) >= 3
    # The first process hands the nonce to those it starts, in their environment.
    leaks = [
        (place, name)
        for place, text in shown.items()
        for name, secret in secrets.items()
        if secret in text and not (name == "nonce" and place.startswith("environ "))
    ]
    assert not leaks, leaks


async def guarded(engine: Engine, launch: Launch) -> dict[str, Any]:
    """Make sure that SGLang's own route gives no orders, not even to the holder of its key."""
    before = await engine.read()
    order = Order(before["epoch"] + 1, Setting(Mode.OFF))
    ours = encode(Message(Verb.APPLY, order), launch.nonce)
    forged = {
        "another nonce": {**ours, "specserve.nonce": launch.nonce + 1},
        "no nonce": {name: value for name, value in ours.items() if "nonce" not in name},
        "a name that is not ours": {"specserve.unheard": 1},
    }
    found = {}
    for what, numbers in forged.items():
        status, text = await engine.post(INTERNAL, {"server_args": numbers}, launch.admin_key)
        found[what] = [status, text]
        assert "true" not in text, found
    for key in (launch.address.api_key, launch.address.token, "wrong"):
        status, _ = await engine.post(INTERNAL, {"server_args": ours}, key)
        assert status == 401, (key, status)
    status, answer = await engine.admin("GET", token="wrong")
    assert (status, answer["code"]) == (401, "Unauthorized")
    status, answer = await engine.admin("PUT", await engine.directive(), token=launch.admin_key)
    assert (status, answer["code"]) == (401, "Unauthorized")
    after = await engine.read()
    assert {name: after[name] for name in ("epoch", "mode")} == {
        name: before[name] for name in ("epoch", "mode")
    }
    assert {rank["epoch"] for rank in after["groups"][0]["ranks"]} == {
        rank["epoch"] for rank in before["groups"][0]["ranks"]
    }
    return found
