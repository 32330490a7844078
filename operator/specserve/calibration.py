"""What to do next about a calibration in the cluster, from what the cluster shows. Pure.

    asked for → a pod is taken aside → its requests end → a Job measures it → kept → back

Nothing is remembered between two looks but for how long something has been so: what was asked for
stands on the SpecServe, which pod is aside on the pod, what is under way in the Job, and what was
dealt with in the ConfigMap of the curve. So it goes on wherever it was left, and whatever ends it
(success, failure, a request that is taken back, a Job or pod that vanishes) ends with every pod
back in its Service.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from specserve import api, conditions, names
from specserve.conditions import Condition, counted
from specserve.curves import Found
from specserve.observed import Pod, Trouble, Worker
from specserve.policy.curve import Curve, CurveError, furthest

#: Seconds that a pod stays aside before it may count as idle: as a stopping pod waits, too, until
#: every proxy has heard of it.
SETTLE_SECONDS: Final = 5.0
#: Seconds between two looks while something is waited for that nobody tells of, and while the Job
#: runs, whose pod is watched.
LOOK: Final = 1.0
LOOK_AT_JOB: Final = 5.0
#: Seconds from the first sight of a Job within which its container runs. What keeps it from that
#: longer (an image, a quota, a full cluster) must not keep the pod from its clients.
START_SECONDS: Final = 120.0
#: Characters of a failure that are kept.
LONGEST_WORDS: Final = 1024
#: Exit statuses of `specserve calibrate` that leave a curve: all agrees, and some cells do not.
_WITH_CURVE: Final = (0, 1)
#: Reason of a Job that failed because its pod did, which knows more about it.
_BACKOFF: Final = "BackoffLimitExceeded"


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of earlier calibrations.

    Attributes:
        request: The last one that was dealt with, empty if there was none.
        curve: The last curve that was measured, as the text of its file; None if there is none.
        failure: Why the last calibration failed, empty if it did not.
        compared: How far the curve is from the one before it, in words; empty if there was none.
        foreign: Whether an object of somebody else has the name.
        kept: Whether it is what the cluster holds; else it is known here alone.
        refused: Why the cluster does not take what came of the last one, empty if it does; the
            curve is the one before it then.
        owner: Uid of the SpecServe that it is of, None if there is no object.
    """

    request: str = ""
    curve: str | None = None
    failure: str = ""
    compared: str = ""
    foreign: bool = False
    kept: bool = True
    refused: str = ""
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A Job that measures a pod.

    Attributes:
        name: Its name.
        uid: Its uid.
        request: For which request it was made.
        pod_uid: Uid of the engine pod.
        ended: Whether it is complete or has failed.
        failure: Why it failed, empty if it did not.
    """

    name: str
    uid: str
    request: str
    pod_uid: str
    ended: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that the next step depends on. Times are seconds on the clock of who looks.

    No two clocks are compared: what is waited for is timed from when it was first seen here, so
    that a later operator gives it as long again.

    Attributes:
        now: The time.
        request: What is asked for, empty if nothing is.
        record: What is kept of earlier ones.
        obstacle: Why none can begin now, as reason and message; None if one can. One that is
            under way goes on.
        halt: What ends one that is under way, likewise; none can begin either.
        last_pod: Whether the only pod that serves may be taken.
        fit: Names of pods that can be measured: their engines take switches.
        pods: All engine pods.
        since: When pods that are aside, Jobs, and workers that are being deleted were first seen
            so, by uid; what is not in it is seen for the first time.
        jobs: The Jobs of the request and of those that pods are aside for.
        workers: Pods of such Jobs.
        in_flight: Requests in the pod that is aside for the request; None if not known.
        patience: Seconds that its requests are given to end.
    """

    now: float
    request: str
    record: Record
    obstacle: tuple[str, str] | None = None
    halt: tuple[str, str] | None = None
    last_pod: bool = False
    fit: frozenset[str] = frozenset()
    pods: Sequence[Pod] = ()
    since: Mapping[str, float] = field(default_factory=dict)
    jobs: Sequence[Job] = ()
    workers: Sequence[Worker] = ()
    in_flight: int | None = None
    patience: float = 0.0

    def waited(self, uid: str) -> float:
        """Seconds since a pod, Job or worker was first seen as it is."""
        return self.now - self.since.get(uid, self.now)

    @property
    def active(self) -> bool:
        """Whether there is a request that was not dealt with."""
        return bool(self.request) and self.request != self.record.request

    @property
    def serving(self) -> list[Pod]:
        """Pods that clients reach, in the order of their names."""
        return sorted((pod for pod in self.pods if pod.usable), key=lambda pod: pod.name)


@dataclass(frozen=True, slots=True)
class TakeAside:
    """Take a pod out of its Service."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class Begin:
    """Make the Job that measures a pod."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class Stop:
    """Delete a Job."""

    job: Job


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep what the request came to: a curve, or why there is none.

    Attributes:
        curve: The curve, None if it was not measured.
        failure: Why not, empty if it was.
    """

    curve: Curve | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class PutBack:
    """Put a pod back into its Service."""

    pod: Pod


Step = TakeAside | Begin | Stop | Keep | PutBack


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step, and what to say meanwhile.

    Attributes:
        step: What to do now, None to wait.
        state: What is under way, None if nothing is.
        again: Seconds until the next look at the latest, None if only a change can matter.
    """

    step: Step | None = None
    state: Condition | None = None
    again: float | None = None


def plan(seen: Situation) -> Plan:
    """Decide the next step.

    Args:
        seen: The situation.

    Returns:
        One step. The situation after it is to be looked at anew.
    """
    aside = [pod for pod in seen.pods if pod.aside is not None and pod.alive]
    mine = [pod for pod in aside if seen.active and pod.aside == seen.request]
    if ending := _end_others(seen, [pod for pod in aside if pod not in mine[:1]]):
        return ending
    if not seen.active:
        return Plan()
    job = next((job for job in seen.jobs if job.request == seen.request), None)
    pod = mine[0] if mine else None
    if job is not None:
        return _watch(seen, job, pod)
    if pod is not None:
        return _drain(seen, pod)
    return _choose(seen)


def _end_others(seen: Situation, aside: Sequence[Pod]) -> Plan | None:
    """End what nobody asks for any more: first the load, then the pods go back."""
    stray = next(
        (
            job
            for job in seen.jobs
            if not (seen.active and job.request == seen.request)
            and not job.ended
            and _worker(seen, job.name, ended=True) is None
        ),
        None,
    )
    state = None
    if not seen.request or seen.request != seen.record.request:
        state = _unknown(
            conditions.ENDING, "a calibration ends, and its pod returns to the Service"
        )
    if stray is not None:
        return Plan(Stop(stray), state, LOOK)
    if not aside:
        return None
    current = {job.name for job in seen.jobs if seen.active and job.request == seen.request}
    if any(_sends(seen, worker) for worker in seen.workers if worker.job not in current):
        return Plan(None, state, LOOK)
    return Plan(PutBack(aside[0]), state, LOOK)


def _choose(seen: Situation) -> Plan:
    if why := seen.obstacle or seen.halt:
        reason, message = why
        return Plan(
            None, Condition("Calibrated", "False", reason, f"asked for, and waits: {message}")
        )
    serving = seen.serving
    if len(serving) < (1 if seen.last_pod else 2):
        few = "no pod is ready"
        if serving:
            few = (
                f"{serving[0].name} is the only pod that is ready; raise replicas, or let it be "
                "taken: policy.breakEven.calibration.lastPod: Take"
            )
        return Plan(
            None,
            Condition(
                "Calibrated", "False", conditions.NOT_ENOUGH_PODS, f"asked for, and waits: {few}"
            ),
        )
    chosen = next((pod for pod in serving if pod.name in seen.fit), None)
    if chosen is None:
        return Plan(
            None,
            Condition(
                "Calibrated",
                "False",
                conditions.NOT_CONTROLLABLE,
                "asked for, and waits: no engine has said that it takes switches "
                "(condition SpeculationControl)",
            ),
        )
    return Plan(TakeAside(chosen), _draining(chosen), LOOK)


def _drain(seen: Situation, pod: Pod) -> Plan:
    if problem := _words(seen.halt) or _lost(seen, pod):
        return _failed(problem)
    waited = seen.waited(pod.uid)
    if waited >= SETTLE_SECONDS and seen.in_flight == 0 and seen.obstacle is None:
        return Plan(Begin(pod), _running(pod), LOOK_AT_JOB)
    if waited > SETTLE_SECONDS + seen.patience:
        if seen.in_flight == 0:
            return _failed(_words(seen.obstacle))
        left = (
            "does not say what it runs"
            if seen.in_flight is None
            else "still runs requests; who keeps connections open, or calls the pod directly?"
        )
        return _failed(f"{seen.patience:.0f} s after it was taken aside {pod.name} {left}")
    return Plan(None, _draining(pod), LOOK)


def _watch(seen: Situation, job: Job, pod: Pod | None) -> Plan:
    worker = _worker(seen, job.name, ended=True)
    if worker is not None:
        return Plan(_outcome(worker, job), None, LOOK)
    sender = _worker(seen, job.name, ended=False)
    if job.ended and sender is not None and _sends(seen, sender):
        return Plan(None, _unknown(conditions.RUNNING, f"Job {job.name} ends"), LOOK)
    if job.failure:
        return _failed(f"Job {job.name}: {job.failure}")
    if job.ended:
        return _failed(f"Job {job.name} has ended, and the pod with its curve is gone")
    if pod is None or pod.uid != job.pod_uid:
        return _failed("the pod that was measured is gone")
    if problem := _words(seen.halt) or _lost(seen, pod) or _not_started(seen, job):
        return _failed(problem)
    return Plan(None, _running(pod), LOOK_AT_JOB)


def _not_started(seen: Situation, job: Job) -> str:
    """Why the container of a Job does not run though it has had the time; empty if it may yet."""
    if seen.waited(job.uid) < START_SECONDS:
        return ""
    workers = [worker for worker in seen.workers if worker.job == job.name]
    if any(worker.started for worker in workers):
        return ""
    why = "no pod of it was made; kubectl describe job tells who refuses it"
    if workers:
        why = workers[0].waits or f"{workers[0].name} waits, and nothing says for what"
    return f"Job {job.name} has not started within {START_SECONDS:.0f} s: {why}"


def _words(why: tuple[str, str] | None) -> str:
    """A reason with its message; empty if there is none."""
    return ": ".join(filter(None, why or ()))


def _lost(seen: Situation, pod: Pod) -> str:
    """Why a pod can be spared no longer, or is of no use; empty if it can."""
    if not seen.serving and not seen.last_pod:
        return f"no pod but {pod.name} was ready any more"
    return "" if pod.ready else f"{pod.name} is not ready any more"


def _outcome(worker: Worker, job: Job) -> Keep:
    if worker.exit_code in _WITH_CURVE:
        try:
            return Keep(Curve.from_json(worker.words))
        except CurveError as error:
            return Keep(None, f"{worker.name} left no curve: {error}")
    if job.failure and not job.failure.startswith(_BACKOFF):
        return Keep(None, f"Job {job.name}: {job.failure}"[:LONGEST_WORDS])
    lines = [line for line in worker.words.splitlines() if line.strip()]
    said = lines[-1].strip() if lines else "it said nothing"
    if _is_curve(worker.words):
        said = "it was stopped before it had measured all"
    return Keep(None, f"{worker.name} ended with {worker.exit_code}: {said}"[:LONGEST_WORDS])


def _is_curve(words: str) -> bool:
    try:
        Curve.from_json(words)
    except CurveError:
        return False
    return True


def _failed(why: str) -> Plan:
    return Plan(Keep(None, why[:LONGEST_WORDS]), None, LOOK)


def _worker(seen: Situation, job: str, *, ended: bool) -> Worker | None:
    return next(
        (w for w in seen.workers if w.job == job and (w.exit_code is not None) is ended), None
    )


def _sends(seen: Situation, worker: Worker) -> bool:
    """Whether a worker may still send; one on a lost node is not waited for longer than it has."""
    over = worker.grace is not None and seen.waited(worker.uid) > worker.grace
    return worker.exit_code is None and not over


def _unknown(reason: str, message: str) -> Condition:
    return Condition("Calibrated", "Unknown", reason, message)


def _draining(pod: Pod) -> Condition:
    return _unknown(
        conditions.DRAINING, f"{pod.name} is out of its Service, and ends what it has begun"
    )


def _running(pod: Pod) -> Condition:
    return _unknown(conditions.RUNNING, f"{pod.name} is out of its Service, and is being measured")


def obstacle(
    record: Record,
    *,
    blocked: Trouble | None,
    rolled_out: bool,
    image: str,
) -> tuple[str, str] | None:
    """Why none can begin now, whatever the pods are, as reason and message.

    One that is under way goes on: nothing of this makes its curve wrong.

    Args:
        record: What is kept of earlier calibrations.
        blocked: Why the objects are not as the spec says, None if they are.
        rolled_out: Whether all pods are there, and of this spec.
        image: Image of the Job, empty if it is not known.
    """
    if blocked is not None:
        return blocked.reason, blocked.message
    if record.foreign:
        return (
            conditions.NAME_TAKEN,
            "the ConfigMap that would keep the curve exists and is not ours; delete it",
        )
    if not image:
        return (
            conditions.NO_IMAGE,
            "the operator was not told its own image (SPECSERVE_OPERATOR_IMAGE)",
        )
    if not rolled_out:
        return conditions.ROLLING_OUT, "not all pods are there, and of this spec"
    return None


def halt(
    spec: api.SpecServeSpec | None, *, mode: str, overridden: bool, replaces: bool
) -> tuple[str, str] | None:
    """What no calibration goes on with: its curve would be moot, or no pod may be switched for it.

    Args:
        spec: The spec, None if it cannot be read.
        mode: The mode in force.
        overridden: Whether there is an override of all SpecServes.
        replaces: Whether pods of an older spec are being replaced: of another model, draft, engine
            or steps.

    Returns:
        Reason and message, None if nothing is in its way.
    """
    if spec is None:
        return conditions.SPEC_REJECTED, "the spec cannot be read"
    if spec.draft.method == "None":
        return conditions.NO_DRAFT, "draft.method is None"
    if mode != "Auto" and overridden:
        return conditions.OVERRIDDEN, f"the override of this installation says {mode}"
    if mode != "Auto":
        reason = conditions.OBSERVING if mode == "Observe" else conditions.PINNED
        return reason, f"policy.mode is {mode}, and only in Auto may a pod be switched for it"
    if replaces:
        return conditions.ROLLING_OUT, "pods of an older spec are being replaced"
    return None


def condition(record: Record, found: Found | None) -> Condition:
    """What calibrations have come to, while none is under way.

    Args:
        record: What is kept of them.
        found: How the curve fits what runs, None if there is none.
    """
    kept = "" if found is None else f"; of the curve before: {found.message}"
    unwritten = f"; it cannot be kept, and is tried again: {record.refused}"
    if not record.refused:
        unwritten = ""
    if record.failure:
        return Condition(
            "Calibrated",
            "False",
            conditions.FAILED,
            f"the calibration failed: {record.failure}{unwritten}{kept}",
        )
    if unwritten:
        return Condition(
            "Calibrated", "False", conditions.NOT_KEPT, f"a curve was measured{unwritten}{kept}"
        )
    if found is None:
        return _unknown(
            conditions.NOT_ASKED_FOR,
            f"none was asked for; annotate the SpecServe with {names.ANNOTATION_CALIBRATE} to ask",
        )
    if found.curve is None:
        return Condition("Calibrated", "False", found.reason, found.message)
    words = "; ".join(filter(None, (_measured(found.curve), record.compared, found.doubt)))
    return Condition("Calibrated", "True", conditions.MEASURED, words)


def compared(curve: Curve, before: str | None) -> str:
    """How far a new curve is from the one before it, in words; empty if they share no cell."""
    if before is None:
        return ""
    try:
        apart = furthest(curve, Curve.from_json(before))
    except CurveError:
        return ""
    if apart is None:
        return ""
    share, point = apart
    return (
        f"at most {100 * share:.1f} % from the curve before "
        f"(batch {point.batch}, {counted(point.steps, 'step')})"
    )


def _measured(curve: Curve) -> str:
    origin, cells = curve.provenance, curve.document.cells
    date = f"{origin.date}: " if origin.date else ""
    known = [(point.spread / point.ratio, point) for point in cells if point.spread is not None]
    if not known:
        return f"{date}{counted(len(cells), 'cell')}, visited once each"
    share, point = max(known, key=lambda one: one[0])
    return (
        f"{date}{counted(len(cells), 'cell')}, the least certain within {100 * share:.1f} % "
        f"(95 %; batch {point.batch}, {counted(point.steps, 'step')})"
    )
