"""What the tests share: a tiny model, a tiny corpus, one training step under a lens, and the
commands as processes.
"""

import contextlib
import functools
import hashlib
import itertools
import multiprocessing.forkserver
import multiprocessing.reduction
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import measure.summary
import runtime.device
from checkpoint.weights import load_model
from config import Config, load_config
from data.token_file import TokenFile, write_corpus
from model import GPT, GPTConfig
from runtime.world import World

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
ALONE = World(CPU)
TINY: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 32,
    "vocab_size": 128,
}
# Compiling takes most of a test's time. Tests of --compile share this model and its batches: one of
# them waits for the C++ compiler, the others find its work in PyTorch's cache.
COMPILED: dict[str, Any] = {"compile": True, "n_layer": 1, "tie_weights": True}

# a shell starts its background jobs with Ctrl-C ignored, nohup with SIGHUP ignored, and Python
# leaves it so: tests need both heard
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# torch.compile in the tests and in what they start, unless said otherwise: neither try out which
# instructions the compiler knows, nor start processes that compile beside this one; each takes
# longer than a tiny model's kernels
for name in ("TORCHINDUCTOR_VEC_ISA_OK", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ.setdefault(name, "1")

torch.set_num_threads(
    1
)  # a tiny model gains nothing from more, and loses much where another program takes a core


# half of the time; begun first, so that at the end of several workers' tests none waits for a long
# one of another
LONG = [
    f"test_{name}.py"
    for name in ("fsdp", "machines", "gpu_script", "ddp", "documents", "resume", "train")
]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if (
        getattr(config.option, "numprocesses", None) and config.option.dist == "no"
    ):  # of pytest-xdist: it was not given
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skipif(True, reason="needs a CUDA GPU"))


@functools.cache
def bf16_pays() -> bool:
    """Whether bfloat16 is about as fast as float32 here. Where it is emulated, only tests that are
    about it take it.
    """
    return runtime.device.bf16_slowdown(CPU) <= 1.5


def fast_precision() -> dict[str, bool]:
    """Options that switch bfloat16 off where it is slow, for a config in which it stands but is not
    the subject.
    """
    return {} if bf16_pays() else {"bf16": False}


@pytest.fixture(autouse=True)
def the_matmul_rate_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run ends with this measurement, which takes longer than the tests' runs."""
    monkeypatch.setattr(measure.summary, "matmul_tflops", _matmul_tflops)


@pytest.fixture(autouse=True)
def compiled_code_is_forgotten() -> None:
    """PyTorch compiles a function for 8 models of one process, and runs later ones uncompiled."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@functools.cache
def _measured(device: torch.device, dtype: torch.dtype) -> float:
    return MATMUL_TFLOPS(device, dtype)


def _matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    return _measured(device, dtype)


MATMUL_TFLOPS = runtime.device.matmul_tflops  # the real one


@pytest.fixture
def tiny_model() -> Callable[..., GPT]:
    def build(seed: int = 0, **options) -> GPT:
        torch.manual_seed(seed)
        return GPT(GPTConfig(**(TINY | options)))

    return build


def transformers_pair(folder: Path, **sizes: Any) -> tuple[GPT, Any]:
    """transformers' GPT-2 with random weights, written to the folder, and ours before it, with the
    same, read from there.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    for p in (
        theirs.parameters()
    ):  # away from the tiny init, so that every term matters and choices are clear
        torch.nn.init.normal_(p, std=0.2)
    theirs.save_pretrained(folder)
    return load_model(str(folder)), theirs


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder `data` with the corpus `tiny`: 4,000 tokens below 100, each of which determines the
    next.
    """
    return write_tiny_corpus(tmp_path)


def write_tiny_corpus(place: Path) -> Path:
    tokens = list(
        itertools.accumulate(range(3999), lambda token, _: (21 * token + 7) % 100, initial=0)
    )
    write_corpus(place / "data" / "tiny", [tokens])
    return place / "data"


@pytest.fixture
def tiny_config(corpus: Path, tmp_path: Path) -> Callable[..., Config]:
    """Options of a run that takes a fraction of a second; keywords override them."""
    return functools.partial(tiny_run, tmp_path)


def tiny_run(place: Path, shape: dict[str, Any] = TINY, **options) -> Config:
    """The options of `tiny_config` for a run in any folder; `shape`: the model's, if it has one."""
    values: dict[str, Any] = {
        "dataset": "tiny",
        "data_dir": str(place / "data"),
        "log_dir": str(place / "logs"),
        "device": "cpu",
        "seq_len": 32,
        "batch_size": 4,
        "max_steps": 6,
        "init": "gpt2",
    }
    return load_config(**(shape | values | options))


@pytest.fixture
def go(tiny_config: Callable[..., Config]) -> Callable[..., dict[str, Any]]:
    """Train a config, or a tiny one with some options; returns the summary."""
    from train import train

    return lambda config=None, **options: train(config or tiny_config(**options), ALONE)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return the folder of a tiny run that is given no name."""
    return tmp_path / "logs/train"


def at_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, GPT], Any]) -> Callable[[], None]:
    """Call `act(call, model)` in every step of the next runs, `call` counting from 1, once its
    gradients are there and clipped.

    The norm that the step goes on with is what `act` returns, if it returns one. Returns what ends
    this.
    """
    import train as train_module

    real, calls = train_module.clip_gradients, itertools.count(1)

    def clip_gradients(model: GPT, grad_clip: float) -> torch.Tensor:
        norm = real(model, grad_clip)
        instead = act(next(calls), model)
        return norm if instead is None else instead

    monkeypatch.setattr(train_module, "clip_gradients", clip_gradients)
    return lambda: monkeypatch.setattr(train_module, "clip_gradients", real)


# ---- commands in processes of their own


class Started:
    """A process that runs a script; to be used like subprocess.Popen.

    It is forked from one that has imported PyTorch, which takes seconds: so it is at work at once.
    It has one thread, as the tests do, and shares nothing else with them.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        cwd: Path,
        env: dict[str, str],
        before: Callable[[], None] | None,
    ):
        self.printed = tempfile.TemporaryDirectory()
        self.out, self.err = (Path(self.printed.name) / name for name in ("stdout", "stderr"))
        for path in (self.out, self.err):
            path.touch()  # there at once, for those who read along
        self.process = fork_server().Process(
            target=_be, args=(command, cwd, env, {1: self.out, 2: self.err}, before)
        )
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.pid
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 100) -> tuple[str, str]:
        """What it has printed on stdout and stderr, once it has ended."""
        self.process.join(timeout)
        out, err = (path.read_text(errors="replace") for path in (self.out, self.err))
        if self.process.exitcode is None:
            raise TimeoutError(f"still there after {timeout} s; it has printed:\n{out}\n{err}")
        return out, err

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        self.process.join()


@functools.cache
def fork_server() -> Any:
    """The multiprocessing context whose processes begin with PyTorch, other packages, and what
    train.py imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "pytest",
            "torch._dynamo",
            "torch._inductor.compile_fx",
            "torch.nn.parallel",
            "tiktoken",
            "pydantic",
            "yaml",
            "filelock",
            "safetensors.torch",
            "rich.table",
            "tests.conftest",
            "train",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # where it finds the last two
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as runtime/start.py does
        multiprocessing.forkserver._forkserver.ensure_running()
    return context


def _be(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    streams: Mapping[int, Path | int],
    before: Callable[[], None] | None,
    forking: bool = False,
) -> None:
    """Become the command `python <command>`: a script, `-m module` or `-c code`. `streams`: what
    the descriptors 0 to 2 are; `forking`: whether the commands that it starts are forked too.
    """
    for descriptor, stream in streams.items():
        given = (
            stream
            if isinstance(stream, int)
            else os.open(stream, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        )
        os.dup2(given, descriptor)
        os.close(given)
    # the fork server's own were made for other files
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:  # read when PyTorch was imported
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if forking:
        forks()
    if before:
        before()
    first, *rest = command
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<test>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


class Forked(subprocess.Popen):
    """subprocess.Popen which forks commands of this Python as `Started` does; for code that starts
    processes by itself.
    """

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: Any,
        *pipes: Any,
    ) -> None:
        self.process = None
        if args[0] != sys.executable:
            super()._execute_child(  # type: ignore[misc]
                args,
                executable,
                preexec_fn,
                close_fds,
                pass_fds,
                cwd,
                env,
                startupinfo,
                creationflags,
                shell,
                *pipes,
            )
            return
        command = [str(word) for word in args[1 + (args[1] == "-u") :]]
        given = enumerate((pipes[0], pipes[3], pipes[5]))  # -1: this process's own
        streams = {
            number: _Descriptor(number if theirs == -1 else theirs) for number, theirs in given
        }
        before = os.setsid if pipes[11] else None  # start_new_session
        self.process = fork_server().Process(
            target=_be,
            args=(
                command,
                cwd or os.getcwd(),
                dict(os.environ if env is None else env),
                streams,
                before,
                True,
            ),
        )
        self.process.start()
        self.pid = self.process.pid
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As os.waitpid, which knows children only."""
        if self.process is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        self.process.join(0 if wait_flags else None)
        code = self.process.exitcode
        return (0, 0) if code is None else (self.pid, -code if code < 0 else code << 8)

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if self.process is None:
            return super()._internal_poll(*given, **more)  # type: ignore[misc]
        pid, status = self._try_wait(os.WNOHANG)
        if pid and self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _Descriptor:
    """The number of an open file, which is another one in the process that it is handed to."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (multiprocessing.reduction.DupFd(self.number),)


def _received(handed_over: Any) -> int:
    return handed_over.detach()


def forks() -> None:
    """Let this process, which is forked, fork the commands of Python that it starts from the same
    one.
    """
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    subprocess.Popen = Forked  # type: ignore[misc]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of Python that this test's code starts, and those that they start, begin with
    PyTorch imported.
    """
    if "forkserver" in multiprocessing.get_all_start_methods() and sys.platform == "linux":
        monkeypatch.setattr(subprocess, "Popen", Forked)


def start(
    *command: str | Path, cwd: Path, before: Callable[[], None] | None = None, **env: str
) -> Any:
    """`python <command>` as a process that goes on beside the test; a script of this project
    (`train.py`, ...) by its name.

    `before` is called in the process first. Returns a Started, or a Popen where processes are not
    forked.
    """
    first, *rest = map(str, command)
    words = (str(ROOT / first) if first.endswith(".py") else first, *rest)
    if "forkserver" in multiprocessing.get_all_start_methods() and sys.platform == "linux":
        return Started(words, cwd, os.environ | env, before)
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        text=True,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=before,
    )


def run(
    *command: str | Path,
    cwd: Path,
    timeout: float = 240,
    before: Callable[[], None] | None = None,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """A script of this project (`train.py`, ...) run to its end, in a process that has PyTorch at
    hand (see `Started`).
    """
    with ended([start(*command, cwd=cwd, before=before, **env)]) as (process,):
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess([*map(str, command)], process.returncode, out, err)


def run_from_nothing(
    *command: str | Path, cwd: Path, timeout: float = 240, **env: str
) -> subprocess.CompletedProcess[str]:
    """A script of this project, as a user would start it."""
    first, *rest = map(str, command)
    return subprocess.run(
        [sys.executable, str(ROOT / first) if first.endswith(".py") else first, *rest],
        cwd=cwd,
        timeout=timeout,
        text=True,
        capture_output=True,
        env=os.environ | env,
    )


TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def start_ranks(ranks: int, *command: str | Path, cwd: Path) -> list[Any]:
    """The processes of a run on several ranks, with the environment and the store of torchrun, but
    without torchrun.
    """
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes = [
        start(
            *command,
            cwd=cwd,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            OMP_NUM_THREADS="1",
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.store = store  # lives as long as they do
    return processes


def run_ranks(
    ranks: int, *command: str | Path, cwd: Path, timeout: float = 100
) -> list[subprocess.CompletedProcess[str]]:
    """A run on several ranks, to its end."""
    with ended(start_ranks(ranks, *command, cwd=cwd)) as processes:
        return [
            subprocess.CompletedProcess([*map(str, command)], process.returncode, *printed)
            for process in processes
            for printed in [process.communicate(timeout=timeout)]
        ]


@contextlib.contextmanager
def ended(processes: list[Any]) -> Iterator[list[Any]]:
    """Processes that are gone at the end, whatever happens."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], Any], process: Any, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def children(process: Any) -> list[int]:
    """Process numbers of a process's children."""
    return sorted(
        map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    )


def kill_all(pids: Iterable[int]) -> None:
    """kill -9 of processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def flags(config: Config) -> list[str]:
    """A config as command-line flags."""
    values = []
    for name in sorted(config.model_fields_set):
        value = getattr(config, name)
        if isinstance(value, bool):
            values.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            values += [f"--{name}", *map(str, value)]
        elif value is not None:
            values += [f"--{name}", str(value)]
    return values


def tokens_in(path: Path) -> np.ndarray:
    """All tokens of a token file, (tokens,) uint16."""
    file = TokenFile(path)
    return file.read([0], file.tokens)[0]


def reseal(folder: Path) -> None:
    """Write a checkpoint's checksums anew, as one who means harm would."""
    (folder / "SHA256SUMS").write_text(
        "".join(
            f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
            for name in sorted(
                path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
            )
            if name != "SHA256SUMS"
        )
    )
