"""A played pod of a Job: its command line runs as a process, and its last words are kept."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specserve import names
from tests.integration.operator_process import ROOT

if TYPE_CHECKING:
    from pathlib import Path

#: What a kubelet keeps of a log in place of last words.
LOG_TAIL = 2048


@dataclass
class PlayedWorker:
    """A pod that measures.

    Attributes:
        item: The object as last seen.
        folder: Where Secrets are mounted, by their names.
        process: Its container's process, None before it runs.
        said: Its output, once it has ended.
    """

    item: Any
    folder: Path
    process: asyncio.subprocess.Process | None = None
    said: str = ""
    _words: Path | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Its name."""
        name: str = self.item["metadata"]["name"]
        return name

    @property
    def arguments(self) -> list[str]:
        """The container's arguments, its files in place of those that are mounted."""
        spec = self.item["spec"]
        container = spec["containers"][0]
        secrets = {v["name"]: v["secret"] for v in spec["volumes"] if "secret" in v}
        self._words = self.folder / f"{self.name}.words"
        files = {container["terminationMessagePath"]: str(self._words)}
        for mount in container["volumeMounts"]:
            secret = secrets.get(mount["name"])
            for entry in (secret or {}).get("items", ()):
                inside = f"{mount['mountPath']}/{entry['path']}"
                files[inside] = str(self.folder / secret["secretName"] / entry["key"])
        given = []
        for word in container["args"]:
            option, equals, value = word.partition("=")
            given.append(option + equals + files.get(value, value))
        return given

    async def run(self) -> dict[str, Any]:
        """Run it to its end; returns the status of its pod then."""
        arguments = self.arguments
        assert self._words is not None
        self._words.touch()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specserve.cli", *arguments),
            env={**os.environ, "PYTHONPATH": str(ROOT / "operator")},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await self.process.communicate()
        self.said = output.decode(errors="replace")
        code = self.process.returncode
        words = self._words.read_text()[: names.LAST_WORDS_BYTES]
        if code and not words:
            words = self.said[-LOG_TAIL:]
        container = self.item["spec"]["containers"][0]
        ended = {
            "exitCode": code,
            "reason": "Error" if code else "Completed",
            "message": words,
        }
        return {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": False,
                    "restartCount": 0,
                    "state": {"terminated": ended},
                }
            ],
        }

    def stop(self) -> None:
        """Ask its process to end, as a kubelet does."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
