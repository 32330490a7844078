"""Carries out what `calibration` decides: pods aside and back, the Job, the curve that is kept."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from specserve import api, calibration, conditions, curves, moments, names, workload
from specserve.calibration import Begin, Job, Keep, PutBack, Record, Situation, Stop, TakeAside
from specserve.cluster import Cluster
from specserve.conditions import Condition
from specserve.curves import ConfigMapText
from specserve.kube import KubeRefused, Object
from specserve.observed import Key, Pod, Trouble, Worker
from specserve.policy import Curve
from specserve.signals import Reading
from specserve.status import Engine
from specserve.target import Notice

#: Seconds until what was forbidden is tried again.
FORBIDDEN_RECHECK = 10.0
#: Seconds for which what is kept is taken as read: nobody but the operator writes it, and whoever
#: deletes it waits for so long.
RECORD_TTL = 300.0
#: Seconds until what the cluster did not take, or did not tell, is tried again.
UNKEPT_RECHECK = 60.0
#: How the API server refuses an object: malformed, forbidden (rights, quota), invalid; a webhook
#: may use any of them.
_NOT_TAKEN = frozenset({400, 403, 422})


class Asking(Protocol):
    """What is asked of pods; `specserve.regulate.Regulator` is the real one."""

    async def ask(self, pod: Pod) -> Reading | None:
        """The load of a pod that is aside; None if it does not say."""
        ...


@dataclass(frozen=True, slots=True)
class Subject:
    """A SpecServe as far as its calibration goes.

    Attributes:
        owner: Its name, namespace and uid.
        request: Value of the annotation, empty if there is none.
        spec: The spec, None if it cannot be read.
        blocked: Why the objects are not as the spec says, None if they are.
        rolled_out: Whether all pods are there, and of this spec.
        replaces: Whether pods of an older spec are being replaced.
        mode: The mode in force.
        overridden: Whether there is an override of all SpecServes.
        pods: Its engine pods.
        workers: Pods of its calibrations.
        engines: What is known of the pods that serve.
    """

    owner: workload.Owner
    request: str
    spec: api.SpecServeSpec | None
    blocked: Trouble | None
    rolled_out: bool
    replaces: bool
    mode: str
    overridden: bool
    pods: Sequence[Pod]
    workers: Sequence[Worker]
    engines: Sequence[Engine]

    @property
    def key(self) -> Key:
        """Its namespace and name."""
        return self.owner.namespace, self.owner.name


class Calibrator:
    """Brings calibrations forward, one step at a time.

    Args:
        cluster: The writes.
        pods: Asked what they run.
        notice: Told what is worth an event.
        provision: What this installation adds to all SpecServes.
        holder: This installation, as directives name it.
        clock: Monotonic seconds.
        wall: Wall-clock seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        pods: Asking,
        notice: Callable[[Notice], None],
        *,
        provision: workload.Provision,
        holder: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._pods = pods
        self._notice = notice
        self._provision = provision
        self._holder = holder
        self._clock = clock
        self._wall = wall
        self._records: dict[Key, tuple[float, Record]] = {}
        #: What calibrations came to that the cluster has not taken.
        self._owed: dict[Key, Record] = {}
        #: When what is waited for was first seen, by uid.
        self._since: dict[Key, dict[str, float]] = {}

    def forget(self, key: Key) -> None:
        """Let go of a SpecServe."""
        self._records.pop(key, None)
        self._owed.pop(key, None)
        self._since.pop(key, None)

    def doubt(self, key: Key) -> None:
        """Have what is kept read anew, as something else is asked for."""
        if key not in self._owed:
            self._records.pop(key, None)

    async def curve(self, key: Key, uid: str) -> ConfigMapText | None:
        """The curve that was measured of a SpecServe, None if there is none.

        Args:
            key: The SpecServe.
            uid: Its uid: what is kept of a namesake that was deleted is none of its.

        Raises:
            KubeError: It could not be read.
        """
        record = await self._record(key)
        if record.curve is None or record.owner != uid:
            return None
        return ConfigMapText(names.curve_config_map(key[1]), record.curve)

    async def look(
        self, subject: Subject, seen: curves.Seen, confirm: Callable[[], Awaitable[None]]
    ) -> tuple[Condition, float | None]:
        """Do what is next.

        Args:
            subject: The SpecServe.
            seen: What its engines report.
            confirm: Raises if the SpecServe is no more; nothing must be made for it then.

        Returns:
            What is to be said, and seconds until the next look at the latest.

        Raises:
            KubeError: The API server does not answer, or does not take a step.
        """
        try:
            return await self._look(subject, seen, confirm)
        except KubeRefused as error:
            if error.status not in _NOT_TAKEN:
                raise
            # Rights of an older installation, a quota, a webhook: that costs no more than the
            # calibration.
            said = Condition("Calibrated", "Unknown", conditions.FORBIDDEN, error.message)
            waits = subject.request or any(pod.aside is not None for pod in subject.pods)
            return said, FORBIDDEN_RECHECK if waits else None

    async def _look(
        self, subject: Subject, seen: curves.Seen, confirm: Callable[[], Awaitable[None]]
    ) -> tuple[Condition, float | None]:
        aside = [pod for pod in subject.pods if pod.aside is not None]
        record = Record()
        if subject.request or aside or self._weighs(subject) or subject.key in self._owed:
            record = await self._record_for(subject, aside, confirm)
        situation = await self._situation(subject, record, aside)
        plan = calibration.plan(situation)
        if plan.step is not None:
            await self._do(subject, situation, plan.step, seen, confirm)
            record = self._known(subject.key) or record
        again = plan.again
        if again is None and not record.kept:
            again = UNKEPT_RECHECK
        elif again is None and subject.request:
            # Nobody tells that what is kept was deleted: then it is asked for anew.
            again = RECORD_TTL
        return plan.state or self._condition(subject, record, seen), again

    def _weighs(self, subject: Subject) -> bool:
        return subject.spec is not None and subject.spec.policy.strategy == "BreakEven"

    def _condition(self, subject: Subject, record: Record, seen: curves.Seen) -> Condition:
        if subject.spec is not None and subject.spec.draft.method == "None":
            return Condition("Calibrated", "Unknown", conditions.NO_DRAFT, "draft.method is None")
        return calibration.condition(record, self._found(subject, record, seen))

    @staticmethod
    def _found(subject: Subject, record: Record, seen: curves.Seen) -> curves.Found | None:
        if record.curve is None or subject.spec is None:
            return None
        text = ConfigMapText(names.curve_config_map(subject.owner.name), record.curve)
        return curves.judge(subject.spec, text, seen, own=True)

    # -- what there is ----------------------------------------------------------------------

    def _known(self, key: Key) -> Record | None:
        read = self._records.get(key)
        return None if read is None else read[1]

    async def _record(self, key: Key) -> Record:
        read = self._records.get(key)
        if read is not None and (key in self._owed or self._clock() - read[0] < _ttl(read[1])):
            return read[1]
        record = await self._read(key)
        self._records[key] = self._clock(), record
        return record

    async def _read(self, key: Key) -> Record:
        name = names.curve_config_map(key[1])
        return _record_of(await self._cluster.get("ConfigMap", key[0], name))

    async def _record_for(
        self,
        subject: Subject,
        aside: Sequence[Pod],
        confirm: Callable[[], Awaitable[None]],
    ) -> Record:
        await self._pay(subject, confirm)
        try:
            record = await self._record(subject.key)
        except KubeRefused as error:
            if error.status not in _NOT_TAKEN or not aside:
                raise
            words = f"what is kept of it cannot be read: {error.message}"
            record = Record(subject.request, failure=words, kept=False)
            self._records[subject.key] = self._clock(), record
        if record.owner not in {None, subject.owner.uid}:
            # Of one of this name that was deleted; what is asked of this one was not dealt with.
            record = Record()
            self._records[subject.key] = self._clock(), record
        return record

    async def _situation(
        self, subject: Subject, record: Record, aside: Sequence[Pod]
    ) -> Situation:
        spec, owner = subject.spec, subject.owner
        situation = Situation(
            now=self._clock(),
            request=subject.request,
            record=record,
            obstacle=calibration.obstacle(
                record,
                blocked=subject.blocked,
                rolled_out=subject.rolled_out,
                image=self._provision.calibrator,
            ),
            halt=calibration.halt(
                spec,
                mode=subject.mode,
                overridden=subject.overridden,
                replaces=subject.replaces,
            ),
            pods=subject.pods,
            workers=subject.workers,
            fit=frozenset(engine.name for engine in subject.engines if engine.controllable),
        )
        if spec is not None:
            situation = replace(
                situation,
                last_pod=spec.policy.break_even.calibration.last_pod == "Take",
                patience=float(spec.pod.termination_grace_period_seconds),
            )
        wanted = {
            names.calibration_job(owner.name, owner.uid, request)
            for request in (pod.aside for pod in aside)
            if request is not None
        }
        wanted |= {one.job for one in subject.workers if one.exit_code is None}
        if situation.active:
            wanted.add(names.calibration_job(owner.name, owner.uid, subject.request))
        jobs = [
            _job_of(item)
            for name in sorted(wanted)
            if (item := await self._cluster.get("Job", owner.namespace, name)) is not None
            and _owner_of(item) == owner.uid
        ]
        mine = next((pod for pod in aside if pod.aside == subject.request), None)
        if situation.active and mine is not None and not jobs:
            reading = await self._pods.ask(mine)
            if reading is not None:
                situation = replace(situation, in_flight=reading.running + reading.queued)
        leaving = (one.uid for one in subject.workers if one.grace is not None)
        waited_for = [*(pod.uid for pod in aside), *(job.uid for job in jobs), *leaving]
        since = self._seen(subject.key, waited_for)
        return replace(situation, jobs=jobs, since=since)

    def _seen(self, key: Key, uids: Sequence[str]) -> dict[str, float]:
        """When each was first seen among these."""
        before, now = self._since.pop(key, {}), self._clock()
        since = {uid: before.get(uid, now) for uid in uids}
        if since:
            self._since[key] = since
        return since

    # -- what is done -----------------------------------------------------------------------

    async def _do(
        self,
        subject: Subject,
        situation: Situation,
        step: calibration.Step,
        seen: curves.Seen,
        confirm: Callable[[], Awaitable[None]],
    ) -> None:
        namespace = subject.owner.namespace
        if isinstance(step, TakeAside):
            await confirm()
            # Before a pod is taken: who cannot keep what comes of it had better not begin.
            if not await self._write(subject, self._owed.get(subject.key, situation.record)):
                return
            await self._mark(namespace, step.pod, names.ASIDE, subject.request)
            self._say(subject, "PodTakenAside", f"{step.pod.name} is out of its Service")
        elif isinstance(step, PutBack):
            await self._mark(namespace, step.pod, names.MANAGER, None)
            self._say(subject, "PodPutBack", f"{step.pod.name} is back in its Service")
        elif isinstance(step, Stop):
            await self._cluster.delete("Job", namespace, step.job.name, step.job.uid)
        elif isinstance(step, Begin):
            await confirm()
            await self._begin(subject, situation, step.pod, seen)
        elif isinstance(step, Keep):
            await confirm()
            await self._keep(subject, situation, step, seen)

    async def _mark(self, namespace: str, pod: Pod, part: str, request: str | None) -> None:
        since = None if request is None else moments.iso(self._wall())
        annotations = {
            names.ANNOTATION_CALIBRATION: request,
            names.ANNOTATION_ASIDE_SINCE: since,
        }
        if request is not None:
            # Stays: the engine's figures may be of the sweep, which a later operator must know.
            annotations[names.ANNOTATION_CALIBRATED] = request
        metadata = {
            "uid": pod.uid,
            "labels": {names.LABEL_PART_OF: part},
            "annotations": annotations,
        }
        try:
            await self._cluster.merge("Pod", namespace, pod.name, {"metadata": metadata})
        except KubeRefused as error:
            # Gone, or another one of this name: the next look finds out.
            if error.status not in {404, 409}:
                raise

    async def _begin(
        self, subject: Subject, situation: Situation, pod: Pod, seen: curves.Seen
    ) -> None:
        spec = subject.spec
        if spec is None or pod.ip is None:
            return
        reading = await self._pods.ask(pod)
        manifest = workload.calibration_job(
            subject.owner,
            spec,
            self._provision,
            workload.Subject(
                request=subject.request,
                pod_uid=pod.uid,
                address=pod.ip,
                model=curves.weights_named(spec.model) or "",
                draft=curves.weights_named(spec.draft),
                gpu=(reading.gpu if reading is not None else "") or workload.hardware(spec),
                holder=self._holder,
            ),
        )
        try:
            await self._cluster.create(manifest)
        except KubeRefused as error:
            if error.status not in _NOT_TAKEN:
                raise
            await self._keep(subject, situation, Keep(None, f"no Job: {error.message}"), seen)

    async def _keep(
        self, subject: Subject, situation: Situation, step: Keep, seen: curves.Seen
    ) -> None:
        before = situation.record
        curve, compared = before.curve, before.compared
        failure = step.failure and f"{moments.iso(self._wall())}: {step.failure}"
        if step.curve is not None:
            found = self._found(subject, before, seen)
            fits = found is not None and found.curve is not None
            compared = calibration.compared(step.curve, before.curve if fits else None)
            curve = _at(step.curve, situation).to_json()
        record = Record(subject.request, curve, failure, compared, owner=subject.owner.uid)
        await self._settle(subject, record, before)

    async def _pay(self, subject: Subject, confirm: Callable[[], Awaitable[None]]) -> None:
        """Try again to write what a calibration came to, if the cluster has not taken it."""
        owed, read = self._owed.get(subject.key), self._records.get(subject.key)
        if owed is None or read is None:
            return
        if owed.owner != subject.owner.uid:
            self.forget(subject.key)
        elif self._clock() - read[0] >= UNKEPT_RECHECK:
            await confirm()
            await self._settle(subject, owed, read[1])

    async def _settle(self, subject: Subject, record: Record, before: Record) -> None:
        """Write what a calibration came to; what is not taken is owed, and the pod returns.

        Here it is owed for as long as this process leads; a later one finds it in the Job's pod.
        """
        try:
            if await self._write(subject, record):
                return
            refused = f"a ConfigMap {names.curve_config_map(subject.owner.name)} is not ours"
        except KubeRefused as error:
            if error.status == 404:
                raise
            refused = error.message
        self._owed[subject.key] = record
        self._records[subject.key] = (
            self._clock(),
            replace(
                record, curve=before.curve, compared=before.compared, kept=False, refused=refused
            ),
        )

    async def _write(self, subject: Subject, record: Record) -> bool:
        """Write what is kept; False if an object of somebody else has the name meanwhile."""
        found = await self._read(subject.key)
        if found.foreign:
            self._records[subject.key] = self._clock(), found
            return False
        manifest = workload.curve_config_map(
            subject.owner,
            record.request,
            {
                curves.KEY: record.curve,
                workload.KEY_COMPARED: record.compared,
                workload.KEY_FAILURE: record.failure,
            },
        )
        written = _record_of(await self._cluster.apply(manifest))
        self._records[subject.key] = self._clock(), written
        self._owed.pop(subject.key, None)
        return True

    def _say(self, subject: Subject, reason: str, message: str) -> None:
        self._notice(Notice(subject.key, "Normal", reason, message))


def _ttl(record: Record) -> float:
    return RECORD_TTL if record.kept else UNKEPT_RECHECK


def _at(curve: Curve, situation: Situation) -> Curve:
    """The curve with the name of the pod that it was measured in; its address says nothing."""
    pod = next((pod for pod in situation.pods if pod.aside == situation.request), None)
    if pod is None:
        return curve
    origin = curve.provenance.model_copy(update={"host": pod.name})
    return Curve(curve.document.model_copy(update={"provenance": origin}))


def _record_of(item: Object | None) -> Record:
    if item is None:
        return Record()
    meta, data = item["metadata"], item.get("data") or {}
    if (meta.get("labels") or {}).get(names.LABEL_MANAGED_BY) != names.MANAGER:
        return Record(foreign=True)
    return Record(
        request=(meta.get("annotations") or {}).get(names.ANNOTATION_CALIBRATED, ""),
        curve=data.get(curves.KEY),
        failure=data.get(workload.KEY_FAILURE, ""),
        compared=data.get(workload.KEY_COMPARED, ""),
        owner=_owner_of(item),
    )


def _job_of(item: Object) -> Job:
    meta = item["metadata"]
    annotations = meta.get("annotations") or {}
    true = [
        one
        for one in (item.get("status") or {}).get("conditions") or ()
        if one["status"] == "True"
    ]
    failed = next((one for one in true if one["type"] in {"Failed", "FailureTarget"}), None)
    failure = ""
    if failed is not None:
        failure = (
            ": ".join(filter(None, (failed.get("reason"), failed.get("message")))) or "failed"
        )
    return Job(
        name=meta["name"],
        uid=meta["uid"],
        request=annotations.get(names.ANNOTATION_CALIBRATION, ""),
        pod_uid=annotations.get(names.ANNOTATION_ASIDE_POD, ""),
        ended=failed is not None or any(one["type"] == "Complete" for one in true),
        failure=failure,
    )


def _owner_of(item: Object) -> str:
    owners: Sequence[Any] = item["metadata"].get("ownerReferences") or ()
    return next((str(one["uid"]) for one in owners if one.get("controller")), "")
