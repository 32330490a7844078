from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines are busy and differ: how long an example takes is not what is tested.
settings.register_profile("specserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("specserve")
