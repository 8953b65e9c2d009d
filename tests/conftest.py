"""Shared by the tests: a tiny model, a tiny corpus, hooks into a training step, and commands as
processes.
"""

import contextlib
import csv
import functools
import itertools
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

import run.summary as run_summary
from checkpoint.files import STATE, read_json
from checkpoint.names import all_checkpoints
from checkpoint.weights import load_model
from config import load_config
from data.token_file import TokenFile, write_corpus
from data.tokenizer import get_encoding
from inference.sampling import Text, grow, seeded
from measure.interleaved import rounds
from measure.preflight import estimate
from model import GPT, GPTConfig
from runtime.errors import UserError
from runtime.files import sha256
from runtime.start import cores
from runtime.world import World

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
ALONE = World(CPU)
TINY = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 32,
    "vocab_size": 128,
}
TINY_RUN = {"dataset": "tiny", "device": "cpu", "seq_len": 32, "batch_size": 4}
# Compiling takes most of a test's time. Tests of --compile share this model and its batches: one of
# them waits for the C++ compiler, the others find its work in PyTorch's cache.
COMPILED = {"compile": True, "n_layer": 1, "tie_weights": True}
WITH_TEXT = {"vocab_size": 50257, "n_layer": 1, "n_embd": 8}  # GPT-2's tokens

# All flags of newer recipes that make another model than GPT-2.
MODERN: dict[str, Any] = {
    "rope": True,
    "norm": "rmsnorm",
    "norm_weight": False,
    "bias": False,
    "qk_norm": True,
    "activation": "relu2",
    "zero_init": True,
    "logit_softcap": 15.0,
    "value_residual": True,
    "embed_shortcut": True,
    "value_embeds": True,
    "bigram_embed": True,
}

# a shell starts its background jobs with Ctrl-C ignored, nohup with SIGHUP ignored, and Python
# leaves it so: tests need both heard
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Unless a test sets them: torch.compile neither tries out which instructions the compiler knows nor
# starts processes that compile, as each takes longer than a tiny model's kernels. And PyTorch looks
# for GPUs without starting CUDA, after which no process could be forked.
for name in (
    "TORCHINDUCTOR_VEC_ISA_OK",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
):
    os.environ.setdefault(name, "1")
# workers begin with this: a thread that waits for another leaves its core to another test
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A tiny model gains nothing from more, and loses much if another program takes a core.
torch.set_num_threads(1)

# Every run asks git for its commit, as long as two steps, and then measures the matmul rate, longer
# than all its steps; check.py measures it too. One run in test_cli.py does both for real.
run_summary.git_commit = functools.cache(run_summary.git_commit)
run_summary.matmul_tflops = estimate.matmul_tflops = lambda *_, **__: 1.0


# half of the time; begun first, so that at the end of several workers' tests none waits for a long
# one of another
LONG = [f"test_{name}.py" for name in ("fsdp", "machines", "ddp", "text", "resume", "train")]


def pytest_xdist_auto_num_workers(config):
    """Return the workers of `-n auto`: a third of the time tests wait for processes or time."""
    return cores() + 1


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip("needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def only_gpu_tests_see_a_gpu(request, monkeypatch):
    """The commands that other tests start would choose it."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def compiled_code_is_forgotten():
    """PyTorch compiles a function for 8 models of one process, and runs later ones uncompiled."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def tiny_model():
    def build(seed=0, **options):
        torch.manual_seed(seed)
        return GPT(GPTConfig(**(TINY | options)))

    return build


def transformers_pair(folder, **sizes):
    """Our GPT-2 and transformers', with the same random weights, which went through a folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    # Away from the tiny init, so that every term matters and choices are clear.
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.2)
    theirs.save_pretrained(folder)
    return load_model(str(folder)), theirs


@pytest.fixture
def corpus(tmp_path):
    """A folder `data` with the corpus `tiny`: 4,000 tokens below 100, each of which determines the
    next.
    """
    return write_tiny_corpus(tmp_path)


def write_tiny_corpus(place):
    tokens = list(
        itertools.accumulate(range(3999), lambda token, _: (21 * token + 7) % 100, initial=0)
    )
    write_corpus(place / "data" / "tiny", [tokens])
    return place / "data"


@pytest.fixture
def tiny_config(corpus, tmp_path):
    """Options of a run that takes a fraction of a second; keywords override them."""
    return functools.partial(tiny_run, tmp_path)


def tiny_run(place, shape=TINY, **options):
    """The options of `tiny_config` for a run in any folder; `shape`: the model's, if it has one."""
    values = {
        "data_dir": str(place / "data"),
        "log_dir": str(place / "logs"),
        "max_steps": 6,
        "init": "gpt2",
    }
    return load_config(**(shape | TINY_RUN | values | options))


@pytest.fixture
def go(tiny_config):
    """Train a config, or a tiny one with some options; returns the summary."""
    from train import train

    return lambda config=None, **options: train(config or tiny_config(**options), ALONE)


@pytest.fixture
def here(tmp_path):
    """Return the folder of a tiny run that is given no name."""
    return tmp_path / "logs/train"


def at_step(monkeypatch, act):
    """Call `act(call, model)` in every step of all next runs, `call` counting from 1 through all of
    them, once its gradients are there and clipped.

    If `act` returns a norm, the step uses it.
    """
    import train as train_module

    real, calls = train_module.clip_gradients, itertools.count(1)

    def clip_gradients(model, grad_clip):
        norm = real(model, grad_clip)
        instead = act(next(calls), model)
        return norm if instead is None else instead

    monkeypatch.setattr(train_module, "clip_gradients", clip_gradients)


def poisoned_at(*steps):
    """Make the gradients of some steps nan."""

    def act(call, model):
        if call not in steps:
            return None
        for p in model.parameters():
            p.grad *= math.nan
        return torch.full((), math.nan, device=p.device)

    return act


@pytest.fixture
def stop_at(monkeypatch):
    """Makes the next run get SIGTERM during a step of its own count."""
    return lambda at: at_step(
        monkeypatch, lambda call, _: signal.raise_signal(signal.SIGTERM) if call == at else None
    )


# ---- commands in processes of their own


@functools.cache
def fork_server():
    """The multiprocessing context whose processes begin with PyTorch, other packages, and what
    train.py imports.
    """
    context = ForkServerContext()
    context.set_forkserver_preload(
        [
            "pytest",
            "torch._dynamo",
            "torch._inductor.compile_fx",
            "rich.table",
            "tests.conftest",
            "tests.encoded",
            "train",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # to find the last three modules
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # runtime/start.py sets it too
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # a process that has started CUDA cannot be forked
        patch.setattr(tempfile, "tempdir", "/tmp")  # the name of a socket has at most 107 letters
        _forkserver.ensure_running()
    return context


def _be(
    command,
    cwd,
    env,
    streams,
    before,
):
    """Become the command `python <command>`: a script, `-m module` or `-c code`. `streams`: the
    files of the descriptors 0 to 2.
    """
    for descriptor, file in streams.items():
        os.dup2(file.fileno(), descriptor)
        file.close()
    # the fork server's own were made for other files
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:  # read when PyTorch was imported
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    for act in before:
        act()
    first, *rest = command
    sys.argv = [first, *rest]
    if first == "-c":
        del sys.argv[1]
        exec(compile(rest[0], "<test>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def forks():
    """Let this process, which is forked, fork the commands of Python that it starts, and what runs
    `in_fresh_process`, from the same one.
    """
    multiprocessing.get_context = lambda *_: fork_server()
    _forkserver.ensure_running = lambda: None
    subprocess.Popen = Forked


class Forked(subprocess.Popen):
    """subprocess.Popen which forks commands of this Python from a process that has imported
    PyTorch, which takes seconds: so they are at work at once.
    """

    before = (forks,)  # called in the new process first

    def _execute_child(self, args, *given):
        self.process = None
        if args[0] != sys.executable:
            super()._execute_child(args, *given)
            return
        cwd, env, pipes, new_session = given[4], given[5], given[9:15], given[20]
        # -1: this process's own
        theirs = [number if pipes[at] == -1 else pipes[at] for number, at in enumerate((0, 3, 5))]
        self.process = fork_server().Process(
            target=_be,
            args=(
                [str(word) for word in args[1:] if word != "-u"],
                cwd or os.getcwd(),
                dict(os.environ if env is None else env),
                {number: Connection(os.dup(theirs[number])) for number in range(3)},
                [*self.before, os.setsid] if new_session else self.before,
            ),
        )
        self.process.start()
        self.pid = self.process.pid
        # Popen too returns when the process has its group: torchrun ends a rank by that.
        with contextlib.suppress(ProcessLookupError):  # it has ended
            while new_session and os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)
        self._close_pipe_fds(*pipes)

    def _wait(self, timeout):
        """Popen's own method waits for children only."""
        if self.process is None:
            return super()._wait(timeout)
        self.process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _internal_poll(self, *given, **more):
        if self.process is None:
            return super()._internal_poll(*given, **more)
        self.returncode = self.process.exitcode
        return self.returncode


@pytest.fixture
def forked(monkeypatch):
    """Commands of Python that this test's code starts, and their own children, begin with PyTorch
    imported, and interleaved sides take short turns.
    """
    monkeypatch.setattr(subprocess, "Popen", Forked)
    monkeypatch.setattr(rounds, "TURN_SECONDS", 0.01)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def forked_processes(monkeypatch):
    """What runs `in_fresh_process` begins with PyTorch imported."""
    context = fork_server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


class Started(Forked):
    """A script's process, forked; its output is in the files `out` and `err`."""

    def __init__(self, words, cwd, env, before):
        self.before = (before,) if before else ()
        self.printed = tempfile.TemporaryDirectory()
        self.out, self.err = (Path(self.printed.name) / name for name in ("stdout", "stderr"))
        with open(self.out, "w") as out, open(self.err, "w") as err:
            super().__init__([sys.executable, *words], cwd=cwd, env=env, stdout=out, stderr=err)

    def communicate(self, input=None, timeout=None):
        """Return all of stdout and stderr once the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)
        out, err = (path.read_text(errors="replace") for path in (self.out, self.err))
        assert self.returncode is not None, f"still there after {timeout} s:\n{out}\n{err}"
        return out, err


def words(first, *rest):
    """The words behind `python` of a command; a script of this project (`train.py`) by its name."""
    return [str(ROOT / first) if str(first).endswith(".py") else str(first), *map(str, rest)]


def start(*command, cwd, before=None, **env):
    """`python <command>` beside the test; `before` is called in its process first."""
    return Started(words(*command), cwd, os.environ | env, before)


def finish(process, timeout=240, status=0):
    """Wait for the end of a process, which has to have this status."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == status, out + err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*command, cwd, before=None, status=0, **env):
    """A command run to its end, in a process that has PyTorch at hand."""
    with ended([start(*command, cwd=cwd, before=before, **env)]) as (process,):
        return finish(process, status=status)


def run_from_nothing(*command, cwd, status=0, **env):
    """A script of this project, as a user would start it."""
    done = subprocess.run(
        [sys.executable, *words(*command)],
        cwd=cwd,
        text=True,
        capture_output=True,
        env=os.environ | env,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def torchrun(*command, cwd, status=0):
    """A script on two ranks, by torchrun."""
    ranks = ["--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    words = ("-m", "torch.distributed.run", *ranks, *command)
    return run(*words, cwd=cwd, before=forks, status=status, OMP_NUM_THREADS="1")


def start_ranks(ranks, *command, cwd):
    """The processes of a run on several ranks, with the environment and the store of torchrun, but
    without torchrun.
    """
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(ranks):
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(start(*command, cwd=cwd, **env))
        processes[-1].store = store  # lives as long as they do
    return processes


def run_ranks(ranks, *command, cwd, timeout=240, status=0):
    """A run on several ranks, to its end, which each has with this status."""
    with ended(start_ranks(ranks, *command, cwd=cwd)) as processes:
        return [finish(process, timeout, status) for process in processes]


@contextlib.contextmanager
def ended(processes):
    """Processes that are gone at the end, whatever happens."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for(condition, process, seconds=100):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def kill_all(pids):
    """kill -9 of processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def flags(config):
    """A config as command-line flags."""
    return rounds.to_flags(config.model_dump(include=config.model_fields_set))


def tokens_in(path):
    """All tokens of a token file, (tokens,) uint16."""
    file = TokenFile(path)
    return file.read(0, file.tokens)


def folder_of(run):
    """The folder of a run, given that or its config."""
    return run if isinstance(run, Path) else Path(run.log_dir) / str(run.run_name)


def log(run):
    """Every column of a run's log but the times."""
    with open(folder_of(run) / "log.csv", newline="") as file:
        return [(row["step"], row["loss"], row["lr"], row["norm"]) for row in csv.DictReader(file)]


def console(run):
    """All that a run has printed."""
    return (folder_of(run) / "console.log").read_text()


def end_of(run):
    """All that an interruption must not change: figures, the best checkpoint's name, and of the
    last one the tensors' hashes, the numbers and the ranks' dropout.
    """
    folder = folder_of(run)
    last, evaluations = all_checkpoints(folder)[-1], folder / "eval.csv"
    saved = read_json(last / STATE)
    dropout = [rank["torch_cpu"] for rank in saved.pop("random")]
    del saved["config"], saved["seconds"]
    return {
        "log": log(run),
        "evaluations": evaluations.exists() and evaluations.read_text(),
        "best": [path.name for path in all_checkpoints(folder, "best")],
        "tensors": [sha256(path) for path in sorted(last.glob("*.safetensors"))],
        "dropout": dropout,
        **saved,
    }


def reseal(folder):
    """Write a checkpoint's checksums anew, as one who means harm would."""
    command = "sha256sum *.safetensors *.json > SHA256SUMS"
    subprocess.run(command, shell=True, cwd=folder, check=True)


def cases(table):
    """Split lines of the form `input => expected message`."""
    return [line.split(" => ") for line in table.strip("\n").splitlines()]


def refused(message, lines=1):
    """Expect a UserError with this in its message, and this number of lines."""
    return pytest.raises(
        UserError, match=message, check=lambda error: str(error).count("\n") + 1 == lines
    )


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """Let a test work in a folder of its own, with relative paths."""
    monkeypatch.chdir(tmp_path)


def grown(model, prompts, n, seeds=None, encoding=None, **settings):
    """The tokens, up to n, that continue each prompt, by default the likeliest."""
    texts = []
    for prompt, seed in zip(prompts, seeds or [0] * len(prompts), strict=True):
        texts.append(Text("", encoding or get_encoding(), seeded(seed)))
        texts[-1].tokens = [*prompt]
    list(grow(model, texts, n, **{"temperature": 0, "top_k": None} | settings))
    return [text.tokens[len(p) :] for text, p in zip(texts, prompts, strict=True)]
