"""Check a run before it takes days, for check.py: about a minute.

Each check prints a line: its finding, and advice if there is a problem. If a step would take long,
a small model with the same options is checked. Nothing is kept.
"""

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.files import SUMS, own_part
from config import GRAPHS_RECORDED, Config
from data.prepare import prepare_if_missing
from dataloader import DataLoader
from inference.validation import evaluating
from measure.preflight.estimate import Estimated
from model import GPT
from run.evaluation import read_needed
from run.log import UNKNOWN
from run.save import save
from run.start import find_checkpoint
from run.state import Run, put_random_state, take_random_state
from run.steps import StepRow, judge, read_step
from runtime.console import Console
from runtime.device import peak_memory_mb
from runtime.errors import TrainingError, UserError
from runtime.world import World
from train import open_data, setup, take_step, train_step

Finding = tuple[bool, str, str]  # passed?, the finding, advice if it did not pass
LONG_STEP = 1.5  # seconds; if a step takes longer, a small model is checked
STEPS, OVERFIT_STEPS = 3, 30
OVERFLOWS = 128  # 128 overflows bring any loss scale of fp16 below 1
# The overfit check passes if the loss of the repeated batch falls by this fraction.
OVERFIT_FALL = 0.02
# Its minimum learning rate: fine-tuning rates barely lower the loss in 30 steps.
OVERFIT_LR = 1e-3
WINDOWS = 20_000  # the most windows of the corpus to read


def check(config: Config, world: World, estimated: Estimated) -> bool:
    """Run and print all checks; returns True if all pass. All ranks must call this.

    Raises UserError for a mistake that a run would refuse, such as a corpus that is too short, and
    TrainingError if the ranks have different weights, or the device is too busy to be measured.
    """
    Path(config.log_dir).mkdir(parents=True, exist_ok=True)
    all_well = True
    with tempfile.TemporaryDirectory(dir=config.log_dir) as place:
        folder = Path(world.broadcast(place))
        for is_well, text, advice in findings(config, world, estimated, folder):
            has_problem = world.any(not is_well)
            all_well &= not has_problem
            if world.rank == 0:
                print(f"PROBLEM {text}; {advice}" if has_problem else f"ok      {text}", flush=True)
    return all_well


def findings(config: Config, world: World, estimated: Estimated, folder: Path) -> Iterator[Finding]:
    """Run the checks one by one. `folder`: for checkpoints, on the disk of the run's own."""
    corpus = Path(config.data_dir) / config.dataset
    try:
        world.on_rank0(lambda: prepare_if_missing(corpus))
        loader, val = open_data(config, world, config.n_vocab)
    except UserError as error:
        error.add_note("no check was made, only the estimate")
        raise
    yield corpus_is_read(loader)
    yield from targets_are_next(loader)
    if math.isnan(estimated.step_seconds):
        raise TrainingError(f"no checks: {UNKNOWN}; try again later")
    is_small = estimated.step_seconds > LONG_STEP
    run = setup(tried_config(config, world, folder, is_small), world)
    with Console(world.rank):
        read_needed(config, world, val, run.vocabulary)
    yield from steps_are_sound(run)  # first, as the next check gathers FSDP's parameters
    yield sees_no_future(run.state.model, world)
    yield from resumes_exactly(run)
    yield overfits(run)

    yield *estimated.disk, "make room, lower keep_last, or choose another log_dir"
    if is_small:
        seconds = estimated.step_seconds
        about = "the above is of a small model with the same options, uncompiled"
    else:
        seconds = statistics.median(run.state.step_seconds[-2:])
        about = f"memory: {peak_memory_mb(world.device):,.0f} MB at most"
    hours = config.max_minutes / 60 if config.max_minutes else config.max_steps * seconds / 3600
    yield True, f"{about}; a step takes about {seconds:.3g} s, the run {hours:,.2f} hours", ""


def tried_config(config: Config, world: World, folder: Path, is_small: bool) -> Config:
    """Return the config whose steps are taken: with a small model and batch if `is_small`.

    Weights of `init_from` keep their size.
    """
    steps = steps_of(config) + 1 + (OVERFLOWS if config.fp16 else 0)
    tried = config.with_options(
        log_dir=str(folder),
        run_name="check",
        keep_last=1,
        max_minutes=None,
        max_steps=max(config.max_steps, steps),
        warmup_steps=0,  # a warm-up's first steps may be too small for some parameters to move
    )
    if not is_small:
        return tried
    B, T = min(config.batch_size, 2), min(config.seq_len, 128)
    micro_steps = min(2, config.accumulation_steps(world.world_size))
    total = micro_steps * B * T * world.world_size
    tried = tried.with_options(batch_size=B, seq_len=T, compile=False, total_batch_tokens=total)
    if config.init_from != "scratch":
        return tried
    heads = min(config.n_head, 2)
    width = config.n_embd // config.n_head * heads
    return tried.with_options(n_layer=min(config.n_layer, 2), n_head=heads, n_embd=width)


def steps_of(config: Config) -> int:
    """Return the number of steps to take: the last ones are as fast as a long run's."""
    return STEPS + GRAPHS_RECORDED if config.has_graphs else STEPS


def take_updates(run: Run) -> Iterator[StepRow]:
    """Take the steps of `steps_of`, and yield each.

    Steps whose gradients overflow in fp16 do not count: its loss scale comes down first.
    """
    while run.state.step - run.state.skipped_overflows < steps_of(run.config):
        row = read_step(take_step(run), run.tokens_per_step)
        judge(row, run)
        yield row


def corpus_is_read(loader: DataLoader) -> Finding:
    """Read windows from all over the corpus; a token beyond the vocabulary raises UserError."""
    windows = range(0, len(loader.stream), math.ceil(len(loader.stream) / WINDOWS))
    for window in windows:
        loader.stream.read([window])
    tokens = len(windows) * loader.stream.seq_len
    return True, f"corpus: {tokens:,} tokens read, none beyond the vocabulary", ""


def targets_are_next(loader: DataLoader) -> Iterator[Finding]:
    """Compare inputs and targets, and the batches of two steps."""
    (x, y), (other, _) = loader.batch(1), loader.batch(2)
    follow = torch.equal(x[:, 1:], y[:, :-1])
    text = f"targets: {'' if follow else 'not '}the tokens after the inputs"
    yield follow, text, "look at TokenStream.read"
    same = torch.equal(x, other)
    text = f"batches: {'the same' if same else 'another'} one in each step"
    meant = loader.overfit_batch or loader.steps_per_epoch < 2
    yield meant or not same, text, "look at DataLoader.batch"


@torch.no_grad()
def sees_no_future(model: GPT, world: World) -> Finding:
    """Change the last token: no logit before it may change."""
    idx = torch.arange(min(16, model.config.block_size), device=world.device)[None]
    changed = idx.clone()
    changed[:, -1] = 0
    with evaluating(model):
        before, after = (model(tokens)[:, :-1] for tokens in (idx, changed))
    is_causal = torch.allclose(before, after, atol=1e-3)
    text = f"attention: {'no token sees a later one' if is_causal else 'tokens see later ones'}"
    return is_causal, text, "look at the causal mask, and for dropout in evaluation"


def steps_are_sound(run: Run) -> Iterator[Finding]:
    """Take steps; check the first loss, all gradients and updates, and that the ranks agree."""
    config, model = run.config, run.state.model
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    before = {name: own_part(p).detach().clone() for name, p in parameters.items()}
    learned = set[str]()

    def look(*_: object) -> None:
        for name, p in parameters.items():
            # the norm is inf or nan after an overflow in fp16
            if p.grad is not None and 0 < own_part(p.grad).norm() < math.inf:
                learned.add(name)

    for optimizer in run.state.optimizers:
        optimizer.register_step_pre_hook(look)
    first, *_ = take_updates(run)
    loss, guess = first.figures["loss"], math.log(config.n_vocab)
    is_well = abs(loss - guess) < 0.7 if config.init_from == "scratch" else loss < guess
    text = f"first loss: {loss:.3f}; a uniform guess has {guess:.3f}"
    yield is_well, text, "look at the initial weights, the loss, and the vocabulary's size"
    # With FSDP a rank sees only its own shards, and few tokens may leave some of them unchanged.
    at_rest = {n for n, p in parameters.items() if torch.equal(own_part(p), before[n])}
    problems = {
        "get no gradient": parameters.keys() - set.union(*run.world.gather(learned)),
        "are not updated": set.intersection(*run.world.gather(at_rest)),
        "keep gradients from step to step": {
            n for n, p in parameters.items() if p.grad is not None
        },
    }
    for problem, names in problems.items():
        named = f": {', '.join(sorted(names)[:3])}" if names else ""
        text = f"parameters: {len(names)} of {len(parameters)} {problem}{named}"
        yield not names, text, "look at forward, make_optimizers and train_step"


def resumes_exactly(run: Run) -> Iterator[Finding]:
    """Save and resume; another checkpoint must be equal, and the next step, on a CPU exactly."""
    config, world, device = run.config, run.world, run.world.device
    before = checksums(run)
    yield True, f"ranks: {world.world_size}, with the same weights", ""  # `save` checked it
    random_state = take_random_state(device)
    resume = config.with_options(resume=str(run.state.checkpoint))
    saved, resume = find_checkpoint(resume, world)
    resumed = setup(resume, world, saved)
    after = checksums(dataclasses.replace(resumed, config=config))  # the same options are written
    step = run.state.step + 1
    again = train_step(resumed, step)
    put_random_state(random_state, device)
    straight = train_step(run, step)
    tolerance = 0.0 if device.type == "cpu" else 1e-3
    lost = [line.split()[1] for line in before if line not in after]
    is_well = not lost and all(
        torch.allclose(torch.as_tensor(straight[name]), torch.as_tensor(again[name]), tolerance, 0)
        for name in straight
    )
    ours, theirs = straight["loss"], again["loss"]
    text = f"resume: next step's loss {theirs:.6f}, without resuming {ours:.6f}"
    if lost:
        text += f"; not restored: {', '.join(lost)}"
    yield is_well, text, "look at State.tensors, State.numbers, random states: one is not saved"


def checksums(run: Run) -> list[str]:
    """Save a run's state; return the lines of its SHA256SUMS, one per file."""
    run.state.checkpoint = None  # a step is saved only once
    save(run)
    sums = Path(str(run.state.checkpoint), SUMS)
    return run.world.on_rank0(lambda: sums.read_text().splitlines())


def overfits(run: Run) -> Finding:
    """Repeat one micro-batch at the full learning rate, from initial weights; its loss must fall.

    fp16's loss scaler starts in the run's state, so that no step overflows.
    """
    config = run.config.with_options(
        lr=max(run.config.lr, OVERFIT_LR),
        lr_schedule="constant",
        dropout=0.0,
        # A few sequences, uncompiled: another shape would compile again, with dynamic shapes, and a
        # compiled run's whole batch may not fit into memory uncompiled.
        batch_size=min(run.config.batch_size, 4),
        compile=False,
        total_batch_tokens=None,
        overfit_batch=True,
        max_steps=10**6,
    )
    repeating = setup(config, run.world)
    repeating.state.scaler.load_state_dict(run.state.scaler.state_dict())
    losses = [train_step(repeating, step)["loss"].item() for step in range(1, 1 + OVERFIT_STEPS)]
    return (
        losses[-1] < (1 - OVERFIT_FALL) * losses[0],
        f"one batch, repeated: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {OVERFIT_STEPS} steps",
        "raise lr, or look at the sign and the size of the update",
    )
