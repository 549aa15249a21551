"""The name of the machine's processor."""

from __future__ import annotations

import os


def processor_name() -> str:
    """Processor and number of cores, for people."""
    name = "unknown processor"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next(line.partition(":")[2].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores"
