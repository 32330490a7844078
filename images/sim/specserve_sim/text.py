"""The text that simulated requests get, and its token ids: the same for all, by position."""

from __future__ import annotations

_CONSONANTS = "bdfgklmnprst"
_VOWELS = "aeiou"
_WIDTH = 4  # characters of a token's text, and of its id with a comma
_IDS = 900


def _word(position: int) -> str:
    first = _CONSONANTS[position % 12]
    vowel = _VOWELS[position // 12 % 5]
    last = _CONSONANTS[position // 60 % 12]
    return f" {first}{vowel}{last}"


class _Endless:
    """A string long enough for whatever prefix is asked for; built once, grown when needed."""

    def __init__(self) -> None:
        self.tokens = 0
        self.text = ""
        self.ids = ""

    def grow(self, tokens: int) -> None:
        if tokens > self.tokens:
            self.tokens = max(1024, 2 * tokens)
            self.text = "".join(map(_word, range(self.tokens)))
            self.ids = "".join(f"{100 + i * 7 % _IDS}," for i in range(self.tokens))


_ENDLESS = _Endless()


def answer_text(tokens: int) -> str:
    """Return the text of the first tokens of any answer: printable ASCII, no JSON escapes."""
    _ENDLESS.grow(tokens)
    return _ENDLESS.text[: tokens * _WIDTH]


def answer_ids(tokens: int) -> str:
    """Return their ids as a JSON list."""
    _ENDLESS.grow(tokens)
    return f"[{_ENDLESS.ids[: max(0, tokens * _WIDTH - 1)]}]"


def prompt_length(text: str) -> int:
    """Return how many tokens a prompt counts for: one for each four characters begun."""
    return max(1, -(-len(text) // _WIDTH))
