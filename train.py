"""Train GPT-2: `python train.py --config quickstart.yaml`, or on several GPUs
`torchrun --nproc_per_node=N train.py --config ddp.yaml`.

`setup` switches each optimization on, `train_step` is one step, `train` the loop around it.
"""

from config import Config
from runtime.start import start

if __name__ == "__main__":
    # Before torch is imported, which takes seconds: --help and mistakes answer at once.
    CHECK = "is a command of its own, with the same options: python check.py"
    ELSEWHERE = dict.fromkeys(("check", "estimate", "fit"), CHECK)
    CONFIG = start(Config, config_file=True, elsewhere=ELSEWHERE)

import datetime
import functools
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from checkpoint.saved import SavedState
from checkpoint.weights import build_model
from data.prepare import prepare_if_missing
from data.vocabulary import GPT2
from dataloader import DataLoader, TokenStream, open_corpus, prefetch
from optimizer import clip_gradients, learning_rate, make_optimizers
from run.evaluation import Evaluation, is_due
from run.expected import ExpectedLosses
from run.folder import RunFolder
from run.log import RunLog
from run.save import advising, check_disk, end_unfinished, save, save_if_best
from run.start import find_checkpoint, is_finished, note_options, open_run, restore
from run.state import Batches, Figures, Run, State, take_random_state
from run.steps import PendingStep, finish_step, pending_step, rescue
from run.summary import announce_long_run, announce_options, finish, live_figures, summarize
from runtime.clock import mark_time
from runtime.console import Console, log
from runtime.device import (
    choose_device,
    ddp_options,
    fsdp_options,
    make_repeatable,
    memory_before_mb,
    recompute_cheap_operations,
    usable_precision,
)
from runtime.errors import TrainingError, reported
from runtime.signals import StopRequest
from runtime.start import return_freed_memory
from runtime.world import World, joined_world, no_sync


def setup(
    config: Config, world: World, resumed: SavedState | None = None, batches: Batches | None = None
) -> Run:
    """Build everything for a training step; each optimization is switched on here.

    `resumed`: the checkpoint to resume from. `batches`: inputs and targets (B, T) of
    every micro-step, on the device (default: from the config's corpus). The config of the result
    has the architecture of the weights in `init_from`, and the size of the corpus's own vocabulary.
    Raises UserError for an option that the device does not support, and for weights or tokens that
    are missing or have different vocabularies.
    """
    # The seed decides weights, order of the data and dropout: the same seed gives the same run.
    device, memory_before = world.device, memory_before_mb(world.device)
    make_repeatable(device)
    folder, vocabulary = Path(config.data_dir) / config.dataset, None
    if batches is None:
        vocabulary = world.on_rank0(lambda: prepare_if_missing(folder))
    torch.manual_seed(config.seed)
    config, model = world.raise_on_all(lambda: build_model(config, vocabulary, resumed))
    torch.manual_seed(config.seed + world.rank)  # dropout differs between ranks
    # The options as they act on this device and number of ranks.
    acting = config.on_device(device.type, world.world_size)
    announce_options(config, acting, world)

    # The times below come from logs/reference/gpu_ms.csv, a published list that states neither GPU
    # nor model, each optimization on top of the ones before it. ladder.py measures their worth on
    # this machine.

    # TF32 (`high`): the tensor cores multiply fp32 numbers, rounded to 10 bits of mantissa, and sum
    # in fp32. 1000 -> 333 ms a step. `medium` does the same with bf16 on CPUs that have AMX.
    # PyTorch keeps this setting for the whole process, so it is set in every run.
    torch.set_float32_matmul_precision(usable_precision(device, config.fp32_precision()))

    # Mixed precision: forward and loss do their matmuls in bf16: the range of fp32 in half
    # the bytes. 333 -> 300 ms. Softmax, norms and the loss sum many small numbers and stay in fp32,
    # as do weights, gradients and optimizer state.
    autocast = functools.partial(
        torch.autocast,
        device.type,
        dtype=getattr(torch, config.matmul_dtype),
        enabled=config.matmul_dtype != "float32",
    )
    # fp16 has less range: small gradients would be 0, so the scaler multiplies the loss, divides
    # the gradients, and skips steps whose gradients overflow.
    scaler = torch.amp.GradScaler(device.type, enabled=config.fp16)

    trained: Any = model
    if config.fsdp and world.distributed:
        from torch.distributed.fsdp import fully_shard

        # FSDP2: each rank keeps 1/N of weights, gradients and optimizer state. A block is gathered
        # only while it computes; parameters outside the blocks, such as the output head, from the
        # forward pass to their gradients. Blocks are compiled one by one, as FSDP gathers weights
        # between them.
        options = fsdp_options(device, world.world_size, bf16=config.bf16)
        for block in model.transformer.h:
            if config.compile:
                block.compile(mode=acting.compile_mode)
            fully_shard(block, **options)
        fully_shard(model, mesh=options["mesh"])  # last: parameters outside the blocks
    else:
        model.to(device)
        # torch.compile fuses all operations between two matmuls into one kernel, so that data
        # passes through memory once, and takes Python out of the step. 300 -> 130 ms, the most
        # after TF32. HellaSwag, sampling and checkpoints use the plain module, which shares its
        # weights: nothing is recompiled for their shapes, and names stay plain. The validation loss
        # has its own graph (run/evaluation.py).
        if config.compile:
            trained = torch.compile(model, mode=acting.compile_mode)
        # DDP: each rank computes its share of the batch. Gradients are averaged over the ranks,
        # bucket by bucket, while the backward pass still computes the next ones.
        if world.distributed:
            trained = DistributedDataParallel(trained, **ddp_options(device))
    # Activation checkpointing of cheap operations: a compiled backward pass recomputes norms, GELU
    # and casts instead of keeping their results. (--recompute, of whole blocks, is in model.py.)
    recompute_cheap_operations(acting.recompute_cheap)

    # AdamW with its weight-decay groups; with fused_adamw one kernel updates all parameters,
    # 93 -> 90 ms. Flash attention (130 -> 97 ms) and the padded vocabulary (97 -> 93 ms) are in
    # model.py.
    optimizers = make_optimizers(model, config, world.rank, world.world_size)
    state = State(model, optimizers, scaler, memory_before)

    # Batches: threads read ahead while the device computes. The sequences of a batch are a pure
    # function of the step, so a resumed run only needs its step.
    val, expected = TokenStream([], config.seq_len), ExpectedLosses({})
    if batches is None:
        loader, val = open_data(config, world, model.config.n_vocab)
        expected = world.on_rank0(lambda: ExpectedLosses.of(loader.stream, model.config.n_vocab))
        loader.announce(val)
        if vocabulary != GPT2:
            log.info(f"{folder} has {vocabulary}")
        log.debug(expected.description)
        restore(resumed, state, loader.stream.fingerprint(), config, world)
        batches = prefetch(loader, device, state.step + 1)
    return Run(config, world, state, trained, autocast, batches, val, expected, vocabulary or GPT2)


def open_data(config: Config, world: World, n_vocab: int) -> tuple[DataLoader, TokenStream]:
    """Open training batches and validation split of a corpus that is there."""
    folder = Path(config.data_dir) / config.dataset
    split, val = world.raise_on_all(
        lambda: open_corpus(folder, config.seq_len, n_vocab, config.val_fraction)
    )
    loader = DataLoader(
        split,
        config.batch_size,
        world_size=world.world_size,
        rank=world.rank,
        accumulation=config.accumulation_steps(world.world_size),
        seed=config.seed,
        shuffle=config.shuffle,
        overfit_batch=config.overfit_batch,
    )
    return loader, val


def train_step(run: Run, step: int) -> Figures:
    """Take one step of the run; steps count from 1.

    Returns its figures by name, tensors () on a device that may still compute them: reading one
    waits for it. If the loss or the norm is not finite, the weights stay unchanged.
    """
    config, state, losses = run.config, run.state, []
    accumulation = config.accumulation_steps(run.world.world_size)
    # Gradient accumulation: sum the gradients of all micro-steps before one update, so the batch
    # may be larger than fits in memory.
    for micro_step in range(accumulation):
        x, y = next(run.batches)  # (B, T) each
        with no_sync(run.model, micro_step < accumulation - 1):
            with run.autocast():
                loss = run.model(x, y) / accumulation  # the sum of the gradients is then a mean
            state.scaler.scale(loss).backward()
        losses.append(loss.detach())  # not read here: that would wait for the device

    # fp16 only: undo the loss scaling before clipping.
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)
    # Clipping scales the gradient of a bad batch down to a norm of grad_clip, so that it cannot
    # throw the weights far off.
    total_norm = clip_gradients(state.model, config.grad_clip)
    loss, norm = run.world.all_reduce_metrics(torch.stack(losses).sum(), total_norm)

    # Warm-up and schedule: the learning rate of this step, times each group's own factor.
    lr = learning_rate(step, config, state.seconds)
    updates = state.begin_update(loss, norm, config)  # False if loss or norm is not finite
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        if updates:
            state.scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    state.scaler.update()
    # A further figure is one more entry: it is logged, and sent to the trackers.
    return {"loss": loss, "norm": norm, "lr": lr}


def take_step(run: Run, stop: StopRequest | None = None, began: float = 0.0) -> PendingStep:
    """Start the next step without waiting for a GPU; `read_step` returns its figures.

    `began`: when the run would have begun without interruptions, on this rank's clock.
    """
    state, device = run.state, run.world.device
    if device.type == "cpu" and len(state.step_seconds) == 1:
        return_freed_memory()  # once, after the first step of this process
    step, start = state.step + 1, mark_time(device)
    figures = train_step(run, step)
    if run.config.fp16:
        figures["loss_scale"] = state.scaler.scale(torch.ones((), device=device))
    # All ranks learn together with the figures whether any of them was asked to stop, and the
    # time on rank 0's clock.
    asked = torch.full((), bool(stop and stop.received), device=device)
    own = 0.0 if run.world.rank else run.world.world_size * (time.perf_counter() - began)
    clock = torch.full((), own, device=device)
    figures["asked"], figures["seconds"] = run.world.all_reduce_metrics(asked, clock)
    pending = pending_step(step, figures, start)
    state.end_step()
    return pending


def between_steps(run: Run, evaluation: Evaluation, stopping: bool) -> None:
    """Save, evaluate and sample if due. Called before the first step and after each step.

    `stopping`: a rank was asked to stop. Raises TrainingError if the last update was skipped.
    """
    config, step, last = run.config, run.state.step, run.is_over
    stopping = stopping and not last  # the last step ends the run anyway
    # A run that ends always saves, so that no step is lost.
    if last or stopping or is_due(config.checkpoint_every, step, last):
        save(run)
    if not stopping:  # after a stop signal there may be no time for an evaluation
        val_loss = evaluation.validate(step, last)
        save_if_best(val_loss, run)
        evaluation.score_hellaswag(step, last)
        evaluation.sample(step, last)
    # The run is saved, but its last update is missing: the exit status has to show that.
    if last and run.state.problem:
        raise TrainingError(
            f"the update of the last step, {step}, was skipped: {run.state.problem}; resume for "
            f"more steps{'' if config.fp16 else ' with a lower --lr'}"
        )


def train(config: Config, world: World, stop: StopRequest | None = None) -> dict[str, Any]:
    """Run the config to its last step, or until `stop` is asked for; returns summary.json.

    Raises UserError for a run that cannot start, before anything is written, and later for a corpus
    that went bad or a checkpoint that cannot be saved; TrainingError for a loss, norm or weight
    that is not finite, or a skipped last update; Stopped at a signal before the first step.
    """
    with Console(world.rank) as console:
        resumed, config = find_checkpoint(config, world)
        if resumed and is_finished(resumed, config, world):
            return {"steps": resumed.step}
        path = Path(f"{config.log_dir}/{config.run_name}")
        runlog = RunLog(path, world.rank, config.last_step, config.trackers())
        run = setup(config, world, resumed)
        config = run.config
        evaluation = Evaluation(run, runlog)
        is_stale = run.state.validate_on(f"{run.val.fingerprint()} {config.eval_tokens}")
        announce_long_run(run)
        check_disk(run)

        # Nothing is written until here. From here on, only this run writes the folder, a signal
        # ends the run after its step, and a failing run is saved first.
        stop, began = stop or StopRequest(), datetime.datetime.now(datetime.UTC)
        with RunFolder(path, console, config.advice()) as folder, runlog, stop, advising(run):
            note_options(config, resumed, world)
            open_run(run, folder, resumed)
            if runlog.trackers.names:
                options = config.model_dump(mode="json")
                runlog.open_trackers(run.state.step, options, live_figures(run))
            evaluation.resume(repeat=run.state.step if is_stale else None)
            for step, loss in runlog.losses().items():
                run.expected.add(step, loss)  # earlier calls have logged the lines
            stop.end_early(world.any(stop.received is not None))
            take_steps(run, runlog, evaluation, stop)
            return finish(run, summarize(run, runlog) | evaluation.latest(), began)


def reads_at_once(run: Run) -> bool:
    """True if the latest step is read before the next one starts: it is the last one, something is
    due after it, or the device has computed it anyway.
    """
    config, step, last = run.config, run.state.step, run.is_over
    every = (config.checkpoint_every, config.eval_every, config.hellaswag_every)
    due = any(is_due(n, step, last) for n in (*every, config.sample_every))
    return last or due or run.world.device.type != "cuda"


def take_steps(run: Run, runlog: RunLog, evaluation: Evaluation, stop: StopRequest) -> None:
    """Take steps to the last one, or until a rank is asked to stop.

    Raises TrainingError if the last update was skipped.
    """
    state, world = run.state, run.world
    began: float | None = None  # when the first step would have begun without interruptions
    before: PendingStep | None
    pending: PendingStep | None = None  # the latest step, until it is read
    stopping = False  # a rank was asked to stop
    random_state = take_random_state(world.device)  # after the latest step
    try:
        while True:
            # First, so that a fresh start, a resumed run and the end take the same path.
            between_steps(run, evaluation, stopping)
            if stopping or run.is_over:
                return
            began = began or time.perf_counter() - state.seconds
            if not stop.has_begun:  # a signal may have come during the evaluation before
                stop.end_early(world.any(stop.received is not None))
                stop.has_begun = True
            before, pending = pending, take_step(run, stop, began)
            random_state = take_random_state(world.device)
            if before:  # read while a GPU computes the next one
                stopping = finish_step(before, run, runlog)
            if stopping or reads_at_once(run):
                before, pending = pending, None  # first, as an error would read it again
                stopping |= finish_step(before, run, runlog)
    except TrainingError:  # the state cannot be used
        raise
    except Exception as error:
        rescue(error, pending, random_state, run, runlog)
        raise


def main(config: Config) -> None:
    """Train; a failure ends the process with one line."""
    with (
        reported(config.log_dir, advice=config.advice()),
        joined_world(choose_device(config.device), config.timeout, config.must_match()) as world,
        StopRequest() as stop,
    ):
        end_unfinished(train(config, world, stop=stop), stop)


if __name__ == "__main__":
    main(CONFIG)
