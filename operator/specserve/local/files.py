"""Files of the state folder: whole or not at all, and readable by their owner alone."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Put a text in place of a file.

    Raises:
        OSError: It cannot be written; what was there before is there still.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can look into; returns it.

    Raises:
        OSError: It cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path
