"""Resuming a run: the same numbers as without the interruption, whatever is switched on; faults in
the middle of a run; checkpoints that went bad.
"""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import optimizer
import run.evaluation as run_evaluation
from checkpoint.names import all_checkpoints
from checkpoint.saved import read_state
from checkpoint.weights import load_model
from config import load_config
from data.token_file import write_corpus
from run.log import read_rows
from run.state import State
from runtime.cli import ConfigError
from tests import soak
from tests.conftest import (
    ALONE,
    COMPILED,
    MODERN,
    at_step,
    end_of,
    ended,
    flags,
    folder_of,
    fork_server,
    log,
    poisoned_at,
    refused,
    reseal,
    run,
    run_ranks,
    start_ranks,
    wait_for,
)
from train import train

needs_proc = pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="finds workers in /proc"
)
needs_dev_full = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)
PARTS = ["model.safetensors", "optimizer.safetensors", "checkpoint.json", "SHA256SUMS"]
NO_SPACE = "No space left on device"


def newest(run):
    return all_checkpoints(folder_of(run))[-1]


def checkpoints(run):
    return sorted(path.name for path in (folder_of(run) / "checkpoints").iterdir())


# ---- exact


LARGE = {"n_layer": 1, "n_embd": 128, "block_size": 128, "seq_len": 128, "batch_size": 2}
WAYS = {
    "dropout and accumulation": {"dropout": 0.2, "batch_size": 2, "total_batch_tokens": 256},
    "muon": {"optimizer": "muon"} | MODERN | {"embed_lr": 0.01, "scalar_lr": 0.02, "dropout": 0.1},
    "several threads": LARGE,
    "compile, evaluating": COMPILED | {"eval_every": 2, "val_fraction": 0.3},
    "compile, dropout": COMPILED | {"dropout": 0.1},
}
SLOW = pytest.param("compile, dropout", marks=pytest.mark.slow)  # has kernels of its own to compile


@pytest.mark.parametrize("way", [*list(WAYS)[:-1], SLOW])
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(way, tiny_config, go, stop_at):
    """test_choices.py does so with every choice of the options, stopped once."""
    straight, twice = (
        tiny_config(**WAYS[way], max_steps=7, run_name=name) for name in ("one", "two")
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2 if "several threads" in way else 1)
    go(straight)
    twice = twice.model_copy(update={"resume": "auto"})
    for at in (3, 2):
        disarm = stop_at(at)
        assert go(twice)["interrupted"]
        disarm()
    summary = go(twice)
    torch.set_num_threads(before)
    assert (summary["steps"], summary["resumed_after_step"]) == (7, 5)
    assert end_of(twice) == end_of(straight)
    assert (summary["val_loss"] is None) == ("eval_every" not in WAYS[way])


def test_a_resume_after_the_last_step_has_nothing_to_do(go, here, capsys):
    go()
    assert go(resume="auto") == {"steps": 6}
    assert "nothing to do: " in capsys.readouterr().out
    (here / "summary.json").unlink()
    assert go(resume="auto")["steps"] == 6
    assert (here / "summary.json").exists()
    shutil.copytree(here / "checkpoints", here.parent / "copied/checkpoints")  # alone
    assert go(load_config(resume=str(here.parent / "copied"))) == {"steps": 6}


def test_another_file_in_the_list_of_state_is_saved_with_a_checksum_and_restored(
    go, here, monkeypatch
):
    more, real = {"numbers": torch.arange(3.0)}, State.tensors
    monkeypatch.setattr(State, "tensors", lambda state: real(state) | {"more.safetensors": more})
    go(max_steps=2)
    assert "  more.safetensors\n" in (newest(here) / "SHA256SUMS").read_text()
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=newest(here), check=True)
    more["numbers"].zero_()
    go(max_steps=3, resume="auto")
    assert more["numbers"].tolist() == [0, 1, 2]


class Normalized(torch.optim.Optimizer):
    """Averages the direction of each gradient; without a gradient that is 0/0."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad / p.grad.norm(), 0.1)
                p.sub_(average, alpha=group["lr"])


def test_an_optimizer_whose_step_without_gradients_is_nan_resumes_exactly(go, here, monkeypatch):
    monkeypatch.setitem(
        optimizer.OPTIMIZERS,
        "adamw",
        lambda params, config, *_: [Normalized(params.values(), {"lr": config.lr})],
    )
    go(run_name="straight")
    go(max_steps=3)
    go(resume="auto")
    assert end_of(here) == end_of(here.with_name("straight"))


def cut(path, lines, torn=""):
    path.write_text("\n".join([*path.read_text().splitlines()[:lines], torn]))


@pytest.mark.parametrize("lost", ["two steps", "evaluations", "summary"])
def test_what_a_kill_has_torn_or_prevented_is_there_once_after_a_resume(lost, go, here):
    options = {"checkpoint_every": 2, "eval_every": 2, "val_fraction": 0.1, "log_every": 4}
    summary = go(**options)
    before = end_of(here)
    shutil.rmtree(here / "checkpoints/best_000006")
    if lost == "summary":  # killed after the last step
        (here / "summary.json").unlink()
        cut(here / "eval.csv", 4, "6,")
    else:
        shutil.rmtree(here / "checkpoints/step_000006")
        cut(here / "log.csv", 9, "7,3.1")
    if lost == "evaluations":
        cut(here / "eval.csv", 3)  # steps 0 and 2
    again = go(**options, resume="auto")
    assert end_of(here) == before
    assert json.loads((here / "summary.json").read_text()) == again
    for name in ("steps", "tokens", "final_loss", "val_loss", "interrupted"):
        assert again[name] == summary[name], name


def test_a_run_killed_at_random_moments_ends_like_an_undisturbed_one(capsys):
    fork_server()  # the tests' own, which has PyTorch at hand; at length: python tests/soak.py
    status = soak.main(soak.SoakOptions(kills=2, longest_life=1.0))
    output = capsys.readouterr()
    assert status == 0, output
    assert "0 run(s) ended with other weights" in output.out


def test_a_signal_in_the_last_step_does_not_leave_out_the_last_evaluation(go, stop_at):
    stop_at(6)
    summary = go(eval_every=4, val_fraction=0.1)
    assert not summary["interrupted"]
    assert summary["val_loss"] is not None


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_from_before_the_first_update_can_be_resumed(go, monkeypatch, fused):
    disarm = at_step(monkeypatch, poisoned_at(1))
    with refused("the update of the last step, 1, was skipped"):
        go(skip_nonfinite=1, max_steps=1, fused_adamw=fused)
    disarm()
    with refused("the last step, 1, was skipped"):
        go(skip_nonfinite=1, max_steps=1, fused_adamw=fused, resume="auto")
    summary = go(skip_nonfinite=1, resume="auto", fused_adamw=fused)
    assert (summary["resumed_after_step"], summary["skipped_steps"], summary["steps"]) == (1, 1, 6)


def curves(run):
    """The losses and validation losses of a run by step."""
    columns = (("log.csv", "loss"), ("eval.csv", "val_loss"))
    return [
        {step: row[column] for step, row in read_rows(run / name, ("step", column)).items()}
        for name, column in columns
    ]


def test_on_another_number_of_ranks_batches_stay_and_steps_are_evaluated_once(
    go, here, tiny_config, tmp_path
):
    """The evaluations of steps that are taken again are in the file as the ranks start: all must
    forget them.
    """
    options = {"eval_every": 3, "val_fraction": 0.1, "checkpoint_every": 2, "shuffle": True}
    go(**options, total_batch_tokens=256, batch_size=2, keep_last=9)
    straight = curves(here)
    before = checkpoints(here)
    for name in ("step_000004", "step_000006", "best_000006"):
        shutil.rmtree(here / "checkpoints" / name)
    again = flags(tiny_config(**options, batch_size=2, resume="auto"))  # its total is kept
    run_ranks(2, "train.py", *again, cwd=tmp_path)
    assert checkpoints(here) == before
    assert curves(here) == [pytest.approx(curve, abs=1e-5) for curve in straight]


# ---- options


def test_options_that_contradict_the_checkpoint_name_both_values(go):
    go()
    given = {"n_layer": 3, "shuffle": True, "optimizer": "muon"}
    with pytest.raises(ConfigError) as caught:
        go(resume="auto", max_steps=9, total_batch_tokens=256, **given)
    said = (
        "n_layer 3 .* 2",
        "shuffle True .* False",
        "optimizer muon .* adamw",
        "total_batch_tokens 256 .* 128",
    )
    for line, values in zip(sorted(str(caught.value).splitlines()), sorted(said), strict=True):
        assert re.match(values, line)


def test_another_corpus_is_refused_naming_both(go, corpus):
    go()
    shutil.rmtree(corpus / "tiny")
    write_corpus(corpus / "tiny", [[token % 99 for token in range(4000)]])
    said = r"another corpus than .*tiny: its fingerprint is 2:\w{10}, this one's 2:\w{10}; .*"
    said += "start a new run from the weights: --init_from .*step_000006"
    with refused(said):
        go(resume="auto", max_steps=9)


def test_options_that_may_change_are_said(go, here, capsys):
    go()
    go(resume="auto", max_steps=8, lr=1e-4, batch_size=2)
    output = capsys.readouterr().out
    assert "note: changed since the checkpoint: " in output
    for change in (
        "lr 0.0003 -> 0.0001",
        "batch_size 4 -> 2",
        "total_batch_tokens None -> 128",
    ):
        assert change in output
    assert "note: the learning rate of step 7 is 0.0001, it was 0.0003 at step 6\n" in output
    assert log(here)[-1][2] == "0.0001"


def test_a_path_alone_is_enough(go, here):
    go(dropout=0.1, max_steps=4, sample_prompt="naïve")
    # everything else is the checkpoint's
    assert go(load_config(resume=str(here), max_steps=6))["steps"] == len(log(here)) == 6
    assert read_state(newest(here)).config["sample_prompt"] == "naïve"
    for resume, message in (
        (f"{here}/checkpoints/step_000004", "has later checkpoints, up to step_000006"),
        ("nowhere", "nowhere: has no whole checkpoint"),
        (f"{here}/step_000006", "is not in its run's checkpoints/"),
    ):
        with refused(message):
            go(load_config(resume=resume, max_steps=9))


@pytest.mark.parametrize("option", ["resume", "init_from"])
def test_a_run_that_begins_anew_keeps_its_config_files_name(option, go, here, tmp_path):
    go(max_steps=1)
    file = tmp_path / "mine.yaml"
    file.write_text((here / "config.yaml").read_text().replace("run_name: train\n", ""))
    value = {"resume": "auto", "init_from": str(here)}[option]
    assert go(load_config(str(file), **{option: value}))["resumed_after_step"] is None
    assert load_config(str(here.with_name("mine") / "config.yaml")).resume is None
    assert read_state(newest(here.with_name("mine"))).step == 1


# ---- the checkpoints that are kept, and their content


def test_the_newest_checkpoints_and_the_best_are_kept_also_after_a_resume(go, here, monkeypatch):
    losses = iter([9.0, 3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 8.0, 7.0])
    monkeypatch.setattr(run_evaluation, "validation_loss", lambda *_, **__: next(losses))
    options = {"checkpoint_every": 1, "keep_last": 2, "eval_every": 1, "val_fraction": 0.1}
    go(**options, max_steps=4)
    go(**options, max_steps=6, resume="auto")
    assert checkpoints(here) == ["best_000002", "step_000005", "step_000006"]
    assert read_state(here / "checkpoints/best_000002").step == 2
    assert read_state(newest(here)).best_val_loss == 1.0
    go(**options, max_steps=7, eval_tokens=64, resume="auto")  # losses of other tokens
    assert checkpoints(here)[0] == "best_000007"


def test_no_checkpoint_is_saved_where_none_are_kept(go, here):
    go(keep_last=0, eval_every=2, val_fraction=0.1)
    assert not (here / "checkpoints").exists()


# ---- signals


SLOW_SAVE = """if True:
    import runpy, sys, time
    from pathlib import Path
    import checkpoint.save

    def save_slowly(path):
        if not Path("saving").exists():
            Path("saving").touch()
            time.sleep(3)

    checkpoint.save.flush_to_disk = save_slowly
    sys.argv[0] = "train.py"
    runpy.run_module("train", run_name="__main__", alter_sys=True)
"""


def test_a_signal_to_one_rank_during_a_slow_save_stops_all_saved_and_says_how_to_go_on(
    tiny_config, tmp_path, here
):
    """Rank 1 hears no signal while it waits for rank 0, which writes."""
    config = tiny_config(max_steps=100_000, batch_size=2, checkpoint_every=3, tensorboard=True)
    options = flags(config)
    with ended(start_ranks(2, "-c", SLOW_SAVE, *options, cwd=tmp_path)) as ranks:
        wait_for((tmp_path / "saving").exists, ranks[0])
        ranks[1].send_signal(signal.SIGUSR1)
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "to resume: the same command with --resume " in outputs[0][0]
    assert len([*here.glob("events.*")]) == 1
    assert [read_state(path).step for path in all_checkpoints(here)] == [3, len(log(here))]


TWO_SIGNALS = """if True:
    import signal
    from runtime.signals import StopRequest
    with StopRequest() as stop:
        stop.has_begun = True
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # torchrun's copy of the same Ctrl-C
        print("is stopping", flush=True)
        stop.received -= 2
        signal.raise_signal(signal.{second})
        print("was not stopped", flush=True)
"""


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_signal_kills_but_a_copy_of_the_first_one_does_not(second, tmp_path):
    status = -signal.Signals[second]
    done = run("-c", TWO_SIGNALS.format(second=second), cwd=tmp_path, status=status)
    assert done.stdout == "is stopping\n"


def test_a_rank_that_hangs_ends_the_others_with_a_message(tiny_config, tmp_path, here):
    """test_ranks.py has one that dies."""
    options = flags(tiny_config(max_steps=100_000, timeout=4))
    with ended(start_ranks(2, "train.py", *options, cwd=tmp_path)) as workers:
        wait_for(lambda: (here / "log.csv").exists() and log(here), workers[0])
        workers[1].send_signal(signal.SIGSTOP)
        errors = workers[0].communicate(timeout=60)[1]
    assert "error: another rank has died, or did not answer within --timeout 4 s" in errors
    assert "Traceback" not in errors


# ---- faults


def test_a_non_finite_step_keeps_the_last_good_checkpoint_and_says_how_to_go_on(
    go, here, monkeypatch
):
    at_step(monkeypatch, poisoned_at(5))
    figures = r"step 5: the loss is [\d.]+, the gradient norm nan, the learning rate 0.0003; "
    advice = r".*--resume .*train --lr 0.00015 --muon_lr 0.01 resumes from its last checkpoint$"
    with refused(figures + advice):
        go(checkpoint_every=2, optimizer="muon")
    assert read_state(newest(here)).step == 4


def test_weights_that_are_no_longer_finite_are_not_saved(go, here, monkeypatch):
    """A finite gradient can still make an update that overflows."""

    def overflow(call, model):
        if call == 4:
            next(model.parameters()).data[0] = float("inf")

    at_step(monkeypatch, overflow)
    with refused(r"step 4: the weights are no longer finite and are not saved; .*Try a lower lr"):
        go(checkpoint_every=2)
    assert read_state(newest(here)).step == 2


@pytest.mark.parametrize("fused", [False, True])
def test_non_finite_steps_change_nothing_and_are_skipped_as_often_as_asked(
    go, here, monkeypatch, capsys, fused
):
    at_step(monkeypatch, poisoned_at(2, 4))
    summary = go(skip_nonfinite=2, checkpoint_every=1, keep_last=9, fused_adamw=fused)
    assert (summary["steps"], summary["skipped_steps"]) == (6, 2)
    assert [row[3] for row in log(here)].count("nan") == 2
    assert "skipped, 2 of at most 2" in capsys.readouterr().out
    for name in PARTS[:2]:
        before, skipped, after = (
            (here / f"checkpoints/step_{step:06d}" / name).read_bytes() for step in (3, 4, 5)
        )
        assert before == skipped != after
    at_step(monkeypatch, poisoned_at(1, 2, 3))
    with refused("step 3: "):
        go(skip_nonfinite=2, run_name="more", fused_adamw=fused)


# ---- bad checkpoints


@pytest.fixture
def saved(go, here):
    """The only checkpoint of a run."""
    go(max_steps=2)
    return newest(here)


def resume(folder, **options):
    return train(load_config(resume=str(folder), max_steps=9, **options), ALONE)


def flip(path):
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("harm", [Path.unlink, flip])
def test_a_damaged_checkpoint_is_skipped_or_refused_in_one_line(name, harm, saved, go, capsys):
    harm(saved / name)
    with refused(r"damaged|missing"):
        resume(saved)
    # the line that is flipped in SHA256SUMS is the optimizer's
    if name != "optimizer.safetensors" and (name, harm) != ("SHA256SUMS", flip):
        with refused(r"damaged|missing"):
            load_model(str(saved))
    assert go(max_steps=3, resume="auto")["resumed_after_step"] is None  # a fresh start
    output = capsys.readouterr().out
    assert "note: skipping a checkpoint: " in output
    assert "is now " in output  # the old folder is kept


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_unless_all_are(go, here, capsys):
    go(checkpoint_every=2)
    straight = log(here)
    (newest(here) / "model.safetensors").write_bytes(b"")
    assert go(checkpoint_every=2, resume="auto")["resumed_after_step"] == 4
    assert "step_000006/model.safetensors: damaged" in capsys.readouterr().out
    assert log(here) == straight
    for path in (here / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"")
    with refused("has no whole checkpoint", lines=4) as caught:
        resume(here)
    others = str(caught.value).splitlines()[1:]
    assert [line.partition("step_")[2][:6] for line in others] == ["000006", "000004", "000002"]


@pytest.mark.parametrize("name", PARTS[:3])
def test_a_file_that_the_checksums_leave_out_counts_as_damaged(name, saved):
    sums = (saved / "SHA256SUMS").read_text().splitlines(keepends=True)
    (saved / "SHA256SUMS").write_text("".join(line for line in sums if name not in line))
    with refused(rf"{name}: damaged: its checksum is not in SHA256SUMS"):
        resume(saved)


def test_a_checkpoint_under_the_name_of_another_step_is_refused_or_skipped(go, here, capsys):
    go(checkpoint_every=4)
    straight = log(here)
    renamed = newest(here).rename(here / "checkpoints/step_000009")
    said = f"{renamed}: has step 6; rename it to step_000006"
    for act in (lambda: resume(renamed), lambda: load_model(str(renamed))):
        with refused(said):
            act()
    assert go(max_steps=9, resume="auto")["resumed_after_step"] == 4
    assert f"note: skipping a checkpoint: {said}" in capsys.readouterr().out
    assert log(here)[:6] == straight
    assert read_state(newest(here)).step == 9


def forge(**changes):
    """Change entries of checkpoint.json, or with dictionaries their entries."""

    def change(state):
        for name, value in changes.items():
            state[name] = state[name] | value if isinstance(value, dict) else value
        return json.dumps(state)

    return change


OTHER_RANDOM = {"python": [3, [2**80] * 625, None], "numpy": ["MT19937", [1], 0, 0, 0.0]}
FORGED = {
    "nested JSON": lambda state: json.dumps(state)[:-1] + ', "x":' + '{"a":' * 100_000,
    "no step": forge(step=None),
    "a negative step": forge(step=-6),
    "an option of the wrong type": forge(config={"lr": {"a": 1}, "seq_len": "long"}),
    "no random state": forge(random=[{}]),
    "another generator": lambda state: forge(random=[state["random"][0] | OTHER_RANDOM])(state),
    "random bytes": lambda state: forge(random=[state["random"][0] | {"torch_cpu": "AA=="}])(state),
    "a loss scaler without a scale": forge(scaler={"growth_factor": 2.0}),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_state_is_one_line_that_names_the_file(case, saved):
    file = saved / "checkpoint.json"
    file.write_text(FORGED[case](json.loads(file.read_text())))
    reseal(saved)
    with refused(rf"^{file}: .*(damaged|not valid): .*$"):
        resume(saved, **{"fp16": True} if "scaler" in case else {})


def test_options_that_a_checkpoint_lacks_have_their_defaults(go, saved):
    file = saved / "checkpoint.json"
    state = json.loads(file.read_text())
    for name in ("init_from", "lr", "grad_clip"):  # the run has their defaults
        del state["config"][name]
    file.write_text(json.dumps(state))
    reseal(saved)
    assert load_model(str(saved)).config.n_layer == 2
    assert resume(saved)["steps"] == 9


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


def test_nothing_in_a_checkpoint_is_executed(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in PARTS[:3]:
        whole = (saved / name).read_bytes()
        (saved / name).write_bytes(pickle.dumps(Bomb()))
        reseal(saved)
        with refused("damaged"):
            resume(saved)
        (saved / name).write_bytes(whole)
    assert not (tmp_path / "exploded").exists()
