"""What the two loops tell each other of a SpecServe. Pure."""

from dataclasses import dataclass, field
from typing import Final, Literal

from specserve import api, moments, queries, workload
from specserve.observed import Key
from specserve.policy import Curve


@dataclass(frozen=True, slots=True)
class Access:
    """What a SpecServe shows to its Prometheus server.

    Attributes:
        token: Bearer token, None if there is none.
        basic: User name and password, None if there are none.
        authorities: Certificates in PEM that the server's must come from, None for the public
            ones.
        missing: What is missing of the Secrets; the server is not asked then.
    """

    token: str | None = None
    basic: tuple[str, str] | None = None
    authorities: str | None = None
    missing: str = ""

    def __repr__(self) -> str:
        """Keep tokens and passwords out of logs and tracebacks."""
        return "Access()"


NO_ACCESS: Final = Access()


@dataclass(frozen=True, slots=True)
class Target:
    """What the second loop needs to know of one SpecServe.

    Attributes:
        key: Its namespace and name.
        policy: The policy in force.
        draft: The draft, for its step counts.
        tokens: Plugin tokens, the current one first.
        api_key: Key of the serving port, None if it is open.
        model: Served model name.
        ranks: Data-parallel ranks of a pod.
        curve: The break-even curve known beforehand, None if there is none that fits.
        mode_until: Wall-clock time in seconds at which a pinned mode ends, None if it does not.
        access: What to show to the Prometheus server of `policy.prometheus`.
        last_switch: Wall-clock time in seconds of the last switch on record, None if none.
    """

    key: Key
    policy: api.Policy
    draft: api.Draft
    tokens: tuple[str, ...]
    api_key: str | None
    model: str
    ranks: int = 1
    curve: Curve | None = None
    mode_until: float | None = None
    access: Access = NO_ACCESS
    last_switch: float | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Keep tokens and keys out of logs and tracebacks."""
        return f"Target({'/'.join(self.key)})"


def target_of(
    key: Key,
    spec: api.SpecServeSpec,
    *,
    tokens: tuple[str, ...],
    api_key: str | None,
    curve: Curve | None,
    access: Access = NO_ACCESS,
    last_switch: float | None = None,
) -> Target:
    """What the second loop needs to know, out of a spec.

    Raises:
        UnusableSpec: `policy.modeUntil` is no time.
    """
    try:
        until = moments.seconds(spec.policy.mode_until)
    except ValueError:
        raise workload.UnusableSpec(
            "spec.policy.modeUntil",
            f"{spec.policy.mode_until} is no time like 2030-01-31T12:00:00Z",
        ) from None
    return Target(
        key=key,
        policy=queries.paced(spec.policy),
        draft=spec.draft,
        tokens=tokens,
        api_key=api_key,
        model=spec.model.served_name or spec.model.source.partition("://")[2].strip("/"),
        ranks=ranks_of(spec),
        curve=curve,
        mode_until=until,
        access=access,
        last_switch=last_switch,
    )


def ranks_of(spec: api.SpecServeSpec) -> int:
    """Data-parallel ranks of a pod, as far as the spec can be understood."""
    try:
        return workload.layout_of(spec).ranks
    except workload.UnusableSpec:
        return spec.engine.data_parallel


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth an event.

    Attributes:
        key: The SpecServe.
        kind: `Normal` or `Warning`.
        reason: One word for machines.
        message: One line for people.
    """

    key: Key
    kind: str
    reason: str
    message: str


#: Seconds for which a warning that was told is not told again. A container that keeps ending has
#: two for each restart, and the kubelet waits for up to 300 s between two.
TOLD_SECONDS: Final = 600.0


class Told:
    """The warnings told of late: what comes and goes and comes again is told once in a while.

    Everything else is news each time, as switches are.
    """

    __slots__ = ("_at",)

    def __init__(self) -> None:
        # In the order of their times, so that what is over stands first.
        self._at: dict[tuple[str, str, str], float] = {}

    def lately(self, uid: str, notice: Notice, now: float) -> bool:
        """Whether a notice needs not be told.

        Args:
            uid: Of the SpecServe: a namesake's are its own.
            notice: The notice, with the words as they are told.
            now: Monotonic seconds.
        """
        while self._at and now - next(iter(self._at.values())) >= TOLD_SECONDS:
            del self._at[next(iter(self._at))]
        return (uid, notice.reason, notice.message) in self._at

    def tell(self, uid: str, notice: Notice, now: float) -> None:
        """Take in that a notice was told."""
        if notice.kind == "Warning":
            self._at.setdefault((uid, notice.reason, notice.message), now)


@dataclass(frozen=True, slots=True)
class Override:
    """A mode for all SpecServes of an installation, set by hand in an emergency.

    Attributes:
        mode: `On`, `Off` or `Observe`; it stands above every policy.
        until: Wall-clock time in seconds at which it ends, None if it does not.
        reason: Why, for people.
    """

    mode: Literal["On", "Off", "Observe"]
    until: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of the override.

    Attributes:
        override: The one in force, None if there is none.
        problem: Why it could not be read of late, empty if it could; `override` is the last known
            one then.
    """

    override: Override | None = None
    problem: str = ""
