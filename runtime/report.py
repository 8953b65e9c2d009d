"""Describe this machine, its code, rates and durations. Does not import torch."""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


# ---- the machine


def machine() -> str:
    """Describe this machine: processor, cores, memory, system."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        text = Path("/proc/cpuinfo").read_text()
        names = re.findall(r"^model name\s*: (.+)$", text, re.MULTILINE)
        processor = names[0] if names else processor
    memory = f"{physical_memory() / 2**30:.0f} GiB"
    return f"{processor}, {os.cpu_count()} cores, {memory}, {platform.system()}"


def physical_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Return the available memory in bytes, or all memory if the system does not report it."""
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/meminfo").read_text()
        return 1024 * int(re.findall(r"^MemAvailable:\s*(\d+)", text, re.MULTILINE)[0])
    return physical_memory()


def _git(*command: str) -> str | None:
    """Return the output of a git command in this checkout; None without git."""
    command = ("git", *command)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(done.stdout).strip()


def git_commit() -> str | None:
    """Return the commit of this code, with -dirty if it was changed since; None without git."""
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def project_files(*patterns: str) -> list[Path]:
    """Return the files that git tracks and that match a pattern, such as "configs/**/*.yaml".

    A user's own files in the checkout are left out. Without git, as in an unpacked archive, they
    are not.
    """
    tracked = _git("ls-files", "-z", "--", *(f":(glob){pattern}" for pattern in patterns))
    if tracked:
        paths = {ROOT / name for name in tracked.strip("\0").split("\0")}
    else:
        paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(path for path in paths if path.is_file())  # a tracked file may be deleted


def git_diff() -> str:
    """Return the changes to tracked files since the commit; empty without any, or without git."""
    return _git("diff", "--no-ext-diff", "--no-color", "HEAD") or ""


def code_hash() -> str:
    """Return a hash of this project's Python files."""
    digest = hashlib.sha256()
    for path in project_files("*.py", "*/*.py", "*/*/*.py"):  # ** would search all corpora and runs
        digest.update(os.fsencode(f"{path.relative_to(ROOT)}\0") + path.read_bytes())
    return digest.hexdigest()[:8]


def flops_rate(tflops: float) -> str:
    """Format a rate of floating-point operations: TFLOP/s, or GFLOP/s below 1."""
    return f"{tflops:,.2f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:,.3g} GFLOP/s"


def about(seconds: float) -> str:
    """Format a long time: as `12 minutes`, `3.2 hours` or `4 days`."""
    unit, size = next(
        (unit, size)
        for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60))
        if seconds >= 2 * size or unit == "minutes"
    )
    count = seconds / size
    if unit == "hours" and count < 10:
        return f"{count:.1f} hours"
    return f"{count:,.0f} {unit if round(count) != 1 else unit.removesuffix('s')}"
