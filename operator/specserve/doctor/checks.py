"""The checklist. Each check looks at evidence and says what it saw, or that it cannot see. Pure.

A check never infers: where the server does not show a thing, the verdict is `unknown` and the
finding says where to look. Figures are of SGLang 0.5.16 with an 8B shape on H200s, and stand for
the order of magnitude only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from specserve.bench.connection import REFUSALS
from specserve.doctor.evidence import Evidence

Verdict = Literal["ok", "problem", "unknown", "not applicable"]

SILENT_CAP: Final = 48
"""What SGLang sets by itself as soon as a draft is loaded."""

WANTED_CAP: Final = 256
POOR_ACCEPTANCE: Final = 1.15
"""Below the lowest break-even that was measured, 1.19: every load loses."""

ENOUGH_ROUNDS: Final = 200
ENOUGH_PASSES: Final = 1000
FEW_PASSES: Final = 0.01
"""Share of decode rounds without a graph that is no cause for concern: odd ones at start."""

_LIVE: Final = frozenset({"EAGLE", "EAGLE3", "NEXTN"})


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: Its name, for machines.
        title: What it is about.
        verdict: `ok`, `problem`, `unknown` (not visible from here) or `not applicable`.
        seen: What was seen, or why nothing was.
        cost: Why it matters; empty where there is no problem.
        remedy: The flag that mends it, or where to look; empty if there is nothing to do.
    """

    check: str
    title: str
    verdict: Verdict
    seen: str
    cost: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """In the form of the report."""
        return {
            "check": self.check,
            "title": self.title,
            "verdict": self.verdict,
            "seen": self.seen,
            "cost": self.cost,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class _Check:
    """One item: what it costs, what mends it, and the function that looks."""

    name: str
    title: str
    cost: str
    remedy: str
    look: Callable[[Evidence], tuple[Verdict, str] | tuple[Verdict, str, str]]
    of_draft: bool = True

    def run(self, evidence: Evidence) -> Finding:
        if self.of_draft and evidence.has_draft is False:
            return Finding(self.name, self.title, "not applicable", "no draft is loaded")
        verdict, seen, *elsewhere = self.look(evidence)
        cost = self.cost if verdict in {"problem", "unknown"} else ""
        remedy = self.remedy if verdict == "problem" else "".join(elsewhere)
        return Finding(self.name, self.title, verdict, seen, cost, remedy)


def findings(evidence: Evidence) -> list[Finding]:
    """Run all checks, in the order in which one would mend things."""
    return [check.run(evidence) for check in _CHECKS]


_NOT_SHOWN: Final = "the server does not show it"
_ON_CPU: Final = "the server runs on a CPU"


def _cap(evidence: Evidence) -> tuple[Verdict, str]:
    each, groups = evidence.cap, evidence.groups
    if each is None:
        return "unknown", _NOT_SHOWN
    shown = f"{each} requests run at once" + (f" in each of {groups} groups" * (groups > 1))
    # Plain data parallelism gives it to every copy, attention data parallelism divides it.
    sharing = evidence.whole("attn_dp_size") or 1
    if evidence.info.get("enable_dp_attention"):
        sharing = max(sharing, groups)
    if each == max(1, SILENT_CAP // sharing):
        return "problem", f"{shown}, which is what SGLang sets by itself once a draft is loaded"
    return "ok", shown


def _acceptance(evidence: Evidence) -> tuple[Verdict, str, str]:
    elsewhere = "run specserve bench with prompts like your traffic's"
    cells = [
        stat
        for group in evidence.plugin.get("groups") or []
        for stat in group.get("stats") or []
        if (stat.get("steps") or 0) > 0
    ]
    rounds = sum(stat["rounds"] for stat in cells)
    if evidence.plugin:
        if rounds < ENOUGH_ROUNDS:
            return "unknown", f"{rounds} drafting rounds of late, too few to tell", elsewhere
        mean = sum(stat["acceptLength"] * stat["rounds"] for stat in cells) / rounds
        return _judged(mean, f"in the last {rounds} drafting rounds")
    means = [load["speculative"].get("accept_length") for load in _speculating(evidence)]
    elsewhere += ", or give --token-file"
    if not means or None in means:
        return "unknown", evidence.no_plugin or _NOT_SHOWN, elsewhere
    if evidence.info.get("speculative_adaptive") is not False:
        seen = "the server's mean counts rounds without a draft too"
        return "unknown", seen, elsewhere
    if evidence.series.get("sglang:spec_verify_calls_total", 0) < ENOUGH_ROUNDS:
        return "unknown", "too few rounds since the server began, or not counted", elsewhere
    return _judged(sum(means) / len(means), "since the server began")


def _speculating(evidence: Evidence) -> list[Mapping[str, Any]]:
    return [load for load in evidence.loads if isinstance(load.get("speculative"), dict)]


def _judged(mean: float, since: str) -> tuple[Verdict, str, str]:
    seen = f"{mean:.2f} tokens won a round {since}"
    return ("problem" if mean < POOR_ACCEPTANCE else "ok"), seen, ""


def _graphs(evidence: Evidence) -> tuple[Verdict, str]:
    info = evidence.info
    if evidence.on_cpu:
        return "not applicable", _ON_CPU
    decode = _decode_graphs(info)
    if info.get("disable_cuda_graph") or decode.get("backend") == "disabled":
        return "problem", "CUDA graphs are switched off"
    passes = {
        name: count
        for name, count in evidence.series.items()
        if name.startswith("sglang:cuda_graph_passes_total{decode")
    }
    total = sum(passes.values())
    bare = passes.get("sglang:cuda_graph_passes_total{decode_none}", 0.0)
    if total >= ENOUGH_PASSES and bare > FEW_PASSES * total:
        return "problem", f"{bare / total:.0%} of {total:,.0f} decode rounds ran without a graph"
    largest = _largest_graph(evidence, decode)
    if largest is None or evidence.cap is None:
        return "unknown", _NOT_SHOWN
    if largest < evidence.cap:
        return "problem", f"captured up to a batch of {largest}, while {evidence.cap} may run"
    return "ok", f"captured up to a batch of {largest}, {evidence.cap} may run"


def _decode_graphs(info: Mapping[str, Any]) -> Mapping[str, Any]:
    config = info.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, dict) else None
    return decode if isinstance(decode, dict) else {}


def _largest_graph(evidence: Evidence, decode: Mapping[str, Any]) -> int | None:
    """The largest batch with a graph; what the scheduler has captured before what was asked."""
    captured = [state.get("decode_cuda_graph_bs") for state in evidence.states]
    for sizes in (*captured, decode.get("bs"), evidence.info.get("cuda_graph_bs")):
        if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
            return int(max(sizes))
    return None


def _live(evidence: Evidence) -> tuple[Verdict, str, str]:
    plugin, info = evidence.plugin, evidence.info
    if plugin:
        steps = plugin.get("availableSteps") or []
        if not plugin.get("controllable"):
            return "problem", f"cannot be switched live: {plugin.get('reason')}", ""
        if 0 not in steps:
            return "problem", f"only {steps} steps are prepared, so it cannot be off", ""
        return "ok", f"the plugin switches between {', '.join(map(str, steps))} steps", ""
    if "speculative_adaptive" not in info:
        return "unknown", evidence.no_plugin or _NOT_SHOWN, "give --token-file"
    if info.get("speculative_algorithm") not in _LIVE:
        seen = f"{info.get('speculative_algorithm')} has a fixed number of draft steps"
        return "problem", seen, ""
    if not info["speculative_adaptive"]:
        return "problem", "adaptive states are not built: every round drafts the same steps", ""
    seen = "adaptive states are built; whether the plugin is there is not visible: "
    return "unknown", seen + (evidence.no_plugin or _NOT_SHOWN), "give --token-file"


def _table(evidence: Evidence) -> tuple[Verdict, str]:
    info, mode = evidence.info, evidence.plugin.get("mode")
    if mode in {"on", "off", "tiers"}:
        return "ok", f"the plugin is ordered {mode}, so the engine's own table does not decide"
    if "speculative_adaptive" not in info:
        return "unknown", _NOT_SHOWN
    if not info["speculative_adaptive"]:
        return "not applicable", "the engine does not adapt its steps"
    if info.get("speculative_adaptive_config"):
        return "unknown", "it has a table of its own, whose content the server does not show"
    if mode is None:
        return "unknown", "no table is given; whether a plugin overrides the built-in one: " + (
            evidence.no_plugin or _NOT_SHOWN
        )
    return "problem", "nobody steers the engine, and it decides by its built-in table"


def _topk(evidence: Evidence) -> tuple[Verdict, str]:
    topk = evidence.whole("speculative_eagle_topk")
    if topk is None:
        return "unknown", _NOT_SHOWN
    return ("problem" if topk > 1 else "ok"), f"{topk} branch{'es' * (topk != 1)} in a draft"


def _draft_attention(evidence: Evidence) -> tuple[Verdict, str]:
    info = evidence.info
    if "speculative_draft_attention_backend" not in info or "attention_backend" not in info:
        return "unknown", _NOT_SHOWN
    draft = info["speculative_draft_attention_backend"]
    target = info.get("decode_attention_backend") or info["attention_backend"]
    if draft is None or draft == target:
        return "ok", f"{target} for both"
    return "problem", f"{draft} for the draft, {target} for the target"


def _warm(evidence: Evidence) -> tuple[Verdict, str]:
    if not evidence.plugin:
        return "unknown", evidence.no_plugin
    kept, mode = evidence.plugin.get("draftKv"), evidence.plugin.get("mode")
    seen = f"mode {mode}, draft {kept}"
    return ("problem" if kept == "warm" and mode == "off" else "ok"), seen


def _peers(evidence: Evidence) -> tuple[Verdict, str, str]:
    if evidence.on_cpu:
        return "not applicable", _ON_CPU, ""
    ranks = evidence.whole("tp_size")
    elsewhere = "on the host: nvidia-smi topo -p2p r, where every pair has to say OK"
    if ranks is None:
        return "unknown", _NOT_SHOWN, elsewhere
    if ranks == 1:
        return "not applicable", "one GPU a replica, so none has to reach another", ""
    seen = f"{ranks} GPUs a replica; how they reach each other no route of the server shows"
    return "unknown", seen, elsewhere


def _all_reduce(evidence: Evidence) -> tuple[Verdict, str]:
    if evidence.on_cpu:
        return "not applicable", _ON_CPU
    ranks = evidence.whole("tp_size")
    if ranks == 1:
        return "not applicable", "one GPU a replica"
    if ranks is None or "disable_custom_all_reduce" not in evidence.info:
        return "unknown", _NOT_SHOWN
    if evidence.info["disable_custom_all_reduce"]:
        return "problem", "switched off by a flag"
    # Whether it is really in use depends on the links, which are another item's business.
    return "ok", "not switched off"


def _retraction(evidence: Evidence) -> tuple[Verdict, str]:
    count = evidence.series.get("sglang:num_retracted_requests_total")
    if count is None:
        return "unknown", "the metrics do not have it (yet)"
    return ("problem" if count > 0 else "ok"), f"{count:,.0f} since the server began"


def _metrics(evidence: Evidence) -> tuple[Verdict, str]:
    if evidence.metrics == 200:
        return "ok", "/metrics answers"
    if evidence.metrics is None:
        return "unknown", "/metrics gave no answer"
    if evidence.metrics in REFUSALS:
        return "unknown", f"/metrics answers {evidence.metrics}: who asks needs a key"
    return "problem", f"/metrics answers {evidence.metrics}"


def _leak(evidence: Evidence) -> tuple[Verdict, str]:
    shown = [each["admin_api_key"] for each in _settings(evidence) if "admin_api_key" in each]
    if not shown:
        return "unknown", _NOT_SHOWN
    if all(map(_is_blank, shown)):
        return "ok", "/server_info shows no admin key"
    who = "anybody" if evidence.open_to_all else "whoever has a user's key"
    return "problem", f"/server_info shows the admin key to {who}"


def _is_blank(value: object) -> bool:
    """Whether this is no key, but what stands where one was taken out: `***`, `<redacted>`."""
    return not value or (isinstance(value, str) and (set(value) <= {"*"} or value[0] == "<"))


def _settings(evidence: Evidence) -> list[Mapping[str, Any]]:
    return [evidence.info, *evidence.states]


_CHECKS: Final = (
    _Check(
        "request-cap",
        "limit of running requests",
        "the rest waits: with 48 at 250 in flight, 0.65 of the throughput without a draft",
        f"--max-running-requests {WANTED_CAP}",
        _cap,
    ),
    _Check(
        "acceptance",
        "acceptance of the draft",
        "below the break-even at every load: at 1.0, throughput of 0.74, 0.57, 0.61 and 0.44 at "
        "1, 10, 70 and 250 in flight",
        "a draft trained for this very model (--speculative-draft-model-path), or none; check "
        "that the chat template of the traffic is the one that it was trained with",
        _acceptance,
    ),
    _Check(
        "cuda-graphs",
        "batches with a CUDA graph",
        "a larger batch runs kernel by kernel, at every draft step",
        "--cuda-graph-max-bs-decode of at least --max-running-requests (before 0.5.16: "
        "--cuda-graph-max-bs), and no flag that disables graphs",
        _graphs,
    ),
    _Check(
        "live-control",
        "switching without a restart",
        "speculation stays on where it loses: 0.44 of the throughput at acceptance 1.0 and 250 in "
        "flight, 0.9 at 2.5",
        "the SpecServe plugin in the image, and --speculative-adaptive "
        "--speculative-eagle-topk 1 --speculative-adaptive-config FILE with 0 among the steps",
        _live,
    ),
    _Check(
        "built-in-table",
        "the engine's own table of steps",
        "it stops drafting from 64 in flight, whatever is accepted: 0.92 at 70 in flight and "
        "acceptance 2.5, where drafting gave 1.36",
        "let SpecServe steer it, or --speculative-adaptive-config FILE",
        _table,
    ),
    _Check(
        "topk",
        "branches of the draft",
        "with several, steps cannot be switched live, and each verify is wider; SGLang chooses "
        "them by itself for some models",
        "--speculative-eagle-topk 1 --speculative-num-steps 3 --speculative-num-draft-tokens 4",
        _topk,
    ),
    _Check(
        "draft-attention",
        "attention backend of the draft",
        "graphs and workspaces are kept twice, and the draft may run on a slower backend",
        "leave out --speculative-draft-attention-backend",
        _draft_attention,
    ),
    _Check(
        "warm-off",
        "what the draft does while off",
        "a warm draft follows each token: 3 to 12 % of throughput on one GPU, up to 31 % on two",
        "draftKv: Cold in the policy, unless speculation is off for seconds only",
        _warm,
    ),
    _Check(
        "peer-access",
        "GPUs that reach each other's memory",
        "without it every draft step pays for the detour: break-even at 1 in flight rises from "
        "1.9 to 2.8, so acceptance 2.5 loses there and wins at 32",
        "",
        _peers,
    ),
    _Check(
        "all-reduce",
        "custom all-reduce",
        "small batches wait for NCCL: on two H200s 9 % of throughput at 1 in flight without "
        "drafting, 17 to 20 % with it",
        "leave out --disable-custom-all-reduce; where NVLink multicast has to stay off, set "
        "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0 instead",
        _all_reduce,
    ),
    _Check(
        "retractions",
        "requests thrown back into the queue",
        "the KV cache was full, and what they had computed is computed again; the draft and its "
        "cache take about 5 % of it",
        "a larger --mem-fraction-static, or a smaller --max-running-requests",
        _retraction,
        of_draft=False,
    ),
    _Check(
        "metrics",
        "metrics",
        "no dashboards, no alerts, and no acceptance unless the plugin tells it",
        "--enable-metrics",
        _metrics,
        of_draft=False,
    ),
    _Check(
        "admin-key-shown",
        "admin key in /server_info",
        "who reads it can change and stop the server",
        "the SpecServe plugin blanks it; else close /server_info to users",
        _leak,
        of_draft=False,
    ),
)
