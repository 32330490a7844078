"""Renders the golden cases: each SpecServe below `cases/` and in `examples/`."""

from pathlib import Path
from typing import Any

import yaml

from specserve.api import SpecServeSpec
from specserve.workload import Owner, desired

HERE = Path(__file__).parent
EXPECTED = HERE / "expected"
EXAMPLES = HERE.parents[1] / "examples"
#: Of the examples, which no API server has given one.
UID = "00000000-0000-4000-8000-000000000000"


def cases() -> dict[str, Path]:
    found = [*sorted((HERE / "cases").glob("*.yaml")), *sorted(EXAMPLES.glob("*.yaml"))]
    return {path.stem: path for path in found}


def manifests(path: Path) -> list[dict[str, Any]]:
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    metadata = body["metadata"]
    owner = Owner(metadata["name"], metadata.get("namespace", "default"), metadata.get("uid", UID))
    return desired(owner, SpecServeSpec.model_validate(body["spec"]))


def rendered(path: Path) -> str:
    return yaml.safe_dump_all(manifests(path), sort_keys=True, width=99)
