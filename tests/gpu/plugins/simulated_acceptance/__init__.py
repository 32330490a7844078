"""A plugin of SGLang, for tests alone: the simulated acceptance of a running server can change.

SGLang reads `SGLANG_SIMULATE_ACC_LEN` when it is imported, and then draws how many tokens each
round wins: for 2.5, two or three with even odds, the same for all requests of the batch. With this
plugin the mean stands in a file that is read at each round, and rounds win two and three in turn.
So every stretch of rounds wins the mean to within one token, and no luck is in a comparison.

The variable must be set for SGLang to simulate at all, to any value above 0. Ranks draw alike as
long as the mean changes while none of them decodes.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from pathlib import Path

VARIABLE = "SPECSERVE_TEST_ACCEPTANCE"
"""Names the file: one float of 8 bytes, the tokens won per round, the bonus token included."""
TARGET = "sglang.srt.speculative.spec_utils._sample_simulated_acc_len"

_FLOAT = struct.Struct("<d")
_ALMOST = 1e-9
"""2.2 thrice is 6.600000000000001, and 1.1 ten times is less than 11."""

_log = logging.getLogger(__name__)


def write(file: Path, mean: float) -> None:
    """Say what rounds win from now on."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, _FLOAT.pack(mean), 0)
    finally:
        os.close(descriptor)


class Draws:
    """Whole numbers whose sum follows a mean that may change."""

    def __init__(self) -> None:
        self._owed = 0.0

    def next(self, mean: float, most: int) -> int:
        """Return what a round wins: from 1 to `most`, the whole number below or above the mean.

        A round that can win one token alone leaves what is owed to others.
        """
        if most <= 1:
            return 1
        self._owed += min(max(mean, 1.0), float(most))
        won = int(self._owed + _ALMOST)
        self._owed -= won
        return won


def register() -> None:
    """Draw in place of SGLang.

    Raises:
        SystemExit: The file cannot be read, or this SGLang draws elsewhere. SGLang would swallow
            any other exception and serve without the plugin.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        with Path(os.environ[VARIABLE]).open("rb") as file:
            content = mmap.mmap(file.fileno(), _FLOAT.size, access=mmap.ACCESS_READ)
    except (KeyError, OSError, ValueError) as error:
        raise SystemExit(f"simulated acceptance: {VARIABLE}: {error!r}") from error
    draws = Draws()

    def draw(_mean: float, _method: str, most: int) -> int:
        return draws.next(_FLOAT.unpack_from(content)[0], int(most))

    HookRegistry.register(TARGET, draw, HookType.REPLACE)
    HookRegistry.apply_hooks()
    if TARGET not in HookRegistry._patched:
        raise SystemExit(f"simulated acceptance: {TARGET} could not be replaced")
    _log.warning("simulated acceptance: read from %s", os.environ[VARIABLE])
