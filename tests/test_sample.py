"""Text from a model: how tokens are chosen, texts together and alone, the stream of characters, the
command, a conversation.
"""

import io
import signal
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import sample
from checkpoint.weights import load_model
from data.tokenizer import END_OF_TEXT, get_encoding
from model import GPT
from runtime.cli import ConfigError, parse
from runtime.errors import UserError
from sample import (
    SampleOptions,
    chooser,
    decoded,
    filtered,
    in_order,
    read_prompts,
    sample_text,
    seeded,
)
from tests.conftest import ROOT, run, start, wait_for

PROMPTS = [
    [5, 6, 7],
    [1],
    list(range(20)),
    [9] * 31,
    list(range(100, 60, -1)),
]  # the last ones reach the context's end, 32


@pytest.fixture
def run_folder(tmp_path):
    """A folder in which `logs/model` is a Hugging Face folder of a random GPT-2 with the real
    vocabulary and a context of 32.
    """
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=32)
    model = GPT2LMHeadModel(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(tmp_path / "logs/model")
    return tmp_path


def options(*words):
    return parse(SampleOptions, ["model", *map(str, words)], positional="run")


# ---- how tokens are chosen


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_p": 1e-9},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"temperature": 0.3},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_scores_are_those_of_transformers(settings):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits, text = (
            torch.randn(200, generator=generator) * 3,
            torch.randint(0, 200, (30,), generator=generator).tolist(),
        )
        s = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "repetition_penalty": 1.0} | settings
        theirs = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(s["repetition_penalty"]),
                TemperatureLogitsWarper(s["temperature"]),
            ]
        )
        theirs += [TopKLogitsWarper(s["top_k"])] if s["top_k"] else []
        theirs += [TopPLogitsWarper(s["top_p"])] if s["top_p"] < 1 else []
        torch.testing.assert_close(
            filtered(logits, text, **s), theirs(torch.tensor([text]), logits[None])[0]
        )


def test_greedy_texts_with_a_penalty_are_those_of_transformers_generate(run_folder):
    theirs, ours = (
        GPT2LMHeadModel.from_pretrained(run_folder / "logs/model").eval(),
        load_model("model", str(run_folder / "logs")),
    )
    for penalty in (1.0, 1.5):
        idx = torch.tensor([[5, 17, 300]])
        expected = theirs.generate(
            idx,
            attention_mask=torch.ones_like(idx),
            do_sample=False,
            max_new_tokens=25,
            min_new_tokens=25,
            repetition_penalty=penalty,
            pad_token_id=END_OF_TEXT,
            eos_token_id=None,
        )
        steps = ours.stream(
            idx.tolist(), 25, None, chooser([seeded(0)], 0, None, repetition_penalty=penalty)
        )
        assert [token for (token,) in steps] == expected[0, 3:].tolist()


def test_a_tiny_top_p_keeps_the_likeliest_token_top_p_1_all_and_temperature_0_needs_neither():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    for top_p in (1e-45, 1e-300, 0.1):
        assert filtered(logits, [0], 1.0, None, top_p).isfinite().tolist() == [
            False,
            True,
            False,
            False,
        ]
    assert torch.equal(filtered(logits, [0], 1.0, None, 1.0), logits)
    assert torch.equal(filtered(logits, [0], 1.0, 10**6, 1 - 1e-9), logits)
    for top_p in (1e-9, 0.9, 1.0):
        assert filtered(logits, [0], 0, 3, top_p).isfinite().tolist() == [False, True, False, False]


# ---- together and alone


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_prompts_of_different_lengths_each_get_what_they_get_alone_also_where_the_window_slides(
    tiny_model, flash, temperature
):
    model = tiny_model(flash=flash, init="gpt2")
    settings = {"temperature": temperature, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    together = list(
        model.stream(PROMPTS, 40, None, chooser([seeded(i) for i in range(5)], **settings))
    )
    for row, prompt in enumerate(PROMPTS):
        alone = list(model.stream([prompt], 40, None, chooser([seeded(row)], **settings)))
        assert [step[row] for step in together] == [token for (token,) in alone]


def test_each_text_stops_at_its_own_end_and_the_others_go_on(tiny_model):
    model = tiny_model(init="gpt2")
    alone = [
        [token for (token,) in model.stream([prompt], 40, None, chooser([seeded(0)], 1.0, None))]
        for prompt in PROMPTS
    ]
    stop = alone[3][4]  # soon, and past the context's end
    steps = list(model.stream(PROMPTS, 40, stop, chooser([seeded(0) for _ in PROMPTS], 1.0, None)))
    for row, tokens in enumerate(alone):
        until = tokens.index(stop) + 1 if stop in tokens else 40
        drawn = [step[row] for step in steps]
        assert drawn == tokens[:until] + [None] * (len(steps) - until)


def test_the_compiled_step_gives_the_same_tokens_and_is_compiled_once(tiny_model):
    model, graphs = tiny_model(n_layer=1, init="gpt2"), []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    decode = torch.compile(model.next_logits, dynamic=False, fullgraph=True, backend=count)
    for prompts in ([[1, 2, 3], [4]], [[7], [8, 9]]):
        plain, compiled = (
            list(model.stream(prompts, 12, None, chooser([seeded(0)] * 2, 0, None), function))
            for function in (None, decode)
        )
        assert plain == compiled
    assert len(graphs) == 1


def test_sampling_never_touches_the_global_random_state(tiny_model):
    model = tiny_model(vocab_size=50257)
    before = torch.get_rng_state()
    sample_text(model, "A", 5, seed=1, num_samples=2)
    assert torch.equal(torch.get_rng_state(), before)


# ---- texts


def tokens_of(text):
    """A text's bytes, a token each: so that characters span tokens."""
    return [get_encoding().encode_single_token(bytes([byte])) for byte in text.encode()]


def test_a_character_that_spans_tokens_comes_out_whole_and_a_cut_one_at_the_end():
    text = "a€😀é"
    pieces = [piece for (piece,) in decoded([[token] for token in tokens_of(text)])]
    assert pieces == ["a", "", "", "€", "", "", "", "😀", "", "é", ""]
    cut = [[token] for token in tokens_of("x😀")[:-1]]
    assert [piece for (piece,) in decoded(cut)] == ["x", "", "", "", "\ufffd"]
    assert [piece for (piece,) in decoded([*cut, [END_OF_TEXT], [None]])] == [
        "x",
        "",
        "",
        "",
        "\ufffd",
        None,
        "",
    ]


def test_what_is_streamed_is_the_text_of_all_tokens_whatever_bytes_they_are():
    rows = torch.randint(
        0, END_OF_TEXT, (20, 60), generator=torch.Generator().manual_seed(0)
    ).tolist()
    for row in rows:
        assert "".join(
            piece for (piece,) in decoded([[token] for token in row])
        ) == get_encoding().decode(row)


def test_texts_come_in_order_the_first_as_it_grows():
    steps = [["a", "x", "1"], ["b", None, "2"], [None, None, "3"], ["", "", ""]]
    assert list(in_order(["A", "X", ""], steps)) == [
        "A",
        "a",
        "b",
        "\n---\n",
        "Xx\n---\n",
        "123",
        "",
        "",
    ]
    assert (
        "".join(in_order(["A", "X"], [["a", "x"], ["b", "y"], ["", "\ufffd"]]))
        == "Aab\n---\nXxy\ufffd"
    )


def test_the_second_sample_of_a_prompt_is_the_first_one_of_the_next_seed(tiny_model):
    model = tiny_model(vocab_size=50257, init="gpt2")
    several = sample_text(model, "Hello", 6, seed=3, num_samples=3)
    assert several == [sample_text(model, "Hello", 6, seed=seed)[0] for seed in (3, 4, 5)]
    assert len(set(several)) == 3


def test_a_model_of_weights_that_are_no_numbers_is_an_error_of_the_user(tiny_model):
    model = tiny_model(vocab_size=50257)
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(UserError, match="logits are not finite"):
        sample_text(model, "Hello", 3)


# ---- the command


def printed(capsys, monkeypatch, folder, *words):
    """What the command prints on stdout and stderr."""
    monkeypatch.chdir(folder)
    sample.main(options("--device", "cpu", *words))
    return capsys.readouterr()


def test_a_file_of_prompts_gives_each_line_its_text_whatever_the_batch(
    run_folder, capsys, monkeypatch
):
    (run_folder / "prompts.txt").write_bytes(
        "\ufeffOne\r\n\nA longer prompt, naïve €\nFour".encode()
    )
    prompts = read_prompts(str(run_folder / "prompts.txt"))
    assert prompts == ["One", "", "A longer prompt, naïve €", "Four"]
    common = (
        "--max_new_tokens",
        40,
        "--num_samples",
        2,
        "--top_p",
        0.9,
        "--repetition_penalty",
        1.1,
    )
    alone = [
        printed(capsys, monkeypatch, run_folder, *common, "--prompt", prompt).out
        for prompt in prompts
    ]
    for batch_size in (1, 3, 16):
        together = printed(
            capsys,
            monkeypatch,
            run_folder,
            *common,
            "--prompt_file",
            "prompts.txt",
            "--batch_size",
            batch_size,
        )
        assert together.out == "\n---\n".join(text.removesuffix("\n") for text in alone) + "\n"
        assert together.err.endswith(" tokens/s\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty; give a prompt on each line"),
        (b"one\ntw\xff\n", "line 2 is not UTF-8 text"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_one_line_with_status_2(
    content, message, run_folder
):
    if content is not None:
        (run_folder / "prompts.txt").write_bytes(content)
    done = run("sample.py", "model", "--prompt_file", "prompts.txt", cwd=run_folder)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --prompt_file prompts.txt: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt_file", "x", "--prompt", "y"], "prompt_file and prompt exclude each other"),
        (["--interactive", "--prompt_file", "x"], "prompt_file and interactive exclude each other"),
        (["--interactive", "--num_samples", "2"], "num_samples and interactive exclude each other"),
        (["--top_p", "0"], "--top_p: input should be greater than 0"),
        (["--top_p", "1.1"], "--top_p: input should be less than or equal to 1"),
        (["--repetition_penalty", "0"], "--repetition_penalty: input should be greater than 0"),
    ],
)
def test_options_that_exclude_each_other_or_are_out_of_range(words, message):
    with pytest.raises(ConfigError, match=message):
        options(*words)


def test_options_without_effect_are_told():
    assert options("--temperature", 0, "--top_p", 0.5, "--num_samples", 2).notes() == [
        "top_p has no effect: temperature is 0",
        "temperature is 0: all texts of a prompt are the same",
    ]
    assert options("--temperature", 0).notes() == options("--top_p", 0.5).notes() == []


def test_a_prompt_longer_than_the_context_is_printed_whole_and_continued(
    run_folder, capsys, monkeypatch
):
    out = printed(
        capsys, monkeypatch, run_folder, "--prompt", "word " * 60, "--max_new_tokens", 3
    ).out
    assert out.startswith("word " * 60)
    assert len(out) > 5 * 60 + 2


def test_text_comes_as_it_is_drawn_and_ctrl_c_ends_its_line(run_folder):
    process = start(
        "sample.py", "model", "--prompt", "Hello", "--max_new_tokens", "1000000", cwd=run_folder
    )
    try:
        wait_for(
            lambda: process.out.exists() and len(process.out.read_text(errors="replace")) > 20,
            process,
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert out.startswith("Hello")
    assert out.endswith("\n")
    assert err == "error: interrupted\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a Unix shell")
def test_a_reader_that_leaves_in_the_middle_ends_it_without_a_word(run_folder):
    pipeline = f"{sys.executable} {ROOT / 'sample.py'} model --max_new_tokens 1000000 | head -c 20; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", pipeline], cwd=run_folder, capture_output=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_terminal_without_the_characters_gets_question_marks(run_folder):
    code = (
        "import sys; sys.argv = ['sample.py', 'model', '--prompt', 'naïve €', "
        "'--max_new_tokens', '3']\n"
        "sys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
        f"import runpy; runpy.run_path({str(ROOT / 'sample.py')!r}, run_name='__main__')"
    )
    done = run("-c", code, cwd=run_folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("na?ve ?")


def test_bf16_weights_draw_text_too(run_folder, capsys, monkeypatch):
    dtypes, real = set(), GPT.next_logits
    monkeypatch.setattr(
        GPT,
        "next_logits",
        lambda model, *args: dtypes.add(model.lm_head.weight.dtype) or real(model, *args),
    )
    said = printed(
        capsys, monkeypatch, run_folder, "--bf16", "--prompt", "Hello", "--max_new_tokens", 3
    )
    assert dtypes == {torch.bfloat16}
    assert said.out.startswith("Hello")
    assert " tokens in " in said.err


def test_compiled_text_is_the_plain_one_and_what_compiling_was_worth_is_told(
    run_folder, capsys, monkeypatch
):
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **options: real(*args, backend="eager", **options)
    )
    words = ("--temperature", 0, "--prompt", "Hello", "--max_new_tokens", 40)
    plain, compiled = (
        printed(capsys, monkeypatch, run_folder, *words, *more) for more in ((), ("--compile",))
    )
    assert compiled.out == plain.out
    assert "note: compiled in " in compiled.err


# ---- interactive


@pytest.fixture
def conversation(run_folder, capsys, monkeypatch):
    """Drives --interactive with lines of input: returns what it printed, and the context and the
    tokens of each answer.

    Ctrl-C comes when `stop_at` pieces of text have been shown.
    """

    def drive(lines, *words, stop_at=None):
        contexts, answers, shown = [], [], []
        real_stream, real_show = GPT.stream, sample.show

        def stream(model, prompts, *args):
            contexts.append(list(prompts[0]))
            answers.append([])
            for tokens in real_stream(model, prompts, *args):
                answers[-1] += tokens
                yield tokens

        def show(text):
            shown.append(text)
            real_show(text)
            if len(shown) == stop_at:
                raise KeyboardInterrupt

        monkeypatch.setattr(GPT, "stream", stream)
        monkeypatch.setattr(sample, "show", show)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
        return printed(capsys, monkeypatch, run_folder, "--interactive", *words), contexts, answers

    return drive


def encoded(text):
    return get_encoding().encode_ordinary(text)


def test_a_conversation_keeps_its_context_and_ends_at_the_end_of_input(conversation):
    said, contexts, answers = conversation(
        b"One\n\nTw\xffo\n", "--max_new_tokens", 4, "--prompt", "Zero"
    )
    assert contexts[:2] == [encoded("Zero"), encoded("Zero") + answers[0] + encoded("\nOne")]
    assert contexts[2] == contexts[1] + answers[1]  # an empty line adds nothing
    assert contexts[3] == (contexts[2] + answers[2] + encoded("\nTw\ufffdo"))[-28:]
    assert len(contexts) == 4
    assert said.err.startswith("16 tokens in ")


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on_from_there(conversation):
    _, contexts, answers = conversation(b"One\nTwo\n", "--max_new_tokens", 8, stop_at=3)
    assert [len(answer) for answer in answers] == [3, 8]
    assert contexts == [encoded("One"), encoded("One") + answers[0] + encoded("\nTwo")]


def test_what_a_conversations_context_cannot_hold_is_forgotten(conversation):
    _, contexts, answers = conversation(
        b"One\nTwo\nThree\n", "--max_new_tokens", 20
    )  # of a context of 32
    assert contexts[2] == (contexts[1] + answers[1] + encoded("\nThree"))[-16:]
    assert [len(answer) for answer in answers] == [20, 20, 20]


def test_after_the_end_of_a_document_a_line_begins_another(conversation, monkeypatch):
    monkeypatch.setattr(sample, "draw", lambda *_: END_OF_TEXT)
    _, contexts, _ = conversation(b"One\nTwo\n")
    assert contexts == [encoded("One"), [*encoded("One"), END_OF_TEXT, *encoded("Two")]]


def test_ctrl_c_at_the_prompt_ends_a_conversation(conversation, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    said, contexts, _ = conversation(b"")
    assert contexts == []
    assert said.err == "0 tokens in 0.00 s: 0.0 tokens/s\n"


def test_a_conversation_without_a_stdin_is_refused(run_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="there is no stdin"):
        printed(capsys, monkeypatch, run_folder, "--interactive")
