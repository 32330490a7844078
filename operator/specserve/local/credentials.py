"""The plugin's token and the serving port's key: that they fit, and that new ones are taken in.

Who renews a token writes it to the engines and to the file of `--token-file`, in whatever order;
the one before is sent to engines that do not have the new one yet.
"""

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from specserve.bench import connection
from specserve.bench.connection import REFUSALS, BadOption, Refused
from specserve.engine import EngineClient, EngineError, EngineRefused
from specserve.local.places import Place
from specserve.local.session import Session, Wish
from specserve.signals import Reading

#: Seconds between two looks at the files.
LOOK: Final = 1.0


async def fit(client: EngineClient, places: Iterable[Place], wish: Wish) -> None:
    """Find out before anything is begun whether engines that answer take what is sent to them.

    Args:
        client: To ask with.
        places: Where the engines are.
        wish: With the token and the key.

    Raises:
        Refused: An engine takes one of them not.
    """
    await asyncio.gather(*(_fits(client, place, wish) for place in places))


async def _fits(client: EngineClient, place: Place, wish: Wish) -> None:
    engine = place.endpoint(wish.tokens, wish.api_key)
    if await _refuses(client.read_back(engine)):
        raise Refused.token(place.admin, wish.tokens[0])
    if wish.spec.policy.source == "Engine" and await _refuses(client.load(engine)):
        raise Refused.key(place.serving, wish.api_key)


async def _refuses(call: Coroutine[Any, Any, Any]) -> bool:
    try:
        answer = await call
    except EngineRefused as refusal:
        return refusal.status in REFUSALS
    except EngineError:
        return False  # it may not be there yet, and is waited for
    return isinstance(answer, Reading) and answer.key_refused


async def follow(
    options: argparse.Namespace, work: Session, renew: Callable[[str], None] | None
) -> None:
    """Take in each change of the files that hold the token and the key, for ever.

    A file that cannot be used changes nothing, and is said once.

    Args:
        options: `--token-file` and `--api-key-file`; what comes from the environment stays.
        work: Told what is new.
        renew: Hands a token to engines that were started from here; None for engines that were
            given, to which somebody else does.
    """
    if options.token_file is None and options.api_key_file is None:
        return
    seen = said = ""
    while True:
        await asyncio.sleep(LOOK)
        try:
            _take_in(options, work, renew)
        except (BadOption, OSError) as error:
            # A file amid being written is whole at the next look.
            before, seen = seen, str(error)
            if seen == before != said:
                said = seen
                work.board.say("warning", "", f"{said}; the one before is sent")
        else:
            seen = said = ""


def _take_in(
    options: argparse.Namespace, work: Session, renew: Callable[[str], None] | None
) -> None:
    wish = work.wish
    before = wish.tokens[0]
    token = connection.token(options, {}) or before
    if token != before:
        if renew is not None:
            renew(token)
        work.adopt_keys((token, before), wish.api_key)
        work.board.say("note", "", f"{options.token_file}: a new token, sent from now on")
    key = connection.api_key(options, {}) or wish.api_key
    if key == wish.api_key:
        return
    if renew is not None:
        raise BadOption(
            f"--api-key-file: {options.api_key_file}: a new key, which engines take at their "
            "start: it holds from the next --start on"
        )
    work.adopt_keys(work.wish.tokens, key)
    work.board.say("note", "", f"{options.api_key_file}: a new key, sent from now on")
