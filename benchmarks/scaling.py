"""How a run scales: the same batch on one process and on several, in turn. `bench.py --scaling
1,2,4` calls it.
"""

import dataclasses
import datetime
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_turn import LEFT_OUT, Side, all_sides, do_rounds, ratios, training_side
from benchmarks.peers import flags
from benchmarks.predict import Predicted, Speed, Work, predict
from config import Config
from measure.ratio import Ratio, median_ratio
from runtime.device import choose_device, device_name
from runtime.errors import UserError
from runtime.files import write_whole
from runtime.report import (
    BLUE,
    ORANGE,
    Column,
    field,
    git_commit,
    machine,
    markdown_table,
    new_figure,
    print_table,
    save_picture,
)
from runtime.start import cores
from runtime.world import launch

WIDTH = 0.02  # enough rounds where every interval is narrower than this share of its median
PROFILED_STEPS = 6  # the first does not count
BUCKET = 25 * 2**20  # bytes that DDP sends at a time, by default


@dataclasses.dataclass(frozen=True)
class Count:
    """A number of processes, and what was found of it."""

    processes: int
    threads: int  # of each
    batch_size: int  # sequences of a micro-step, of each
    micro_steps: int
    tokens: int  # of a step, of all processes
    hardware: float  # GPUs, or cores in use, over those of the first number
    tokens_per_sec: float
    over_first: Ratio
    waiting: float  # share of the step, the mean over the processes
    update_s: float
    link: float | None  # GB/s
    memory_mb: float

    @property
    def efficiency(self) -> float:
        """How much faster it is than the first, over how much more hardware it has."""
        return self.over_first.median / self.hardware

    @property
    def step_s(self) -> float:
        """The median step."""
        return self.tokens / self.tokens_per_sec


def describe(processes: int) -> str:
    """A number of processes, for the user."""
    return "1 process" if processes == 1 else f"{processes} processes"


class Scaling:
    """Groups of so many processes that take turns at the same training steps."""

    def __init__(self, name: str, config: Config, given: Sequence[str], counts: Sequence[int]):
        """`config`: that of the file `name` with the options `given`. Raises UserError for what
        cannot be measured here.
        """
        self.name, self.config, self.given, self.counts = name, config, given, counts
        self.device = choose_device(config.device)
        self.work = Work.of(config)
        self.fsdp = config.fsdp
        check_counts(counts, self.work, self.device)

    def sides(self, place: Path) -> list[Side]:
        """A side for each number of processes, which share out the cores, unless the user has set
        their threads.
        """
        sides = []
        for n in self.counts:
            config = self.config.model_copy(
                update={"batch_size": self.work.split(n)[0], "total_batch_tokens": self.work.tokens}
            )
            names = dict.fromkeys([*self.given, "batch_size", "total_batch_tokens"])
            sides.append(
                training_side(
                    describe(n),
                    ["--config", self.name, *flags(config, list(names))],
                    str(place / str(n)),
                    ranks=n,
                )
            )
        return sides

    def measure(self, rounds: int, folder: Path) -> None:
        """Take turns, then profile each side, and write what was found to the folder. Raises
        TrainingError if a side fails.
        """
        if self.device.type == "cpu" and max(self.counts) > cores():
            print(
                f"note: {max(self.counts)} processes share {cores()} cores: what they reach says "
                f"nothing of more cores"
            )
        with tempfile.TemporaryDirectory() as place:
            sides = self.sides(Path(place))
            with all_sides(sides) as turns:
                rates = do_rounds(
                    sides,
                    turns,
                    rounds,
                    WIDTH,
                    folder / "in_turn.json",
                    lambda line: print(line, flush=True),
                )
                for side in sides:
                    side.ask(f"{PROFILED_STEPS} {min(BUCKET, 4 * self.work.parameters)}")
                    side.answer()
        found = self.found(sides, rates)
        write_report(
            found,
            self.predictions(found),
            self.name,
            folder,
            self.device,
            len(rates[sides[0].name]),
        )

    def found(self, sides: Sequence[Side], rates: Mapping[str, Sequence[float]]) -> list[Count]:
        """What was found of each number of processes. The last answer of each side is that of its
        profiled turn.
        """
        found = []
        used = [
            n if self.device.type == "cuda" else min(cores(), n * side.turns[-1]["threads"])
            for n, side in zip(self.counts, sides, strict=True)
        ]
        for n, side, hardware in zip(self.counts, sides, used, strict=True):
            last, first = side.turns[-1], sides[0].name
            answers = last.get("ranks", [last])
            # the profiler's own start is in the first step
            profiles = [
                {name: steps[1:] for name, steps in answer["profile"].items()} for answer in answers
            ]
            found.append(
                Count(
                    n,
                    last["threads"],
                    *self.work.split(n),
                    tokens=self.work.tokens,
                    hardware=hardware / used[0],
                    tokens_per_sec=statistics.median(rates[side.name]),
                    over_first=Ratio(1.0)
                    if side.name == first
                    else median_ratio(ratios(rates, side.name, first)),
                    waiting=statistics.fmean(
                        sum(profile["waiting"]) / sum(profile["step"]) for profile in profiles
                    ),
                    update_s=statistics.median(profiles[0]["update"]),
                    link=last.get("link_gb_s"),
                    memory_mb=max(answer["peak_memory_mb"] for answer in answers),
                )
            )
        return found

    def predictions(self, found: Sequence[Count]) -> list[Predicted]:
        """What the plain model says of each number of processes, given what the first does and how
        fast the link is.
        """
        first, predicted = found[0], []
        compute = first.step_s * (1 - first.waiting) - first.update_s
        for count in found:
            beside = self.device.type == "cuda" or count.processes * count.threads < cores()
            speed = Speed(compute, first.update_s / first.processes, count.link or math.inf, beside)
            predicted.append(predict(self.work, speed, count.processes, count.hardware, self.fsdp))
        return predicted


def check_counts(counts: Sequence[int], work: Work, device: torch.device) -> None:
    """Raises UserError for numbers of processes that cannot train this batch here."""
    if launch().world_size > 1:
        raise UserError("--scaling: starts its processes itself; run it without torchrun")
    if device.type == "mps":
        raise UserError("--scaling: several processes cannot share the Apple GPU; use --device cpu")
    sequences = work.tokens // work.seq_len
    for n in counts:
        if sequences % n:
            nearest = [
                max(m for m in range(1, n) if sequences % m == 0),
                *[m for m in range(n + 1, sequences + 1) if sequences % m == 0][:1],
            ]
            raise UserError(
                f"--scaling {n}: the {sequences} sequences of a step ({work.tokens:,} tokens) do "
                f"not divide among {n} "
                f"processes; nearest that work: {' or '.join(map(str, nearest))}"
            )
    if device.type == "cuda" and max(counts) > torch.cuda.device_count():
        raise UserError(
            f"--scaling {max(counts)}: each process takes a GPU, and there are "
            f"{torch.cuda.device_count()} here; leave "
            f"larger numbers out, or use --device cpu"
        )


# ---- the report

COLUMNS = [
    field("processes", "processes"),
    field("threads", "threads"),
    Column("batch", lambda count: f"{count.batch_size} x {count.micro_steps}"),
    field("tokens/s", "tokens_per_sec", ",.0f"),
    Column("x first", lambda count: "" if count.over_first.low is None else str(count.over_first)),
    field("efficiency", "efficiency", ".0%"),
    field("waiting", "waiting", ".1%"),
    field("MB each", "memory_mb", ",.0f"),
]


def ms(seconds: float) -> str:
    """Seconds in milliseconds."""
    return f"{seconds * 1e3:,.1f}"


PREDICTED = [
    Column("processes", lambda row: str(row[0].processes)),
    Column("step, ms", lambda row: ms(row[0].step_s)),
    Column("predicted", lambda row: ms(row[1].step_s)),
    Column("waiting, ms", lambda row: ms(row[0].waiting * row[0].step_s)),
    Column("predicted", lambda row: ms(row[1].waiting_s)),
    Column("update, ms", lambda row: ms(row[0].update_s)),
    Column("predicted", lambda row: ms(row[1].update_s)),
    Column("link, GB/s", lambda row: f"{row[0].link:.3g}"),
]


def write_report(
    found: Sequence[Count],
    predicted: Sequence[Predicted],
    name: str,
    folder: Path,
    device: torch.device,
    rounds: int,
) -> None:
    """Print what was found beside what the model predicts, and write it: report.md, results.json
    and a picture.
    """
    beside = [row for row in zip(found, predicted, strict=True) if row[0].link]
    print_table(f"{found[0].tokens:,} tokens a step, {rounds} rounds in turn", COLUMNS, found)
    print_table("measured, and predicted from the first and the link", PREDICTED, beside)
    draw(found, predicted, folder / "scaling.png")
    lines = [
        f"# {Path(name).stem}: the same batch on more processes",
        "",
        f"{machine()}; device {device_name(device)}, torch {torch.__version__}, commit "
        f"{git_commit()}, {datetime.date.today()}. "
        f"{found[0].tokens:,} tokens a step, {rounds} rounds in turn after the first {LEFT_OUT}.",
        "",
        *markdown_table(COLUMNS, found),
        "",
        "batch: sequences of a micro-step x micro-steps, of each process. tokens/s: of all "
        "processes, the median of the rounds. x "
        "first: the median of the rounds' ratios, with its 95% interval. Efficiency: that over "
        "how much more hardware it has, GPUs "
        "or, on a CPU, cores in use. Waiting: the share of a profiled step in which a process "
        "has a transfer under way "
        "and computes nothing, the mean over the processes. MB: peak memory, of the GPU's "
        "tensors on CUDA, else of a process.",
        "",
        "## Beside the model's prediction",
        "",
        *markdown_table(PREDICTED, beside),
        "",
        f"Predicted by the model of docs/scaling.md from the step of "
        f"{describe(found[0].processes)} and from the speed of the "
        f"link, which the processes measured by all-reduces of the size of DDP's buckets.",
        "",
        "![tokens/s and waiting](scaling.png)",
    ]
    write_whole(folder / "report.md", "\n".join(lines) + "\n")
    rows: list[dict[str, Any]] = [
        dataclasses.asdict(count)
        | {
            "step_s": count.step_s,
            "efficiency": count.efficiency,
            "predicted": dataclasses.asdict(said) | {"step_s": said.step_s},
        }
        for count, said in zip(found, predicted, strict=True)
    ]
    write_whole(
        folder / "results.json",
        json.dumps(
            {
                "machine": machine(),
                "git": git_commit(),
                "torch": torch.__version__,
                "config": name,
                "rounds": rounds,
                "counts": rows,
            },
            indent=1,
        )
        + "\n",
    )


def draw(found: Sequence[Count], predicted: Sequence[Predicted], path: Path) -> None:
    """How many times as fast as the first, and the share of waiting, measured and predicted."""
    figure, (left, right) = new_figure(1, 2, figsize=(9, 3.6))
    numbers, factors = [count.processes for count in found], [count.over_first for count in found]
    middle = [factor.median for factor in factors]
    arms = [
        [factor.median - factor.ends[0] for factor in factors],
        [factor.ends[1] - factor.median for factor in factors],
    ]
    left.errorbar(numbers, middle, yerr=arms, marker="o", color=BLUE, label="measured")
    left.plot(
        numbers,
        [predicted[0].step_s / said.step_s for said in predicted],
        "s--",
        color=ORANGE,
        label="predicted",
    )
    left.plot(
        numbers,
        [count.hardware for count in found],
        ":",
        color="0.4",
        label="as much faster as there is more hardware",
    )
    left.set(ylabel=f"tokens/s over those of {numbers[0]}")
    left.legend(fontsize=8)
    right.plot(
        numbers, [100 * count.waiting for count in found], "o-", color=BLUE, label="measured"
    )
    right.plot(
        numbers,
        [100 * said.waiting_s / said.step_s for said in predicted],
        "s--",
        color=ORANGE,
        label="predicted",
    )
    right.set(ylabel="share of the step spent waiting, %")
    for axes in (left, right):
        axes.set(xlabel="processes")
        axes.set_xticks(numbers)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    save_picture(figure, path)
