"""--fsdp: a model in shards trains to the numbers of DDP, and its checkpoints resume anywhere."""

import json
import re

import pytest
import torch

from checkpoint.weights import load_model
from data.tokenizer import END_OF_TEXT, get_encoding
from tests.conftest import (
    MODERN,
    console,
    end_of,
    grown,
    run_ranks,
    tiny_run,
    write_tiny_corpus,
)
from tests.test_evaluate import item, write_items
from tests.test_resume import checkpoints
from tests.test_train import column, rows

# all that a step does, over GPT-2's vocabulary, padded, so that samples and HellaSwag take part
EVERYTHING = {
    "vocab_size": 50304,
    "n_embd": 16,
    "tie_weights": True,
    "dropout": 0.1,
    "grad_clip": 0.5,
    "decay_matrices_only": True,
    "fused_adamw": True,
    "shuffle": True,
    "val_fraction": 0.045,  # five sequences: each rank has other ones, in whole batches and not
    "eval_every": 2,
    "sample_every": 2,
    "sample_tokens": 8,
    "sample_temperature": 0.5,
    "hellaswag_every": 4,
    "hellaswag_file": "items.jsonl",
    "max_steps": 4,
    "batch_size": 2,
    "total_batch_tokens": 256,
}
# a bias of six numbers: the last of four ranks has none of it
FEW = {"max_steps": 4, "batch_size": 2, "total_batch_tokens": 256, "dropout": 0.1, "n_embd": 6}
FSDP = FEW | {"fsdp": True}
BF16 = FEW | {"bf16": True, "dropout": 0.0, "tie_weights": True}
NEWER = MODERN | {"n_embd": 8, "embed_lr": 0.01, "scalar_lr": 0.02}


def do(ranks, place, actions):
    """Let ranks do the actions, each with the options of a tiny run of that name or of a resume;
    returns rank 0's results by name.
    """
    given = []
    for name, (action, options) in actions.items():
        if "resume" not in options:
            config = tiny_run(place, run_name=name, **options)
            options = config.model_dump(mode="json", include=config.model_fields_set)
        given.append((action, options))
    command = ["-m", "tests.sharded", json.dumps(given), "results.json"]
    for done in run_ranks(ranks, *command, cwd=place, timeout=2000):
        assert "Warning: FSDP2" not in done.stderr
    return dict(zip(actions, json.loads((place / "results.json").read_text()), strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    write_tiny_corpus(folder)
    write_items(folder / "items.jsonl", [item(seed) for seed in range(3)])
    return folder


def elsewhere(run, **options):
    """Options that resume a run in another folder, which they name."""
    return options | {"resume": f"logs/{run}", "log_dir": f"logs/{options}"}


@pytest.fixture(scope="module")
def two(place):
    """What two processes did, by the name of the run."""
    sample = {"vocab_size": 50304, "max_steps": 1, "sample_every": 1, "sample_tokens": 3}
    sharded = {"fsdp": True, "recompute": True}
    compiled = {"fsdp": True, "compile": True, "max_steps": 2, "hellaswag_every": 2}
    return do(
        2,
        place,
        {
            "ddp": ("train", EVERYTHING),
            "fsdp": ("train", EVERYTHING | sharded),
            "ddp bf16": ("train", BF16),
            "bf16": ("looked_at", BF16 | {"fsdp": True}),
            "compiled": ("train", BF16 | {"fsdp": True, "compile": True}),
            "compiled, evaluated": ("graphs", EVERYTHING | compiled),
            "fp16": ("train", FSDP | {"fp16": True}),
            "ddp modern": ("train", FEW | NEWER),
            "modern": ("train", FSDP | NEWER | {"recompute": True}),
            "sampled": ("sampled", FSDP | sample),
            "ddp few": ("train", FEW | {"recompute": True}),
            "straight": ("train", FSDP),
            "ddp few, with FSDP": ("saved_again", elsewhere("ddp few", fsdp=True)),
            "straight, with DDP": ("saved_again", elsewhere("straight", fsdp=False)),
            "again": ("train", FSDP | {"max_steps": 2}),
            "again, resumed": ("train", {"resume": "logs/again", "max_steps": 4}),
            "not saved": ("not_saved", FSDP | {"checkpoint_every": 2}),
        },
    )


@pytest.fixture(scope="module")
def four(place, two):
    """What four processes did."""
    return do(
        4,
        place,
        {
            "bf16 on four": ("train", BF16 | {"fsdp": True, "batch_size": 1}),
            "straight, on four": ("saved_again", elsewhere("straight", fsdp=True, batch_size=1)),
        },
    )


def figures(place, *runs, name="loss"):
    """Return a column of the logs of runs."""
    return [column(place / "logs" / run, name) for run in runs]


def drawn(model, n, temperature):
    """The first line of a sample of n tokens, which begins a document."""
    (tokens,) = grown(model, [[END_OF_TEXT]], n, [1337], temperature=temperature, top_k=50)
    return get_encoding().decode(tokens).splitlines()[0]


def last_sample(folder):
    return re.findall(r"sample after step \d+: (.*)", console(folder))[-1]


def test_a_sharded_run_has_the_losses_norms_evaluations_and_samples_of_ddp(two, place):
    runs = ("ddp", "fsdp")
    whole, sharded = figures(place, *runs)
    assert len(whole) == 4
    assert sharded == pytest.approx(whole, abs=1e-4)
    # a CPU sums the squares of an embedding's million gradients one after the other: the whole norm
    # is the one that is less exact
    whole, sharded = figures(place, *runs, name="norm")
    assert sharded == pytest.approx(whole, rel=1e-3)
    evaluated = [rows(place / "logs" / run, "eval.csv") for run in runs]
    for theirs, ours in zip(*evaluated, strict=True):
        theirs, ours = ([float(x) for x in row.values() if x] for row in (theirs, ours))
        assert ours == pytest.approx(theirs, abs=1e-4)
    of_ddp, model = (load_model(str(place / "logs" / run)) for run in runs)
    assert last_sample(place / "logs" / runs[1]) == drawn(model, 8, 0.5)
    assert model.lm_head.weight is model.transformer.wte.weight
    for theirs, ours in zip(of_ddp.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("one", "other", "within"),
    [
        ("ddp few", "straight", 1e-6),  # with and without --recompute
        ("ddp bf16", "bf16", 1e-3),
        ("ddp bf16", "bf16 on four", 1e-3),
        ("ddp bf16", "compiled", 1e-3),
        ("straight", "fp16", 1e-2),
        ("ddp modern", "modern", 1e-5),
    ],
)
def test_losses_and_norms_are_the_same_within_the_precision(one, other, within, two, four, place):
    for name in ("loss", "norm"):
        ours, theirs = figures(place, one, other, name=name)
        assert len(ours) == 4
        assert ours == pytest.approx(theirs, rel=within)


def test_bf16_gathers_blocks_in_bf16_and_keeps_the_rest_in_fp32(two):
    """Gradients are summed once a step for each block and once for the rest, in two micro-steps."""
    fp32 = "torch.float32"
    assert two["bf16"] == {
        "block": "torch.bfloat16",
        "residual": fp32,
        "head": fp32,
        "sums": [fp32] * 3 * 4,
    }


def test_blocks_are_compiled_once_for_all_of_them_and_for_no_shape_of_an_evaluation(two):
    """Evaluations come before the first step too: one that switched compiling off for good would
    leave no graph.
    """
    # after eight forms of one function PyTorch runs it uncompiled
    assert two["compiled, evaluated"] == 1


def test_of_processes_that_draw_different_tokens_rank_0s_count(two, place):
    folder = place / "logs/sampled"
    assert last_sample(folder) == drawn(load_model(str(folder)), 3, 0.8)


# ---- checkpoints


@pytest.mark.parametrize(
    ("run", "options"),
    [
        ("ddp few", {"fsdp": True}),
        ("straight", {"fsdp": False}),
        ("straight", {"fsdp": True, "batch_size": 1}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("two", "four")
def test_a_checkpoint_resumes_with_the_same_bits_sharded_or_not_on_any_number_of_ranks(
    run, options, place
):
    again = place / elsewhere(run, **options)["log_dir"] / run
    assert end_of(again)["tensors"] == end_of(place / "logs" / run)["tensors"]


def test_a_resume_with_fsdp_is_exact(two, place):
    straight, again = (place / "logs" / name for name in ("straight", "again"))
    assert end_of(straight) == end_of(again)


def test_a_checkpoint_that_cannot_be_written_is_one_error_and_leaves_the_one_before(two, place):
    assert re.fullmatch(r".*No space left on device.*", two["not saved"])
    assert checkpoints(place / "logs/not saved") == ["step_000002"]
