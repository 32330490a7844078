"""Orders as numbers: what goes through SGLang's `/set_internal_state` to the scheduler ranks.

SGLang's own message for that path holds a flat map from names to numbers (from 0.5.16 on it is
typed so), and a message type of our own would break with its wire format. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from specserve_engine.control import Order
from specserve_engine.wire import MAX_EPOCH, DraftKv, Mode, Setting, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "specserve."
_TIER: Final = "tier."
_MODES: Final = tuple(Mode)
_DRAFT_KV: Final = tuple(DraftKv)


class Verb(IntEnum):
    """What a rank is to do with an order."""

    PREPARE = 1  # say whether it could be obeyed, and keep it
    COMMIT = 2  # obey the one that was kept
    ABORT = 3  # forget the one that was kept
    APPLY = 4  # obey it, if every rank of the group can


@dataclass(frozen=True, slots=True)
class Message:
    """One order on its way to the ranks of every group."""

    verb: Verb
    order: Order


class Malformed(ValueError):
    """A message in our name that is none of ours."""


def encode(message: Message, nonce: int) -> dict[str, int]:
    """Return the numbers of a message. `nonce` proves that this plugin sent it."""
    setting = message.order.setting
    fields = {
        "nonce": nonce,
        "verb": int(message.verb),
        "epoch": message.order.epoch,
        "mode": _MODES.index(setting.mode),
        "draftKv": _DRAFT_KV.index(setting.draft_kv),
    }
    if setting.steps is not None:
        fields["steps"] = setting.steps
    for tier in setting.tiers:
        fields[f"{_TIER}{tier.min_batch}"] = tier.steps
    return {PREFIX + name: value for name, value in fields.items()}


def concerns_us(fields: Mapping[str, object]) -> bool:
    """Say whether any of the names is ours; then the whole message must be."""
    return any(name.startswith(PREFIX) for name in fields)


def decode(fields: Mapping[str, object], nonce: int) -> Message:
    """Read a message back.

    Raises:
        Malformed: It is not what `encode` makes with this nonce. The text is safe to log.
    """
    numbers: dict[str, int] = {}
    for name, value in fields.items():
        if not name.startswith(PREFIX) or type(value) not in {int, float}:
            raise Malformed("holds something that is not an order's")
        number = int(value)  # type: ignore[call-overload]
        if number != value:
            raise Malformed("holds a fraction")
        numbers[name.removeprefix(PREFIX)] = number
    if numbers.pop("nonce", None) != nonce:
        raise Malformed("does not carry this engine's nonce")
    try:
        verb = Verb(numbers.pop("verb"))
        epoch = numbers.pop("epoch")
        mode = _MODES[_index(numbers.pop("mode"), len(_MODES))]
        draft_kv = _DRAFT_KV[_index(numbers.pop("draftKv"), len(_DRAFT_KV))]
    except (KeyError, ValueError) as error:
        raise Malformed(f"is not an order: {error!r}") from None
    steps = numbers.pop("steps", None)
    tiers = []
    for name, number in numbers.items():
        batch = name.removeprefix(_TIER)
        if batch == name or not (batch.isascii() and batch.isdigit()):
            raise Malformed("holds something that is not an order's")
        tiers.append(Tier(int(batch), number))
    tiers.sort(key=lambda tier: tier.min_batch)
    if not 0 <= epoch <= MAX_EPOCH or (mode is Mode.ON) != (steps is not None):
        raise Malformed("is not an order")
    if (mode is Mode.TIERS) != bool(tiers):
        raise Malformed("is not an order")
    return Message(verb, Order(epoch, Setting(mode, steps, tuple(tiers), draft_kv)))


def _index(number: int, end: int) -> int:
    if not 0 <= number < end:
        raise ValueError(number)
    return number
