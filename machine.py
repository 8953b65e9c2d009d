"""The machine in words."""

import os
import platform
import re
from pathlib import Path


def machine() -> str:
    """Processor, cores, memory, system."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        processor = names[0] if names else processor
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 0
    return f"{processor}, {os.cpu_count()} cores" + (f", {memory:.0f} GiB" if memory else "") + f", {platform.system()}"
