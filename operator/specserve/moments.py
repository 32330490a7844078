"""Wall-clock seconds and the texts they are written as (RFC 3339). Reads no clock."""

import datetime


def iso(moment: float) -> str:
    """Wall-clock seconds as a text in UTC, rounded down to the second."""
    return _utc(moment).replace(microsecond=0).isoformat().replace("+00:00", "Z")


def exact(moment: float) -> str:
    """The same to the millisecond."""
    return _utc(moment).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(text: str | None) -> float | None:
    """The wall-clock seconds of a text, None of none.

    Raises:
        ValueError: Python reads no time in it; schemas take more than Python does (leap seconds,
            small letters).
    """
    return datetime.datetime.fromisoformat(text).timestamp() if text else None


def _utc(moment: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC)
