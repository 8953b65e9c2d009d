"""The same batch on more processes: real groups of a tiny model, the waiting in a profile, and the
plain model's arithmetic.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

import bench
from benchmarks import in_turn, predict
from benchmarks.exchange import STEP, figures_of
from benchmarks.in_turn import Group
from benchmarks.predict import Speed, Work
from benchmarks.scaling import check_counts
from config import load_config
from runtime.cli import parse_command_line
from runtime.errors import TrainingError, UserError
from tests.conftest import CPU, ROOT, TINY

# ---- real processes


def command_line(*arguments):
    """What bench.py does with these arguments; returns its exit status."""
    try:
        bench.main(
            parse_command_line(bench.BenchOptions, [str(argument) for argument in arguments])
        )
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.fixture
def tiny_yaml(tmp_path, corpus):
    values = TINY | {
        "dataset": "tiny",
        "data_dir": corpus,
        "seq_len": 32,
        "batch_size": 4,
        "device": "cpu",
    }
    (tmp_path / "tiny.yaml").write_text(
        "".join(f"{name}: {value}\n" for name, value in values.items())
    )
    return tmp_path / "tiny.yaml"


def test_one_process_and_two_train_the_same_batch_in_turn(tiny_yaml, tmp_path, monkeypatch, forked):
    monkeypatch.setattr(in_turn, "TURN_SECONDS", 0.01)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert (
        command_line(
            "--config",
            tiny_yaml,
            "--scaling",
            "2,1",
            "--rounds",
            "6",
            "--log_dir",
            tmp_path / "logs",
        )
        == 0
    )
    (folder,) = (tmp_path / "logs/bench").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        "in_turn.json",
        "report.md",
        "results.json",
        "scaling.png",
    }

    one, two = json.loads((folder / "in_turn.json").read_text())["sides"]
    assert len(one["tokens_per_sec"]) == len(two["tokens_per_sec"]) == 6
    assert "--batch_size 4 --total_batch_tokens 128" in one["command"]
    assert "--batch_size 2 --total_batch_tokens 128" in two["command"]
    assert one["turns"][0]["loss"] == pytest.approx(
        two["turns"][0]["loss"], abs=1e-5
    )  # the same sequences
    assert [len(turn.get("ranks", [])) for turn in (one["turns"][0], two["turns"][0])] == [0, 2]
    assert all(
        rank["asleep"] and rank["tokens"] == turn["tokens"]
        for turn in two["turns"]
        for rank in turn["ranks"]
    )

    one, two = json.loads((folder / "results.json").read_text())["counts"]
    assert (one["processes"], one["waiting"], one["link"], one["predicted"]["waiting_s"]) == (
        1,
        0,
        None,
        0,
    )
    assert (two["processes"], two["batch_size"], two["micro_steps"]) == (2, 2, 1)
    assert 0 < two["waiting"] < 1
    assert two["link"] > 0
    assert two["update_s"] > 0
    sent = (
        4 * Work.of(load_config(str(tiny_yaml))).parameters
    )  # bytes: half of the gradients out, half of the sums back
    assert two["predicted"]["waiting_s"] == pytest.approx(sent / (two["link"] * 1e9))
    assert two["efficiency"] == pytest.approx(two["over_first"]["median"] / two["hardware"])
    report = (folder / "report.md").read_text()
    assert (
        "| processes | threads | batch | tokens/s | x first | efficiency | waiting | MB each |"
        in report
    )
    assert "![tokens/s and waiting](scaling.png)" in report


def group(code, ranks=2):
    return Group("a group", [sys.executable, "-c", code], {}, ranks)


ANSWERS = (
    "import json, os, sys, time\nrank = int(os.environ['RANK'])\nfor steps in map(int, "
    "sys.stdin):\n    {}\n"
    "    print(json.dumps({{'seconds': [0.5] * steps, 'tokens': 8 * steps, 'asleep': {}, 'rank': "
    "rank}}), flush=True)"
)


def test_a_groups_figures_are_its_first_processs_and_all_take_as_many_steps():
    with group(ANSWERS.format("time.sleep(0.1 * rank)", True)) as both:
        for member in both.members[1:]:
            member.steps = 7  # of its own: what counts is the first one's
        assert [both.turn(), both.turn()] == [16.0, 16.0]
    assert [turn["rank"] for turn in both.turns] == [0, 0]
    assert [len(rank["seconds"]) for rank in both.turns[-1]["ranks"]] == [1, 1]
    assert all(member.process.poll() is not None for member in both.members)


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (
            "rank == 1 and sys.exit('error: wrong here'); time.sleep(1000)",
            "wrong here",
        ),  # the first one still waits for it
        (
            "sys.exit('error: another process died') if rank == 0 else sys.exit('error: wrong "
            "here')",
            "wrong here",
        ),
        (
            "sys.exit('error: another process died') if rank == 0 else os.kill(os.getpid(), 9)",
            "killed by signal 9",
        ),
        ("sys.exit('error: wrong here') if rank == 0 else sys.exit(1)", "wrong here"),
    ],
)
def test_a_group_that_fails_tells_the_reason_of_the_process_that_has_one(
    happens, reason, monkeypatch
):
    monkeypatch.setattr(in_turn, "OTHERS_END", 1.0)
    with (
        group(ANSWERS.format(happens, True)) as both,
        pytest.raises(TrainingError, match=f"^a group: {reason}"),
    ):
        both.turn()


def test_a_group_of_which_one_process_does_not_sleep_is_refused():
    with (
        group(ANSWERS.format("pass", "rank == 0")) as both,
        pytest.raises(TrainingError, match="keep computing"),
    ):
        both.turn()


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scaling", "1,2"], "scaling trains on the config's corpus: name one"),
        (
            ["--config", "CONFIG", "--scaling", "2"],
            "scaling compares at least two numbers of processes, such as 1,2",
        ),
        (
            ["--config", "CONFIG", "--scaling", "1,0"],
            "scaling: input should be greater than or equal to 1, not '0'",
        ),
        (
            ["--config", "CONFIG", "--scaling", "1,2", "--scan", "batch_size=1,2"],
            "scan and scaling exclude each other",
        ),
        (
            ["--config", "CONFIG", "--scaling", "1,2", "--steps", "3"],
            "steps has no effect with scaling",
        ),
        (["--config", "CONFIG", "--rounds", "9"], "rounds has no effect without scaling"),
        (
            ["--config", "CONFIG", "--total_batch_tokens", "64"],
            "total_batch_tokens has no effect without scaling",
        ),
        (
            ["--config", "CONFIG", "--scaling", "1,2", "--rounds", "5"],
            "rounds: input should be greater than or equal to 6, not '5'",
        ),
        (
            ["--config", "CONFIG", "--scaling", "1,3"],
            "--scaling 3: the 4 sequences of a step (128 tokens) do not divide among 3 "
            "processes; nearest that work: 2 or 4",
        ),
        (
            ["--config", "CONFIG", "--scaling", "1,8"],
            "do not divide among 8 processes; nearest that work: 4\n",
        ),
        (
            ["--config", "CONFIG", "--scaling", "1,2", "--total_batch_tokens", "100"],
            "total_batch_tokens 100 is not a multiple",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, said, tiny_yaml, tmp_path, capsys):
    words = [str(tiny_yaml) if word == "CONFIG" else word for word in arguments]
    assert command_line(*words, "--log_dir", tmp_path / "logs") == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.splitlines()) == 1
    assert not (tmp_path / "logs").exists()


def test_more_processes_than_gpus_are_an_error_and_so_is_torchrun(monkeypatch):
    work = Work(100, 10, 64, 8, 8, 1, mixed=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        UserError, match="--scaling 4: each process takes a GPU, and there are 2 here"
    ):
        check_counts([1, 4], work, torch.device("cuda"))
    check_counts([1, 2], work, torch.device("cuda"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="run it without torchrun"):
        check_counts([1, 2], work, CPU)


# ---- waiting, in a profile


def event(
    name, start, end, device=DeviceType.CPU, children=(), is_async=False, is_user_annotation=False
):
    """An event of the profiler, which counts microseconds."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start * 1e6, end=end * 1e6),
        device_type=device,
        cpu_children=children,
        is_async=is_async,
        is_user_annotation=is_user_annotation,
    )


def test_a_process_waits_where_a_transfer_is_under_way_and_it_computes_nothing():
    found = figures_of(
        [
            event(STEP, 0, 10),
            event("autograd", 1, 7, children=["aten::mm"]),
            event("aten::mm", 1, 3),
            event("aten::mm", 4, 6),
            event("c10d::allreduce_", 2, 9),
            event("gloo:all_reduce", 2, 5, is_async=True),
            event("gloo:all_reduce", 5, 8, is_async=True),
            event("Optimizer.step#AdamW.step", 8, 9.5, children=["aten::mul"]),
            event("aten::mul", 8, 9),
            event(STEP, 20, 24),
            event("gloo:all_reduce", 23, 30, is_async=True),
        ]
    )
    assert found["step"] == pytest.approx([10, 4])
    assert found["transfer"] == pytest.approx([6, 1])
    assert found["waiting"] == pytest.approx(
        [1 + 2, 1]
    )  # from 3 to 4, and from 6 to 8; what is beyond a step is not its
    assert found["update"] == pytest.approx([1.5, 0])


def test_a_compiled_graph_computes_as_a_whole():
    found = figures_of(
        [
            event(STEP, 0, 10),
            event("CompiledFunctionBackward", 0, 6, children=["aten::mm"]),
            event("aten::mm", 1, 2),
            event("gloo:all_reduce", 4, 8, is_async=True),
        ]
    )
    assert found["waiting"] == pytest.approx([2])


def test_a_gpu_waits_while_only_nccls_kernels_run():
    gpu = DeviceType.CUDA
    found = figures_of(
        [
            event(STEP, 0, 10),
            event(STEP, 0, 10, gpu),
            event("aten::mm", 0, 10),  # the CPU hands work over meanwhile
            event("FSDP::post_backward", 0, 10, gpu, is_user_annotation=True),
            event("nccl:all_reduce", 3, 9, gpu, is_user_annotation=True),
            event("Optimizer.step#AdamW.step", 8, 8.1),
            event("Optimizer.step#AdamW.step", 8.2, 9.2, gpu, is_user_annotation=True),
            event("gemm", 1, 5, gpu),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4, 8, gpu),
            event("Memcpy DtoD", 6, 7, gpu),
        ]
    )
    assert found["waiting"] == pytest.approx([2])
    assert found["update"] == pytest.approx([1])


# ---- the plain model


def work(**changes):
    """100 parameters, 40 of them embeddings; 32 sequences of 16 tokens a step."""
    return Work(
        **{
            "parameters": 100,
            "late": 40,
            "tokens": 512,
            "seq_len": 16,
            "batch_size": 8,
            "flops_per_token": 1,
            "mixed": False,
        }
        | changes
    )


def test_a_ring_all_reduce_sends_two_and_fsdp_three_times_the_gradients_less_one_share():
    assert work().sent(1) == (0, 0)
    assert work().sent(2) == (2 * 1 / 2 * 400, 2 * 1 / 2 * 160)
    assert work().sent(4) == (2 * 3 / 4 * 400, 2 * 3 / 4 * 160)
    assert work().sent(4, fsdp=True)[0] == 3 * 3 / 4 * 400  # one micro-step
    assert work().sent(2, fsdp=True)[0] == 1 / 2 * (
        2 * 2 * 400 + 400
    )  # two: weights are gathered in each
    assert work(mixed=True).sent(4, fsdp=True) == (3 / 4 * (2 * 200 + 400), 3 / 4 * (2 + 4) * 40)


def test_a_batch_is_split_into_the_largest_micro_steps_that_fit():
    assert [work().split(n) for n in (1, 2, 4, 8, 32)] == [(8, 4), (8, 2), (8, 1), (4, 1), (1, 1)]
    assert work(tokens=16 * 36).split(3) == (
        6,
        2,
    )  # 12 sequences each, of which at most 8 at a time


def test_a_step_waits_for_what_backward_does_not_hide():
    fast = Speed(compute_s=12, update_s=1, link=1e-6)  # 1000 bytes a second
    alone = predict.predict(work(), fast, 1)
    assert (alone.compute_s, alone.update_s, alone.waiting_s, alone.step_s) == (12, 1, 0, 13)
    four = predict.predict(
        work(), fast, 4
    )  # 0.6 s of transfers beside 2 s of backward: but the embeddings' come last
    assert (four.compute_s, four.update_s) == (3, 1)  # every process updates all parameters
    assert four.waiting_s == pytest.approx(2 * 3 / 4 * 160 / 1000)
    slow = Speed(compute_s=12, update_s=1, link=1e-7)
    assert predict.predict(work(), slow, 4).waiting_s == pytest.approx(6 - 2 / 3 * 3)
    # of two micro-steps, only the last one's backward pass has transfers beside it
    assert predict.predict(work(), slow, 2).waiting_s == pytest.approx(4 - 2 / 3 * 6 / 2)
    sharded = predict.predict(work(), slow, 4, fsdp=True)
    assert (sharded.update_s, sharded.waiting_s) == (1 / 4, pytest.approx(9 - 3))


def test_processes_that_share_the_cores_hide_nothing_and_share_the_time():
    two = predict.predict(
        work(), Speed(compute_s=12, update_s=1, link=1e-6, beside=False), 2, hardware=1
    )
    assert (two.compute_s, two.update_s, two.waiting_s) == (12, 2, pytest.approx(0.4))


def test_the_docs_have_the_tables_that_the_model_makes():
    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    found = predict.cases()
    assert [line for line in predict.tables(found) if line not in text.splitlines()] == []
    sizes = {
        case.config: (case.work.parameters, case.work.late, case.work.tokens) for case in found
    }
    assert sizes == {
        "gpt2_124m": (124_475_904, 50304 * 768 + 1024 * 768, 2**19),
        "gpt2_1558m": (1_557_686_400, 50304 * 1600 + 1024 * 1600, 2**20),
    }
    assert all(0.2 < case.efficiency < 1.01 for case in found)
    assert Path(ROOT / "docs/scaling.png").is_file()
