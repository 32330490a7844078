"""SGLang's flags by version: how each that matters here is spelt, and which one a word means.

SGLang takes any unambiguous beginning of a flag, and renames flags between releases, so that one
command line means different things to two versions: `--cuda-graph-max-bs` is a flag of 0.5.16,
and an ambiguous beginning to 0.5.23. The operator does not know which version an image holds. It
therefore writes each flag in the one spelling that all of `VERSIONS` share.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

#: Versions whose flags are known, in order. A test holds the table against their parsers.
VERSIONS: Final = ("0.5.14", "0.5.16", "0.5.18", "0.5.23")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of SGLang.

    Attributes:
        name: how it is rendered: a spelling of every version that has the flag.
        aliases: further spellings of all these versions.
        former: spellings that were dropped, each with the last version that takes it.
        since: the first version that has the flag.
    """

    name: str
    aliases: tuple[str, ...] = ()
    former: Mapping[str, str] = field(default_factory=dict)
    since: str = VERSIONS[0]

    @property
    def all_spellings(self) -> tuple[str, ...]:
        """The spellings of any version."""
        return (self.name, *self.aliases, *self.former)

    def spellings(self, version: str) -> frozenset[str]:
        """What the parser of one of `VERSIONS` takes for this flag, in full."""
        at = VERSIONS.index(version)
        if at < VERSIONS.index(self.since):
            return frozenset()
        kept = {old for old, last in self.former.items() if at <= VERSIONS.index(last)}
        return frozenset({self.name, *self.aliases, *kept})


FLAGS: Final = (
    Flag("--model-path", ("--model",)),
    Flag("--served-model-name"),
    Flag("--revision"),
    Flag("--quantization"),
    Flag("--context-length"),
    Flag("--trust-remote-code"),
    Flag("--host"),
    Flag("--port"),
    Flag("--config"),
    Flag("--api-key"),
    Flag("--admin-api-key"),
    Flag("--ssl-certfile"),
    Flag("--ssl-keyfile"),
    Flag("--tp-size", ("--tensor-parallel-size",)),
    Flag("--dp-size", ("--data-parallel-size",)),
    Flag("--pp-size", ("--pipeline-parallel-size",)),
    Flag("--attn-dp-size", ("--attention-data-parallel-size",), since="0.5.23"),
    Flag("--enable-dp-attention"),
    Flag("--nnodes"),
    Flag("--use-ray"),
    Flag("--tokenizer-worker-num"),
    Flag("--grpc-mode"),
    Flag("--smg-grpc-mode", since="0.5.16"),
    Flag("--grpc-port", since="0.5.16"),
    Flag("--max-running-requests"),
    Flag("--max-total-tokens"),
    Flag("--mem-fraction-static"),
    Flag("--enable-metrics"),
    Flag("--decode-log-interval"),
    Flag("--cuda-graph-max-bs-decode", former={"--cuda-graph-max-bs": "0.5.18"}),
    Flag("--cuda-graph-bs-decode", former={"--cuda-graph-bs": "0.5.18"}),
    Flag("--cuda-graph-config"),
    Flag("--cuda-graph-backend-decode"),
    Flag("--disable-cuda-graph"),
    Flag("--disable-decode-cuda-graph"),
    Flag("--speculative-algorithm"),
    Flag("--speculative-draft-model-path", ("--speculative-draft-model",)),
    Flag("--speculative-draft-model-revision"),
    Flag("--speculative-num-steps"),
    Flag("--speculative-num-draft-tokens"),
    Flag("--speculative-eagle-topk"),
    Flag("--speculative-adaptive"),
    Flag("--speculative-adaptive-config"),
)
_BY_SPELLING: Final = {text: flag.name for flag in FLAGS for text in flag.all_spellings}
NAMES: Final = frozenset(flag.name for flag in FLAGS)


def meant(word: str) -> tuple[str, ...]:
    """Names of the known flags that some version may take `word` for, in order.

    More than one means that the word is ambiguous; none, that it is a flag of no concern here.
    Underscores count as dashes: no version takes them, and nobody means anything else by them.
    """
    text = word.replace("_", "-")
    if text in _BY_SPELLING:
        return (_BY_SPELLING[text],)
    if not text.startswith("--"):
        return ()
    return _unique(name for full, name in _BY_SPELLING.items() if full.startswith(text))


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))
