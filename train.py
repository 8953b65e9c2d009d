"""Train GPT-2: `python train.py --config quickstart.yaml`, or `torchrun --nproc_per_node=N train.py --config ddp.yaml`."""

import os

from config import Config, UserError, did_you_mean, exit_with, parse_command_line, reconfigure_output

if __name__ == "__main__":
    # before torch is imported, which takes seconds: --help and mistakes answer at once
    CONFIG = parse_command_line(Config, description=__doc__, config_file=True)
    # PyTorch's CPU allocator then asks Linux for large pages: fewer page faults, faster steps on a CPU
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import contextlib
import datetime
import importlib
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from checkpoint import CheckpointError, RandomState, RunState, all_checkpoints, keep_best, save_checkpoint
from data.token_file import TokenFileError
from data.tokenizer import TokenizerError, get_encoding
from dataloader import DataLoader, TokenStream, is_validation, open_corpus, prefetch
from device import (
    autocast_for,
    check_compiler,
    device_name,
    flash_note,
    is_out_of_memory,
    make_repeatable,
    set_precision,
    synchronize,
)
from evaluate import validation_loss
from model import GPT
from optimizer import clip_gradients, learning_rate, make_optimizers
from parallel import Process, average, gather, start_process
from resume import build_model, find_checkpoint, restore, resumed_config
from runlog import (
    EVAL_COLUMNS,
    LOG_COLUMNS,
    append_row,
    continue_run_folder,
    duration,
    log_line,
    read_rows,
    start_run_folder,
    summarize,
    write_whole,
)
from sample import sample_text
from signals import StopRequest

SMALL_CORPORA = ("pydocs", "shakespeare")  # prepared when first asked for


class TrainingError(Exception):
    """The run cannot go on; the message says why and what may help."""


# ---- setting up


def open_data(config: Config, process: Process, n_tokens: int) -> tuple[DataLoader, TokenStream]:
    """The training batches and the validation split; prepares a small corpus that is not there yet.

    Raises TokenFileError or TokenizerError.
    """
    folder = Path(config.data_dir) / config.dataset
    if process.rank == 0 and not any(folder.glob("*.bin")):
        if config.dataset not in SMALL_CORPORA:
            there = {path.parent.name for path in folder.parent.glob("*/*.bin")}
            own_text = f"python data/text.py FILE --name {folder.name}"
            script = "python data/fineweb.py" if config.dataset == "fineweb" else own_text
            nearest = did_you_mean(config.dataset, sorted(there.union(SMALL_CORPORA)))
            raise TokenFileError(f"{folder}: no such corpus (a folder of *.bin token files){nearest}; write it with: {script}")
        process.say(f"preparing {folder}")
        importlib.import_module(f"data.{config.dataset}").prepare(folder)
    if process.distributed:
        dist.barrier()
    train, val = open_corpus(folder, config.seq_len, n_tokens, config.val_fraction)
    loader = DataLoader(train, config.batch_size, world_size=process.world_size, rank=process.rank,
                        accumulation=config.accumulation_steps(process.world_size), seed=config.seed,
                        shuffle=config.shuffle, overfit_batch=config.overfit_batch)
    if config.eval_every and not len(val):
        raise TokenFileError(f"{folder}: eval_every {config.eval_every}, but nothing to validate on: {val.tokens:,} tokens make "
                             f"no sequence of {config.seq_len}; raise val_fraction (now {config.val_fraction:g}), such as to 0.1, "
                             f"or add a *_val_*.bin file")
    if config.val_fraction and val.spans and is_validation(val.spans[0].path):
        process.say(f"note: val_fraction has no effect: {folder} has validation files of its own")
    process.say(f"loaded {train.tokens:,} tokens of {folder}" + (f", and {val.tokens:,} for validation" if val.tokens else ""))
    process.say(f"1 epoch = {loader.steps_per_epoch:,} batches")
    process.say(f"1 step = {loader.global_batch * config.seq_len:,} tokens: batch_size {config.batch_size} x seq_len "
                f"{config.seq_len} x {process.world_size} processes x {loader.accumulation} micro-steps")
    return loader, val


# ---- one step


def compute_gradients(model: torch.nn.Module, batches: Iterator[tuple[Tensor, Tensor]], accumulation: int,
                      optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler, grad_clip: float,
                      autocast: Callable[[], contextlib.AbstractContextManager]) -> tuple[Tensor, Tensor]:
    """Forward and backward of all micro-steps, clipping. Returns this process's mean loss and the global gradient norm before
    clipping, both on the device."""
    losses = []
    for micro_step in range(accumulation):
        x, y = next(batches)
        last = micro_step == accumulation - 1
        # DDP averages gradients over the processes in the last micro-step only; no_sync must cover the forward too
        accumulate = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else contextlib.nullcontext()
        with accumulate:
            with autocast():
                loss = model(x, y) / accumulation
            scaler.scale(loss).backward()
        losses.append(loss.detach())
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    return torch.stack(losses).sum(), clip_gradients(model, grad_clip)


def update_weights(optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler) -> None:
    """One step of the optimizers, with the gradients that are there."""
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


# ---- the run


def train(config: Config, process: Process, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Run the config from the first step to the last; returns what summary.json holds.

    Raises UserError, TokenFileError, TokenizerError or CheckpointError, before anything is written unless a corpus goes bad
    or a checkpoint cannot be saved later on, and TrainingError at a non-finite loss, norm or weight.
    """
    device, say = process.device, process.say
    started = datetime.datetime.now(datetime.UTC)
    resume_notes: list[str] = []
    if resumed := find_checkpoint(config, process):
        config, resume_notes = resumed_config(config, *resumed, process.world_size)
    checkpoint, state = resumed or (None, None)
    done = state.step if state else 0  # steps taken before this call
    run = Path(config.log_dir) / str(config.run_name)
    if done >= config.max_steps and gather((run / "summary.json").exists(), process)[0]:
        say(f"nothing to do: {checkpoint} is step {done} of {config.max_steps}; raise max_steps to go on")
        return {"steps": done}
    notes = resume_notes + config.notes() + set_precision(config, device)
    make_repeatable(device)
    if config.compile:
        check_compiler(device)
        micro_steps = config.accumulation_steps(process.world_size)
        if config.compile_mode in ("reduce-overhead", "max-autotune") and device.type == "cuda" and micro_steps > 1:
            raise UserError(f"compile_mode {config.compile_mode} with {micro_steps} micro-steps: its CUDA graphs would overwrite "
                            f"the accumulated gradients; use compile_mode default or max-autotune-no-cudagraphs, or a batch_size that "
                            f"makes one micro-step")
        if config.compile_mode == "reduce-overhead" and device.type != "cuda":
            notes.append("compile_mode reduce-overhead has no effect without CUDA: it records CUDA graphs")
    if config.sample_every:
        get_encoding()  # fails now rather than at the first sample

    # data and model
    torch.manual_seed(config.seed)
    config, raw_model = build_model(config, checkpoint)
    loader, val = open_data(config, process, raw_model.config.n_tokens)
    corpus = loader.stream.fingerprint()
    if state and state.corpus != corpus:
        raise CheckpointError(f"{checkpoint} was trained on another corpus than {config.data_dir}/{config.dataset}: its "
                              f"fingerprint is {state.corpus[:12]}, this one's {corpus[:12]}; restore it, or begin a new run")
    raw_model.to(device)
    torch.manual_seed(config.seed + process.rank)  # what is random from here on is dropout: different in each process
    # evaluation, sampling and checkpoints use raw_model: nothing is compiled again for their shapes, names stay plain
    model: Any = torch.compile(raw_model, mode=config.compile_mode) if config.compile else raw_model
    if process.distributed:
        # the buffers are constants; the option has a new name since PyTorch 2.13
        known = inspect.signature(DistributedDataParallel).parameters
        options: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None,
                                        gradient_as_bucket_view=True, **options)

    # optimizer
    optimizers, group_lines = make_optimizers(raw_model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=config.fp16)
    autocast = autocast_for(config, device)
    if checkpoint and state:
        restore(checkpoint, state, raw_model, optimizers, scaler, process)

    # what the user should know
    announce(config, process, raw_model, group_lines)
    if process.rank == 0:  # the lock is held until the process or this function ends
        more_notes, lock = start_run_folder(run, config) if not checkpoint else ([], continue_run_folder(run, config, done))
        notes += more_notes
    notes += flash_note(config, device)
    for note in notes:
        say(f"note: {note}")
    if checkpoint:
        say(f"going on from {checkpoint}, after step {done}")

    def evaluate(step: int) -> float:
        loss = validation_loss(raw_model, val, config.batch_size, config.eval_tokens, device,
                               rank=process.rank, world_size=process.world_size, autocast=autocast)
        say(f"step {step:{width}d}/{config.max_steps} | validation loss {loss:.4f}")
        if not math.isfinite(loss):
            raise TrainingError(f"step {step}: the validation loss is {loss}; {remedy(run, config)}")
        if process.rank == 0:
            append_row(run / "eval.csv", EVAL_COLUMNS, (step, repr(loss)))
        return loss

    def save(step: int) -> Path | None:
        """Save a checkpoint; every process has to call this. Returns its folder on the one that wrote it."""
        states = gather(RandomState.take(device), process)
        if process.rank or not config.keep_last:
            return None
        if not all(p.isfinite().all() for p in raw_model.parameters()):
            raise TrainingError(f"step {step}: the weights are no longer finite and are not saved; {remedy(run, config)}")
        folder = save_checkpoint(run, raw_model, optimizers, RunState(
            step=step, tokens=step * tokens_per_step, tokens_per_step=tokens_per_step, best_val_loss=best_val_loss,
            skipped_steps=skipped, corpus=corpus, scaler=scaler.state_dict(), random=states,
            config=config.model_dump(mode="json") | {"data_dir": str(Path(config.data_dir).resolve())}), keep_last=config.keep_last)
        say(f"saved {folder}")
        return folder

    # the loop
    tokens_per_step = loader.global_batch * config.seq_len
    width = len(str(config.max_steps))
    batches = prefetch(loader, device, range(done + 1, config.max_steps + 1))
    step_seconds: list[float] = []
    skipped = state.skipped_steps if state else 0
    # by rank 0's file: the others may have read it before it was cut
    rows = gather(read_rows(run / "eval.csv") if checkpoint else [], process)[0]
    evaluated = {int(step): float(loss) for step, loss, *_ in rows}
    best_val_loss = min((loss for step, loss in evaluated.items() if step), default=state.best_val_loss if state else None)
    loop_start = first_step_end = clock()
    val_loss = evaluated.get(done)
    if config.eval_every and (done % config.eval_every == 0 or done == config.max_steps) and val_loss is None:
        val_loss = evaluate(done)  # before the first step; or the run ended between saving this step and evaluating it
        best_val_loss = min(val_loss, best_val_loss or math.inf) if done else None
    if checkpoint and val_loss is not None and val_loss == best_val_loss and process.rank == 0:
        keep_best(run, checkpoint)
    step, loss, stopping = done, math.nan, False
    with StopRequest() as stop:
        for step in range(done + 1, config.max_steps + 1):
            lr = learning_rate(step, config)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = lr

            # the timed part: nothing but the step, between two synchronizations
            synchronize(device)
            start = clock()
            figures = compute_gradients(model, batches, loader.accumulation, optimizers, scaler, config.grad_clip, autocast)
            if not config.skip_nonfinite:  # else the figures have to be read first
                update_weights(optimizers, scaler)
            loss, norm, stopping = average(*figures, stop.received is not None, process)
            stopping = stopping and step < config.max_steps  # the last step ends the run anyway
            scaler_skips = config.fp16 and not math.isfinite(norm) and scaler.get_scale() >= 1  # and lowers the scale
            finite = math.isfinite(loss) and (math.isfinite(norm) or scaler_skips)
            if config.skip_nonfinite and finite:
                update_weights(optimizers, scaler)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            synchronize(device)
            step_seconds.append(clock() - start)

            if not finite:
                what = f"step {step}: the loss is {loss}, the gradient norm {norm}, the learning rate {lr:g}"
                if skipped == config.skip_nonfinite:
                    raise TrainingError(f"{what}; {remedy(run, config)}" + (", or bf16 instead of fp16" if config.fp16 else ""))
                skipped += 1
                scaler.update()  # lowers the scale
                say(f"{what}: left out, {skipped} of {config.skip_nonfinite}")
            last = step == config.max_steps or stopping
            if step % config.log_every == 0 or step == 1 or last or not finite:
                row = (step, loss, lr, norm, step_seconds[-1] * 1e3, tokens_per_step / step_seconds[-1])
                left = (clock() - first_step_end) / max(1, step - done - 1) * (config.max_steps - step)
                say(log_line(row, config.max_steps) + (f" | {duration(left)} left" if step > done + 1 and not last else ""))
                if process.rank == 0:
                    append_row(run / "log.csv", LOG_COLUMNS, (*map(repr, row[:4]), f"{row[4]:.3f}", f"{row[5]:.1f}"))
            saving = last or (config.checkpoint_every and step % config.checkpoint_every == 0)
            saved = save(step) if saving else None
            if stopping:  # whoever stopped it may not wait
                break
            if config.eval_every and (step % config.eval_every == 0 or last):
                val_loss = evaluate(step)
                if best_val_loss is None or val_loss < best_val_loss:
                    best_val_loss = val_loss
                    saved = saved if saving else save(step)
                    if saved:
                        keep_best(run, saved)
            if config.sample_every and process.rank == 0 and (step % config.sample_every == 0 or last):
                text = sample_text(raw_model, config.sample_prompt, config.sample_tokens, seed=config.seed)[0]
                say(f"sample after step {step}: {text}")
            if step == done + 1:
                first_step_end = clock()  # compiling is over: the estimate of the time left begins here
    seconds = clock() - loop_start
    if not step_seconds:  # the run had been ended after its last step: the log has the times
        rows = gather(read_rows(run / "log.csv"), process)[0]
        step_seconds, loss = [float(row[4]) / 1e3 for row in rows], float(rows[-1][1])

    # the report
    summary = summarize(config, raw_model, device, process.world_size, step_seconds, tokens_per_step)
    summary |= {"steps": step, "tokens": step * tokens_per_step, "resumed_after_step": done or None, "skipped_steps": skipped,
                "final_loss": loss if math.isfinite(loss) else None, "val_loss": val_loss, "seconds": seconds,
                "interrupted": stopping, "started": started.isoformat(timespec="seconds")}
    if process.rank == 0:
        write_whole(run / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
        lock.release()
    say(f"{'interrupted' if stopping else 'done'}: {step} steps, {summary['tokens']:,} tokens in {duration(seconds)}; "
        f"loss {loss:.4f}" + ("" if val_loss is None else f", validation loss {val_loss:.4f}"))
    say(f"median {summary['median_dt_ms']:.2f} ms a step, {summary['median_tokens_per_sec']:,.0f} tokens/s (without the first "
        f"{summary['median_leaves_out']}); peak memory {summary['peak_memory_mb']:,.0f} MB; {summary['utilization']:.0%} of the "
        f"{summary['matmul_tflops']:.2f} TFLOP/s that a large matrix product reaches here")
    if stopping and config.keep_last:
        say(f"to go on: the same command with --resume auto, or --resume {run}")
    say(f"{run}/ has log.csv, summary.json and config.yaml" + (
        f", and checkpoints/; for text: python sample.py {run}" if config.keep_last else ""))
    return summary


def remedy(run: Path, config: Config) -> str:
    """What to do when training has failed."""
    lower = f"--resume {run} --lr {config.lr / 2:g} goes on from its last checkpoint"
    return (f"the log is kept in {run}. Try a lower lr, more warmup_steps or grad_clip 1.0"
            + (f"; {lower}" if all_checkpoints(run) else ""))


def announce(config: Config, process: Process, model: GPT, group_lines: list[str]) -> None:
    """Print what is about to run."""
    on = [name for name in ("tf32", "bf16", "fp16", "compile", "flash", "fused_adamw") if getattr(config, name)]
    process.say("\n".join([
        f"device: {device_name(process.device)}, processes: {process.world_size}, torch {torch.__version__}",
        f"{model.num_parameters():,} parameters", *group_lines, f"optimizations on: {', '.join(on) or 'none'}"]))


def main(config: Config) -> None:
    """Train; ends the process with a message and a status other than 0 if that fails."""
    reconfigure_output()
    try:
        train(config, start_process(config))
    except (UserError, TokenFileError, TokenizerError, CheckpointError) as error:
        exit_with(error)
    except TrainingError as error:
        exit_with(error, status=1)
    except KeyboardInterrupt:
        exit_with(UserError("interrupted"), status=130)
    except OSError as error:
        exit_with(UserError(f"{error.filename or config.log_dir}: {error.strerror or error}"), status=1)
    except (RuntimeError, MemoryError) as error:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = next((line for line in str(error).splitlines() if "rror" in line), type(error).__name__)
            exit_with(TrainingError(f"--compile failed: {reason.strip()}; run without --compile"), status=1)
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            exit_with(TrainingError(
                f"another process died or did not answer within {config.timeout} s ({str(error).rpartition('] ')[2][:60]}); "
                f"--resume auto goes on from the last checkpoint"), status=1)
        if not is_out_of_memory(error):
            raise
        exit_with(TrainingError(
            f"out of memory at batch_size {config.batch_size}, seq_len {config.seq_len}. These lower it: a smaller --batch_size "
            f"(--total_batch_tokens keeps the step as large), --bf16, --flash, --compile, a smaller --seq_len or model"), status=1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(CONFIG)
