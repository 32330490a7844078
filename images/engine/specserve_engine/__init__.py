"""Control core and admin listener that switch speculative decoding in a live engine.

`wire` has the contract's values, `control` decides which directive holds, `ranks` is the edge to
the scheduler ranks, `rounds` counts decode rounds, `listener` puts HTTP in front of all that.
"""

from specserve_engine.control import Capability, Control, Identity, Versions
from specserve_engine.listener import Listener, bind, serving

__all__ = ["Capability", "Control", "Identity", "Listener", "Versions", "bind", "serving"]
