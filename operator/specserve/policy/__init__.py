"""When to speculate: pure decisions on one pod's load, and the directives that carry them out.

`decide` is the chain of checks. `threshold` proposes a mode, `guard` says whether a flip is
allowed now, `evidence` turns readings into what the pod is known to do, `directive` puts a mode
into the words of the engine's admin endpoint. Times are seconds on one clock of the caller's.
"""

from specserve.policy.decision import decide
from specserve.policy.state import Memory, Mode, Sample, Verdict
from specserve.policy.threshold import unreachable

__all__ = ["Memory", "Mode", "Sample", "Verdict", "decide", "unreachable"]
