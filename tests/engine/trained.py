"""Trained pairs of a target and a draft, made on the spot and kept in the user's cache.

    python -m tests.engine.trained

prints where the pair of the tests lies.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from tests.engine.environment import hash_of, interpreter, made
from tests.engine.install import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

PAIR = "tests.engine.pair"


def prepare(module: str = PAIR, *arguments: str) -> Path:
    """Return the folder of a trained pair, with `target`, `draft` and `prompts.json` in it.

    Args:
        module: What trains it, from the command line `FOLDER ARGUMENTS`, with nothing but what
            an engine's environment has.
        arguments: Its further arguments.

    Raises:
        subprocess.CalledProcessError: It could not be trained.
    """
    python = interpreter()
    source = REPOSITORY.joinpath(*module.split(".")).with_suffix(".py")
    key = hash_of(source.read_bytes(), *(word.encode() for word in (*arguments, str(python))))
    name = f"{module.rpartition('.')[2]}-{key}"

    def fill(folder: Path) -> None:
        subprocess.run(
            [python, "-m", module, folder, *arguments],
            check=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
        )

    return made(name, fill, f"Training {module}", "half a minute")


if __name__ == "__main__":
    print(prepare())
