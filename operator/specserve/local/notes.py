"""What of a SpecServe means nothing without a cluster: said in a line each. Pure."""

from collections.abc import Iterator

from specserve.bench.connection import BadOption
from specserve.document import Document

#: The parts of spec.pod that hold for a process as well.
_POD_HERE = frozenset({"terminationGracePeriodSeconds"})


def notes(
    asked: Document, *, engines: int, started: bool, api_key: bool, curve: bool
) -> Iterator[str]:
    """What to say of a SpecServe before it is steered.

    Args:
        asked: The SpecServe.
        engines: How many engines there are.
        started: Whether they are started from here.
        api_key: Whether the serving port's key is given.
        curve: Whether a curve is given as a file.

    Raises:
        BadOption: It cannot be done without what a cluster has.
    """
    _check(asked, started=started, api_key=api_key)
    spec, written = asked.spec, asked.written
    if not started:
        if "replicas" in written and spec.replicas != engines:
            yield f"spec.replicas is {spec.replicas}, engines given: {engines}; these are steered"
        for part in ("engine", "pod"):
            if written.get(part):
                yield f"spec.{part} says how engines are started; those given run already"
        if spec.model.token_secret_ref is not None:
            yield "spec.model.tokenSecretRef fetches weights; the engines given have theirs"
        if spec.engine.api_key_secret_ref is not None and not api_key:
            yield "spec.engine.apiKeySecretRef is a Secret; give its key with --api-key-file"
    else:
        yield from _of_started(asked, api_key=api_key)
    if written.get("rollout"):
        yield "spec.rollout replaces pods; here an engine is replaced by starting it anew"
    if curve and spec.policy.strategy != "BreakEven":
        yield f"--curve is not used: spec.policy.strategy is {spec.policy.strategy}"


def _check(asked: Document, *, started: bool, api_key: bool) -> None:
    spec = asked.spec
    server = spec.policy.prometheus
    if spec.policy.source == "Prometheus" and server is not None:
        for field, reference in (
            ("bearerTokenSecretRef", server.bearer_token_secret_ref),
            ("basicAuthSecretRef", server.basic_auth_secret_ref),
            ("caSecretRef", server.ca_secret_ref),
        ):
            if reference is not None:
                raise BadOption(
                    f"spec.policy.prometheus.{field}: there are no Secrets here; name a server "
                    "that needs none, or have the engines asked (spec.policy.source: Engine)"
                )
    if started and spec.engine.api_key_secret_ref is not None and not api_key:
        raise BadOption(
            "spec.engine.apiKeySecretRef: there are no Secrets here; give its key with "
            "--api-key-file, or the engines would be open to everybody"
        )


def _of_started(asked: Document, *, api_key: bool) -> Iterator[str]:
    engine = asked.written.get("engine") or {}
    if "image" in engine or "imagePullPolicy" in engine:
        yield "spec.engine.image: no container is run; what is, --entry-point says"
    if engine.get("resources"):
        yield "spec.engine.resources: nothing is reserved or limited; GPUs are told apart only"
    if "sharedMemory" in engine:
        yield "spec.engine.sharedMemory: /dev/shm is this machine's"
    parts = sorted(set(asked.written.get("pod") or {}) - _POD_HERE)
    if parts:
        named = ", ".join(f"spec.pod.{part}" for part in parts)
        yield f"{named}: there is no pod; paths are those of this machine"
    if not api_key:
        yield (
            "the serving ports are open to all who reach this machine; --api-key-file gives them "
            "a key"
        )
