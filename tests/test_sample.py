"""Text from a model: how tokens are chosen, texts together and alone, the stream of characters, the
command, a conversation.
"""

import functools
import io
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import inference.sampling
import sample
from data.tokenizer import END_OF_TEXT, get_encoding
from inference.sampling import Text, encode, grow, keys_for, pack_weights, probabilities, seeded
from runtime.cli import parse
from sample import SampleOptions, Sampler, compile_decoding
from tests.conftest import ROOT, ended, grown, refused, run, start, transformers_pair, wait_for

# the last ones reach the context's end, 32
PROMPTS = [[5, 6, 7], [1], [*range(20)], [9] * 31, [*range(100, 60, -1)]]


@pytest.fixture
def run_folder(tmp_path):
    """A folder in which `logs/model` is a Hugging Face folder of a random GPT-2 with the real
    vocabulary and a context of 32.
    """
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32}
    transformers_pair(tmp_path / "logs/model", **sizes)
    return tmp_path


def options(*words):
    return parse(SampleOptions, ["model", *map(str, words)], positional="run")


# ---- how tokens are chosen


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 10**6, "top_p": 1e-9},
        {"top_p": 0.7, "temperature": 0.3},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 0.5},
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers(settings):
    s = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "repetition_penalty": 1.0} | settings
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(s["repetition_penalty"])])
    theirs += [TemperatureLogitsWarper(s["temperature"])]
    theirs += [TopKLogitsWarper(s["top_k"])] if s["top_k"] else []
    theirs += [TopPLogitsWarper(s["top_p"])] if s["top_p"] < 1 else []
    generator = seeded(0)
    logits = torch.randn(20, 200, generator=generator) * 3
    texts = torch.randint(0, 200, (20, 30), generator=generator)
    tokens, p = probabilities(logits, texts.tolist(), **s)
    ours = torch.zeros(20, 200).scatter(1, tokens, p / p.sum(-1, keepdim=True))
    torch.testing.assert_close(ours, theirs(texts, logits).softmax(-1))


def alone(model, prompt, n, seed=0, **settings):
    """The tokens, up to n, that continue a prompt."""
    (tokens,) = grown(model, [prompt], n, [seed], **settings)
    return tokens


@pytest.mark.parametrize("settings", [(1.0, None, 1e-300), (0, 3, 1e-9), (1e-45, 3), (1e-20, 3)])
def test_a_tiny_top_p_and_temperature_0_keep_the_likeliest_token(settings):
    tokens, p = probabilities(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), [[0]], *settings)
    assert tokens[p > 0].tolist() == [1]


# ---- together and alone


def test_prompts_of_different_lengths_each_get_what_they_get_alone_also_where_the_window_slides(
    tiny_model,
):
    model = tiny_model(init="gpt2")
    settings = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    one_by_one = [alone(model, prompt, 40, seed, **settings) for seed, prompt in enumerate(PROMPTS)]
    assert grown(model, PROMPTS, 40, range(5), **settings) == one_by_one


def test_attention_of_a_gpu_sees_a_multiple_of_128_keys_and_the_text_is_the_same(
    tiny_model, monkeypatch
):
    """cuDNN's attention takes long to plan for each new number of keys."""
    assert [keys_for(200, torch.device(kind)) for kind in ("cpu", "cuda")] == [200, 256]
    model, lengths = tiny_model(block_size=300, init="gpt2"), set()
    attention = F.scaled_dot_product_attention

    def attend(q, k, v, **given):
        lengths.add(k.size(2))
        return attention(q, k, v, **given)

    for prompts in ([[*range(100)] * 2, [1, 2, 3]], [[*range(100)] * 2] * 2):
        expected = grown(model, prompts, 70)
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(F, "scaled_dot_product_attention", attend)
            on_gpu.setattr(
                inference.sampling, "keys_for", lambda n, _: keys_for(n, torch.device("cuda"))
            )
            assert grown(model, prompts, 70) == expected
        assert lengths == {256, 384}


def test_packed_weights_give_the_same_logits_and_those_of_one_text_or_in_bf16_are_not_packed(
    tiny_model,
):
    model, plain = tiny_model(init="gpt2"), tiny_model(init="gpt2")
    for rows, dtype in ((1, torch.float32), (5, torch.bfloat16)):
        pack_weights(model.to(dtype), rows)
        assert type(model.lm_head) is torch.nn.Linear
    model = tiny_model(init="gpt2")
    pack_weights(model, 5)
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    idx = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(model(idx), plain(idx))
    assert grown(model, PROMPTS, 40) == grown(plain, PROMPTS, 40)


def test_each_text_stops_at_its_own_end_and_the_others_go_on(tiny_model, monkeypatch):
    model = tiny_model(init="gpt2")
    texts = [alone(model, prompt, 40, temperature=1.0) for prompt in PROMPTS]
    stop = texts[3][4]  # soon, and past the context's end
    monkeypatch.setattr(inference.sampling, "END_OF_TEXT", stop)
    for drawn, text in zip(grown(model, PROMPTS, 40, temperature=1.0), texts, strict=True):
        assert drawn == (text[: text.index(stop) + 1] if stop in text else text)


# ---- texts


def test_a_character_that_spans_tokens_comes_out_whole_and_a_cut_one_at_the_end():
    bytes_of = [get_encoding().encode_single_token(bytes([byte])) for byte in "a€😀".encode()]
    for last, is_last in ((END_OF_TEXT, False), (bytes_of[-2], True)):
        text, strings = Text("", [], seeded(0)), []
        for token in bytes_of[:-2]:
            text.append(token, is_last=False)
            strings.append(text.string)
        assert strings == ["a", "a", "a", "a€", "a€", "a€"]
        text.append(last, is_last)
        assert (text.string, text.ended) == ("a€\ufffd", True)


@pytest.mark.parametrize("stop", ["y z", "b x", "€", "ab x€y z"])
def test_a_text_ends_before_the_first_stop_after_its_prompt_which_may_span_tokens(stop):
    """What is certain never has to be taken back."""
    drawn = "ab x€y zab x€y z"
    tokens = [get_encoding().encode_single_token(bytes([byte])) for byte in drawn.encode()]
    text, certain = Text(f"ab {stop}", [], seeded(0), stop), [f"ab {stop}"]
    for token in tokens:
        if not text.ended:
            text.append(token, is_last=False)
            assert text.certain.startswith(certain[-1])
            certain.append(text.certain)
    assert text.string == text.certain == f"ab {stop}" + drawn.partition(stop)[0]


def test_the_beginning_of_a_stop_waits_until_it_is_none_or_the_text_ends():
    text, certain = Text("end", [], seeded(0), "ended"), []
    for character in "ed endenden":
        token = get_encoding().encode_single_token(character)
        text.append(token, is_last=len(certain) == 10)
        certain.append(text.certain)
    waiting = ["", "ed", "ed ", "ed ", "ed ", "ed ", "ed ", "ed end", "ed end", "ed end"]
    assert certain == [f"end{text}" for text in [*waiting, "ed endenden"]]


def test_another_vocabulary_and_weights_that_are_no_numbers_are_errors_of_the_user(tiny_model):
    model = tiny_model()
    with refused("a vocabulary of 128 is not that of GPT-2's tokenizer"):
        encode(model, "")
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with refused("logits are not finite"):
        alone(model, [1], 3)


# ---- the command


@pytest.fixture
def printed(run_folder, capsys, monkeypatch):
    """Runs the command; returns its stdout and stderr."""
    monkeypatch.chdir(run_folder)

    def call(*words):
        sample.main(options("--device", "cpu", *words))
        return capsys.readouterr()

    return call


def test_a_file_of_prompts_gives_each_line_its_texts_whatever_the_batch(run_folder, printed):
    prompts = ["One", "", "A longer prompt, naïve €"]
    (run_folder / "prompts.txt").write_bytes(("\ufeff" + "\r\n".join(prompts)).encode())
    common = ("--max_new_tokens", 40, "--top_p", 0.9, "--repetition_penalty", 1.1)
    texts = [
        printed(*common, "--prompt", prompt, "--seed", seed).out.removesuffix("\n")
        for prompt in prompts
        for seed in (1, 2)
    ]
    words = ("--prompt_file", "prompts.txt", "--num_samples", 2, "--seed", 1)
    for batch_size in (4, 16):
        together = printed(*common, *words, "--batch_size", batch_size)
        assert together.out == "\n---\n".join(texts) + "\n"
        assert together.err.endswith(" tokens/s\n")
    (run_folder / "prompts.txt").write_bytes(b"na\xefve")
    with refused("--prompt_file prompts.txt: not UTF-8 .*byte 0xef"):
        printed(*words)


def test_each_text_of_a_batch_ends_before_the_stop(run_folder, printed):
    words = ("--num_samples", 4, "--max_new_tokens", 30, "--batch_size", 3)
    texts = printed(*words).out.removesuffix("\n").split("\n---\n")
    stop = texts[1][20:23]
    expected = [text.partition(stop)[0] for text in texts]
    assert expected[1] != texts[1]
    assert printed(*words, "--stop", stop).out == "\n---\n".join(expected) + "\n"


# with --repetition_penalty 1e-40 the penalized logits and then the probabilities would overflow
def test_options_without_effect_are_told():
    assert options("--temperature", 0, "--top_p", 0.5).notes() == [
        "top_p has no effect: temperature is 0"
    ]
    assert options("--temperature", 0).notes() == options("--top_p", 0.5).notes() == []
    both = options("--interactive", "--num_samples", 2, "--prompt_file", "x", "--prompt", "y")
    assert both.notes() == [
        "prompt has no effect: prompt_file is set",
        "prompt_file has no effect: interactive is on",
        "num_samples has no effect: interactive is on",
    ]


def test_text_comes_as_it_is_drawn_and_ctrl_c_ends_its_line(run_folder):
    words = ("model", "--prompt", "Hello", "--max_new_tokens", "1000000")
    with ended([start("sample.py", *words, cwd=run_folder)]) as (process,):
        wait_for(lambda: len(process.out.read_text(errors="replace")) > 20, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert out.startswith("Hello")
    assert out.endswith("\n")
    assert err == "error: interrupted\n"


def test_a_terminal_without_the_characters_gets_question_marks(run_folder):
    code = (
        "import sys; sys.argv = ['sample.py', 'model', '--prompt', 'naïve €', "
        "'--max_new_tokens', '3']\n"
        "sys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
        f"import runpy; runpy.run_path({str(ROOT / 'sample.py')!r}, run_name='__main__')"
    )
    done = run("-c", code, cwd=run_folder)
    assert done.stdout.startswith("na?ve ?")


def test_bf16_weights_continue_a_prompt_that_is_longer_than_the_context(run_folder, printed):
    prompt = "word " * 60
    out = printed("--bf16", "--prompt", prompt, "--max_new_tokens", 3).out
    assert out.startswith(prompt)
    assert len(out) > len(prompt) + 2
    sampler = Sampler(options("--bf16", "--log_dir", run_folder / "logs"), 1)
    assert sampler.model.lm_head.weight.dtype == torch.bfloat16


def test_compile_is_refused_on_a_cpu(printed):
    with refused("--compile: decoding on a CPU is slower compiled; run without it"):
        printed("--compile")


def test_compiled_text_is_the_plain_one_and_decoding_is_compiled_once(
    tiny_model, monkeypatch, capsys
):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    model = tiny_model(init="gpt2")
    decode = compile_decoding(model, 2)
    assert "note: compiled in " in capsys.readouterr().err
    for prompts in (PROMPTS[:2], PROMPTS[3:], [[1, 2], [3, 4]]):
        assert grown(model, prompts, 40, decode=decode) == grown(model, prompts, 40)
    assert len(graphs) == 1


# ---- interactive


@pytest.fixture
def conversation(printed, monkeypatch):
    """Drives --interactive with lines of input: returns its output, and the context and the tokens
    of each answer.

    Ctrl-C comes when `stop_at` pieces of text have been shown.
    """

    def drive(lines, *words, stop_at=None):
        contexts, answers, shown = [], [], []
        real_show = sample.show

        def watched(model, texts, **given):
            contexts.append([*texts[0].tokens])
            for _ in grow(model, texts, **given):
                answers[len(contexts) - 1 :] = [texts[0].tokens[len(contexts[-1]) :]]
                yield

        def show(text):
            shown.append(text)
            real_show(text)
            if len(shown) == stop_at:
                raise KeyboardInterrupt

        monkeypatch.setattr(sample, "grow", watched)
        monkeypatch.setattr(sample, "show", show)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
        return printed("--interactive", *words), contexts, answers

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
    _, contexts, answers = conversation(b"One\nTwo\n", "--max_new_tokens", 8, stop_at=4)
    assert [len(answer) for answer in answers] == [3, 8]
    assert contexts == [encoded("One"), encoded("One") + answers[0] + encoded("\nTwo")]


def test_after_the_end_of_a_document_a_line_begins_another(conversation, monkeypatch):
    monkeypatch.setattr(inference.sampling, "draw", lambda *_: END_OF_TEXT)
    _, contexts, _ = conversation(b"One\nTwo\n")
    assert contexts == [encoded("One"), [*encoded("One"), END_OF_TEXT, *encoded("Two")]]
