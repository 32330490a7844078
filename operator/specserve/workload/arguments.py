"""The command line of the engine: what the operator renders, and what a user may say instead.

Flags are told apart as SGLang's own parser does it (`flags`), in every spelling of every version.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from specserve import names
from specserve.api import SpecServeSpec
from specserve.conditions import counted
from specserve.workload.flags import NAMES, meant
from specserve.workload.layout import (
    Layout,
    Misfit,
    check,
    has_graphs,
    layout,
    sizes_are_given,
    whole,
)

#: Algorithms whose number of steps can be changed while the engine runs.
LIVE_METHODS: Final = frozenset({"EAGLE", "EAGLE3", "NEXTN"})

#: Batch sizes from which on the engine's own policy, in mode `auto`, learns and chooses apart.
ADAPTIVE_SLOTS: Final = (1, 8, 32, 128)
#: Decode rounds between two choices of that policy; its default of 5 follows every chance run of
#: drafts that were kept or not.
ADAPTIVE_UPDATE_INTERVAL: Final = 100

#: SGLang takes this flag only as two arguments: it looks for it before it parses the rest.
FLAG_CONFIG: Final = "--config"

#: Flags that only the operator may set, and what to do instead.
_OWNED: Final[Mapping[str, str]] = {
    "--model-path": "use spec.model.source",
    "--served-model-name": "use spec.model.servedName",
    "--revision": "use spec.model.revision",
    "--port": "leave it out: the serving port is fixed",
    "--enable-metrics": "leave it out: metrics are always on",
    FLAG_CONFIG: "use spec.engine.args for each of its lines",
    "--api-key": "use spec.engine.apiKeySecretRef",
    "--admin-api-key": "leave it out: the operator makes this key",
    "--speculative-algorithm": "use spec.draft.method",
    "--speculative-draft-model-path": "use spec.draft.source",
    "--speculative-draft-model-revision": "use spec.draft.revision",
    "--speculative-adaptive": "use spec.draft.method",
    "--speculative-adaptive-config": "use spec.draft.steps",
}

#: Also owned, while the operator switches the engine.
_OWNED_WHILE_LIVE: Final[Mapping[str, str]] = {
    "--speculative-num-steps": "use spec.draft.steps",
    "--speculative-num-draft-tokens": "use spec.draft.steps",
    "--speculative-eagle-topk": "leave it out: only 1 can be switched in a live engine",
}

_WITHOUT_CONTROL: Final = "the engine would start without its control"
_PLAIN_HTTP: Final = "probes and the operator talk plain HTTP to the engine"
#: Flags that cannot be served, and why.
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "--tokenizer-worker-num": _WITHOUT_CONTROL,
    "--nnodes": _WITHOUT_CONTROL,
    "--use-ray": _WITHOUT_CONTROL,
    "--grpc-mode": _WITHOUT_CONTROL,
    "--smg-grpc-mode": _WITHOUT_CONTROL,
    "--grpc-port": "the engine does not start with it and a key, and the operator sets a key",
    "--ssl-certfile": _PLAIN_HTTP,
    "--ssl-keyfile": _PLAIN_HTTP,
}
#: The one value of some of them that changes nothing.
_HARMLESS: Final[Mapping[str, str]] = {"--tokenizer-worker-num": "1", "--nnodes": "1"}

#: Addresses that a pod may listen on. The operator's own choice, an empty one, is every address
#: of either family: `::` would not do, as asyncio and uvloop make it IPv6 only.
_HOSTS: Final = frozenset({"", "0.0.0.0", "::"})


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
        words: how it is rendered.
        written: how the user called it.
    """

    flag: str
    values: tuple[str, ...]
    words: tuple[str, ...]
    written: str = ""

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

    The user's arguments come last; where one of them has a counterpart among the operator's, only
    the user's is rendered. Known flags are written in full.

    Args:
        spec: the SpecServe.
        model_path: name or directory of the target, as the engine is to see it.
        draft_path: the same for the draft, None without one.

    Raises:
        UnusableArgument: the user sets a flag that only the operator may set.
        UnusableSpec: the limits of the engine exclude each other.
    """
    live = spec.draft.method in LIVE_METHODS
    given = split(spec.engine.args)
    ours = list(_ours(spec, _layout(spec, given), model_path, draft_path))
    values = {argument.flag: argument.values for argument in ours}
    theirs = _last_of_each(
        argument for argument in given if not _redundant(argument, values, live=live)
    )
    taken = {argument.flag for argument in theirs}
    # Words without a flag are a subcommand of the image's entry point: they lead.
    head = [argument for argument in theirs if not argument.flag]
    tail = [argument for argument in theirs if argument.flag]
    kept = [argument for argument in ours if argument.flag not in taken]
    kept += _graphs(values | _values(tail), live=live)
    return [word for argument in (*head, *kept, *tail) for word in argument.words]


def _graphs(values: Mapping[str, tuple[str, ...]], *, live: bool) -> Iterator[Argument]:
    """The bound of CUDA graph sizes: a batch above it runs without, and slowly.

    SGLang's own bound depends on the GPU, from 8 to 512. It holds for every step count, 0
    included.

    Raises:
        UnusableSpec: the limits in force exclude each other.
    """
    try:
        shape = layout(values)
        check(shape, values, graphs=live)
        if has_graphs(values) and not sizes_are_given(values):
            limit = whole("--max-running-requests", values, 1)
            yield Argument.of("--cuda-graph-max-bs-decode", shape.batch(limit))
    except Misfit as error:
        raise UnusableSpec("spec.engine", str(error)) from None


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


def layout_of(spec: SpecServeSpec) -> Layout:
    """How the engine is divided, where the user's arguments win.

    Raises:
        UnusableSpec: the sizes do not go together.
    """
    return _layout(spec, split(spec.engine.args))


def requests_asked(spec: SpecServeSpec) -> int:
    """Requests that a pod is told to run at once, all copies of the model together.

    Raises:
        UnusableSpec: the limits do not go together.
    """
    given = split(spec.engine.args)
    copies = _layout(spec, given).copies
    share = _share(spec.engine.max_running_requests, copies)
    values = {"--max-running-requests": (str(share),)} | _values(given)
    try:
        return copies * whole("--max-running-requests", values, share)
    except Misfit as error:
        raise UnusableSpec("spec.engine", str(error)) from None


def _layout(spec: SpecServeSpec, given: Iterable[Argument]) -> Layout:
    sizes = {
        "--tp-size": (str(spec.engine.tensor_parallel),),
        "--dp-size": (str(spec.engine.data_parallel),),
    }
    try:
        return layout(sizes | _values(given))
    except Misfit as error:
        raise UnusableSpec("spec.engine", str(error)) from None


def _values(given: Iterable[Argument]) -> dict[str, tuple[str, ...]]:
    return {argument.flag: argument.values for argument in given}


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
    written, equals, value = group[0].partition("=")
    if len(written.split()) != 1:
        first = written.split()[0]
        raise UnusableArgument(
            first, f"{group[0]!r} is one argument; write {first} and its value as two"
        )
    flags = meant(written)
    if len(flags) > 1:
        raise UnusableArgument(
            written, f"{written} may be {' or '.join(flags[:3])}; write it in full"
        )
    flag = flags[0] if flags else written
    values = (value, *group[1:]) if equals else tuple(group[1:])
    return Argument(flag, values, (f"{flag}{equals}{value}", *group[1:]), written)


def _redundant(argument: Argument, ours: Mapping[str, tuple[str, ...]], *, live: bool) -> bool:
    """Whether the user says what the operator says anyway.

    Raises:
        UnusableArgument: the user says something else, and may not.
    """
    flag, written = argument.flag, argument.written
    called = written if written == flag else f"{written} ({flag})"
    if flag in _UNSUPPORTED:
        if argument.values == (_HARMLESS.get(flag),):
            return False
        raise UnusableArgument(written, f"{called} is not supported: {_UNSUPPORTED[flag]}")
    if flag == "--host":
        if argument.values and argument.values[0] in _HOSTS:
            return False
        raise UnusableArgument(
            written,
            f"{called} must be 0.0.0.0 or ::, or be left out: probes and the operator reach the "
            "engine at the address of its pod",
        )
    instead = _OWNED.get(flag) or (_OWNED_WHILE_LIVE.get(flag) if live else None)
    if instead is None:
        return False
    if flag != FLAG_CONFIG and ours.get(flag) == argument.values:
        return True
    raise UnusableArgument(written, f"{called} belongs to the operator; {instead}")


def _last_of_each(arguments: Iterator[Argument]) -> list[Argument]:
    """Without earlier values of a known flag. Unknown flags may be meant to be repeated."""
    kept: dict[object, Argument] = {}
    for position, argument in enumerate(arguments):
        kept[argument.flag if argument.flag in NAMES else position] = argument
    return list(kept.values())


def _called(source: str) -> str:
    """The name of a model that was given none; SGLang refuses one with a colon (0.5.14 to 0.5.23).

    The tag of an image and the port of its registry have one.
    """
    return source.partition("://")[2].strip("/").replace(":", "-")


def _ours(
    spec: SpecServeSpec, shape: Layout, model_path: str, draft_path: str | None
) -> Iterator[Argument]:
    model, engine = spec.model, spec.engine
    yield Argument.of("--model-path", model_path)
    yield Argument.of("--served-model-name", model.served_name or _called(model.source))
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
    yield Argument.of("--max-running-requests", _share(engine.max_running_requests, shape.copies))
    if engine.mem_fraction_static is not None:
        yield Argument.of("--mem-fraction-static", engine.mem_fraction_static)
    yield Argument.of("--enable-metrics")
    # The default of 40 batches leaves the gauges stale for seconds under load.
    yield Argument.of("--decode-log-interval", 5)
    yield from _speculation(spec, draft_path)


def _share(requests: int, copies: int) -> int:
    """The part of each copy of the model, as SGLang gives the limit to every one of them."""
    if requests < copies:
        raise UnusableSpec(
            "spec.engine.maxRunningRequests",
            f"{counted(requests, 'request')} cannot be shared by {copies} copies of the model "
            "(engine.dataParallel)",
        )
    return requests // copies


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
