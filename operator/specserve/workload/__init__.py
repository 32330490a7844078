"""From a SpecServe to the objects that serve it: plain manifests, the same for the same input.

Nothing here depends on the version of the operator, on the order of a mapping, on the policy or
(in the pod template) on the number of replicas, so that only a change which a pod must see
replaces pods.
"""

from specserve.workload.arguments import (
    UnusableArgument,
    UnusableSpec,
    adaptive_config,
    layout_of,
    requests_asked,
)
from specserve.workload.calibration import (
    KEY_COMPARED,
    KEY_FAILURE,
    Subject,
    calibration_job,
    curve_config_map,
)
from specserve.workload.compare import field_of, first_difference, template_hash
from specserve.workload.hardware import hardware, is_hardware
from specserve.workload.objects import (
    Manifest,
    Owner,
    credentials,
    desired,
    engine_config,
    owner_reference,
)
from specserve.workload.ownership import taken_over
from specserve.workload.provision import NONE_PROVIDED, Peer, Provision

__all__ = [
    "KEY_COMPARED",
    "KEY_FAILURE",
    "NONE_PROVIDED",
    "Manifest",
    "Owner",
    "Peer",
    "Provision",
    "Subject",
    "UnusableArgument",
    "UnusableSpec",
    "adaptive_config",
    "calibration_job",
    "credentials",
    "curve_config_map",
    "desired",
    "engine_config",
    "field_of",
    "first_difference",
    "hardware",
    "is_hardware",
    "layout_of",
    "owner_reference",
    "requests_asked",
    "taken_over",
    "template_hash",
]
