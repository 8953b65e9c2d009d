"""Several machines: the ranks of a run meet, agree, and continue after some were lost, with the
numbers of a run that lost none.
"""

import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from data.token_file import write_corpus
from run.save import end_unfinished
from runtime.signals import StopRequest
from tests.conftest import (
    ALONE,
    ROOT,
    flags,
    forks,
    kill_all,
    refused,
    run_ranks,
    start,
    tiny_run,
    wait_for,
    write_tiny_corpus,
)
from tests.test_resume import curves, needs_proc
from train import train

# ---- they agree


DIFFERENT = """if True:
    import os, runpy, sys
    import torch
    if os.environ["RANK"] == "1":
        {on_rank_1}
    sys.argv[0] = {train!r}
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_different(on_rank_1, *options, **how):
    """Run train.py on two ranks, the second of which does something else first."""
    code = DIFFERENT.format(on_rank_1=on_rank_1, train=str(ROOT / "train.py"))
    return run_ranks(2, "-c", code, *options, **how)


def refusal(on_rank_1, *options, cwd):
    """Return the lines that rank 0 prints if both ranks end with status 2."""
    first, _ = run_different(on_rank_1, *options, cwd=cwd, status=2)
    return first.stderr.splitlines()


def test_ranks_with_other_options_code_or_pytorch_do_not_train_together(tiny_config, tmp_path):
    other = """torch.__version__ = "2.11.0"; sys.argv += ["--lr", "0.1"]
        import runtime.world
        runtime.world.code_hash = lambda: "another"
    """
    lr, version, code = refusal(other, *flags(tiny_config()), cwd=tmp_path)
    assert lr == "error: lr: all ranks need the same, but it is 0.0003 on rank 0 and 0.1 on rank 1"
    assert version.endswith(f"it is {torch.__version__} on rank 0 and 2.11.0 on rank 1")
    assert re.fullmatch(r"error: hash of the code: .* \w{8} on rank 0 and another on rank 1", code)
    assert not Path(tiny_config().log_dir).exists()


def test_other_tokens_are_an_error_with_the_ranks_that_have_them(tiny_config, tmp_path):
    write_corpus(tmp_path / "elsewhere/data/tiny", [[1] * 4000])
    options = [*flags(tiny_config()), "--data_dir", "data"]
    (line,) = refusal('os.chdir("elsewhere")', *options, cwd=tmp_path)
    assert line.startswith("error: data/tiny: rank 1 did not find the same tokens there as rank 0;")


def test_a_machine_that_does_not_see_the_runs_folder_gets_a_line_and_cannot_resume(
    tiny_config, tmp_path
):
    (tmp_path / "elsewhere").mkdir()
    apart = 'os.chdir("elsewhere")'
    options = [*flags(tiny_config(max_steps=2)), "--log_dir", "logs"]
    resume = [*options, "--max_steps", "4", "--resume", "auto"]
    for done in run_different(apart, *options, "--fsdp", cwd=tmp_path):  # rank 0 alone saves
        assert done.stderr == ""
    console = (tmp_path / "logs/train/console.log").read_text()
    assert "note: logs/train is not there for rank 1; put --log_dir on a file system" in console
    (line,) = refusal(apart, *resume, cwd=tmp_path)
    assert line.startswith("error: logs/train/checkpoints/step_000002 is there for rank 0 but not ")


# ---- machines that are lost


def test_a_run_that_torchrun_may_restart_wants_resume_auto(tiny_config, monkeypatch, here):
    """Without it, the restarted ranks would move the run aside and begin anew."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with refused(r"^--max_restarts: .*; add --resume auto$"):
        train(tiny_config(), ALONE)
    assert not here.exists()
    assert train(tiny_config(max_steps=1, resume="auto"), ALONE)["steps"] == 1
    with refused("at the same checkpoint; name the run instead"):
        train(tiny_config(resume=f"{here}/checkpoints/step_000001"), ALONE)
    other = f"{here.parent}/other"
    with refused(f"copy {here} to {other}/train and add --resume auto"):
        train(tiny_config(resume=str(here), log_dir=other), ALONE)


def test_where_another_machine_was_told_to_stop_this_one_ends_so_that_it_is_started_again(
    monkeypatch,
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    stop = StopRequest()
    end_unfinished({"interrupted": False}, stop)
    with pytest.raises(SystemExit, match="1"):
        end_unfinished({"interrupted": True}, stop)
    stop.received = 1.0  # this machine too
    end_unfinished({"interrupted": True}, stop)


# train.py whose steps wait until the file `limit` lets them through, or they are asked to stop
GATED = f"""
import os, runpy, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import runtime.signals
from run.state import State

os.getppid = lambda: int(os.environ["AGENT"])  # it is forked, and no child of torchrun
stops = []

class StopRequest(runtime.signals.StopRequest):
    def __init__(self):
        super().__init__()
        stops.append(self)

real = State.begin_update

def begin_update(state, *figures):
    limit = Path(__file__).with_name("limit")
    while state.step >= int(limit.read_text()) and not any(stop.received for stop in stops):
        time.sleep(0.02)
    return real(state, *figures)

State.begin_update = begin_update
runtime.signals.StopRequest = StopRequest
sys.argv[0] = {str(ROOT / "train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STEPS, PATIENCE = 12, 250  # PATIENCE: seconds


def working_in(folder):
    """The numbers of the processes that work in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended meanwhile
            if (process / "cwd").readlink() == folder:
                yield int(process.name)


def is_agent():
    """Let this process fork its ranks, which find its number in their environment."""
    forks()
    os.environ["AGENT"] = str(os.getpid())


class Run:
    """A run on agents in place of machines, each with one rank and a folder of its own."""

    def __init__(self, place):
        self.place = place
        self.agents: dict = {}
        with socket.socket() as any_free:
            any_free.bind(("localhost", 0))
            self.port = any_free.getsockname()[1]
        write_tiny_corpus(place)
        self.config = tiny_run(
            place,
            n_layer=1,
            batch_size=1,
            total_batch_tokens=256,
            shuffle=True,
            max_steps=STEPS,
            val_fraction=0.1,
            eval_every=4,
            checkpoint_every=2,
            timeout=60,
            resume="auto",
            run_name="run",
        )
        (place / "gated.py").write_text(GATED)
        self.let_through(0)

    def let_through(self, step):
        """Open the gate for the steps up to this one."""
        (self.place / "limit.tmp").write_text(str(step))
        os.replace(self.place / "limit.tmp", self.place / "limit")

    def start(self, agents, nnodes="2"):
        """Start torchrun on the machines of these names; `a` keeps the rendezvous."""
        for agent in agents:
            (self.place / agent).mkdir(exist_ok=True)
            self.agents[agent] = start(
                *["-m", "torch.distributed.run", "--max_restarts=5", "--rdzv_backend=c10d"],
                f"--nnodes={nnodes}",
                f"--rdzv_endpoint=localhost:{self.port}",
                f"--rdzv_conf=is_host={int(agent == 'a')},last_call_timeout=5,"
                "keep_alive_interval=1,keep_alive_max_attempt=10",
                self.place / "gated.py",
                *flags(self.config),
                cwd=self.place / agent,
                before=is_agent,
                OMP_NUM_THREADS="1",
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # see docs/cluster.md
            )

    def console(self):
        """Return the run's console.log; an earlier run of its name has been moved aside."""
        return "".join(path.read_text() for path in self.place.glob("logs/run/console.log"))

    def worlds(self):
        """Return the number of ranks of each attempt."""
        return [int(n) for n in re.findall(r"^device: .*ranks: (\d+)", self.console(), re.M)]

    def until(self, step, world=2):
        """Let the run continue until this step is logged by `world` ranks. An agent that starts
        early may log the step before the other joins.
        """
        self.let_through(step)
        logged = f"step {step:2d}/{STEPS} | loss"
        wait_for(
            lambda: logged in self.console() and self.worlds()[-1] == world,
            self.agents["a"],
            PATIENCE,
        )


def is_preempted(run):
    """SIGTERM to one agent, which comes back"""
    run.start("ab")
    run.until(5)
    run.agents["b"].send_signal(signal.SIGTERM)
    time.sleep(1)  # until its ranks have noticed
    run.let_through(6)
    run.agents.pop("b").communicate(timeout=PATIENCE)
    run.start("b")
    run.until(9)


def leaves_and_comes_back(run):
    """--nnodes=1:2: a machine loses its power; the other continues alone, then with a new one."""
    run.start("ab", "1:2")
    run.until(5)
    kill_all(working_in(run.place / "b"))
    run.agents.pop("b").communicate(timeout=PATIENCE)
    run.until(8, world=1)
    run.start("b", "1:2")
    wait_for(lambda: run.worlds()[-1:] == [2], run.agents["a"], PATIENCE)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("way", [leaves_and_comes_back, is_preempted])
def test_a_run_on_two_machines_goes_on_after_a_loss(way, tmp_path):
    run, logs = Run(tmp_path), tmp_path / "logs"
    try:
        way(run)
        run.let_through(STEPS)
        for name, agent in run.agents.items():
            printed = agent.communicate(timeout=PATIENCE)
            assert agent.returncode == 0, (name, *printed)
    finally:
        for name in "ab":
            kill_all(working_in(tmp_path / name))
    assert [path.name for path in logs.glob("[!.]*")] == ["run"]  # not begun anew
    train(run.config.model_copy(update={"run_name": "straight"}), ALONE)
    straight = [pytest.approx(curve, abs=1e-5) for curve in curves(logs / "straight")]
    assert curves(logs / "run") == straight
