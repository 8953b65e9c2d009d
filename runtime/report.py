"""Describe this machine, its code, durations and figures with intervals. Does not import torch."""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from dataclasses import dataclass
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


UNKNOWN = "the device could not be measured, or is too busy with other programs"


def describe_duration(seconds: float | None, mfu: float, shorter: str) -> str:
    """Return a line on how long some work takes, estimated at `mfu`, and a shorter alternative."""
    if seconds is None:
        return f"how long this takes is not known: {UNKNOWN}; shorter: {shorter}"
    return f"takes about {about(seconds)}, at {mfu:.0%} MFU; shorter: {shorter}"


# ---- figures with intervals

SAME = (0.95, 1.05)  # an interval inside shows that two speeds differ by less than 5%


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval; without one it comes from a single measurement."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval; without one, the value twice."""
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return low, high

    @property
    def width(self) -> float:
        """The interval's width as a share of the value."""
        return (self.ends[1] - self.ends[0]) / self.value

    @property
    def inverse(self) -> "Estimate":
        """The reciprocal."""
        if self.low is None or self.high is None:
            return Estimate(1 / self.value)
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low)

    @property
    def verdict(self) -> str:
        """The verdict on a factor: `no difference` within 0.95 to 1.05, `unclear` if it
        contains 1 and is wider; empty if it leaves 1 out, or if there is none.
        """
        low, high = self.ends
        if self.low is None or not low <= 1 <= high:
            return ""
        return "no difference" if SAME[0] <= low and high <= SAME[1] else "unclear"

    def __str__(self) -> str:
        """Format a factor, with its verdict: `1.12 (0.96 to 1.28), unclear`."""
        low, high = self.ends
        if self.low is None:
            return f"{self.value:.2f}"
        hides_one = "1.00" in (f"{low:.2f}", f"{high:.2f}") and not low <= 1 <= high
        digits = 3 if high - low < 0.02 or hides_one else 2
        verdict = self.verdict and f", {self.verdict}"
        return f"{self.value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f}){verdict}"

    def __format__(self, style: str) -> str:
        """Format as a factor, or in a style such as ".4f" as a mean: `0.3480 +- 0.0480`."""
        if not style:
            return str(self)
        low, high = self.ends
        half = "" if self.low is None else f" +- {high - self.value:{style}}"
        noise = " (within noise)" if low <= 0 <= high else ""
        return f"{self.value:{style}}{half}{noise}"
