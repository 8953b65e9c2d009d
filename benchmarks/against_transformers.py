"""Training speed and peak memory of this project's GPT-2 (124M) against `transformers`' GPT2LMHeadModel.

Both train on the same random tokens under the same bf16 autocast, torch.compile and fused AdamW. Each side is a process
of its own, so that its peak memory is its own; the steps alternate, so that a machine whose speed drifts treats both
alike. Prints each pair, then the medians and their ratio, and appends them to a JSON file with --output.

    python benchmarks/against_transformers.py --steps 10
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import GPT2_TOKENS


def build_ours(tie_weights: bool, loss_chunks: int) -> tuple[object, Callable]:
    """This project's model as `--bf16 --compile --flash --fused_adamw --vocab_size 50304` builds it."""
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(vocab_size=50304, flash=True, tie_weights=tie_weights, loss_chunks=loss_chunks))
    return model, lambda compiled, x, y: compiled(x, y)


def build_transformers(*_: object) -> tuple[object, Callable]:
    """transformers' model with its own defaults (tied weights, scaled_dot_product_attention) but no dropout, as ours."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    # transformers shifts the labels itself, so the same T tokens are input and label
    return model, lambda compiled, x, _: compiled(input_ids=x, labels=x).loss


def worker(build: Callable, tie_weights: bool, loss_chunks: int, B: int, T: int, connection: Connection) -> None:
    """Train one step for each message received; answer with its seconds, its loss and the process's peak memory in MiB."""
    import torch

    from runtime.device import synchronize
    from runtime.measure import peak_memory_mb

    torch.manual_seed(1337)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, loss_of = build(tie_weights, loss_chunks)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    compiled = torch.compile(model)
    while connection.recv() == "step":
        tokens = torch.randint(0, GPT2_TOKENS, (B, T + 1), device=device)
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(compiled, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        synchronize(device)
        connection.send((time.perf_counter() - start, value, peak_memory_mb(device)))


def main() -> None:
    """Time both sides in turn and print what they reach."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--tie_weights", action=argparse.BooleanOptionalAction, default=True,
                        help="ours with tied weights, as GPT-2 and transformers have them")
    parser.add_argument("--loss_chunks", type=int, default=1, help="parts that ours computes the loss in")
    parser.add_argument("--output", help="JSON file to write the result to")
    args = parser.parse_args()

    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages for both, as in train.py
    context = multiprocessing.get_context("spawn")
    sides, processes = {}, []
    for name, build in (("ours", build_ours), ("transformers", build_transformers)):
        sides[name], child = context.Pipe()
        processes.append(context.Process(
            target=worker, args=(build, args.tie_weights, args.loss_chunks, args.batch_size, args.seq_len, child), daemon=True))
        processes[-1].start()
        child.close()

    seconds: dict[str, list[float]] = {name: [] for name in sides}
    peak: dict[str, float] = {}
    for i in range(-3, args.steps):  # three untimed steps: compilation and warm-up
        for name, connection in sides.items():
            connection.send("step")
            dt, loss, peak[name] = connection.recv()
            if i >= 0:
                seconds[name].append(dt)
            print(f"{'warm-up' if i < 0 else f'{i + 1:7d}'} {name:12s} {dt:8.3f} s  loss {loss:.4f}", flush=True)
    for connection, process in zip(sides.values(), processes, strict=True):
        connection.send("stop")
        process.join()

    tokens = args.batch_size * args.seq_len
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["transformers"], strict=True)]
    for name in sides:
        print(f"{name:12s} {tokens / medians[name]:9.1f} tokens/s  peak {peak[name]:8.0f} MB")
    print(f"ours / transformers: {statistics.median(ratios):.3f} (pairs {min(ratios):.3f} to {max(ratios):.3f}), "
          f"memory {peak['ours'] / peak['transformers']:.3f}")
    if args.output:
        import torch
        import transformers

        result = {"machine": platform.platform(), "python": platform.python_version(),
                  "torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads(),
                  "options": vars(args), "seconds": seconds, "peak_memory_mb": peak,
                  "tokens_per_sec": {name: tokens / medians[name] for name in sides},
                  "speed_ratio": statistics.median(ratios), "memory_ratio": peak["ours"] / peak["transformers"]}
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
