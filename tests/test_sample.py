"""Text from a model: how tokens are chosen, texts together and alone, the stream of characters, the
command.
"""

import os
import re
import shlex
import signal

import pytest
import tiktoken
import torch
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import sample
from data.tokenizer import END_OF_TEXT, SEPARATOR, get_encoding
from data.vocabulary import GPT2
from inference.sampling import (
    KVCache,
    Text,
    decode_step,
    prefill,
    probabilities,
    seeded,
)
from runtime.cli import parse
from runtime.console import Console
from sample import SampleOptions, load_sampled_model
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


def options(words):
    return parse(SampleOptions, shlex.split(f"model {words}"), positional="run")


# ---- how tokens are chosen


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 10**6, "top_p": 1e-9},
        {"top_p": 0.7, "temperature": 0.3},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.9},
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers(settings):
    s = {"temperature": 1.0, "top_k": None, "top_p": 1.0} | settings
    theirs = LogitsProcessorList([TemperatureLogitsWarper(s["temperature"])])
    theirs += [TopKLogitsWarper(s["top_k"])] if s["top_k"] else []
    theirs += [TopPLogitsWarper(s["top_p"])] if s["top_p"] < 1 else []
    generator = seeded(0)
    logits = torch.randn(20, 200, generator=generator) * 3
    tokens, p = probabilities(logits, **s)
    ours = torch.zeros(20, 200).scatter(1, tokens, p / p.sum(-1, keepdim=True))
    torch.testing.assert_close(ours, theirs(None, logits).softmax(-1))


def alone(model, prompt, n, seed=0, **settings):
    """The tokens, up to n, that continue a prompt."""
    (tokens,) = grown(model, [prompt], n, [seed], **settings)
    return tokens


@pytest.mark.parametrize("settings", [(1.0, None, 1e-300), (0, 3, 1e-9), (1e-45, 3), (1e-20, 3)])
def test_a_tiny_top_p_and_temperature_0_keep_the_likeliest_token(settings):
    tokens, p = probabilities(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), *settings)
    assert tokens[p > 0].tolist() == [1]


# ---- together and alone


def test_prompts_of_different_lengths_each_get_what_they_get_alone_also_where_the_window_slides(
    tiny_model,
):
    model = tiny_model(init="gpt2")
    settings = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
    one_by_one = [alone(model, prompt, 40, seed, **settings) for seed, prompt in enumerate(PROMPTS)]
    assert grown(model, PROMPTS, 40, range(5), **settings) == one_by_one


@torch.no_grad()
def test_attention_of_a_gpu_reads_a_multiple_of_128_keys_and_the_logits_are_the_same(tiny_model):
    """cuDNN's attention takes long to plan for each new number of keys."""
    assert KVCache(tiny_model().to("meta"), 1, 1).multiple == 128
    model = tiny_model(block_size=300, init="gpt2")
    for texts in ([[*range(100)] * 2, [1, 2, 3]], [[*range(100)] * 2] * 2):
        exact, padded = KVCache(model, 2, 300), KVCache(model, 2, 300, multiple=128)
        assert [cache.keys_for(200) for cache in (exact, padded)] == [200, 256]
        read = prefill
        for _ in range(70):
            logits = read(model, exact, texts)
            torch.testing.assert_close(read(model, padded, texts), logits)
            tokens = logits.argmax(-1).tolist()
            texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
            read = decode_step


def test_each_text_stops_at_its_own_end_and_the_others_go_on(tiny_model):
    model = tiny_model(init="gpt2")
    texts = [alone(model, prompt, 40, temperature=1.0) for prompt in PROMPTS]
    stop = texts[3][4]  # soon, and past the context's end
    ranks = {bytes([byte]): byte + (byte >= stop) for byte in range(256)}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=".", mergeable_ranks=ranks, special_tokens={SEPARATOR: stop}
    )
    drawn = grown(model, PROMPTS, 40, encoding=encoding, temperature=1.0)
    assert drawn == [text[: [*text, stop].index(stop) + 1] for text in texts]


# ---- texts


def tokens_of_bytes(text):
    return [get_encoding().encode_single_token(bytes([byte])) for byte in text.encode()]


def test_a_character_that_spans_tokens_comes_out_whole_and_a_cut_one_at_the_end():
    tokens = tokens_of_bytes("a€😀")
    for last, is_last in ((END_OF_TEXT, False), (tokens[-2], True)):
        text, strings = Text("", get_encoding(), seeded(0)), []
        for token in tokens[:-2]:
            text.append(token, is_last=False)
            strings.append(text.string)
        assert strings == ["a", "a", "a", "a€", "a€", "a€"]
        text.append(last, is_last)
        assert (text.string, text.ended) == ("a€\ufffd", True)


@pytest.mark.parametrize("stop", ["y z", "b x", "€", "ab x€y z", "none"])
def test_a_text_ends_before_the_first_stop_after_its_prompt_which_may_span_tokens(stop):
    """What is certain never has to be taken back."""
    drawn = "ab x€y zab x€y z"
    text, certain = Text(f"ab {stop}", get_encoding(), seeded(0), stop), f"ab {stop}"
    tokens = tokens_of_bytes(drawn)
    for i, token in enumerate(tokens, 1):
        if not text.ended:
            text.append(token, is_last=i == len(tokens))
            assert text.certain.startswith(certain)
            certain = text.certain
    assert text.string == certain == f"ab {stop}" + drawn.partition(stop)[0]


def test_another_vocabulary_and_weights_that_are_no_numbers_are_errors_of_the_user(tiny_model):
    model = tiny_model()
    with refused("a model of 128 tokens cannot have GPT-2's vocabulary, of 50,257"):
        GPT2.encoding_for(model.config.n_vocab)
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with refused("logits are not finite"):
        alone(model, [1], 3)


# ---- the command


@pytest.fixture
def printed(run_folder, capsys, monkeypatch):
    """Runs the command; returns its stdout and stderr."""
    monkeypatch.chdir(run_folder)

    def call(words):
        with Console(on_stderr=True):
            sample.main(options(f"--device cpu {words}"))
        return capsys.readouterr()

    return call


def test_a_file_of_prompts_gives_each_line_its_texts_whatever_the_batch(run_folder, printed):
    prompts, path = ["One", "", "A longer prompt, naïve €"], run_folder / "prompts.txt"
    path.write_bytes(("\ufeff" + "\r\n".join(prompts)).encode())
    common = "--max_new_tokens 40 --top_p 0.9"
    texts = []
    for prompt in prompts:
        for seed in (1, 2):
            text = printed(f"{common} --prompt '{prompt}' --seed {seed}").out.removesuffix("\n")
            texts.append(prompt + text.removeprefix(prompt).partition("e")[0])
    words = f"{common} --prompt_file prompts.txt --num_samples 2 --seed 1 --stop e"
    for batch_size in (4, 16):
        together = printed(f"{words} --batch_size {batch_size}")
        assert together.out == "\n---\n".join(texts) + "\n"
        assert together.err.endswith(" tokens/s\n")
    path.write_bytes(b"na\xefve")
    with refused("--prompt_file prompts.txt: not UTF-8 .*byte 0xef"):
        printed(words)


def test_options_without_effect_are_told():
    assert options("--temperature 0 --top_p 0.5 --prompt_file x --prompt y").notes() == [
        "prompt has no effect: prompt_file is set",
        "top_p has no effect: temperature is 0",
    ]
    assert options("--temperature 0").notes() == options("--top_p 0.5").notes() == []


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
    (run_folder / "prompt").write_text(prompt := "word " * 60)
    words = "--bf16 --prompt_file prompt --max_new_tokens 3"
    out = printed(words).out
    assert out.startswith(prompt)
    assert len(out) > len(prompt) + 2
    assert load_sampled_model(options(words))[0].lm_head.weight.dtype == torch.bfloat16


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("close", ["os.close(2)", "os.dup2(os.open('/dev/full', 1), 2)"])
def test_notes_that_stderr_does_not_take_leave_the_texts_alone(close, run_folder):
    command = "model --device cpu --max_new_tokens 5 --temperature 0 --top_k 5"
    code = (
        f"import os, sys; {close}; os.execv(sys.executable, [sys.executable, "
        f"{str(ROOT / 'sample.py')!r}, *{command.split()!r}])"
    )
    done = run("-c", code, cwd=run_folder)
    assert done.stdout
    assert not re.search("top_k|tokens/s", done.stdout)
