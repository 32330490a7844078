"""What there is to serve: whether the kind is installed, in which schema, and in which namespaces.

All of it is found out without a right in the cluster at large. Discovery and the published schema
are open to every ServiceAccount; whether there are rights in a namespace shows when they are used.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve import names, schema, telemetry
from specserve.kube import Kube, KubeError, KubeRefused

log = logging.getLogger(__name__)

#: Longest time in seconds between two looks at what is missing.
LOOK = 10.0
#: Seconds between two looks while there is nothing to serve, and between two lines about it.
LOOK_FOR_ANY = 2.0
SAY_AGAIN = 60.0

_GROUP = f"/apis/{names.API_VERSION}"
_OPENAPI = "/openapi/v3"
#: The kind must have been gone in so many looks: an aggregated answer may lag for a moment.
_GONE_LOOKS = 2


@dataclass(frozen=True, slots=True)
class Scope:
    """What is served.

    Attributes:
        namespaces: The served ones; empty means all.
        waiting: Those of the list in which there are no rights, as before they exist.
    """

    namespaces: tuple[str, ...]
    waiting: tuple[str, ...] = ()


async def installed(kube: Kube) -> bool:
    """Whether the API server serves SpecServes.

    Raises:
        KubeError: It did not say.
    """
    try:
        listed = await kube.call("GET", _GROUP)
    except KubeRefused as error:
        if error.status == 404:
            return False
        raise
    return any(one["name"] == names.PLURAL for one in listed["resources"])


async def find(kube: Kube, wanted: Sequence[str], known: Collection[str] = ()) -> Scope | None:
    """What can be served now; None if there is nothing.

    Args:
        kube: Connection to the API server.
        wanted: Namespaces to serve; empty means all.
        known: Those of them that need not be asked about: they are served.

    Raises:
        KubeError: The API server did not say.
    """
    if not await installed(kube):
        return None
    unknown = [name for name in wanted if name not in known]
    asked = (_may_list(kube, name) for name in unknown)
    # All answers are waited for: who asks again too early counts from the last refusal.
    rights = await asyncio.gather(*asked, return_exceptions=True)
    failures = [one for one in rights if isinstance(one, BaseException)]
    if failures:
        # The one that asks for the longest pause.
        raise max(failures, key=lambda error: getattr(error, "retry_after", 0.0))
    barred = {name for name, may in zip(unknown, rights, strict=True) if not may}
    served = tuple(name for name in wanted if name not in barred)
    if wanted and not served:
        return None
    return Scope(served, tuple(name for name in wanted if name in barred))


async def wait(kube: Kube, wanted: Sequence[str]) -> Scope:
    """Wait until there is something to serve, and say what is missing."""
    loop = asyncio.get_running_loop()
    said = -SAY_AGAIN
    while True:
        pause = LOOK_FOR_ANY
        missing = f"the kind {names.PLURAL}.{names.GROUP} is not installed: apply the CRD"
        try:
            scope = await find(kube, wanted)
            if scope is not None:
                return scope
            if wanted and await installed(kube):
                missing = f"no rights on {names.PLURAL} in {', '.join(wanted)}; do they exist?"
        except KubeError as error:
            missing = f"looking for {names.PLURAL}.{names.GROUP}: {error}"
            if isinstance(error, KubeRefused):
                pause = max(pause, error.retry_after)
        if loop.time() - said >= SAY_AGAIN:
            log.warning("nothing to serve yet: %s", missing)
            said = loop.time()
        await asyncio.sleep(pause)


async def changed(
    kube: Kube, wanted: Sequence[str], scope: Scope, look_seconds: float
) -> Scope | None:
    """Return what can be served when it is something else than before; None if it is nothing.

    Args:
        kube: Connection to the API server.
        wanted: Namespaces to serve; empty means all.
        scope: What could be served before.
        look_seconds: Time between two looks at what is served; what is missing is looked for
            every ten seconds if that is more often.
    """
    loop = asyncio.get_running_loop()
    gone = 0
    soon = min(LOOK, look_seconds)
    usual = look_seconds if wanted and not scope.waiting else soon
    at_all = loop.time() + look_seconds
    pause = usual
    while True:
        await asyncio.sleep(pause)
        pause = usual
        # A margin, for a pause may end a moment early.
        everywhere = gone > 0 or loop.time() > at_all - 1.0
        try:
            now = await find(kube, wanted, () if everywhere else scope.namespaces)
        except KubeError as error:
            if isinstance(error, KubeRefused):
                pause = max(pause, error.retry_after)
            continue
        if everywhere:
            at_all = loop.time() + look_seconds
        if now is None:
            gone += 1
            pause = soon
        else:
            gone = 0
        if gone >= _GONE_LOOKS or (now is not None and now != scope):
            return now


async def published(kube: Kube) -> str:
    """Which schema the API server publishes: another text for each; empty if it publishes none.

    Raises:
        KubeError: The API server did not say.
    """
    try:
        index = await kube.call("GET", _OPENAPI)
    except KubeRefused as error:
        if error.status in {403, 404}:
            return ""
        raise
    found = (index.get("paths") or {}).get(_GROUP.lstrip("/")) or {}
    return str(found.get("serverRelativeURL") or "")


async def compare(kube: Kube) -> tuple[str, str] | None:
    """Hold the installed schema against our own.

    Returns:
        Whether the installed one is `older`, `newer` or `different`, and in what, in one line;
        None if the two agree or the installed one is not published.

    Raises:
        KubeError: The API server did not say.
    """
    try:
        answer = await kube.call("GET", f"{_OPENAPI}{_GROUP}", timeout=30.0)
    except KubeRefused as error:
        if error.status in {403, 404}:
            log.warning("the installed schema is not published and cannot be compared: %s", error)
            return None
        raise
    theirs = _of_our_kind(answer)
    if theirs is None:
        return None
    ours = schema.document()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    lacking, unknown = schema.differences(ours, theirs)
    telemetry.schema_fields.labels("lacking").set(len(lacking))
    telemetry.schema_fields.labels("unknown").set(len(unknown))
    parts = []
    if lacking:
        parts.append(f"it lacks {_some(lacking)}")
    if unknown:
        parts.append(f"this operator does not know {_some(unknown)}")
    if not parts:
        return None
    kind = "different" if lacking and unknown else "older" if lacking else "newer"
    return kind, "; ".join(parts)


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(paths[:5]) + more


def _of_our_kind(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for candidate in (answer.get("components") or {}).get("schemas", {}).values():
        for kind in candidate.get("x-kubernetes-group-version-kind", ()):
            if (kind.get("group"), kind.get("kind")) == (names.GROUP, names.KIND):
                found: Mapping[str, Any] = candidate
                return found
    return None


async def _may_list(kube: Kube, namespace: str) -> bool:
    path = f"{_GROUP}/namespaces/{namespace}/{names.PLURAL}"
    try:
        await kube.call("GET", path, query={"limit": "1"})
    except KubeRefused as error:
        if error.status in {403, 404}:
            return False
        raise
    return True
