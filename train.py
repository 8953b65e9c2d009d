"""Train GPT-2: `python train.py --config quickstart.yaml`, or `torchrun --nproc_per_node=N train.py
--config ddp.yaml`.
"""

from runtime.signals import StopRequest, end_unfinished

STOP = StopRequest()
if __name__ == "__main__":
    STOP.hear("imports")  # first of all, as they take seconds

from config import Config
from runtime.cli import parse_command_line, reconfigure_output
from runtime.errors import TrainingError, reported
from runtime.process import before_torch, trim_memory_if_short

if __name__ == "__main__":
    # before torch is imported, which takes seconds: --help and mistakes answer at once
    CONFIG = parse_command_line(Config, description=__doc__, config_file=True)
    before_torch()

import datetime
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoint import (
    State,
    check_same_tokens,
    emergency_save,
    find_checkpoint,
    hint,
    keep_best,
    open_run,
    save,
)
from data.prepare import prepare_if_missing
from data.token_file import TokenFileError
from data.tokenizer import get_encoding
from dataloader import DataLoader, TokenStream, is_validation, open_corpus, prefetch
from estimate import estimate
from evaluate import HellaSwag, validation_loss
from kernels.attention import blocked_is_faster
from optimizer import clip_gradients, learning_rate, make_optimizers
from runtime.device import (
    autocast_to,
    check_compiler,
    choose_device,
    describe,
    flash_note,
    matmul_dtype,
    prepare,
    synchronize,
)
from runtime.measure import TimeLeft, bf16_note, live_figures, memory_before_mb, summarize
from runtime.parallel import compiling_told, gradients_averaged, parallelize
from runtime.runlog import LogRow, RunFolder
from runtime.world import World, joined_world, launch
from sample import sample_text
from weights import build_model


def build(
    config: Config,
    world: World,
    say: Callable[[str], None],
    checkpoint: Path | None = None,
) -> tuple[Config, State, Any, Callable]:
    """All that a step computes with: the config, which has taken over the architecture of the
    weights it starts from; the state; the model to train; and the autocast around forward and loss.
    `say` is told what the user should know.

    Raises UserError for what this device cannot do and for weights that cannot be had or do not
    fit.
    """
    device, dtype, before = (
        world.device,
        matmul_dtype(bf16=config.bf16, fp16=config.fp16),
        memory_before_mb(world.device),
    )
    notes = prepare(
        device, tf32=config.tf32, bf16=config.bf16, recompute_cheap=config.recompute_cheap
    )
    notes += (
        check_compiler(device, config.compile_mode, config.accumulation_steps(world.world_size))
        if config.compile
        else []
    )
    torch.manual_seed(config.seed)
    config, raw_model = world.raise_on_all(lambda: build_model(config, checkpoint))
    torch.manual_seed(
        config.seed + world.rank
    )  # what is random from here on is dropout: different in each process
    if config.flash:
        shape = (config.batch_size, config.n_head, config.seq_len, config.n_embd // config.n_head)
        notes += flash_note(
            device,
            dtype,
            shape,
            config.dropout,
            config.compile and blocked_is_faster(device, dtype, shape[2]),
        )
    model = parallelize(raw_model, raw_model.transformer.h, world, config)
    optimizers, groups = make_optimizers(raw_model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=config.fp16)
    say(
        "\n".join(
            [
                f"{raw_model.num_parameters():,} parameters",
                *groups,
                *(f"note: {note}" for note in notes),
            ]
        )
    )
    return config, State(raw_model, optimizers, scaler, before), model, autocast_to(dtype, device)


def open_data(
    config: Config, run: RunFolder, world: World, n_vocab: int
) -> tuple[DataLoader, TokenStream, HellaSwag]:
    """The training batches, the validation split and HellaSwag; prepares a small corpus that is not
    there yet. Raises UserError.
    """
    if config.sample_every:
        get_encoding()  # fails now rather than at the first sample
    folder = Path(config.data_dir) / config.dataset
    world.on_rank0(lambda: prepare_if_missing(folder, run.message))
    split, val = world.raise_on_all(
        lambda: open_corpus(folder, config.seq_len, n_vocab, config.val_fraction)
    )
    loader = world.raise_on_all(
        lambda: DataLoader(
            split,
            config.batch_size,
            world_size=world.world_size,
            rank=world.rank,
            seed=config.seed,
            shuffle=config.shuffle,
            accumulation=config.accumulation_steps(world.world_size),
            overfit_batch=config.overfit_batch,
        )
    )
    if config.eval_every and not len(val):
        raise TokenFileError(
            f"{folder}: eval_every {config.eval_every}, but nothing to validate on: "
            f"{val.tokens:,} tokens make "
            f"no sequence of {config.seq_len}; raise val_fraction (now {config.val_fraction:g}), "
            f"such as to 0.1, "
            f"or add a *_val_*.bin file"
        )
    if config.val_fraction and val.spans and is_validation(val.spans[0].path):
        run.message(f"note: val_fraction has no effect: {folder} has validation files of its own")
    check_same_tokens(folder, split.fingerprint(), world)
    run.message(
        f"loaded {split.tokens:,} tokens of {folder}"
        + (f", and {val.tokens:,} for validation" if val.tokens else "")
    )
    run.message(loader.describe())
    return loader, val, HellaSwag(config, world)


def train(
    config: Config,
    world: World,
    clock: Callable[[], float] = time.perf_counter,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Run the config from the first step to the last, or until `stop` is asked for; returns what
    summary.json holds.

    Raises UserError for what cannot be trained, before anything is written unless a corpus goes bad
    or a checkpoint cannot be saved later on, TrainingError at a non-finite loss, norm or weight,
    and Stopped at a signal before the first step.
    """
    device, started, stop = (
        world.device,
        datetime.datetime.now(datetime.UTC),
        stop or StopRequest("set-up"),
    )
    resumed, config, notes = find_checkpoint(config, world)
    run = RunFolder(
        Path(config.log_dir) / str(config.run_name), world.rank, config.advice(), config.trackers()
    )
    if resumed and resumed.saved.step >= config.max_steps and world.broadcast(run.is_finished()):
        run.message(
            f"nothing to do: {resumed.folder} is step {resumed.saved.step} of "
            f"{config.max_steps}; raise max_steps to go on"
        )
        return {"steps": resumed.saved.step}

    run.message(describe(world))
    config, state, model, autocast = build(
        config, world, run.message, resumed.folder if resumed else None
    )
    loader, val, hellaswag = open_data(config, run, world, state.model.config.n_vocab)
    corpus, tokens_per_step = loader.stream.fingerprint(), loader.global_batch * config.seq_len
    if resumed:
        resumed.restore(state, config, loader.stream.fingerprint(like=resumed.saved.corpus), world)
    run.message(
        "optimizations on: {}; off: {}".format(
            *(", ".join(some) or "none" for some in config.optimizations(world.world_size))
        )
    )
    first_step, step_seconds, loss, stopping = state.step + 1, [], math.nan, False  # of this call
    batches = prefetch(loader, device, range(first_step, config.max_steps + 1))

    with (
        run,
        stop,
        emergency_save(run, state, config, corpus, world),
        compiling_told(run.message, world, config.compile),
    ):
        for note in [
            *notes,
            *config.notes(),
            *(bf16_note(device) if config.bf16 else []),
            *open_run(run, config, resumed, world),
        ]:
            run.message(f"note: {note}")
        run.follow(
            config.model_dump(mode="json"),
            lambda: live_figures(
                state.model.flops_per_token(config.seq_len),
                matmul_dtype(bf16=config.bf16, fp16=config.fp16),
                world,
            ),
        )
        saved, saved_step = resumed.folder if resumed else None, state.step
        evaluated, hellaswag.scores = world.broadcast(run.evaluations())
        if resumed:
            run.message(f"going on from {resumed.folder}, after step {state.step}")
        stop.end_early(world.sum(stop.received is not None))
        begun, time_left = clock(), TimeLeft(config.max_steps, clock)
        while True:
            # ---- between two steps: save, evaluate, sample, stop
            step, last = state.step, state.step >= config.max_steps
            if step != saved_step and (last or stopping or is_due(config.checkpoint_every, step)):
                saved, saved_step = save(run, state, config, corpus, world), step
            if stopping:  # whoever stopped it may not wait
                break
            if config.eval_every and (last or is_due(config.eval_every, step)):
                if step not in evaluated:
                    evaluated[step] = validation_loss(
                        state.model, val, config.batch_size, config.eval_tokens, world, autocast
                    )
                    if not math.isfinite(evaluated[step]):
                        raise TrainingError(
                            f"step {step}: the validation loss is {evaluated[step]}; "
                            f"{hint(run.path, config.lr)}"
                        )
                    run.log_evaluation(step, config.max_steps, val_loss=evaluated[step])
                if step and evaluated[step] < (
                    math.inf if state.best_val_loss is None else state.best_val_loss
                ):
                    if step != saved_step:
                        saved, saved_step = save(run, state, config, corpus, world), step
                    state.best_val_loss = evaluated[step]
                    keep_best(run, saved, world)
            hellaswag.score_if_due(step, state.model, run, autocast)
            if config.sample_every and step and (last or is_due(config.sample_every, step)):
                run.log_sample(
                    step,
                    sample_text(
                        state.model,
                        config.sample_prompt,
                        config.sample_tokens,
                        seed=config.seed,
                        agree=world.broadcast,
                    )[0],
                )
            if last:
                break

            # ---- one step
            trim_memory_if_short()
            step, stop.phase = step + 1, "steps"
            state.begin_step(device)
            lr = learning_rate(step, config)
            synchronize(device)
            start, losses = clock(), []
            for micro_step in range(loader.accumulation):
                x, y = next(batches)  # (B, T) each
                with gradients_averaged(model, now=micro_step == loader.accumulation - 1):
                    with autocast():
                        micro_loss = model(x, y) / loader.accumulation
                    state.scaler.scale(micro_loss).backward()
                losses.append(micro_loss.detach())
            for optimizer in state.optimizers:
                state.scaler.unscale_(optimizer)
            total_norm = clip_gradients(state.model, config.grad_clip)  # from before clipping
            loss, norm, stopping = world.all_reduce_metrics(
                torch.stack(losses).sum(), total_norm, stop.received is not None
            )
            # at an fp16 overflow the scaler leaves the update out by itself and lowers its scale
            overflow = (
                config.fp16
                and math.isfinite(loss)
                and not math.isfinite(norm)
                and state.scaler.get_scale() >= 1
            )
            is_good = (math.isfinite(loss) and math.isfinite(norm)) or overflow
            state.is_whole = False  # until all of it is updated
            for optimizer in state.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["lr_factor"]
                if is_good:
                    state.scaler.step(optimizer)
                optimizer.zero_grad(set_to_none=True)
            state.scaler.update()
            synchronize(device)
            step_seconds.append(clock() - start)

            state.step, state.is_whole, last, left = (
                step,
                True,
                step == config.max_steps,
                time_left.after(step),
            )
            if not is_good:
                what = f"step {step}: the loss is {loss}, the gradient norm {norm}, the learning rate {lr:g}"
                if state.skipped_steps == config.skip_nonfinite:
                    raise TrainingError(
                        f"{what}; {hint(run.path, config.lr)}"
                        + (", or bf16 instead of fp16" * config.fp16)
                    )
                state.skipped_steps += 1
                run.message(f"{what}: left out, {state.skipped_steps} of {config.skip_nonfinite}")
            stopping = stopping and not last  # the last step ends the run anyway
            if last or stopping or not is_good or step == 1 or is_due(config.log_every, step):
                run.log(
                    LogRow(
                        step,
                        loss,
                        lr,
                        norm,
                        step_seconds[-1] * 1e3,
                        tokens_per_step / step_seconds[-1],
                    ),
                    config.max_steps,
                    None if stopping else left,
                )

        summary = (
            summary_of(run, config, state, world, step_seconds, loss)
            | {
                "resumed_after_step": first_step - 1 or None,
                "val_loss": evaluated[max(evaluated)] if evaluated else None,
                "seconds": clock() - begun,
                "steps_this_call": len(step_seconds),
                "interrupted": stopping,
                "started": started.isoformat(timespec="seconds"),
            }
            | hellaswag.latest()
        )
        run.finish(summary, has_checkpoints=config.keep_last > 0)
    return summary


def summary_of(
    run: RunFolder, config: Config, state: State, world: World, seconds: list[float], loss: float
) -> dict[str, Any]:
    """What summary.json says of the steps, which took `seconds`, and of the last one's loss."""
    if (
        not seconds
    ):  # the run had ended after its last step, without its summary: the log has the times
        seconds, loss = world.broadcast(run.times_and_loss())
    tokens_per_step, dtype = (
        config.tokens_per_step(world.world_size),
        matmul_dtype(bf16=config.bf16, fp16=config.fp16),
    )
    return {
        "steps": state.step,
        "tokens": state.step * tokens_per_step,
        "parameters": state.model.num_parameters(),
        "skipped_steps": state.skipped_steps,
        "final_loss": loss if math.isfinite(loss) else None,
    } | summarize(
        seconds,
        tokens_per_step,
        state.model.flops_per_token(config.seq_len),
        dtype,
        world,
        state.memory_before,
    )


def is_due(every: int, step: int) -> bool:
    """Whether what is done every so many steps (0: never) is done after this one."""
    return every > 0 and step % every == 0


def main(config: Config, stop: StopRequest | None = None) -> None:
    """Train, or say what that would take; ends the process with a message and a status other than 0
    if that fails.
    """
    reconfigure_output()
    with (
        reported(config.log_dir, advice=config.advice()),
        joined_world(
            choose_device(config.device, launch()), config.timeout, config.alike()
        ) as world,
    ):
        if config.estimate:
            estimate(config, world)
        else:
            end_unfinished(train(config, world, stop=stop.hear("set-up") if stop else None), stop)


if __name__ == "__main__":
    main(CONFIG, STOP)
