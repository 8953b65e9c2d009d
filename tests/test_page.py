"""The pages: their numbers are those of results.csv and ladder.json, their code is the recipe's,
and a browser shows them without errors and without a network.
"""

import html
import json
import math
import re
import shutil

import pytest

from config import load_config
from measure.ladder.explain import card_of, code_at, explained
from measure.ladder.losses import apart
from measure.ladder.record import LIMITS, Record
from measure.ladder.stages import ablated_losses, with_seeds
from measure.report.estimate import Estimate
from measure.report.pictures import pair_of
from measure.report.report import Figure, Report, Row, write_report
from runtime.cli import find_config
from runtime.errors import UserError
from runtime.report import project_files
from tests.conftest import ROOT
from tests.test_ladder import EPYC, RESULTS, climb, plan, table
from tests.test_learning import fake_losses

VISIBLE = "parts => parts.filter(part => part.checkVisibility({visibilityProperty: true})).length"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.fixture(scope="module", params=[("h200", "gpu_ms"), ("h200", "speedup"), (EPYC, "speedup")])
def ladder(request, tmp_path_factory):
    """The folder of a ladder of ours, as another machine would have it."""
    machine, name = request.param
    folder = tmp_path_factory.mktemp("logs") / name
    folder.mkdir()
    text = (RESULTS / machine / name / "ladder.json").read_text()
    (folder / "ladder.json").write_text(text.replace("AMD EPYC,", "a <made-up> machine,"))
    climb(name, "--report_only", "--log_dir", str(folder.parent))
    return folder


def numbers_in(html):
    """The numbers that a part of a page shows."""
    shown = re.sub(r"<svg.*?</svg>|<[^>]*>", " ", html, flags=re.DOTALL).replace(",", "")
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w-])", shown)


def sources(rows, record, name):
    """The numbers of a stage and of its base that its card may show."""
    found = list[float]()
    tokens = {row["tokens_per_step"] for row in rows.values()}
    for row in (rows[name], rows[rows[name]["base"]]):
        share = 1.0 if len(tokens) == 1 else 1024 / int(row["tokens_per_step"])
        figures = [text for column, text in row.items() if text and column not in ("stage", "base")]
        found += [float(text) for text in figures if text not in ("fp16", "fp32")]
        found += [float(row["ms_per_step"]) * share, 100 * float(row["utilization"] or 0)]
        if guess := record["predicted"]["stages"].get(row["stage"]):
            parts = [guess[limit] for limit in LIMITS]
            found += [1e3 * share * seconds for seconds in (*parts, sum(parts))]
    return found


def test_every_figure_of_a_stage_is_that_of_the_results(ladder):
    page = (ladder / "report.html").read_text()
    rows, record = table(ladder / "results.csv"), json.loads((ladder / "ladder.json").read_text())
    lines = dict(re.findall(r'<a class="row" href="#(\w+)"(.*?)</a>', page, re.DOTALL))
    cards = page.split('<details class="card" id="')[1:]
    assert [card.partition('"')[0] for card in cards] == [*rows][1:]
    assert lines.keys() == {*[*rows][1:]}
    first = next(iter(rows))
    widths = {first: float(re.search(r'class="first" width="([\d.]+)%"', page)[1])}
    for name, card in zip([*rows][1:], cards, strict=True):
        row, known = rows[name], sources(rows, record, name)
        assert f'data-factor="{float(row["over_base"])}"' in lines[name]
        assert f'data-predicted="{row["predicted_over_base"]}"' in lines[name]
        widths[name] = float(re.search(r'class="done" width="([\d.]+)%"', lines[name])[1])
        speed = float(row["tokens_per_sec"]) / float(rows[first]["tokens_per_sec"])
        assert widths[name] == pytest.approx(widths[first] / speed, rel=0.03)  # of medians
        diamond = float(re.search(r'<svg x="([\d.]+)%"', lines[name])[1])
        guessed = widths[row["base"]] / float(row["predicted_over_base"])
        assert diamond == pytest.approx(guessed, abs=0.02)
        big = card[card.index('class="big') :]
        texts = [
            re.sub(r'<span class="name">.*?</span>|95%', "", lines[name], flags=re.DOTALL),
            re.sub(r"before \(.*?<small>|95% confidence", "", big[: big.index("<h3>Why")]),
            re.sub(
                "1,024 tokens|after .* steps",
                "",
                big[big.index("<h3>Where") :].split("</table>")[0],
            ),
        ]
        shown = [number for text in texts for number in numbers_in(text.partition(">")[2])]
        assert len(shown) > 15
        strange = [
            number
            for number in shown
            if not any(f"{value:.{len(number.partition('.')[2])}f}" == number for value in known)
        ]
        assert strange == []
        assert numbers_in(big)[0] == f"{float(row['over_base']):.2f}"


def test_the_summary_is_that_of_the_results_and_is_everywhere_the_same(ladder, capsys):
    rows = table(ladder / "results.csv")
    first = next(iter(rows.values()))
    changing = [row for row in rows.values() if not 0.95 <= float(row["over_base"]) <= 1.05]
    best = max(changing, key=lambda row: float(row["over_first"]))
    page, text = ((ladder / f"report.{kind}").read_text() for kind in ("html", "md"))
    headline = re.search("<title>(.*)</title>", page)[1]
    total = float(best["over_first"])
    assert headline.startswith(f"{total:.{1 if total >= 10 else 2}f} times as fast on a")
    assert page.count(headline) >= 3  # its heading, and the link's preview
    assert f"**{html.unescape(headline)}**" in text
    assert f"![{html.unescape(headline)}](first.svg)" in text
    assert headline in (ladder / "first.svg").read_text()
    climb(ladder.name, "--report_only", "--log_dir", str(ladder.parent))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(html.unescape(headline))
    assert last.partition(": ")[2] in text
    how = "a product of interleaved ones" if best["over_first_low"] else "a ratio of two single"
    assert how in last
    memory = float(best["peak_memory_mb"]) / float(first["peak_memory_mb"])
    assert f"{float(best['tokens_per_sec']):,.0f} tokens a second" in text
    assert f"{memory:.2f} of the memory" in text


def test_every_figure_of_a_page_of_losses_is_that_of_the_results(tmp_path):
    """Of a ladder and of its last stage's ablation, with made-up losses of three seeds."""
    stages, (whole,) = plan("recipes"), plan("recipes/normuon")
    whole.name = "all"
    trained = {"recipes": stages, "ablate_normuon": [whole, *ablated_losses(whole).values()]}
    for name, each in trained.items():
        record, loss = Record(folder=tmp_path / name), 4.5
        for i, own in enumerate(with_seeds(each, 3).values()):
            loss -= (0.2, -0.1, 0.001)[i % 3]
            for j, stage in enumerate(own):
                final = loss + 0.01 * (i * j % 3)
                fake_losses(record, stage, 8.0, loss + 0.5, final, every=400)
        listed = stages if name == "recipes" else [whole]
        record.stages, record.seeds = {stage.name: stage.planned for stage in listed}, 3
        record.save()
    where = ("--report_only", "--log_dir", str(tmp_path))
    climb("--ablate", "recipes/normuon", *where)
    climb("recipes", *where)
    page = (tmp_path / "recipes/report.html").read_text()
    rows = table(tmp_path / "recipes/results.csv")
    last, options = rows["normuon"], table(tmp_path / "ablate_normuon/results.csv")
    share = float(last["tokens_share"])
    assert (
        f"<h1>The loss of AdamW with one learning rate after {share:.2f} of the tokens</h1>" in page
    )
    assert f"step {800 * share:.0f} instead of 800<" in page
    assert rows["muon"]["among_others"] == options["optimizer"]["lower"]
    assert "residual_scaling" not in options, "zero_init is on, so it has no effect"
    assert "embed_lr" in options, "its row there is of another value than that of rates"
    assert [rows[name]["among_others"] for name in ("rates", "untied")] == [""] * 2
    for name, row in rows.items():
        assert f"<b>{float(row['loss']):.2f}</b> {name}</a>" in page
        lower, low, high = (float(row[f"lower{end}"] or 0) for end in ("", "_low", "_high"))
        if not lower:
            continue
        card = page.split(f'<details class="card" id="{name}"')[1].split("</details>")[0]
        text = "lower" if lower > 0 else "higher"
        kind = "none" if low <= 0 <= high else "better" if lower > 0 else "worse"
        assert f'<summary class="effect {kind}">' in card
        worth = "no clear change" if kind == "none" else f"{abs(lower):.3f} {text}"
        assert f'<span class="words">{worth}</span>' in card
        ends = " to ".join(
            f"{end:.3f}" for end in sorted((low, high) if lower > 0 else (-low, -high))
        )
        assert f"<strong>{abs(lower):.3f}</strong></div><div>nats per token {text}" in card
        assert f"{ends} with 95% confidence" in card
    kinds = [len(re.findall(f'"effect {kind}"', page)) for kind in ("better", "worse", "none")]
    assert f"{kinds[0]} lower the loss, {kinds[1]} raise it, {kinds[2]} show" in page
    climb("recipes", *where, "--seeds", "1")
    of_one = (tmp_path / "recipes/report.html").read_text()
    assert ": means over the seeds, with 95% intervals." in page
    assert ", in one run each." in of_one
    assert ("one seed: no interval" in page, "one seed: no interval" in of_one) == (False, True)


def test_labels_beside_a_chart_keep_apart_and_inside():
    assert apart({"a": 50, "b": 51, "c": 99, "d": 99.5}, 5) == {"a": 50, "b": 55, "c": 95, "d": 100}


def test_the_page_is_one_small_file_that_asks_for_nothing(ladder):
    page = (ladder / "report.html").read_text()
    assert len(page) < 0.3e6
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)
    assert ("made-up" in page) == ("&lt;made-up&gt;" in page)


def test_a_report_without_a_ladder_has_a_page_with_its_table(tab, tmp_path):
    figures = [Figure("side", "side"), Figure("ours_over", "ours over it")]
    row = Row("a peer's", {"ours_over": Estimate(0.5, 0.4, 0.6)})
    write_report(Report(tmp_path, "Beside peers", figures, [row]))
    tab.goto((tmp_path / "report.html").as_uri())
    assert tab.locator("td").all_inner_texts() == ["a peer's", "0.50 (0.40 to 0.60)"]


def test_a_curve_beside_its_bases_falls_and_a_loss_that_is_not_finite_is_no_point():
    pair = pair_of({1: 5.0, 2: 4.0, 3: 3.0}, {1: 5.0, 2: math.nan, 3: 3.5}, "loss")
    ours, base = (
        [[*map(float, place.split(","))] for place in pair.lines[kind].split()]
        for kind in ("own", "base")
    )
    assert pair.last == {"own": 3.0, "base": 3.5}
    assert ours[0][0] < ours[1][0], "steps go to the right"
    assert ours[0][1] < ours[1][1], "a lower loss is drawn lower"
    assert base[-1][1] < ours[-1][1]
    assert len(base) == 1
    assert math.isnan(pair_of({1: 5.0}, {}, "loss").last["base"])


def test_all_code_that_a_yaml_names_is_there():
    files = project_files("configs/*.yaml", "configs/*/*.yaml")
    named = [re.findall(r"(?m)^# Code: (.*)$", path.read_text()) for path in files]
    places = [place for lines in named for line in lines for place in line.split(", ")]
    assert len(places) > 60
    assert [place for place in places if not code_at(place)] == []


@pytest.mark.parametrize(
    ("place", "first", "last"),
    [
        ("optimizer.py:orthogonalize", "def orthogonalize(", "return x"),
        ("train.py:torch.compile(", "# torch.compile fuses", "trained = torch.compile("),
        ("model.py:if self.config.qk_norm", "# Additions of newer", "q, k = rms_norm(q)"),
        ("kernels/attention.py:attention_forward", "# torch.compile treats", "return y, largest"),
    ],
)
def test_a_card_shows_a_function_or_a_statement_with_the_comment_above_it(place, first, last):
    file, line, text = code_at(place)
    lines = text.splitlines()
    assert lines[0].startswith(first)
    assert lines[-1].strip().startswith(last)
    assert (ROOT / file).read_text().splitlines()[line - 1].strip() == lines[0]


def test_a_long_function_is_cut_and_what_is_gone_or_not_unique_is_left_out():
    assert len(code_at("train.py:train_step")[2].splitlines()) == 26
    gone = ("model.py:gone", "model.py:forward", "model.py:return", "gone.py:x", "README.md:GPT-2")
    assert [*map(code_at, gone)] == [None] * len(gone)


@pytest.mark.parametrize("path", project_files("configs/speedup*.yaml"), ids=lambda path: path.stem)
def test_the_first_line_of_a_yaml_is_its_title(path):
    title, why, elsewhere = explained(path)
    assert 3 < len(title) <= 28, title
    assert not title.endswith(".")
    assert why[0]
    assert elsewhere[0].startswith("Published")
    assert "Code:" not in "".join(why + elsewhere)


def card(stage, base):
    return card_of(stage, *(find_config(name).resolve() for name in (stage, base)))


def test_a_stage_over_an_earlier_one_is_named_so_unless_what_is_between_costs_no_time():
    assert card("speedup6_flash", "speedup5").title == "Flash attention"
    assert card("speedup5", "speedup3").title == "torch.compile"
    assert card("speedup6", "baseline")[:2] == ("A batch of 6", "all before it")


def test_a_stage_that_changes_two_things_names_both_and_has_the_options_and_code_of_both():
    both = card("speedup6", "speedup5_max_autotune")
    assert (both.title, both.also) == ("Flash attention", "a batch of 6")
    assert both.yaml == "flash: true\nbatch_size: 6\n"
    assert any("scaled_dot_product_attention" in text for _, _, text in both.code)
    assert both.why[0].startswith("softmax(QK^T)V in one kernel")
    assert any(text.startswith("Published log (RTX 3080)") for text in both.elsewhere)


def test_a_config_that_needs_the_options_of_its_ladder_has_a_card(tmp_path):
    (tmp_path / "plain.yaml").write_text("seq_len: 64\n")
    (tmp_path / "own.yaml").write_text("# Half steps.\nbase: plain.yaml\ntotal_batch_tokens: 128\n")
    with pytest.raises(UserError):
        load_config(str(tmp_path / "own.yaml"))
    found = card_of("own", tmp_path / "own.yaml", tmp_path / "plain.yaml")
    assert found.title == "Half steps"
    assert (found.yaml, found.code) == ("total_batch_tokens: 128\n", [])


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser):
    """A tab for one page, which must make no error and ask for nothing but itself."""
    tab, errors, requests = browser.new_page(), list[str](), list[str]()
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    yield tab
    page = tab.url.partition("#")[0]
    tab.close()
    assert (errors, requests) == ([], [page])


def test_guessing_hides_the_factors_and_ends_with_a_score(tab, ladder):
    rows = table(ladder / "results.csv")
    tab.goto((ladder / "report.html").as_uri())
    tab.get_by_role("button", name="Guess first").press("Enter")
    secrets = tab.locator(".secret")
    assert secrets.evaluate_all(VISIBLE) == 0
    assert tab.locator("h1").inner_text() == "How many times as fast?"
    asked = tab.locator(".stairs > a.row")
    for i in range(asked.count()):
        name = asked.nth(i).get_attribute("data-stage")
        field = asked.nth(i).locator("input")
        field.fill(rows[name]["over_base"])
        field.press("Enter")
        assert asked.nth(i).locator("b").is_visible()
    n = asked.count()
    assert (
        tab.locator("#score")
        .inner_text()
        .startswith(f"Within 25%: you {n} of {n}, the prediction ")
    )
    assert tab.locator(".stairs .secret").evaluate_all(VISIBLE) > 4 * n


def test_a_row_opens_its_card_with_the_code(tab, ladder):
    tab.goto((ladder / "report.html").as_uri())
    assert tab.locator(".card[open]").count() == 0
    assert "dirty" not in tab.locator("body").inner_text()  # the commit
    tab.locator(".stairs > a.row").nth(1).press("Enter")
    opened = tab.locator(".card[open]")
    opened.wait_for()
    assert "autocast" in " ".join(opened.locator("pre").all_inner_texts())
    assert opened.locator("polyline").count() == 2
    tab.get_by_role("button", name="Open all").press("Enter")
    assert tab.locator(".card[open]").count() == tab.locator(".card").count()


def test_the_page_is_copied_as_markdown(tab, ladder):
    tab.goto((ladder / "report.html").as_uri())
    copied = tab.evaluate("document.getElementById('markdown').content.textContent")
    tab.get_by_role("button", name="Copy as Markdown").click()
    tab.get_by_role("button", name="Copied").wait_for()
    headline = copied.strip().splitlines()[0]
    assert headline.strip("*") == tab.title()


def test_nothing_is_wider_than_the_screen(tab, ladder):
    tab.goto((ladder / "report.html").as_uri())
    tab.get_by_role("button", name="Open all").click()
    for width in (320, 390, 768, 1280):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
