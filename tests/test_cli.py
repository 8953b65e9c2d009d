"""The command line, as a user types it: from the first command to a sample, on two processes, and
with each kind of mistake.
"""

import csv
import json
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from checkpoint.weights import load_model
from tests.conftest import (
    ROOT,
    TINY,
    TORCHRUN,
    ended,
    fast_precision,
    flags,
    run,
    run_from_nothing,
    wait_for,
)

SMALL = shlex.split(
    "--n_layer 1 --n_head 2 --n_embd 16 --block_size 32 --seq_len 32 --batch_size 2 --max_steps 3 "
    "--device cpu"
)


def torchrun(*options, cwd):
    """train.py on two processes."""
    return run(
        *TORCHRUN, "--nproc_per_node=2", ROOT / "train.py", *options, cwd=cwd, OMP_NUM_THREADS="1"
    )


def losses(folder, column="loss"):
    with open(folder / "log.csv", newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file)]


# ---- the main path


def test_a_newcomers_path_from_an_empty_folder_to_a_sample(tmp_path):
    more = (
        "--eval_every 3 --eval_tokens 640 --sample_every 3 --sample_tokens 4 --log_every 1 "
        "--warmup_steps 1"
    )
    precision = [f"--no-{name}" for name in fast_precision()]
    command = ["train.py", "--config", "quickstart.yaml", *SMALL, *more.split(), *precision]
    trained = run_from_nothing(*command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert trained.returncode == 0, trained.stderr
    for text in (
        "preparing data/pydocs",
        "step 3/3 | loss",
        "step 3/3 | validation loss",
        "sample after step 3: The",
        "saved logs/quickstart/checkpoints/step_000003",
        "done: 3 steps",
    ):
        assert text in trained.stdout, trained.stdout
    assert (tmp_path / "data/pydocs/pydocs_train_000000.bin").is_file()
    sample = ["sample.py", "quickstart", "--prompt", "Python is", "--max_new_tokens", "8", "--seed"]
    sampled = [
        run_from_nothing(*sample, "1", cwd=tmp_path),
        run(*sample, "1", cwd=tmp_path),
        run(*sample, "2", cwd=tmp_path),
    ]
    assert [s.returncode for s in sampled] == [0, 0, 0]
    assert sampled[0].stdout.startswith("Python is")
    assert sampled[0].stdout == sampled[1].stdout != sampled[2].stdout
    by_folder = "sample.py logs/quickstart --max_new_tokens 4 --temperature 0 --top_k none"
    done = run(*by_folder.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_runs_config_yaml_repeats_the_run(tiny_config, tmp_path):
    config = tiny_config(shuffle=True, lr_schedule="cosine", warmup_steps=2)
    first = run("train.py", *flags(config), cwd=tmp_path)
    again = run("train.py", "--config", "logs/train/config.yaml", cwd=tmp_path)
    assert (first.returncode, again.returncode) == (0, 0), again.stderr
    assert losses(tmp_path / "logs/train.1") == losses(tmp_path / "logs/train")


def test_two_ranks_train_as_one_does(tiny_config, tmp_path):
    """Gradients, losses and norms of 2 gloo ranks with accumulation equal one process with the
    whole batch.
    """
    shared = {
        "total_batch_tokens": 8 * 32,
        "eval_every": 3,
        "val_fraction": 0.3,
        "shuffle": True,
        "grad_clip": 0.5,
    }
    one = tiny_config(run_name="one", batch_size=8, **shared)
    two = tiny_config(run_name="two", batch_size=2, **shared)
    alone = run("train.py", *flags(one), cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    both = torchrun(*flags(two), cwd=tmp_path)
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("step 1/6 | loss") == 1, "every rank prints"
    assert "2 ranks x 2 micro-steps" in both.stdout
    folders = [tmp_path / "logs" / config.run_name for config in (one, two)]
    for column in ("loss", "norm", "lr"):
        ours, theirs = (losses(folder, column) for folder in folders)
        assert ours == pytest.approx(theirs, rel=1e-4)
    val_losses = [json.loads((f / "summary.json").read_text())["val_loss"] for f in folders]
    assert val_losses[0] == pytest.approx(val_losses[1], rel=1e-5)
    weights = [load_model(config.run_name, config.log_dir).parameters() for config in (one, two)]
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_ctrl_c_ends_the_run_cleanly_with_what_was_logged(tiny_config, tmp_path):
    folder = tmp_path / "logs/train"
    command = [sys.executable, ROOT / "train.py", *flags(tiny_config(max_steps=10**6))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # nothing forked: Python's own start
    process = subprocess.Popen(command, cwd=tmp_path, text=True, **pipes)
    with ended([process]):
        log = folder / "log.csv"
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "interrupted: " in out
    assert json.loads((folder / "summary.json").read_text())["interrupted"] is True
    assert len(losses(folder)) >= 3


# ---- mistakes: one clear line, nothing lost


def failure(*command, cwd, status=2, **env):
    """The one error line of a command that must fail."""
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert not list(cwd.glob("logs/*")), "a run that could not start left a folder"
    return lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_where_there_is_none(tmp_path):
    line = failure("train.py", *SMALL, "--device", "cuda", cwd=tmp_path)
    assert "--device cuda: not available to this PyTorch" in line


def test_a_corpus_that_is_not_there_names_the_nearest_and_what_to_run(tmp_path):
    line = failure("train.py", *SMALL, "--dataset", "shakespear", cwd=tmp_path)
    assert "did you mean shakespeare?" in line
    assert "python data/text.py FILE --name shakespear" in line


def test_no_corpus_and_no_network_says_how_to_get_it(tmp_path):
    command = ["train.py", *SMALL, "--dataset", "shakespeare"]
    line = failure(*command, cwd=tmp_path, https_proxy="http://127.0.0.1:9")
    assert "could not be downloaded" in line
    assert "python data/shakespeare.py --source FILE" in line


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-10], "damaged: its header promises 4,000 tokens"),
        (lambda raw: b"Once upon a time " * 100, "not a token file"),
        (
            lambda raw: raw[:1024] + np.full(4000, 200, "<u2").tobytes(),
            "token 0 has the id 200, beyond the model's vocabulary of 128",
        ),
        (lambda raw: b"", "not a token file"),
    ],
    ids=["truncated", "foreign", "beyond the vocabulary", "empty"],
)
def test_bad_token_files(damage, message, tiny_config, tmp_path):
    path = tmp_path / "data/tiny/tiny_train_000000.bin"
    given = flags(tiny_config())
    path.write_bytes(damage(path.read_bytes()))
    assert message in failure("train.py", *given, cwd=tmp_path)


@pytest.mark.parametrize(
    ("options", "env", "status", "message"),
    [
        (
            {"batch_size": 200},
            {},
            2,
            "4,000 tokens make 124 sequences of 32, but one step takes 200, at least 6,401 tokens",
        ),
        (
            {"compile": True},
            {"PATH": "/nowhere", "CXX": "no-such-compiler"},
            2,
            "no C++ compiler found",
        ),
        (
            {"compile": True},
            {"TORCHINDUCTOR_CACHE_DIR": "/tmp/white space"},
            2,
            "--compile: '/tmp/white space': PyTorch cannot compile in a folder with white space",
        ),
        (
            {"n_layer": 1, "n_head": 1, "n_embd": 10**11},  # 40 TB of embedding
            {},
            1,
            "out of memory at batch_size 4, seq_len 32. These lower it: a smaller --batch_size",
        ),
    ],
    ids=["small corpus", "no compiler", "white space", "memory"],
)
def test_a_run_that_cannot_start_here_says_why(
    options, env, status, message, tiny_config, tmp_path
):
    command = ["train.py", *flags(tiny_config(**options))]
    assert message in failure(*command, cwd=tmp_path, status=status, **env)


def test_a_compilers_cache_that_cannot_be_made_names_what_to_set(tiny_config, tmp_path):
    (tmp_path / "file").write_text("")
    cache = f"{tmp_path}/file/x"
    command = ["train.py", *flags(tiny_config())]
    done = run_from_nothing(*command, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {cache}: PyTorch")
    assert "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written" in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_diverging_run_exits_with_1_and_keeps_its_log(tiny_config, tmp_path):
    done = run("train.py", *flags(tiny_config(lr=1e30)), cwd=tmp_path)
    assert done.returncode == 1
    assert "error: step " in done.stderr
    assert "Traceback" not in done.stderr
    assert len(losses(tmp_path / "logs/train")) >= 1


def test_a_mistake_under_torchrun_is_printed_once_and_nobody_hangs(tmp_path):
    done = torchrun("--n_layr", "3", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("--n_layr: unknown option; did you mean --n_layer?") == 1


def test_an_indivisible_batch_counts_the_processes_that_torchrun_started(tmp_path):
    done = torchrun("--total_batch_tokens", "12288", cwd=tmp_path)
    assert "12,288 is not a multiple of the 8,192 tokens" in done.stderr
    assert "nearest that work: 8,192 or 16,384" in done.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["missing"], "missing: no such run with a checkpoint"),
        (["x", "--temperature", "-1"], "--temperature: input should be greater"),
        ([], "the following arguments are required: run"),
        (["x", "--promt", "y"], "--promt: unknown option; did you mean --prompt?"),
        (["x", "--top_k", "0"], "--top_k: input should be greater than or equal to 1"),
    ],
)
def test_sampling_mistakes(command, message, tmp_path):
    assert message in failure("sample.py", *command, cwd=tmp_path)


def test_sampling_from_a_model_of_another_vocabulary_is_refused(tiny_config, tmp_path):
    assert run("train.py", *flags(tiny_config(max_steps=1)), cwd=tmp_path).returncode == 0
    done = run("sample.py", "train", cwd=tmp_path)
    assert done.returncode == 2
    assert f"a vocabulary of {TINY['vocab_size']} is not that of GPT-2's tokenizer" in done.stderr
