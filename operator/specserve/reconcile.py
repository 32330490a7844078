"""The first loop: SpecServe → desired objects → apply → status.

Level-triggered: whatever woke it, it looks at all it knows and brings the cluster to it. What it
knows comes from watches; nothing is written that holds already, so that at rest nothing is written
at all.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from specserve import (
    api,
    conditions,
    curves,
    document,
    keys,
    moments,
    names,
    observed,
    queries,
    status,
    telemetry,
    workload,
)
from specserve.calibrator import Calibrator, Subject
from specserve.cluster import Cluster
from specserve.conditions import Condition
from specserve.curves import ConfigMapText
from specserve.decisions import Switch
from specserve.kube import KubeError, KubeRefused, KubeUnreachable, Object
from specserve.observed import Credentials, Key, Owned, Pod, Trouble, Worker
from specserve.signals import Reading
from specserve.status import Engine
from specserve.target import Access, Notice, Standing, Target, ranks_of, target_of
from specserve.workqueue import WorkQueue

log = logging.getLogger(__name__)

#: Seconds in which changes of pods and engines are gathered into one status write.
GATHER = 0.2
#: Seconds until what cannot be mended here is looked at again.
RECHECK = 10.0
#: Seconds until a spec that the API server refused is tried again.
REJECTED_RECHECK = 60.0
#: Seconds between tries when the API server does not answer: first and longest.
BACKOFF = (1.0, 30.0)
#: Seconds for which a user's Secret is taken as read.
SECRET_TTL = 10.0
#: Seconds after which the Secret of the API key is looked at again: nobody tells of its changes.
SECRET_RECHECK = 60.0
#: Longest wait in seconds for the end of a pinned mode: clocks of the wall are set.
LONGEST_WAIT = 600.0

#: Reasons that are part of coming and going, and no news.
_ROUTINE = frozenset(
    {
        conditions.NO_PODS,
        conditions.NO_DRAFT,
        conditions.NO_SAMPLES,
        conditions.NOT_OBSERVED,
        conditions.NOT_REPORTED,
        conditions.REPLICAS_NOT_READY,
        conditions.SCALED_TO_ZERO,
        conditions.SWITCH_PENDING,
        conditions.ROLLING_OUT,
        conditions.PINNED,
        conditions.OBSERVING,
        conditions.NO_CURVE,
        "Loading",
    }
)
#: Why a load is unknown, where another content of a Secret may mend it.
_CREDENTIALS_REFUSED = frozenset({"Unauthorized", "KeyUnusable", "CertificateRejected"})
_NEWSWORTHY = (
    conditions.READY,
    conditions.METRICS_FRESH,
    conditions.SPECULATION_CONTROL,
    conditions.THRESHOLD_REACHABLE,
    conditions.STRATEGY_DECIDES,
    conditions.DRAFT_EFFECTIVE,
    conditions.CURVE_KNOWN,
    conditions.CALIBRATED,
    conditions.REQUEST_CAPACITY,
)
#: Those that are news when they begin to hold.
_GOOD_NEWS = frozenset({conditions.READY, conditions.CALIBRATED})


@dataclass(slots=True)
class _Resource:
    """A SpecServe as last seen."""

    key: Key
    uid: str
    generation: int
    leaving: bool
    rotate: str
    handed_to: str
    calibrate: str
    spec: api.SpecServeSpec | None
    refusal: str
    status: Mapping[str, Any]
    failures: int = 0


class Steering(Protocol):
    """What this loop tells and asks the second one, `specserve.regulate.Regulator`."""

    def configure(self, target: Target) -> None:
        """Take in a new or changed SpecServe."""
        ...

    def release(self, key: Key) -> None:
        """Let go of a SpecServe."""
        ...

    def observe(self, old: Pod | None, new: Pod | None) -> None:
        """Take in a pod that appeared, changed or vanished."""
        ...

    def engines(self, key: Key) -> list[Engine]:
        """What is known of the usable pods of a SpecServe."""
        ...

    async def ask(self, pod: Pod) -> Reading | None:
        """Ask a pod that is aside for its load; None if it does not say."""
        ...

    def asked(self, key: Key) -> bool:
        """Whether every usable pod of a SpecServe has been asked at least once."""
        ...

    def live(self, key: Key) -> bool:
        """Whether live round times of its engines are known."""
        ...

    def switches(self, key: Key) -> tuple[Switch, ...]:
        """The last changes that its engines confirmed."""
        ...

    def mode(self, target: Target) -> str:
        """The mode in force."""
        ...

    @property
    def standing(self) -> Standing:
        """What is known of the override of all SpecServes."""
        ...

    @property
    def stretch(self) -> float:
        """Sample period in force divided by the period asked for."""
        ...


class _Blocked(Exception):
    """The objects cannot be brought to the spec; somebody has to change something."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.trouble = Trouble(reason, message)


class Reconciler:
    """Brings the objects of all SpecServes to their specs, and their statuses to the facts.

    Args:
        cluster: The writes.
        regulator: The second loop.
        queue: SpecServes to look at.
        notice: Told what is worth an event.
        provision: What this installation adds to all SpecServes.
        holder: This installation, as it is on record with what it serves.
        curve_seconds: Time for which a ConfigMap with a curve is taken as read.
        clock: Monotonic seconds.
        wall: Wall-clock seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        regulator: Steering,
        queue: WorkQueue[Key],
        notice: Callable[[Notice], None],
        *,
        provision: workload.Provision = workload.NONE_PROVIDED,
        holder: str = "",
        curve_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._regulator = regulator
        self._queue = queue
        self._notice = notice
        self._provision = provision
        self._holder = holder
        self._foreign: dict[Key, str] = {}
        self._curve_seconds = curve_seconds
        self._clock = clock
        self._wall = wall
        self._resources: dict[Key, _Resource] = {}
        self._pods: dict[Key, dict[str, Pod]] = {}
        self._workers: dict[Key, dict[str, Worker]] = {}
        self._owned: dict[Key, dict[str, Owned]] = {}
        self._credentials: dict[Key, Credentials] = {}
        self._user_secrets: dict[Key, tuple[float, Object | None]] = {}
        # Digest of what was applied and of what it became: equal to both means nothing to do,
        # also where the server rewrites a value (1000m becomes 1).
        self._applied: dict[str, tuple[int, bytes]] = {}
        # The version that came of it: a watch may tell late of the one before.
        self._versions: dict[str, str] = {}
        self._curves: dict[Key, tuple[float, ConfigMapText]] = {}
        self._found: dict[Key, curves.Found] = {}
        self._targets: dict[Key, Target] = {}
        self._published: set[Key] = set()
        self._doubted: set[Key] = set()
        self._calibrated: dict[Key, Condition] = {}
        self._calibrator = Calibrator(
            cluster,
            regulator,
            notice,
            provision=provision,
            holder=holder,
            clock=clock,
            wall=wall,
        )

    # -- what the watches say ---------------------------------------------------------------

    def take_resource(self, item: Object, *, deleted: bool = False) -> None:
        """Take in a SpecServe that appeared, changed or vanished."""
        meta = item["metadata"]
        key = (meta["namespace"], meta["name"])
        if deleted:
            known = self._resources.get(key)
            # The end of a namesake that was deleted before may be told late.
            if known is None or known.uid == meta["uid"]:
                self._forget(key)
            return
        spec, refusal = _parse(item.get("spec"))
        annotations = meta.get("annotations") or {}
        known = self._resources.get(key)
        new = _Resource(
            key=key,
            uid=meta["uid"],
            generation=meta["generation"],
            leaving=bool(meta.get("deletionTimestamp")),
            rotate=annotations.get(names.ANNOTATION_ROTATE, ""),
            handed_to=annotations.get(names.ANNOTATION_OPERATOR, ""),
            calibrate=annotations.get(names.ANNOTATION_CALIBRATE, ""),
            spec=spec,
            refusal=refusal,
            status=item.get("status") or {},
        )
        if known is not None and known.uid == new.uid:
            # Our own status write comes back as an event; it is no reason to look again.
            same = _asks(known) == _asks(new)
            if same and known.status == new.status:
                return
            if same:
                known.status = known.status or new.status
                self._queue.add(key, GATHER)
                return
            new.status = known.status or new.status
            if known.calibrate != new.calibrate:
                self._calibrator.doubt(key)
        self._resources[key] = new
        if new.leaving:
            self._regulator.release(key)
        self._queue.add(key)

    def take_pod(self, old: Pod | Worker | None, new: Pod | Worker | None) -> None:
        """Take in a pod, of whichever kind, that appeared, changed or vanished."""
        if isinstance(old, Worker) or isinstance(new, Worker):
            self._take(self._workers, old, new, GATHER)
            return
        self._regulator.observe(old, new)
        self._take(self._pods, old, new, GATHER)

    def take_owned(self, old: Owned | None, new: Owned | None) -> None:
        """Take in an object of ours that appeared, changed or vanished."""
        self._take(self._owned, old, new, GATHER if new else 0.0)

    def take_credentials(self, old: Credentials | None, new: Credentials | None) -> None:
        """Take in a Secret of engine credentials that appeared, changed or vanished."""
        value = new or old
        if value is None or value.name != names.credentials_secret(value.key[1]):
            return
        if new is None:
            self._credentials.pop(value.key, None)
        else:
            self._credentials[value.key] = new
        self._queue.add(value.key)

    def changed(self, key: Key) -> None:
        """Take in that the engines of a SpecServe report something new."""
        if key in self._resources:
            self._queue.add(key, GATHER)

    def _take(self, store: Any, old: Any, new: Any, delay: float) -> None:
        if old is not None and new is not None and old.key != new.key:
            # Somebody has taken or changed the label that names its SpecServe.
            self._take(store, old, None, delay)
        value = new or old
        objects = store.setdefault(value.key, {})
        if new is None:
            objects.pop(value.uid, None)
            self._applied.pop(value.uid, None)
            self._versions.pop(value.uid, None)
            if not objects:
                del store[value.key]
        else:
            objects[new.uid] = new
        if value.key in self._resources:
            self._queue.add(value.key, delay)

    def _forget(self, key: Key) -> None:
        self._resources.pop(key, None)
        self._curves.pop(key, None)
        self._found.pop(key, None)
        self._calibrated.pop(key, None)
        self._calibrator.forget(key)
        self._targets.pop(key, None)
        self._published.discard(key)
        self._foreign.pop(key, None)
        self._regulator.release(key)
        self._queue.forget(key)

    # -- the loop ---------------------------------------------------------------------------

    async def work(self) -> None:
        """Reconcile keys from the queue, one after the other, for ever."""
        while True:
            key = await self._queue.get()
            telemetry.queue_length.set(len(self._queue))
            started = self._clock()
            result = "ok"
            try:
                result = await self.reconcile(key)
            except Exception:
                # A bug in one SpecServe must not stop the others; it is looked at again.
                log.exception("%s/%s: reconcile failed", *key)
                result = "bug"
                self._queue.add(key, RECHECK)
            finally:
                telemetry.reconciles.labels(result).inc()
                telemetry.reconcile_seconds.observe(self._clock() - started)
                self._queue.done(key)

    async def reconcile(self, key: Key) -> str:
        """Bring one SpecServe to its spec; returns the result as a word for metrics."""
        resource = self._resources.get(key)
        if resource is None or resource.leaving:
            self._regulator.release(key)
            return "gone"
        blocked: Trouble | None = None
        try:
            if key in self._doubted:
                self._doubted.discard(key)
                await self._confirm(resource)
            blocked = await self._bring(resource)
            if blocked is not None and blocked.reason == conditions.OTHER_OPERATOR:
                return self._leave(resource, blocked)
            self._foreign.pop(key, None)
            await self._calibrate(resource, blocked)
            await self._publish(resource, blocked)
        except KubeRefused as error:
            if error.status == 404:
                return await self._vanished(resource)
            return self._retry(resource, error)
        except KubeUnreachable as error:
            return self._retry(resource, error)
        resource.failures = 0
        if blocked is not None:
            rejected = blocked.reason == conditions.SPEC_REJECTED
            self._queue.add(key, REJECTED_RECHECK if rejected else RECHECK)
            return "blocked"
        if any(_locked_out(one) for one in self._regulator.engines(key)):
            # Nobody tells of changes of the user's Secrets.
            self._queue.add(key, RECHECK)
        elif resource.spec is not None and resource.spec.engine.api_key_secret_ref is not None:
            # Engines that start are given the key as it was read last.
            self._queue.add(key, SECRET_RECHECK)
        return "ok"

    async def _vanished(self, resource: _Resource) -> str:
        """Forget a SpecServe that is no more, also where nobody tells of its end."""
        try:
            item = await self._cluster.get(names.KIND, *resource.key)
        except KubeError as error:
            return self._retry(resource, error)
        uid = ((item or {}).get("metadata") or {}).get("uid")
        if uid != resource.uid and self._resources.get(resource.key) is resource:
            self._forget(resource.key)
        elif uid == resource.uid:
            # Its namespace or another object was missing, not the SpecServe.
            self._queue.add(resource.key, RECHECK)
        return "gone"

    def relist(self, items: Iterable[Object], before: Collection[Key]) -> None:
        """Take in a full list of SpecServes: what no watch has told, their ends among it.

        Args:
            items: All that there are.
            before: Keys that were known when the list was begun.
        """
        listed = set()
        for item in items:
            meta = item["metadata"]
            listed.add((meta["namespace"], meta["name"]))
            self.take_resource(item)
        for key in before:
            if key not in listed and key in self._resources:
                self._queue.add(key)
                self._doubted.add(key)

    def keys(self, namespace: str = "") -> frozenset[Key]:
        """All SpecServes that are known, of a namespace or of all."""
        return frozenset(key for key in self._resources if namespace in ("", key[0]))

    def leave(self, namespace: str) -> None:
        """Forget the SpecServes of a namespace; nothing in the cluster is touched."""
        for key in self.keys(namespace):
            self._forget(key)

    def _leave(self, resource: _Resource, blocked: Trouble) -> str:
        """Keep off what another installation serves; its status is that one's, too."""
        self._regulator.release(resource.key)
        if self._foreign.get(resource.key) != blocked.message:
            self._foreign[resource.key] = blocked.message
            log.warning("%s/%s: %s", *resource.key, blocked.message)
            self._notice(Notice(resource.key, "Warning", blocked.reason, blocked.message))
        return "foreign"

    def _retry(self, resource: _Resource, error: KubeError) -> str:
        first, longest = BACKOFF
        pause = min(first * 2 ** min(resource.failures, 16), longest)
        if isinstance(error, KubeRefused):
            pause = max(pause, error.retry_after)
        resource.failures += 1
        log.warning("%s/%s: %s; next try in %.0f s", *resource.key, error, pause)
        self._queue.add(resource.key, pause)
        return "error"

    async def _bring(self, resource: _Resource) -> Trouble | None:
        """Apply what is missing; returns why that was not possible."""
        if resource.spec is None:
            return Trouble(conditions.SPEC_REJECTED, resource.refusal)
        try:
            return await self._bring_to(resource, resource.spec)
        except workload.UnusableSpec as error:
            return Trouble(conditions.SPEC_REJECTED, str(error))
        except _Blocked as error:
            return error.trouble

    async def _bring_to(self, resource: _Resource, spec: api.SpecServeSpec) -> Trouble | None:
        owner = workload.Owner(resource.key[1], resource.key[0], resource.uid)
        missing, api_key = await self._user_keys(resource.key[0], spec)
        access = await self._access(resource.key[0], spec)
        missing = "; ".join(filter(None, (missing, access.missing)))
        credentials = await self._ensure_credentials(resource, owner, api_key)
        found = await self._curve(resource, spec)
        target = self._targets[resource.key] = target_of(
            resource.key,
            spec,
            tokens=credentials.tokens,
            api_key=api_key,
            curve=found.curve if found else None,
            access=access,
            last_switch=moments.seconds(
                (resource.status.get("speculation") or {}).get("lastSwitchTime")
            ),
        )
        self._regulator.configure(target)
        self._look_again(target)
        desired = workload.desired(owner, spec, self._provision)
        await self._apply(resource, desired)
        await self._prune(resource, desired)
        return Trouble(conditions.SECRET_MISSING, missing) if missing else None

    async def _apply(self, resource: _Resource, desired: list[workload.Manifest]) -> None:
        live = {(one.kind, one.name): one for one in self._owned.get(resource.key, {}).values()}
        todo = [
            manifest
            for manifest in desired
            if not self._in_place(
                resource, manifest, live.get((manifest["kind"], manifest["metadata"]["name"]))
            )
        ]
        if not todo:
            return
        await self._confirm(resource)
        refused: list[Trouble] = []
        for manifest in todo:
            one = live.get((manifest["kind"], manifest["metadata"]["name"]))
            if one is None and refused and manifest["kind"] == "Deployment":
                # No engine starts before all that goes with it is there: a NetworkPolicy is.
                break
            try:
                if one is None:
                    one = await self._unlabelled(resource, manifest)
                await self._apply_one(resource, manifest, one)
            except _Blocked as error:
                refused.append(error.trouble)
        if refused:
            raise _Blocked(refused[0].reason, "; ".join(each.message for each in refused))

    def _in_place(
        self, resource: _Resource, manifest: workload.Manifest, one: Owned | None
    ) -> bool:
        if one is None or one.owner != resource.uid:
            return False
        here = hash(observed.written_parts(manifest)), one.live
        if self._applied.get(one.uid) != here and observed.holds(one.live, manifest):
            self._applied[one.uid] = here
        return self._applied.get(one.uid) == here

    async def _apply_one(
        self, resource: _Resource, manifest: workload.Manifest, one: Owned | None
    ) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        try:
            answer = await self._write(manifest, one)
        except KubeRefused as error:
            # Server-side apply says 500 of a field that the schema does not know; other 500s pass.
            unknown_field = error.status == 500 and "typed patch object" in error.message
            if error.status in {400, 403, 409, 422} or unknown_field:
                if kind == "Service" and one is not None and error.status != 403:
                    raise _Blocked(
                        conditions.CHANGED_BY_HAND,
                        f"Service {name}: somebody has changed it so that it cannot be set back: "
                        f"{error.message}; kubectl delete service {name} has it made anew",
                    ) from None
                reason = conditions.SPEC_REJECTED if error.status != 403 else "ApplyForbidden"
                raise _Blocked(reason, f"{kind} {name}: {error.message}") from None
            raise
        result, wanted = observed.owned(kind, answer), hash(observed.written_parts(manifest))
        before, version = self._applied.get(result.uid), observed.version(answer)
        stale = self._versions.get(result.uid) == version
        self._applied[result.uid] = wanted, result.live
        self._versions[result.uid] = version
        self._owned.setdefault(resource.key, {})[result.uid] = result
        drifted = before is not None and before[0] == wanted
        if not stale:
            self._say_applied(resource, one, result, drifted=drifted)

    async def _write(self, manifest: workload.Manifest, one: Owned | None) -> Object:
        """Apply, also where somebody else has left no room for it.

        A Service does not depend on the spec, so it is never the spec that is refused.
        """
        try:
            return await self._cluster.apply(manifest)
        except KubeRefused as error:
            if one is None or one.kind != "Service" or error.status != 422:
                raise
            namespace = manifest["metadata"]["namespace"]
            item = await self._cluster.get(one.kind, namespace, one.name)
            fields = None if item is None else workload.taken_over(item)
            if item is None or fields is None:
                raise
            version = {key: item["metadata"][key] for key in ("uid", "resourceVersion")}
            await self._cluster.merge(
                one.kind, namespace, one.name, {"metadata": {**version, "managedFields": fields}}
            )
            return await self._cluster.apply(manifest)

    def _say_applied(
        self, resource: _Resource, old: Owned | None, new: Owned, *, drifted: bool
    ) -> None:
        """Tell what became of an object.

        Args:
            resource: Its SpecServe.
            old: What it was.
            new: What it is.
            drifted: Whether it was as it should be, and somebody else has changed it since.
        """
        changed = old is None or old.live != new.live
        if not changed or not (drifted or new.kind == "Deployment"):
            return
        what = f"{new.kind} {new.name} "
        what += "set back, as somebody else had changed it" if drifted else "changed"
        if old is None:
            what = f"{new.kind} {new.name} created"
        elif new.kind == "Deployment":
            # Both as the API server shows them: just what its controller compares.
            path = workload.first_difference(json.loads(old.live), json.loads(new.live))
            field = None if path is None or drifted else workload.field_of(path)
            what += (
                ", no pod is replaced"
                if path is None
                else f", pods are replaced: {field or f'{path} of the pod template'}"
            )
        reason = "SetBack" if drifted else "WorkloadApplied"
        self._notice(Notice(resource.key, "Normal", reason, what))

    async def _confirm(self, resource: _Resource) -> None:
        """Stop if the SpecServe is no more: its objects must not be made again."""
        item = await self._cluster.get(names.KIND, *resource.key)
        meta = (item or {}).get("metadata") or {}
        if meta.get("uid") != resource.uid or meta.get("deletionTimestamp"):
            raise KubeRefused(404, "NotFound", "the SpecServe is no more")

    async def _unlabelled(self, resource: _Resource, manifest: workload.Manifest) -> Owned | None:
        """Find an object that no watch tells of; one that somebody else made is not taken over."""
        kind, meta = manifest["kind"], manifest["metadata"]
        item = await self._cluster.get(kind, meta["namespace"], meta["name"])
        if item is None:
            return None
        if not _ours(item, resource):
            raise _Blocked(
                conditions.NAME_TAKEN,
                f"{kind} {meta['name']} exists and is not ours; rename the SpecServe, or delete "
                f"that {kind}",
            )
        return observed.owned(kind, item)

    async def _prune(self, resource: _Resource, desired: list[workload.Manifest]) -> None:
        wanted = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in desired}
        for one in list(self._owned.get(resource.key, {}).values()):
            if one.owner == resource.uid and (one.kind, one.name) not in wanted:
                await self._cluster.delete(one.kind, resource.key[0], one.name, one.uid)

    # -- secrets ----------------------------------------------------------------------------

    async def _user_keys(self, namespace: str, spec: api.SpecServeSpec) -> tuple[str, str | None]:
        """What is missing of the user's Secrets, and the key of the serving port."""
        key_field = "spec.engine.apiKeySecretRef"
        found, missing = await self._secret_values(
            namespace,
            {
                "spec.model.tokenSecretRef": _entry(spec.model.token_secret_ref),
                key_field: _entry(spec.engine.api_key_secret_ref),
            },
        )
        return missing, found.get(key_field)

    async def _access(self, namespace: str, spec: api.SpecServeSpec) -> Access:
        """What to show to the Prometheus server, if one is to be asked."""
        server = spec.policy.prometheus
        if spec.policy.source != "Prometheus" or server is None:
            return Access()
        at = "spec.policy.prometheus."
        token, basic, authorities = (
            f"{at}{name}" for name in ("bearerTokenSecretRef", "basicAuthSecretRef", "caSecretRef")
        )
        login = server.basic_auth_secret_ref
        found, missing = await self._secret_values(
            namespace,
            {
                token: _entry(server.bearer_token_secret_ref),
                basic: (login.name, login.username_key) if login else None,
                f"{basic}.passwordKey": (login.name, login.password_key) if login else None,
                authorities: _entry(server.ca_secret_ref),
            },
        )
        named = basic in found and f"{basic}.passwordKey" in found
        return Access(
            token=found.get(token),
            basic=(found[basic], found[f"{basic}.passwordKey"]) if named else None,
            authorities=found.get(authorities),
            missing=missing,
        )

    async def _secret_values(
        self, namespace: str, entries: Mapping[str, tuple[str, str] | None]
    ) -> tuple[dict[str, str], str]:
        """Values of the user's Secrets by the field that names them, and what is missing."""
        found: dict[str, str] = {}
        missing = []
        for field, entry in entries.items():
            if entry is None:
                continue
            name, key = entry
            item = await self._user_secret((namespace, name))
            if item is None:
                missing.append(f"Secret {name} is missing ({field})")
            elif not (item.get("data") or {}).get(key):
                missing.append(f"Secret {name} has no key {key} ({field})")
            else:
                # One trailing line break is what `kubectl create secret --from-file` leaves.
                found[field] = observed.decode(item["data"][key]).rstrip("\n")
        return found, "; ".join(missing)

    async def _user_secret(self, key: Key) -> Object | None:
        read = self._user_secrets.get(key)
        if read is None or self._clock() - read[0] > SECRET_TTL:
            read = self._clock(), await self._cluster.get("Secret", *key)
            self._user_secrets[key] = read
        return read[1]

    async def _ensure_credentials(
        self, resource: _Resource, owner: workload.Owner, api_key: str | None
    ) -> Credentials:
        """Create the credentials once; afterwards add what is missing, rotate when asked."""
        have = self._credentials.get(resource.key)
        if have is None:
            await self._confirm(resource)
            have = await self._create_credentials(resource, owner, api_key)
        annotations: dict[str, str] = {}
        if self._holder and have.holder != self._holder:
            if have.holder and resource.handed_to != self._holder:
                raise _Blocked(
                    conditions.OTHER_OPERATOR,
                    f"served by the operator {have.holder}, and left alone by {self._holder}; "
                    f"to hand it over, annotate the SpecServe: "
                    f"{names.ANNOTATION_OPERATOR}={self._holder}",
                )
            annotations[names.ANNOTATION_OPERATOR] = self._holder
        changes: dict[str, str] = {}
        if have.rotated != resource.rotate and resource.rotate:
            changes[names.KEY_PLUGIN_TOKEN_PREVIOUS] = have.data.get(names.KEY_PLUGIN_TOKEN, "")
            changes[names.KEY_PLUGIN_TOKEN] = keys.token()
        for name, make in keys.MADE.items():
            if not have.data.get(name) and name not in changes:
                changes[name] = make()
        admin_key = changes.get(names.KEY_ADMIN_KEY) or have.data[names.KEY_ADMIN_KEY]
        config = workload.engine_config(admin_key, api_key)
        unread = api_key is None and resource.spec and resource.spec.engine.api_key_secret_ref
        if have.data.get(names.KEY_CONFIG) != config and not unread:
            changes[names.KEY_CONFIG] = config
        if changes or annotations:
            have = observed.credentials(
                await self._cluster.merge(
                    "Secret",
                    resource.key[0],
                    have.name,
                    {
                        "metadata": {
                            "uid": have.uid,
                            "annotations": {
                                **annotations,
                                **({names.ANNOTATION_ROTATED: resource.rotate} if changes else {}),
                            },
                        },
                        **({"stringData": changes} if changes else {}),
                    },
                )
            )
            self._credentials[resource.key] = have
            if names.KEY_PLUGIN_TOKEN in changes:
                self._notice(
                    Notice(
                        resource.key,
                        "Normal",
                        "CredentialsRotated",
                        "the plugin token was renewed; engines take the old one until they have "
                        "read the new one",
                    )
                )
        return have

    async def _create_credentials(
        self, resource: _Resource, owner: workload.Owner, api_key: str | None
    ) -> Credentials:
        admin_key = keys.token()
        manifest = workload.credentials(
            owner,
            plugin_token=keys.token(),
            plugin_token_previous="",
            admin_key=admin_key,
            nonce=keys.nonce(),
            config_yaml=workload.engine_config(admin_key, api_key),
            rotated=resource.rotate,
            holder=self._holder,
        )
        item = await self._cluster.create(manifest)
        if item is None:
            item = await self._cluster.get("Secret", resource.key[0], manifest["metadata"]["name"])
        if item is None:
            raise KubeUnreachable("the Secret of credentials was deleted while it was made")
        name = manifest["metadata"]["name"]
        if not _ours(item, resource):
            raise _Blocked(
                conditions.NAME_TAKEN,
                f"Secret {name} exists and is not ours; rename the SpecServe, or delete that "
                "Secret",
            )
        labels = manifest["metadata"]["labels"]
        if not labels.items() <= (item["metadata"].get("labels") or {}).items():
            # The watch sees what carries them, and the engines mount it all the same.
            patch = {"metadata": {"uid": item["metadata"]["uid"], "labels": labels}}
            item = await self._cluster.merge("Secret", resource.key[0], name, patch)
        have = self._credentials[resource.key] = observed.credentials(item)
        return have

    # -- curves -----------------------------------------------------------------------------

    async def _curve(self, resource: _Resource, spec: api.SpecServeSpec) -> curves.Found | None:
        """The curve known beforehand, None if the policy uses none."""
        key = resource.key
        if spec.policy.strategy != "BreakEven":
            self._found.pop(key, None)
            return None
        name = spec.policy.break_even.curve_config_map
        text = None if name is None else await self._config_map(key, name)
        try:
            own = await self._calibrator.curve(key, resource.uid)
        except KubeError as error:
            # One that nobody named is done without until it can be read.
            log.warning("%s/%s: the calibrated curve was not read: %s", *key, error)
            own = None
        found = self._found[key] = curves.find(spec, text, self._seen(key), own)
        return found

    def _seen(self, key: Key) -> curves.Seen:
        """What the engines of a SpecServe report of themselves."""
        return status.reported(self._regulator.engines(key))

    async def _calibrate(self, resource: _Resource, blocked: Trouble | None) -> None:
        """Bring a calibration forward by a step, or end one that nobody asks for any more."""
        key, target = resource.key, self._targets.get(resource.key)
        owned = [one for one in self._owned.get(key, {}).values() if one.owner == resource.uid]
        subject = Subject(
            owner=workload.Owner(key[1], key[0], resource.uid),
            request=resource.calibrate,
            spec=resource.spec,
            blocked=blocked,
            rolled_out=all(one.rolled_out for one in owned),
            replaces=any(one.replaces for one in owned),
            mode=self._regulator.mode(target) if target else "Auto",
            overridden=self._regulator.standing.override is not None,
            pods=list(self._pods.get(key, {}).values()),
            workers=list(self._workers.get(key, {}).values()),
            engines=self._regulator.engines(key),
        )
        said, again = await self._calibrator.look(
            subject, self._seen(key), lambda: self._confirm(resource)
        )
        self._calibrated[key] = said
        if again is not None:
            self._queue.add(key, again)

    async def _config_map(self, key: Key, name: str) -> ConfigMapText:
        """What a ConfigMap holds; while the API server does not say, what it held."""
        read = self._curves.get(key)
        if read is not None and read[1].name != name:
            read = None
        if read is not None and self._clock() - read[0] < self._curve_seconds:
            return read[1]
        try:
            item = await self._cluster.get("ConfigMap", key[0], name)
        except KubeError as error:
            answered = isinstance(error, KubeRefused) and error.status < 500
            if not answered and read is not None:
                return read[1]
            text = ConfigMapText(name, None, str(error))
        else:
            data = (item or {}).get("data") or {}
            problem = "there is none" if item is None else f"it has no key {curves.KEY}"
            text = ConfigMapText(name, data.get(curves.KEY), problem)
        self._curves[key] = self._clock(), text
        return text

    def _look_again(self, target: Target) -> None:
        """Have a SpecServe looked at when what nobody tells of may have changed."""
        policy = target.policy
        if policy.strategy == "BreakEven" and policy.break_even.curve_config_map is not None:
            self._queue.add(target.key, self._curve_seconds)
        left = None if target.mode_until is None else target.mode_until - self._wall()
        if left is not None and left > 0 and policy.mode in {"On", "Off"}:
            self._queue.add(target.key, min(left + 0.1, LONGEST_WAIT))

    # -- status -----------------------------------------------------------------------------

    async def _publish(self, resource: _Resource, blocked: Trouble | None) -> None:
        if self._resources.get(resource.key) is not resource:
            return  # a newer one is queued already
        if (
            blocked is None
            and resource.status
            and resource.key not in self._published
            and not self._regulator.asked(resource.key)
        ):
            # A new leader that knows nothing yet must not unsay what its predecessor knew; the
            # engines' first reports wake this again.
            return
        self._published.add(resource.key)
        deployments = [
            one
            for one in self._owned.get(resource.key, {}).values()
            if one.kind == "Deployment" and one.owner == resource.uid
        ]
        target, found = self._targets.get(resource.key), self._found.get(resource.key)
        new = status.build(
            status.Observation(
                name=resource.key[1],
                generation=resource.generation,
                spec=resource.spec,
                blocked=blocked,
                deployment=deployments[0] if deployments else None,
                pods=list(self._pods.get(resource.key, {}).values()),
                engines=self._regulator.engines(resource.key),
                ranks=ranks_of(resource.spec) if resource.spec else 1,
                requests=_requests(resource.spec) if resource.spec else None,
                period_milliseconds=_period(resource.spec, self._regulator.stretch),
                previous=resource.status,
                mode=self._regulator.mode(target) if target else None,
                override=_words(self._regulator.standing),
                override_problem=self._regulator.standing.problem,
                curve=(found.reason, found.message) if found else None,
                live=self._regulator.live(resource.key),
                switches=self._regulator.switches(resource.key),
                calibrated=self._calibrated.get(resource.key),
            ),
            moments.iso(self._wall()),
            moments.iso,
        )
        if new == resource.status:
            return
        # The watch may tell of the write before its answer is here.
        before = resource.status
        await self._cluster.status(*resource.key, new)
        self._report(resource, before, new)
        resource.status = new

    def _report(
        self, resource: _Resource, old_status: Mapping[str, Any], new: Mapping[str, Any]
    ) -> None:
        """Tell the transitions that somebody should know of."""
        before = {c["type"]: c for c in old_status.get("conditions") or ()}
        for condition in new["conditions"]:
            old = before.get(condition["type"], {})
            if condition["type"] not in _NEWSWORTHY or (
                (old.get("status"), old.get("reason"))
                == (condition["status"], condition["reason"])
            ):
                continue
            if condition["status"] == "False" and condition["reason"] not in _ROUTINE:
                self._notice(
                    Notice(
                        resource.key, "Warning", condition["reason"], condition["message"] or "-"
                    )
                )
            elif condition["status"] == "True" and condition["type"] in _GOOD_NEWS:
                self._notice(
                    Notice(resource.key, "Normal", condition["type"], condition["message"])
                )

    @property
    def foreign(self) -> int:
        """How many SpecServes other installations serve."""
        return len(self._foreign)

    @property
    def known(self) -> int:
        """How many SpecServes there are."""
        return len(self._resources)

    def reference(self, key: Key) -> dict[str, str] | None:
        """Reference to a SpecServe for an event, None if it is no more."""
        resource = self._resources.get(key)
        if resource is None:
            return None
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": key[0],
            "name": key[1],
            "uid": resource.uid,
        }


def _locked_out(engine: Engine) -> bool:
    code, _ = engine.sample_error or ("", "")
    return engine.key_refused or code in _CREDENTIALS_REFUSED


def _words(standing: Standing) -> str:
    """The override for people, empty if there is none."""
    override = standing.override
    if override is None:
        return ""
    end = "" if override.until is None else f" until {moments.iso(override.until)}"
    return f"{override.mode}{end}" + (f", {override.reason}" if override.reason else "")


def _ours(item: Object, resource: _Resource) -> bool:
    """Whether an object was made for a SpecServe or a namesake, also if it lost its labels."""
    labels = item["metadata"].get("labels") or {}
    managed = labels.get(names.LABEL_MANAGED_BY) == names.MANAGER
    return managed or observed.controller(item) == resource.uid


def _asks(resource: _Resource) -> tuple[Any, ...]:
    return (
        *(resource.generation, resource.leaving),
        *(resource.rotate, resource.handed_to, resource.calibrate),
    )


def _parse(spec: Any) -> tuple[api.SpecServeSpec | None, str]:
    try:
        return api.SpecServeSpec.model_validate(spec), ""
    except ValidationError as error:
        words = document.first(error)
        return None, f"{words}; the installed CRD may be older than the operator"


def _requests(spec: api.SpecServeSpec) -> int | None:
    """Requests that a pod is asked to run at once, if that can be understood."""
    try:
        return workload.requests_asked(spec)
    except workload.UnusableSpec:
        return None


def _period(spec: api.SpecServeSpec | None, stretch: float) -> int | None:
    """Sample period in force in milliseconds, None if it is the one asked for."""
    if spec is None:
        return None
    period = queries.paced(spec.policy).sample_period_milliseconds
    if stretch > 1.0:
        # Rounded up to half the period, or each new pod would be news.
        return round(period * round(stretch * 2 + 0.5) / 2)
    return period if period > spec.policy.sample_period_milliseconds else None


def _entry(ref: api.SecretKeyRef | api.CertificateKeyRef | None) -> tuple[str, str] | None:
    return None if ref is None else (ref.name, ref.key)
