"""A real engine as the operator would start it, on this machine and not in a pod.

The command line and the environment are those of the rendered pod; what a pod has in volumes is
written into a folder, and its place put where the rendered one stood.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specserve import names
from specserve.api import SpecServeSpec
from specserve.workload import Owner, desired, engine_config
from tests.engine.client import Address
from tests.engine.environment import FLAGS
from tests.engine.install import mount_credentials

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.engine.environment import Environment

POD_UID = "11111111-2222-4333-8444-555555555555"
SERVED_NAME = "tiny"


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine, and how to reach it then.

    Attributes:
        admin_key: SGLang's, which no client ever sends.
        nonce: What orders on SGLang's own route must carry.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    address: Address
    admin_key: str
    nonce: int


def spec_of(pair: Path, ranks: int) -> dict[str, Any]:
    """Return the spec of a SpecServe that serves a trained pair on a CPU.

    Args:
        pair: The folder of target and draft.
        ranks: Tensor-parallel ranks.
    """
    return {
        "model": {"source": f"path://{pair}/target", "servedName": SERVED_NAME},
        "draft": {"method": "EAGLE", "source": f"path://{pair}/draft", "steps": [0, 1, 3]},
        "engine": {
            "image": "none",
            "tensorParallel": ranks,
            "maxRunningRequests": 16,
            "resources": {},
            "args": list(FLAGS),
        },
    }


def rendered(environment: Environment, pair: Path, folder: Path, ranks: int) -> Launch:
    """Return what the operator renders for a trained pair.

    Args:
        environment: Where it is to run.
        pair: The folder of target and draft.
        folder: Takes what volumes would hold.
        ranks: Tensor-parallel ranks.
    """
    spec = SpecServeSpec.model_validate(spec_of(pair, ranks))
    owner = Owner("tiny", "tests", POD_UID)
    [template] = [
        manifest["spec"]["template"]
        for manifest in desired(owner, spec)
        if manifest["kind"] == "Deployment"
    ]
    [container] = template["spec"]["containers"]
    token, api_key, admin_key = (secrets.token_hex(16) for _ in range(3))
    credentials, config, adaptive = (
        folder / name for name in ("credentials", names.KEY_CONFIG, names.ADAPTIVE_FILE)
    )
    nonce = secrets.randbelow(2**52) + 2**51  # long enough to be found by its digits
    mount_credentials(credentials, token, nonce)
    config.write_text(engine_config(admin_key, api_key))
    adaptive.write_text(template["metadata"]["annotations"][names.ANNOTATION_ADAPTIVE])
    places = {
        names.ENGINE_CONFIG: str(config),
        names.ADAPTIVE_CONFIG: str(adaptive),
        names.CREDENTIALS_DIR: str(credentials),
    }

    def here(text: str) -> str:
        for place, path in places.items():
            text = text.replace(place, path)
        return text

    variables = {item["name"]: here(item["value"]) for item in container["env"] if "value" in item}
    return Launch(
        (
            str(environment.python),
            *("-m", "sglang.launch_server"),
            *(here(word) for word in container["args"]),
        ),
        environment.environ(ranks, **variables, **{names.ENV_POD_UID: POD_UID}),
        Address(names.PORT_SERVING, names.PORT_ADMIN, token, api_key),
        admin_key,
        nonce,
    )
