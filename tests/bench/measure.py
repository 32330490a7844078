"""What the kernel counts for processes and for the machine, and distributions of what we count."""

from __future__ import annotations

import math
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TICKS = os.sysconf("SC_CLK_TCK")
MIB = 2**20


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, user and system, all threads, in steps of 10 ms."""
    # The command's name may hold blanks and brackets; nothing behind the last bracket does.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_mib(pid: int) -> float:
    """Resident memory of a process now, in MiB."""
    return _status(pid, "VmRSS")


def peak_mib(pid: int) -> float:
    """The most resident memory the process ever had, in MiB."""
    return _status(pid, "VmHWM")


def _status(pid: int, field: str) -> float:
    found = re.search(
        rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    assert found is not None
    return int(found[1]) * 1024 / MIB


def busy_seconds() -> float:
    """CPU time that all cores together have spent so far on anything but idling."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = map(int, first)
    return (user + nice + system + irq + softirq) / TICKS


class Meter:
    """Measures named processes, and the machine beside them, over the length of a phase.

    Args:
        pids: processes by name; those that have ended must be left out.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._began = time.monotonic()
        self._cpu = {name: cpu_seconds(pid) for name, pid in self._pids.items()}
        self._busy = busy_seconds()

    @property
    def seconds(self) -> float:
        """Time since the phase began."""
        return time.monotonic() - self._began

    def read(self) -> dict[str, Any]:
        """CPU by process in cores, memory in MiB, and what others took of the machine."""
        seconds = self.seconds
        cores = {
            name: (cpu_seconds(pid) - self._cpu[name]) / seconds
            for name, pid in self._pids.items()
        }
        busy = (busy_seconds() - self._busy) / seconds
        return {
            "seconds": round(seconds, 2),
            "cores": {name: round(share, 3) for name, share in cores.items()},
            "residentMiB": {name: round(resident_mib(pid), 1) for name, pid in self._pids.items()},
            "machineBusyCores": round(busy, 2),
            "othersCores": round(max(0.0, busy - sum(cores.values())), 2),
            "loadAverage": round(os.getloadavg()[0], 2),
        }


@dataclass(frozen=True, slots=True)
class Distribution:
    """Order statistics of a sample, in the unit of its values; nearest rank, none interpolated."""

    count: int
    p50: float
    p90: float
    p99: float
    longest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """Sum up at least one value."""
        ordered = sorted(values)

        def rank(share: float) -> float:
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

        return cls(len(ordered), rank(0.5), rank(0.9), rank(0.99), ordered[-1])

    def to_json(self) -> dict[str, Any]:
        """The statistics, rounded to a tenth of a thousandth."""
        return {
            "count": self.count,
            "p50": round(self.p50, 4),
            "p90": round(self.p90, 4),
            "p99": round(self.p99, 4),
            "max": round(self.longest, 4),
        }


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    total = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert total is not None
    return {
        "cores": os.cpu_count(),
        "processor": model[1] if model else platform.machine(),
        "memoryGiB": round(int(total[1]) / 2**20, 1),
        "kernel": platform.release(),
        "loadAverageAtStart": [round(each, 2) for each in os.getloadavg()],
    }
