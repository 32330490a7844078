"""An engine that runs fewer requests at once than asked for: told with its numbers, and healed."""

from __future__ import annotations

import itertools
from dataclasses import replace

from tests.integration.api import eventually

ASKED = 64
TOKENS = 96
"""What a small KV cache holds: SGLang runs half as many requests at most."""


async def test_a_limit_that_the_cache_cannot_hold_is_told_until_there_is_memory(operator, stage):
    """SGLang lowers it at the start with a line in its log; the pod is ready all the same."""
    stage.kubelet.tune = lambda config: replace(config, max_total_tokens=TOKENS)
    (old,) = await stage.up(engine={"maxRunningRequests": ASKED})
    said = (await stage.has("RequestCapacity", "False", "CapacityReduced"))["message"]
    assert said.startswith(f"{ASKED} requests at once are asked for; "), said
    assert f"{old.name}: runs at most 48, as its KV cache holds {TOKENS} tokens" in said
    assert "Raise engine.memFractionStatic" in said
    await stage.has("Ready", "True")
    await stage.has("ThresholdReachable", "True")

    stage.kubelet.tune = lambda config: config
    stage.kubelet.loads = False
    await stage.edit(engine={"memFractionStatic": "0.9"})

    def successor():
        return next((pod for pod in stage.kubelet.of("chat") if pod.uid != old.uid), None)

    new = await eventually(successor, 10, "the pod with more memory")
    # The engine of the spec before says nothing about this one.
    await stage.has("RequestCapacity", "Unknown")
    await new.loaded()
    await stage.has("RequestCapacity", "True", "AsAsked")
    await stage.ready()


async def test_the_engine_that_falls_short_is_named_with_the_sums_of_its_copies(operator, stage):
    """Each data-parallel copy has a share of the limit and a cache of its own."""
    caches = itertools.chain([TOKENS // 2], itertools.repeat(400_000))
    stage.kubelet.tune = lambda config: replace(config, max_total_tokens=next(caches))
    engine = {"maxRunningRequests": ASKED, "dataParallel": 2}
    pods = await stage.up(replicas=2, engine=engine)
    short, enough = sorted(pods, key=lambda pod: pod.engine.config.running_cap)
    assert [pod.engine.config.running_cap for pod in (short, enough)] == [24, 32]
    said = (await stage.has("RequestCapacity", "False", "CapacityReduced"))["message"]
    assert f"{short.name}: runs at most 48, as its KV cache holds {TOKENS} tokens" in said
    assert enough.name not in said
    await stage.edit(engine={"maxRunningRequests": 48})
    await stage.has("RequestCapacity", "True", "AsAsked")
