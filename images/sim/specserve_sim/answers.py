"""What the serving routes answer, in the shape that SGLang 0.5.23 gives its own answers.

Names, types and places follow the golden files under `tests/golden/`; texts are this project's.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from specserve_sim.engine import NAME
from specserve_sim.text import answer_ids, answer_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from specserve_sim.engine import Gauges, GroupLoad, SimEngine, Ticket

SECTIONS = frozenset({"all", "core", "memory", "spec", "lora", "disagg", "queues"})


def loads_body(engine: SimEngine, include: frozenset[str]) -> dict[str, Any]:
    """Return the body of /v1/loads.

    Args:
        engine: whose load.
        include: sections asked for, of `SECTIONS`; none means all.
    """
    config = engine.config
    everything = not include or "all" in include
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": NAME,
        "accelerator": None,
        "num_accelerators": config.tensor_parallel * config.data_parallel,
        "loads": [
            _group_load(engine, rank, load, include, everything=everything)
            for rank, load in enumerate(engine.loads())
        ],
    }


_PREFIXES = {"speculative": "spec", "disaggregation": "disagg"}


def loads_text(engine: SimEngine, include: frozenset[str]) -> str:
    """Return the load in Prometheus' text format, each number a gauge by data-parallel rank."""
    lines: dict[str, list[str]] = {}
    for load in loads_body(engine, include)["loads"]:
        rank = load.pop("dp_rank")
        for name, value in _flat(load):
            lines.setdefault(name, [f"# TYPE {name} gauge"]).append(
                f'{name}{{dp_rank="{rank}"}} {value}'
            )
    return "\n".join(line for family in lines.values() for line in family) + "\n"


def _flat(load: Mapping[str, Any], prefix: str = "sglang") -> Iterator[tuple[str, float]]:
    for key, value in load.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}_{_PREFIXES.get(key, key)}")
        elif isinstance(value, int | float):
            yield f"{prefix}_{key}", value


def _group_load(
    engine: SimEngine,
    rank: int,
    load: GroupLoad,
    include: frozenset[str],
    *,
    everything: bool,
) -> dict[str, Any]:
    capacity = engine.config.max_total_tokens
    body: dict[str, Any] = {
        "timestamp": load.at,
        "dp_rank": rank,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.queued,
        "num_waiting_uncached_tokens": load.queued_tokens,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": load.used_tokens + load.queued_tokens,
        "num_active_tokens": load.used_tokens + load.queued_tokens,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": capacity,
        "max_running_requests": engine.config.running_cap,
        "token_usage": round(load.used_tokens / capacity, 4),
        "gen_throughput": round(load.throughput, 2),
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": 0,
        "total_prefill_busy_us": 0,
        "decode_moments": None,
    }
    if everything or "memory" in include:
        body["memory"] = {
            "weight_gb": 0.0,
            "kv_cache_gb": 0.0,
            "graph_gb": 0.0,
            "token_capacity": capacity,
        }
    if load.accept_length is not None and (everything or "spec" in include):
        body["speculative"] = {
            "accept_length": load.accept_length,
            "accept_rate": load.accept_rate,
        }
    if everything or "disagg" in include:
        body["disaggregation"] = {
            "mode": "null",
            "prefill_bootstrap_queue_reqs": 0,
            "prefill_inflight_queue_reqs": 0,
            "decode_prealloc_queue_reqs": 0,
            "decode_transfer_queue_reqs": 0,
            "decode_retracted_queue_reqs": 0,
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        }
    if everything or "queues" in include:
        body["queues"] = {
            "waiting": load.queued,
            "grammar": 0,
            "paused": 0,
            "retracted": 0,
            "prealloc_ready": 0,
        }
    return body


@dataclass(slots=True)
class Generation:
    """Writes the answers of one request as it goes on.

    Attributes:
        engine: that it runs in.
        ticket: of the request.
        rid: its id.
        received: Unix time at which it came.
    """

    engine: SimEngine
    ticket: Ticket
    rid: str
    received: float

    def events(self) -> Iterator[str]:
        """Return the events of its stream that are due: one, with the answer so far."""
        yield self.body()

    def body(self) -> str:
        """Return the answer so far, as JSON; the last one carries what only the end knows."""
        request = self.ticket.request
        tokens = request.tokens
        return (
            f'{{"text":"{answer_text(tokens)}","output_ids":{answer_ids(tokens)},'
            f'"meta_info":{json.dumps(self.meta(), separators=(",", ":"))}}}'
        )

    def meta(self) -> dict[str, Any]:
        """Return its `meta_info`; what only the end knows is there at the end."""
        engine, request = self.engine, self.ticket.request
        admitted = request.arrived if request.admitted is None else request.admitted
        first = admitted if request.first_token is None else request.first_token
        done = request.state == "finished"
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": {"type": "length", "length": request.tokens} if done else None,
            "prompt_tokens": request.prompt_tokens,
            "weight_version": "default",
            "num_retractions": 0,
            "storage_prefetch_wait": 0.0,
            "storage_staging_wait": 0.0,
            "forward_entry_time": engine.wall(admitted),
            "prefill_finished_time": engine.wall(first),
            "queue_time": (admitted - request.arrived) / engine.config.time_scale,
            "reasoning_tokens": 0,
            "completion_tokens": request.tokens,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None if engine.config.data_parallel == 1 else self.ticket.group,
        }
        if done:
            meta |= self._last()
        return meta

    def _last(self) -> dict[str, Any]:
        engine, request = self.engine, self.ticket.request
        ended = request.arrived if request.ended is None else request.ended
        first = ended if request.first_token is None else request.first_token
        scale = engine.config.time_scale
        decoded = max(0, request.tokens - 1)
        last: dict[str, Any] = {
            "weight_versions": [{"version": "default", "start": 0, "end": request.tokens}],
            "e2e_latency": (ended - request.arrived) / scale,
        }
        steps = engine.config.first_steps
        if steps is not None:
            verifies = request.verifies
            # As upstream counts them: drafts of the start-up width in every round, whatever the
            # width was.
            proposed = verifies * steps
            last |= {
                "spec_accept_rate": request.accepted / proposed if proposed else 0.0,
                "spec_accept_length": request.tokens / verifies if verifies else 0.0,
                "spec_num_correct_drafts": request.accepted,
                "spec_num_proposed_drafts": proposed,
                "spec_verify_ct": verifies,
                "spec_correct_drafts_histogram": list(request.histogram),
            }
        return last | {
            "request_received_ts": self.received,
            "first_token_latency": (first - request.arrived) / scale,
            "api_server_dispatch_finish_ts": engine.wall(request.arrived),
            "request_finished_ts": engine.wall(ended),
            "decode_throughput": decoded * scale / (ended - first) if ended > first else 0.0,
            "response_sent_to_client_ts": time.time(),
        }


def models_body(engine: SimEngine) -> dict[str, Any]:
    """Return the body of /v1/models."""
    name = engine.config.served_model_name
    card = {
        "id": name,
        "object": "model",
        "created": int(engine.born_wall),
        "owned_by": "specserve-sim",
        "root": name,
        "parent": None,
        "max_model_len": engine.config.context_length,
    }
    return {"object": "list", "data": [card]}


def server_info_body(engine: SimEngine) -> dict[str, Any]:
    """Return the body of /server_info: the settings that matter here, and never a key."""
    config = engine.config
    scheduler = engine.groups[0].scheduler
    return {
        "version": NAME,
        "simulated": True,
        "status": "ready",
        "model_path": config.model_path,
        "served_model_name": config.served_model_name,
        "tp_size": config.tensor_parallel,
        "dp_size": config.data_parallel,
        "max_running_requests": config.request_limit,
        "max_total_num_tokens": config.max_total_tokens,
        "speculative_algorithm": config.algorithm,
        "speculative_num_steps": scheduler.active_steps if scheduler.has_draft else None,
        "speculative_eagle_topk": config.topk if scheduler.has_draft else None,
        "api_key": None,
        "admin_api_key": None,
        "internal_states": [
            {
                "max_running_requests": config.request_limit,
                "effective_max_running_requests_per_dp": config.running_cap,
                "speculative_num_steps": group.scheduler.active_steps,
            }
            for group in engine.groups
        ],
        "sim": {
            "profile": config.profile,
            "accept_length": scheduler.accept_length,
            "time_scale": config.time_scale,
            "boots": engine.boots,
        },
    }


# name, help, and where the value of one group is; the names that the `drop` fault leaves out
# are those that a policy could live on.
_COUNTS = ("sglang:num_running_reqs", "sglang:num_queue_reqs")


def _gauge_values(engine: SimEngine, gauges: Gauges) -> list[tuple[str, str, float]]:
    capacity = engine.config.max_total_tokens
    drafting = gauges.accept_length > 0
    return [
        ("num_running_reqs", "Requests being decoded.", gauges.running),
        ("num_queue_reqs", "Requests waiting.", gauges.queued),
        ("gen_throughput", "Tokens per second.", gauges.throughput),
        ("token_usage", "Share of the KV cache in use.", gauges.used_tokens / capacity),
        ("num_used_tokens", "Tokens in the KV cache.", gauges.used_tokens),
        ("max_total_num_tokens", "Tokens the KV cache holds.", capacity),
        ("spec_accept_length", "Tokens won per verify.", gauges.accept_length),
        ("spec_accept_rate", "Drafts accepted of those proposed.", gauges.accept_rate),
        ("spec_num_steps", "Draft steps.", gauges.steps),
        ("spec_num_draft_tokens", "Verify width.", gauges.steps + 1 if drafting else 0),
    ]


_COUNTERS = {
    "prompt_tokens_total": ("Prompt tokens of ended requests.", True),
    "generation_tokens_total": ("Tokens of ended requests.", True),
    "num_requests_total": ("Ended requests.", True),
    "num_aborted_requests_total": ("Requests aborted.", False),
    "spec_verify_calls_total": ("Verifies of ended requests.", False),
}


def metrics_text(engine: SimEngine) -> str:
    """Return the body of /metrics, in Prometheus' text format."""
    return "\n".join(_metrics_lines(engine)) + "\n"


def _metrics_lines(engine: SimEngine) -> Iterator[str]:
    fault = engine.behaviour.metrics
    config = engine.config
    model = json.dumps(config.served_model_name)
    groups = [_gauge_values(engine, gauges) for gauges in engine.gauges()]
    for index, (name, meaning, _) in enumerate(groups[0]):
        full = f"sglang:{name}"
        if fault == "drop" and full in _COUNTS:
            continue
        yield f"# HELP {full} {meaning} Simulated."
        yield f"# TYPE {full} gauge"
        for rank, values in enumerate(groups):
            value = math.nan if fault == "nan" else float(values[index][2])
            dp = f'dp_rank="{rank}",' if config.data_parallel > 1 else ""
            labels = (
                f'{dp}engine_type="unified",model_name={model},'
                'moe_ep_rank="0",pp_rank="0",tp_rank="0"'
            )
            yield f"{full}{{{labels}}} {_number(value)}"
    for name, (meaning, by_streaming) in _COUNTERS.items():
        if fault == "drop" and name == "generation_tokens_total":
            continue
        counts = sorted(item for item in engine.counters.items() if item[0][0] == name)
        if counts:  # a counter is there from its first count on
            yield f"# HELP sglang:{name} {meaning} Simulated."
            yield f"# TYPE sglang:{name} counter"
        for key, value in counts:
            streaming = f'is_streaming="{key[1]}",' if by_streaming else ""
            labels = f'engine_type="unified",{streaming}model_name={model}'
            yield f"sglang:{name}{{{labels}}} {_number(float(value))}"


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(value)
