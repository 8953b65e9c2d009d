"""What more processes would do: a plain model of a training step, and what it says of hardware that
this project has not run on.

    python -m benchmarks.predict               the tables of docs/scaling.md, and its picture

bench.py --scaling holds the same model against what it measures. docs/scaling.md explains it.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from runtime.interrupt import end_at_ctrl_c

    end_at_ctrl_c()  # also during the imports

from collections.abc import Sequence
from dataclasses import dataclass

from config import Config, load_config
from runtime.cli import Options, parse_command_line
from runtime.errors import reported
from runtime.report import COLOURS, MARKERS, Column, field, markdown_table, new_figure, save_picture

BACKWARD = 2 / 3  # of the computation: two matrix products for each of the forward pass
GRADIENT = 4  # bytes: gradients are exchanged in fp32


# ---- the model


@dataclass(frozen=True)
class Work:
    """What a step of a run has to do, whatever the number of processes."""

    parameters: int
    # those of them whose gradients are ready only when the backward pass ends: the embeddings
    late: int
    tokens: int  # of all processes
    seq_len: int
    batch_size: int  # sequences that a process takes at a time, at most
    flops_per_token: int
    mixed: bool  # bf16 or fp16: FSDP gathers the weights in 2 bytes

    @staticmethod
    def of(config: Config) -> "Work":
        """The work of a step of a training config, whose batch is that of one process where no
        total is set.
        """
        import torch

        from model import GPT, GPTConfig

        with torch.device("meta"):  # the sizes alone
            model = GPT(GPTConfig.of(config))
        late = model.transformer.wte.weight.numel() + model.transformer.wpe.weight.numel()
        return Work(
            model.num_parameters(),
            late,
            config.tokens_per_step(1),
            config.seq_len,
            config.batch_size,
            model.flops_per_token(config.seq_len),
            config.bf16 or config.fp16,
        )

    def split(self, ranks: int) -> tuple[int, int]:
        """Sequences of a micro-step and micro-steps of a step, for each of so many processes, among
        which the batch divides: the largest micro-step that fits.
        """
        each = self.tokens // self.seq_len // ranks
        batch = max(n for n in range(1, min(each, self.batch_size) + 1) if each % n == 0)
        return batch, each // batch

    def sent(self, ranks: int, fsdp: bool = False) -> tuple[float, float]:
        """Bytes that each process sends over its link in a step, in rings; and how many of them no
        computation can hide.

        DDP: one all-reduce of all gradients. FSDP: in each micro-step the weights are gathered for
        the forward and again for the backward pass; the gradients are reduced once, each to the
        process that keeps it.
        """
        ring = (ranks - 1) / ranks
        if not fsdp:
            return ring * 2 * GRADIENT * self.parameters, ring * 2 * GRADIENT * self.late
        weight = 2 if self.mixed else 4
        return (
            ring * (2 * weight * self.split(ranks)[1] + GRADIENT) * self.parameters,
            ring * (weight + GRADIENT) * self.late,
        )


@dataclass(frozen=True)
class Speed:
    """What one process's hardware and its link do."""

    compute_s: float  # forward and backward of all of a step's tokens
    update_s: float  # gradient norm and optimizer, of all parameters
    link: float  # GB/s: what NCCL's tests call the bus bandwidth
    # whether transfers go on beside the computation; not where they need the cores that compute
    beside: bool = True


@dataclass(frozen=True)
class Predicted:
    """The parts of a step, in seconds."""

    compute_s: float
    update_s: float
    waiting_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.update_s + self.waiting_s


def predict(
    work: Work, speed: Speed, ranks: int, hardware: float | None = None, fsdp: bool = False
) -> Predicted:
    """A step on so many processes, which together have `hardware` times that of one process (none:
    as many times).
    """
    share = 1 / (hardware or ranks)  # of what one process's hardware would need alone
    compute = speed.compute_s * share
    # FSDP keeps and updates each parameter once, DDP on every process
    update = speed.update_s * share * (1 if fsdp else ranks)
    sent, late = (
        number / (speed.link * 1e9) if ranks > 1 else 0.0 for number in work.sent(ranks, fsdp)
    )
    # DDP's transfers begin in the last micro-step's backward pass, FSDP's are spread over the whole
    # computation
    window = compute if fsdp else BACKWARD * compute / work.split(ranks)[1]
    return Predicted(compute, update, max(late, sent - window) if speed.beside else sent)


# ---- published figures of hardware


@dataclass(frozen=True)
class Link:
    """A link between GPUs."""

    name: str
    speed: float  # GB/s
    source: str
    ranks: tuple[int, ...]  # numbers of GPUs to predict


LINKS = (
    Link(
        "NVLink, one machine",
        370,
        "NCCL's maintainers: 450 GB/s, less 20% for the protocol (NVIDIA/nccl-tests, issue 212)",
        (1, 2, 4, 8),
    ),
    Link(
        "PCIe 5.0, one machine",
        28,
        "8 RTX 5090, all_reduce_perf (NVIDIA/nccl, issue 1639)",
        (1, 2, 4, 8),
    ),
    Link(
        "one 400 Gb/s card for each machine of 8",
        46,
        "46 to 48 GB/s for each 400 Gb/s card (NVIDIA/nccl-tests, issue 290)",
        (16, 32, 64, 128),
    ),
    Link(
        "one 400 Gb/s card for each GPU, machines of 8",
        320,
        "4 machines of 8 H100 and 8 cards, all_reduce_perf (NVIDIA/nccl, issue 1221)",
        (16, 32, 64, 128),
    ),
)
GPU = "H100 SXM"
PEAK, MEMORY = 989e12, 3.35e12  # FLOP/s in bf16 without sparsity, bytes/s; NVIDIA's data sheet
# bytes of a parameter: AdamW reads it, its gradient and two averages, and writes all but the
# gradient, which the norm reads too
UPDATE_BYTES = 8 * 4


@dataclass(frozen=True)
class Published:
    """How fast a model was trained on 8 of these GPUs."""

    config: str
    tokens_per_sec: float  # of each GPU
    source: str


MODELS = (
    Published(
        "gpt2_124m",
        10e9 / (45 * 60) / 8,
        "llm.c, 10 billion tokens in 45 minutes on 8 H100 (KellerJordan/modded-nanogpt, README)",
    ),
    Published(
        "gpt2_1558m",
        1_048_576 / 2.80 / 8,
        "llm.c, 1,048,576 tokens in 2.80 s on 8 H100 (karpathy/llm.c, scripts/run_gpt2_1558M.sh)",
    ),
)


def speed_of(work: Work, published: Published, link: Link) -> Speed:
    """One of these GPUs and its link."""
    update = UPDATE_BYTES * work.parameters / MEMORY
    # what the published step spent on its update and on waiting is small beside it, and stays in
    # the computation
    return Speed(work.tokens / published.tokens_per_sec, update, link.speed)


# ---- tables and picture


@dataclass(frozen=True)
class Case:
    """One prediction."""

    config: str
    link: Link
    ranks: int
    fsdp: bool
    work: Work
    predicted: Predicted
    alone: Predicted  # on one GPU

    @property
    def efficiency(self) -> float:
        """The share of the tokens/s that as many GPUs would reach if each did what one does alone."""
        return self.alone.step_s / self.ranks / self.predicted.step_s

    @property
    def tokens_per_sec(self) -> float:
        """Of all GPUs."""
        return self.work.tokens / self.predicted.step_s


def cases() -> list[Case]:
    """All predictions."""
    found = []
    for model in MODELS:
        work = Work.of(load_config(f"{model.config}.yaml"))
        for link in LINKS:
            speed = speed_of(work, model, link)
            found += [
                Case(
                    model.config,
                    link,
                    ranks,
                    fsdp,
                    work,
                    predict(work, speed, ranks, fsdp=fsdp),
                    predict(work, speed, 1),
                )
                for fsdp in (False, True)
                for ranks in link.ranks
            ]
    return found


COLUMNS = [
    field("model", "config"),
    Column("link", lambda case: case.link.name),
    field("GPUs", "ranks"),
    Column("", lambda case: "FSDP" if case.fsdp else "DDP"),
    Column("sent, GB", lambda case: f"{case.work.sent(case.ranks, case.fsdp)[0] / 1e9:.3g}"),
    Column("step, ms", lambda case: f"{case.predicted.step_s * 1e3:,.0f}"),
    Column("waiting", lambda case: f"{case.predicted.waiting_s / case.predicted.step_s:.0%}"),
    field("tokens/s", "tokens_per_sec", ",.0f"),
    field("efficiency", "efficiency", ".0%"),
]
INPUT_COLUMNS = [
    field("model", "config"),
    Column("tokens/s on one GPU", lambda model: f"{model.tokens_per_sec:,.0f}"),
    Column("of the peak", lambda model: f"{utilization(model):.0%}"),
    field("source", "source"),
]
LINK_COLUMNS = [field("link", "name"), field("GB/s", "speed", "g"), field("source", "source")]


def utilization(model: Published) -> float:
    """The share of the GPU's peak that the published speed is."""
    return (
        model.tokens_per_sec * Work.of(load_config(f"{model.config}.yaml")).flops_per_token / PEAK
    )


def tables(found: Sequence[Case]) -> list[str]:
    """The inputs and the predictions, as lines of markdown; of each link, its largest number of
    GPUs.
    """
    return [
        *markdown_table(LINK_COLUMNS, LINKS),
        "",
        *markdown_table(INPUT_COLUMNS, MODELS),
        "",
        *markdown_table(COLUMNS, [case for case in found if case.ranks == case.link.ranks[-1]]),
    ]


def draw(found: Sequence[Case], path: Path) -> None:
    """Efficiency over the number of GPUs: a picture for each model, a line for each link, dashed
    under FSDP.
    """
    figure, both = new_figure(1, len(MODELS), figsize=(10, 4.6), sharey=True)
    for axes, model in zip(both, MODELS, strict=True):
        for link, colour, marker in zip(LINKS, COLOURS, MARKERS, strict=False):
            for fsdp in (False, True):
                line = [
                    case
                    for case in found
                    if (case.config, case.link, case.fsdp) == (model.config, link, fsdp)
                ]
                axes.plot(
                    [case.ranks for case in line],
                    [100 * case.efficiency for case in line],
                    color=colour,
                    marker=marker,
                    markersize=5,
                    linestyle="--" if fsdp else "-",
                    label=f"{link.name}, {'FSDP' if fsdp else 'DDP'}",
                )
        axes.set(title=f"{model.config}: a prediction", xlabel=f"{GPU} GPUs", ylim=(0, 105))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks := [2**n for n in range(8)], map(str, ticks))
        axes.grid(alpha=0.3)
    both[0].set_ylabel("predicted efficiency, %")
    figure.legend(
        *both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8
    )
    save_picture(figure, path)


class PredictOptions(Options):
    """options"""

    output: str = "docs/scaling.png"
    """where the picture goes"""


def main(argv: Sequence[str]) -> None:
    """Print the tables and draw the picture. Raises UserError."""
    options = parse_command_line(PredictOptions, argv, description=__doc__)
    found = cases()
    print("\n".join(tables(found)))
    draw(found, Path(options.output))


if __name__ == "__main__":
    with reported("the picture"):
        main(sys.argv[1:])
