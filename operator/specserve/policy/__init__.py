"""When to speculate: pure decisions on one pod's load, and the directives that carry them out.

`decide` is the chain of checks. `threshold` and `breakeven` propose, `guard` says whether a flip
is allowed now, `trial` whether the last one helped, `probe` when to look at what is not in use;
`evidence` turns readings into what the pod is known to do, `acceptance`, `curve` and `knowledge`
hold what is known of traffic and rounds, and `directive` puts a setting into the words of the
engine's admin endpoint. Times are seconds on one clock of the caller's.
"""

from specserve.policy.acceptance import Acceptance
from specserve.policy.curve import Curve, CurveError
from specserve.policy.decision import decide
from specserve.policy.evidence import crashed, pardoned
from specserve.policy.knowledge import Knowledge
from specserve.policy.rounds import Accepted, Cell, Rounds
from specserve.policy.state import Context, Memory, Mode, Sample, Setting, Verdict
from specserve.policy.threshold import unreachable

__all__ = [
    "Acceptance",
    "Accepted",
    "Cell",
    "Context",
    "Curve",
    "CurveError",
    "Knowledge",
    "Memory",
    "Mode",
    "Rounds",
    "Sample",
    "Setting",
    "Verdict",
    "crashed",
    "decide",
    "pardoned",
    "unreachable",
]
