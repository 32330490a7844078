"""Every name that leaves the process: API group, labels, ports, paths, files.

One module, so that the wire contract and the object names can be read in one place.
"""

import hashlib
from typing import Final

GROUP: Final = "specserve.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "SpecServe"
PLURAL: Final = "specserves"
SINGULAR: Final = "specserve"
SHORT_NAME: Final = "sps"
CATEGORIES: Final = ("all", "serving")

#: Field manager of every server-side apply, and `reportingComponent` of every event.
MANAGER: Final = "specserve"

LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_PART_OF: Final = "app.kubernetes.io/part-of"

#: Begins the name of a `specserve local` in directives; an installation is NAMESPACE/NAME.
HOLDER_LOCAL: Final = "local/"

#: Server-side filter of every list and watch the operator opens.
OWNED_SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGER}"

#: On a SpecServe: each new value makes the operator rotate the engine credentials once.
ANNOTATION_ROTATE: Final = f"{GROUP}/rotate-credentials"
#: On the Secret: the last value of ANNOTATION_ROTATE that was honoured.
ANNOTATION_ROTATED: Final = f"{GROUP}/rotated"

#: On the Secret: the installation that serves the SpecServe. On a SpecServe: the one that may take
#: it over from another.
ANNOTATION_OPERATOR: Final = f"{GROUP}/operator"

#: On a SpecServe: each new value asks for one calibration of one of its pods.
ANNOTATION_CALIBRATE: Final = f"{GROUP}/calibrate"
#: On the ConfigMap of the curve: the last value of ANNOTATION_CALIBRATE that was dealt with. On an
#: engine pod: the last one that it was taken aside for.
ANNOTATION_CALIBRATED: Final = f"{GROUP}/calibrated"
#: On an engine pod that was taken aside, and on the Job that measures it: for which value.
ANNOTATION_CALIBRATION: Final = f"{GROUP}/calibration"
#: On an engine pod that was taken aside: since when, for people.
ANNOTATION_ASIDE_SINCE: Final = f"{GROUP}/aside-since"
#: On the Job: the uid of the pod that it measures.
ANNOTATION_ASIDE_POD: Final = f"{GROUP}/aside-pod"
#: Value of LABEL_PART_OF of an engine pod that was taken out of its Service. A Deployment does
#: not select by this label, so that the pod stays its own and is not replaced.
ASIDE: Final = "specserve-calibration"

#: On an engine pod: SGLang's adaptive configuration, which a volume shows the engine as a file.
ANNOTATION_ADAPTIVE: Final = f"{GROUP}/adaptive-config"

#: On an engine pod: the Secret and its key that SGLang's API key is taken from. Another reference
#: replaces the pods: an engine whose port was open must not stay so.
ANNOTATION_API_KEY: Final = f"{GROUP}/api-key-from"

ENGINE_CONTAINER: Final = "engine"
CALIBRATION_CONTAINER: Final = "calibrate"
COMPONENT_ENGINE: Final = "engine"
COMPONENT_CALIBRATION: Final = "calibration"
#: Label that the Job controller gives to the pods of a Job.
LABEL_JOB: Final = "batch.kubernetes.io/job-name"
#: Label that the API server itself gives every namespace.
LABEL_NAMESPACE: Final = "kubernetes.io/metadata.name"

PORT_SERVING: Final = 30000
PORT_ADMIN: Final = 9470
PORT_NAME_SERVING: Final = "http"
PORT_NAME_ADMIN: Final = "admin"

PATH_SPECULATION: Final = "/v1/speculation"
PATH_ADMIN_HEALTH: Final = "/health"
PATH_LOADS: Final = "/v1/loads"
PATH_METRICS: Final = "/metrics"
PATH_SERVING_HEALTH: Final = "/health"

#: Keys of the credentials Secret, mounted as files of the same names.
KEY_PLUGIN_TOKEN: Final = "plugin-token"  # noqa: S105 - the name of a key, not a secret
KEY_PLUGIN_TOKEN_PREVIOUS: Final = "plugin-token-previous"  # noqa: S105
KEY_ADMIN_KEY: Final = "admin-key"
KEY_NONCE: Final = "nonce"
CREDENTIALS_DIR: Final = "/etc/specserve/credentials"
#: A further key: the file of SGLang's own keys, which must stay out of arguments and environment.
KEY_CONFIG: Final = "config.yaml"
ENGINE_CONFIG_DIR: Final = "/etc/specserve/engine"
ENGINE_CONFIG: Final = f"{ENGINE_CONFIG_DIR}/{KEY_CONFIG}"
ADAPTIVE_FILE: Final = "adaptive.json"
ADAPTIVE_DIR: Final = "/etc/specserve/adaptive"
ADAPTIVE_CONFIG: Final = f"{ADAPTIVE_DIR}/{ADAPTIVE_FILE}"

#: What a container writes here is kept in the status of its pod.
LAST_WORDS: Final = "/dev/termination-log"
#: So many bytes of it.
LAST_WORDS_BYTES: Final = 4096

ENV_POD_UID: Final = "SPECSERVE_POD_UID"
ENV_ADMIN_PORT: Final = "SPECSERVE_ADMIN_PORT"
ENV_CREDENTIALS_DIR: Final = "SPECSERVE_CREDENTIALS_DIR"
ENV_REQUIRE_LIVE: Final = "SPECSERVE_REQUIRE_LIVE"
ENV_STEPS: Final = "SPECSERVE_STEPS"
ENV_HUB_TOKEN: Final = "HF_TOKEN"  # noqa: S105


def credentials_secret(name: str) -> str:
    """Name of the Secret that holds the engine credentials of the SpecServe `name`."""
    return f"{name}-credentials"


def curve_config_map(name: str) -> str:
    """Name of the ConfigMap with the curve that was calibrated for the SpecServe `name`."""
    return f"{name}-curve"


def calibration_job(name: str, uid: str, request: str) -> str:
    """Name of the Job that does what a value of ANNOTATION_CALIBRATE asks of a SpecServe.

    The same for the same request, so that it is made once; 63 characters at most.
    """
    # Not a secret: it only has to differ from request to request.
    digest = hashlib.sha256(f"{uid}/{request}".encode()).hexdigest()
    return f"{name}-cal-{digest[:6]}"


def selector(name: str) -> dict[str, str]:
    """Labels that select the engine pods of the SpecServe `name`.

    They depend on its identity alone, never on a version, a user's label or the model, because a
    Deployment's selector is immutable.
    """
    return {LABEL_NAME: MANAGER, LABEL_INSTANCE: name, LABEL_COMPONENT: COMPONENT_ENGINE}


def served(name: str) -> dict[str, str]:
    """Labels that select the engine pods of the SpecServe `name` which its clients may reach."""
    return {**selector(name), LABEL_PART_OF: MANAGER}


def labels(name: str) -> dict[str, str]:
    """Labels of every object made for the SpecServe `name`: its selector and who manages it."""
    return {**selector(name), LABEL_MANAGED_BY: MANAGER, LABEL_PART_OF: MANAGER}


def calibration_labels(name: str) -> dict[str, str]:
    """Labels of the pods that measure one of the SpecServe `name`."""
    return {**labels(name), LABEL_COMPONENT: COMPONENT_CALIBRATION}


def selector_string(name: str) -> str:
    """The selector in the form that the scale subresource and `kubectl -l` take."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector(name).items()))
