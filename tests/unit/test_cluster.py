"""What the operator's writes do with refusals of their own kind."""

from typing import Any

import pytest

from specserve.cluster import Cluster
from specserve.kube import APPLY, MERGE, KubeRefused

OLD_SCHEMA = KubeRefused(
    500,
    "InternalError",
    "failed to create typed patch object (team/chat): .status.new: field not declared in schema",
)


class FakeKube:
    """Answers each call by its content type."""

    def __init__(self, **answers: Exception | None) -> None:
        self.answers = {APPLY: answers.get("apply"), MERGE: answers.get("merge")}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def call(self, _: str, path: str, *, content_type: str, body: Any, **__: Any) -> Any:
        assert path.endswith("/status")
        self.calls.append((content_type, body["status"]))
        if (error := self.answers[content_type]) is not None:
            raise error
        return {}


async def publish(kube: FakeKube) -> list[str]:
    await Cluster(kube, "me").status("team", "chat", {"new": 1})  # type: ignore[arg-type]
    return [content_type for content_type, _ in kube.calls]


async def test_a_status_is_applied():
    assert await publish(FakeKube()) == [APPLY]


async def test_an_older_schema_gets_what_it_knows():
    assert await publish(FakeKube(apply=OLD_SCHEMA)) == [APPLY, MERGE]


@pytest.mark.parametrize(
    "error",
    [
        KubeRefused(404, "NotFound", "gone"),
        KubeRefused(500, "InternalError", "etcdserver: request timed out"),
    ],
)
async def test_other_refusals_are_passed_on(error):
    kube = FakeKube(apply=error)
    with pytest.raises(KubeRefused):
        await publish(kube)
    assert len(kube.calls) == 1
