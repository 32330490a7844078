"""What the two loops tell each other of a SpecServe. Pure."""

from dataclasses import dataclass, field

from specserve import api
from specserve.observed import Key


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
        last_switch: Wall-clock time in seconds of the last switch on record, None if none.
    """

    key: Key
    policy: api.Policy
    draft: api.Draft
    tokens: tuple[str, ...]
    api_key: str | None
    model: str
    ranks: int = 1
    last_switch: float | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Keep tokens and keys out of logs and tracebacks."""
        return f"Target({'/'.join(self.key)})"


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
