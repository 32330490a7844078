"""Keeps SGLang's record of configuration changes from growing with every switch.

Each change of steps appends an entry for good: to `ServerArgs` in 0.5.14 to 0.5.18 (and from
there into every answer of `/server_info`), to the runtime context in 0.5.23. Only the last one
says anything: each sets the same two fields.
"""

from __future__ import annotations

from typing import Any, Final

SOURCE: Final = "adaptive_spec.restore"
"""Under which SGLang records a change of steps."""
_SERVER_ARGS_RECORDS: Final = ("_runtime_mutations", "_resolved_overrides")
_CONTEXT_RECORD: Final = "_overrides_log"


def records(server_args: Any, context: Any) -> list[list[Any]]:
    """Return the records that exist in this version: lists of (source, fields)."""
    found = [getattr(server_args, name, None) for name in _SERVER_ARGS_RECORDS]
    found.append(getattr(context, _CONTEXT_RECORD, None))
    return [record for record in found if isinstance(record, list)]


def compact(record: list[Any]) -> None:
    """Drop all entries of switches but the last, in place."""
    last = True
    for position in range(len(record) - 1, -1, -1):
        if record[position][0] == SOURCE:
            if not last:
                del record[position]
            last = False
