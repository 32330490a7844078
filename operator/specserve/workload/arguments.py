"""The command line of the engine: what the operator renders, and what a user may say instead.

Names and aliases of the flags are those of SGLang 0.5.16 and 0.5.23, whose parser also takes any
unambiguous abbreviation of a flag.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from specserve import names
from specserve.api import SpecServeSpec

#: Algorithms whose number of steps can be changed while the engine runs.
LIVE_METHODS: Final = frozenset({"EAGLE", "EAGLE3", "NEXTN"})

#: Batch sizes from which on the engine's own policy, in mode `auto`, learns and chooses apart.
ADAPTIVE_SLOTS: Final = (1, 8, 32, 128)
#: Decode rounds between two choices of that policy; its default of 5 follows every chance run of
#: drafts that were kept or not.
ADAPTIVE_UPDATE_INTERVAL: Final = 100

#: SGLang takes this flag only as two arguments: it looks for it before it parses the rest.
FLAG_CONFIG: Final = "--config"

_ALIASES: Final[Mapping[str, str]] = {
    "--model": "--model-path",
    "--tensor-parallel-size": "--tp-size",
    "--data-parallel-size": "--dp-size",
    "--speculative-draft-model": "--speculative-draft-model-path",
}

#: Flags that only the operator may set, and where their value belongs instead.
_OWNED: Final[Mapping[str, str]] = {
    "--model-path": "spec.model.source",
    "--served-model-name": "spec.model.servedName",
    "--revision": "spec.model.revision",
    "--port": "nothing: the serving port is fixed",
    "--enable-metrics": "nothing: metrics are always on",
    FLAG_CONFIG: "spec.engine.args for each of its lines",
    "--api-key": "spec.engine.apiKeySecretRef",
    "--admin-api-key": "nothing: the operator makes this key",
    "--speculative-algorithm": "spec.draft.method",
    "--speculative-draft-model-path": "spec.draft.source",
    "--speculative-draft-model-revision": "spec.draft.revision",
    "--speculative-adaptive": "spec.draft.method",
    "--speculative-adaptive-config": "spec.draft.steps",
}

#: Also owned, while the operator switches the engine.
_OWNED_WHILE_LIVE: Final[Mapping[str, str]] = {
    "--speculative-num-steps": "spec.draft.steps",
    "--speculative-num-draft-tokens": "spec.draft.steps",
    "--speculative-eagle-topk": "nothing: only 1 can be switched in a live engine",
}

#: Flags under which the engine starts without the plugin or without its HTTP server, by the only
#: value that keeps both (None: there is none).
_UNSUPPORTED: Final[Mapping[str, str | None]] = {
    "--tokenizer-worker-num": "1",
    "--nnodes": "1",
    "--use-ray": None,
    "--grpc-mode": None,
    "--smg-grpc-mode": None,
}

#: Addresses that a pod may listen on. The operator's own choice, an empty one, is every address
#: of either family: `::` would not do, as asyncio and uvloop make it IPv6 only.
_HOSTS: Final = frozenset({"", "0.0.0.0", "::"})

_RENDERED: Final = (
    "--host", "--tp-size", "--dp-size", "--max-running-requests", "--decode-log-interval",
    "--quantization", "--context-length", "--trust-remote-code",
)  # fmt: skip
_KNOWN: Final = frozenset({*_RENDERED, *_OWNED, *_OWNED_WHILE_LIVE, *_UNSUPPORTED})


class UnusableSpec(ValueError):
    """A SpecServe that the API server accepts and no pod can be made of.

    Attributes:
        field: path of the field to change.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnusableArgument(UnusableSpec):
    """An argument in spec.engine.args that would take the engine out of the operator's hands.

    Attributes:
        flag: the flag as the user wrote it.
    """

    def __init__(self, flag: str, message: str) -> None:
        super().__init__("spec.engine.args", message)
        self.flag = flag


@dataclass(frozen=True, slots=True)
class Argument:
    """A flag with its values.

    Attributes:
        flag: its full name, whatever the user called it; empty for words before the first flag.
        values: what follows it.
        words: how it was written, to be handed on unchanged.
    """

    flag: str
    values: tuple[str, ...]
    words: tuple[str, ...]

    @classmethod
    def of(cls, flag: str, *values: object) -> "Argument":
        """A flag of the operator's, written as one word that no value can be mistaken for."""
        texts = tuple(_literal(str(value)) for value in values)
        words = (f"{flag}={texts[0]}",) if texts else (flag,)
        return cls(flag, texts, words)


def _literal(text: str) -> str:
    """`text` so that the kubelet does not expand a `$(NAME)` in it."""
    return text.replace("$(", "$$(")


def arguments(spec: SpecServeSpec, model_path: str, draft_path: str | None) -> list[str]:
    """The arguments of the engine container.

    The user's arguments come last and as they were written; where one of them has a counterpart
    among the operator's, only the user's is rendered.

    Args:
        spec: the SpecServe.
        model_path: name or directory of the target, as the engine is to see it.
        draft_path: the same for the draft, None without one.

    Raises:
        UnusableArgument: the user sets a flag that only the operator may set.
    """
    live = spec.draft.method in LIVE_METHODS
    ours = list(_ours(spec, model_path, draft_path))
    values = {argument.flag: argument.values for argument in ours}
    theirs = _last_of_each(
        argument
        for argument in split(spec.engine.args)
        if not _redundant(argument, values, live=live)
    )
    taken = {argument.flag for argument in theirs}
    # Words without a flag are a subcommand of the image's entry point: they lead.
    head = [argument for argument in theirs if not argument.flag]
    tail = [argument for argument in theirs if argument.flag]
    kept = [argument for argument in ours if argument.flag not in taken]
    return [word for argument in (*head, *kept, *tail) for word in argument.words]


def adaptive_config(spec: SpecServeSpec) -> str | None:
    """SGLang's adaptive configuration as JSON; None where nothing is switched.

    Only steps that stand in it can be ordered, and at a batch size whose slot leaves a step out
    the engine has no CUDA graphs for it. So every slot lists all of them, 0 among them.
    """
    if spec.draft.method not in LIVE_METHODS:
        return None
    steps = sorted(set(spec.draft.steps))
    slots = {str(size): {"candidate_steps": steps} for size in ADAPTIVE_SLOTS}
    return json.dumps({"update_interval": ADAPTIVE_UPDATE_INTERVAL, **slots})


def parallelism(spec: SpecServeSpec) -> tuple[int, int]:
    """GPUs per copy of the model and copies per pod, where the user's arguments win.

    Raises:
        UnusableArgument: the user gives a size that is no whole number above 0.
    """
    sizes = {"--tp-size": spec.engine.tensor_parallel, "--dp-size": spec.engine.data_parallel}
    for argument in split(spec.engine.args):
        if argument.flag in sizes:
            text = argument.values[0] if argument.values else ""
            if not (text.isascii() and text.isdigit() and int(text) > 0):
                raise UnusableArgument(
                    argument.words[0], f"{argument.words[0]} needs a whole number above 0"
                )
            sizes[argument.flag] = int(text)
    return sizes["--tp-size"], sizes["--dp-size"]


def split(words: list[str]) -> list[Argument]:
    """A command line as flags with their values; takes `--flag value` and `--flag=value`.

    Raises:
        UnusableArgument: a flag and its value stand in one word, with a space between.
    """
    groups: list[list[str]] = []
    for word in words:
        if _is_flag(word) or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return [_argument(group) for group in groups]


def _is_flag(word: str) -> bool:
    # "-1" is a value.
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()


def _argument(group: list[str]) -> Argument:
    if not _is_flag(group[0]):
        return Argument("", tuple(group), tuple(group))
    flag, equals, value = group[0].partition("=")
    if len(flag.split()) != 1:
        first = flag.split()[0]
        raise UnusableArgument(
            first, f"{group[0]!r} is one argument; write {first} and its value as two"
        )
    values = (value, *group[1:]) if equals else tuple(group[1:])
    return Argument(_full_name(flag), values, tuple(group))


def _full_name(flag: str) -> str:
    """The name that SGLang knows a flag by, if it is one that matters here."""
    if flag in _KNOWN:
        return flag
    if flag in _ALIASES:
        return _ALIASES[flag]
    meant = {name for name in _KNOWN if name.startswith(flag)}
    meant |= {name for alias, name in _ALIASES.items() if alias.startswith(flag)}
    return meant.pop() if len(meant) == 1 else flag


def _redundant(argument: Argument, ours: Mapping[str, tuple[str, ...]], *, live: bool) -> bool:
    """Whether the user says what the operator says anyway.

    Raises:
        UnusableArgument: the user says something else, and may not.
    """
    flag, written = argument.flag, argument.words[0].partition("=")[0]
    if flag in _UNSUPPORTED:
        if argument.values == (_UNSUPPORTED[flag],):
            return False
        raise UnusableArgument(
            written, f"{written} is not supported: the engine would start without its control"
        )
    if flag == "--host":
        if argument.values and argument.values[0] in _HOSTS:
            return False
        raise UnusableArgument(
            written,
            f"{written} must be 0.0.0.0 or ::, or be left out: probes and the operator reach the "
            "engine at the address of its pod",
        )
    place = _OWNED.get(flag) or (_OWNED_WHILE_LIVE.get(flag) if live else None)
    if place is None:
        return False
    if flag != FLAG_CONFIG and ours.get(flag) == argument.values:
        return True
    raise UnusableArgument(written, f"{written} belongs to the operator; use {place}")


def _last_of_each(arguments: Iterator[Argument]) -> list[Argument]:
    """Without earlier values of a known flag. Unknown flags may be meant to be repeated."""
    kept: dict[object, Argument] = {}
    for position, argument in enumerate(arguments):
        kept[argument.flag if argument.flag in _KNOWN else position] = argument
    return list(kept.values())


def _ours(spec: SpecServeSpec, model_path: str, draft_path: str | None) -> Iterator[Argument]:
    model, engine = spec.model, spec.engine
    yield Argument.of("--model-path", model_path)
    yield Argument.of(
        "--served-model-name", model.served_name or model.source.partition("://")[2].strip("/")
    )
    if model.revision:
        yield Argument.of("--revision", model.revision)
    if model.quantization:
        yield Argument.of("--quantization", model.quantization)
    if model.context_length:
        yield Argument.of("--context-length", model.context_length)
    if model.trust_remote_code:
        yield Argument.of("--trust-remote-code")
    yield Argument.of("--host", "")
    yield Argument.of("--port", names.PORT_SERVING)
    yield Argument(FLAG_CONFIG, (names.ENGINE_CONFIG,), words=(FLAG_CONFIG, names.ENGINE_CONFIG))
    yield Argument.of("--tp-size", engine.tensor_parallel)
    yield Argument.of("--dp-size", engine.data_parallel)
    yield Argument.of("--max-running-requests", engine.max_running_requests)
    yield Argument.of("--enable-metrics")
    # The default of 40 batches leaves the gauges stale for seconds under load.
    yield Argument.of("--decode-log-interval", 5)
    yield from _speculation(spec, draft_path)


def _speculation(spec: SpecServeSpec, draft_path: str | None) -> Iterator[Argument]:
    draft = spec.draft
    if draft.method == "None":
        return
    yield Argument.of("--speculative-algorithm", draft.method)
    if draft_path is not None:
        yield Argument.of("--speculative-draft-model-path", draft_path)
    if draft.revision:
        yield Argument.of("--speculative-draft-model-revision", draft.revision)
    if draft.method == "NGRAM":
        return
    # Not a count below the largest candidate: until 0.5.23 the engine sizes a buffer from it.
    yield Argument.of("--speculative-num-steps", max(draft.steps))
    yield Argument.of("--speculative-eagle-topk", 1)
    if draft.method in LIVE_METHODS:
        yield Argument.of("--speculative-adaptive")
        yield Argument.of("--speculative-adaptive-config", names.ADAPTIVE_CONFIG)
