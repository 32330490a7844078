"""A pair whose draft must look far back: each line is the last one, every letter moved on by one.

    python -m tests.engine.distant FOLDER

Writes the checkpoints that `tests.engine.pair` does, and FOLDER/prompts.json. A line is random
letters, so that nothing near a token tells what it is: only the token one line before does. What
a draft has not kept of that time it cannot guess, and an older line does not help it.

Needs torch, safetensors and tokenizers: run it in an engine's environment.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from torch import Tensor

from tests.engine.pair import (
    SHAPES,
    Draft,
    Schooling,
    Target,
    save_pair,
    train_draft,
    train_target,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyz012345"
LINE = 64
NEAR = 48
"""Tokens that a draft sees whose context is cut, in the probe."""
TEXTS = 400
SCHOOLING = Schooling(target_steps=300, draft_steps=400, length=416, peak_rate=4e-3)


def text(source: random.Random, size: int) -> str:
    """Return a text of `size` bytes from a random first line."""
    places = [source.randrange(len(ALPHABET)) for _ in range(LINE)]
    return "".join(ALPHABET[(places[n % LINE] + n // LINE) % len(ALPHABET)] for n in range(size))


@torch.no_grad()
def probe(target: Target, draft: Draft, length: int, texts: int = 8) -> dict[str, float]:
    """Return how often the draft's first guess is the target's, by what the draft may see.

    Args:
        target: What it has to guess.
        draft: What guesses.
        length: Of each text, in bytes; guesses are counted from the third line on.
        texts: How many.
    """
    source = random.Random(1)
    tokens = torch.tensor([list(text(source, length).encode()) for _ in range(texts)])
    hidden = target(tokens)
    chosen = target.lm_head(hidden).argmax(-1)
    embedded, behind = target.embed_tokens(tokens)[:, 1:], hidden[:, :-1]

    def right(states: Tensor, wanted: Tensor) -> float:
        return round(float((target.lm_head(states).argmax(-1) == wanted).float().mean()), 3)

    first = 2 * LINE
    windows = [
        part.unfold(1, NEAR, 1).flatten(0, 1).transpose(1, 2) for part in (embedded, behind)
    ]
    cut = draft(*windows)[:, -1].view(texts, -1, behind.shape[-1])
    return {
        "targetRight": round(
            float((chosen[:, first:-1] == tokens[:, first + 1 :]).float().mean()), 3
        ),
        "draftRight": right(draft(embedded, behind)[:, first:], chosen[:, first + 1 :]),
        f"draftRightSeeing{NEAR}": right(cut[:, first - NEAR + 1 :], chosen[:, first + 1 :]),
    }


def make(folder: Path, schooling: Schooling) -> None:
    """Train and write a pair, and what to ask it."""
    torch.set_num_threads(1)  # small matrices: more threads wait for one another
    torch.manual_seed(schooling.seed)

    def texts(source: random.Random) -> str:
        return text(source, schooling.length)

    target = train_target(SHAPES["cpu"], schooling, texts)
    draft = train_draft(target, SHAPES["cpu"], schooling, texts)
    found = probe(target, draft, schooling.length)
    print(found, flush=True)
    save_pair(folder, SHAPES["cpu"], target, draft)
    asked = {
        "looksBack": LINE,
        "texts": [text(random.Random(n), schooling.length) for n in range(TEXTS)],
        "probe": found,
    }
    (folder / "prompts.json").write_text(json.dumps(asked, indent=1))


def main() -> None:
    """Run from the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("folder", type=Path)
    make(cli.parse_args().folder, SCHOOLING)


if __name__ == "__main__":
    main()
