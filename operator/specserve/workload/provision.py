"""What an installation provides for all SpecServes: images, pull secrets, who may switch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specserve.workload.arguments import UnusableSpec


@dataclass(frozen=True, slots=True)
class Peer:
    """Pods that may connect.

    Attributes:
        namespace: their namespace.
        labels: what all of them carry.
    """

    namespace: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Provision:
    """Defaults of one installation.

    Attributes:
        image: engine image of a SpecServe that names none; empty if there is none.
        registry: put before engine images that name no registry; empty for the node's default.
        pull_secrets: names of the pull secrets of pods whose SpecServe names none.
        calibrator: image with the `specserve` command, for the Jobs of calibrations; empty if it
            is not known.
        admin: who alone may reach the admin port; None leaves it to the cluster.
    """

    image: str = ""
    registry: str = ""
    pull_secrets: tuple[str, ...] = ()
    calibrator: str = ""
    admin: Peer | None = None


NONE_PROVIDED: Final = Provision()


def engine_image(given: str | None, provision: Provision) -> str:
    """The image that an engine runs.

    Raises:
        UnusableSpec: neither the SpecServe nor the installation names one.
    """
    image = given or provision.image
    if not image:
        raise UnusableSpec(
            "spec.engine.image",
            "name an image, or install the operator with a default one (engineDefaults.image)",
        )
    if provision.registry and not _names_registry(image):
        return f"{provision.registry.rstrip('/')}/{image}"
    return image


def _names_registry(image: str) -> bool:
    # The rule of all container tools: a first part is a registry if it could not be a folder.
    first, slash, _ = image.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")
