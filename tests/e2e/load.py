"""Clients inside the cluster, with nothing but Python: run as a pod of the simulator's image.

They ask through the Service, on a new connection each time, in waves of many and of few. SIGTERM
ends the load; the last line printed is a JSON object with what became of the requests.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass, field

MANY_SECONDS = 8.0
FEW_SECONDS = 12.0
SILENT_SECONDS = 60.0


@dataclass
class Count:
    """What became of the requests."""

    sent: int = 0
    answered: int = 0
    tokens: int = 0
    lost: list[str] = field(default_factory=list)


async def ask(host: str, port: int, tokens: int) -> int:
    """One streamed request; returns the tokens that came, raises what went wrong."""
    body = json.dumps(
        {
            "text": "load" * 64,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0},
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(
            b"POST /generate HTTP/1.0\r\nHost: engine\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            raise OSError(f"answered {status.decode().strip() or 'nothing'}")
        got, done = 0, False
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                got = json.loads(line[6:])["meta_info"]["completion_tokens"]
        if not done or got != tokens:
            raise OSError(f"cut off after {got} of {tokens} tokens")
        return got
    finally:
        writer.close()


async def client(count: Count, host: str, port: int, wanted: list[int], number: int) -> None:
    """Ask again and again while so many clients are wanted."""
    while wanted[0] >= 0:
        if number >= wanted[0]:
            await asyncio.sleep(0.1)
            continue
        count.sent += 1
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                count.tokens += await ask(host, port, 64)
            count.answered += 1
        except (OSError, TimeoutError, ValueError) as error:
            count.lost.append(f"{time.strftime('%H:%M:%S')} {type(error).__name__}: {error}")
            await asyncio.sleep(0.5)


async def main(host: str, port: int, many: int, few: int) -> None:
    """Run until SIGTERM; `many` 0 sends one request and ends."""
    if many == 0:
        print(json.dumps({"tokens": await ask(host, port, 8)}), flush=True)
        return
    count, wanted = Count(), [few]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    clients = [asyncio.create_task(client(count, host, port, wanted, n)) for n in range(many)]
    while not ended.is_set():
        wanted[0] = few if wanted[0] == many else many
        try:
            async with asyncio.timeout(MANY_SECONDS if wanted[0] == many else FEW_SECONDS):
                await ended.wait()
        except TimeoutError:
            continue
    wanted[0] = -1
    await asyncio.gather(*clients)
    print(
        json.dumps(
            {
                "sent": count.sent,
                "answered": count.answered,
                "tokens": count.tokens,
                "lost": count.lost,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
