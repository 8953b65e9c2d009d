"""The ladder's page: its numbers are results.csv's, its code is the recipe's, and a browser shows
it without errors and without a network.
"""

import json
import math
import re
import shutil

import pytest

from config import load_config
from measure.ladder.explain import card_of, code_at, explained
from measure.ladder.report import FIGURES
from measure.report.estimate import Estimate
from measure.report.report import Figure, Report, Row, curve_of, write_report
from runtime.cli import find_config
from runtime.errors import UserError
from runtime.report import project_files
from tests.conftest import ROOT
from tests.test_ladder import EPYC, RESULTS, climb, table

SPEEDUP = ["baseline", *(f"speedup{i}" for i in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10))]
# the figures of a report without a ladder
SIDES = [Figure("side", "side"), Figure("ours_over", "ours over it", "", "speed", bar=True)]
VISIBLE = "parts => parts.filter(part => part.checkVisibility({visibilityProperty: true})).length"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """The folder of our own speedup ladder, up to speedup10, as another machine would have it."""
    folder = tmp_path_factory.mktemp("logs") / "speedup"
    folder.mkdir()
    text = (RESULTS / EPYC / "speedup/ladder.json").read_text()
    record = json.loads(text.replace("AMD EPYC,", "a <made-up> machine,"))
    record["stages"] = {name: record["stages"][name] for name in SPEEDUP}
    (folder / "ladder.json").write_text(json.dumps(record))
    climb("speedup", "--report_only", "--log_dir", str(folder.parent))
    return folder


def test_every_number_on_the_page_is_that_of_the_results(ladder):
    page = (ladder / "report.html").read_text()
    rows = table(ladder / "results.csv")
    assert re.findall(r'<article id="stage-(\w+)"', page) == SPEEDUP
    for name, article in zip(SPEEDUP, page.split("<article ")[1:], strict=True):
        shown = [float(value) for value in re.findall(r'<data [^>]*value="([^"]*)"', article)]
        has = {column for column, text in rows[name].items() if text} - {"stage", "base"}
        bars = [f.name for f in FIGURES if f.bar and f.name in has and name != "baseline"]
        columns = [*bars, *(f.name for f in FIGURES if not f.bar and f.name in has)]
        assert {"tokens_per_sec", "final_loss", "predicted_memory", "over_first"} < {*columns}
        assert "over_base" in columns or name == "baseline"
        assert shown == [float(rows[name][column]) for column in columns]
    curves = json.loads(re.search(r'id="curves">(.*?)</script>', page, re.DOTALL)[1])
    assert len(curves) == len(SPEEDUP)
    assert curves[1]["tokens"][:2] == [1024, 2048]
    seconds = curves[1]["seconds"]
    assert seconds[0] == pytest.approx(float(rows["speedup1"]["first_step_s"]))
    assert seconds == sorted(seconds)  # the first step, which compiles, takes longest
    assert "a &lt;made-up&gt; machine" in page


def test_the_view_has_a_row_for_each_stage_with_the_factors_of_the_results(ladder):
    page = (ladder / "report.html").read_text()
    rows = table(ladder / "results.csv")
    shown = re.findall(r'<a class="row" href="#stage-(\w+)">(.*?)</a>', page, re.DOTALL)
    assert [name for name, _ in shown] == SPEEDUP
    places = []  # value and position of all ends and marks
    for name, line in shown:
        marks = re.findall(
            r'data-figure="(\w+)" data-value="(.*?)" data-low="(.*?)" data-high="(.*?)">'
            r'\s*<line.* x1="(.*?)%" x2="(.*?)%".*\s*<use.* x="(.*?)%"',
            line,
        )
        row, values = rows[name], [[*map(float, numbers)] for _, *numbers in marks]
        assert [figure for figure, *_ in marks] == [
            f.name for f in FIGURES if f.bar and row[f.name] and name != "baseline"
        ]
        for (figure, *_), (value, low, high, start, end, middle) in zip(marks, values, strict=True):
            ends = [row.get(f"{figure}_{end}") or row[figure] for end in ("low", "high")]
            assert [value, low, high] == [*map(float, (row[figure], *ends))]
            places += [(low, start), (value, middle), (high, end)]
        assert name == "baseline" or f" over {row['base']}</small>" in line
    assert {*rows["speedup3"]} > {"over_base_low", "published_over_base", "predicted_over_base"}
    (least, left), (most, right) = min(places), max(places)
    for value, place in places:
        share = math.log(value / least) / math.log(most / least)
        assert place == pytest.approx(left + share * (right - left), abs=0.02)
    assert 0 < left < right < 100


def test_reports_without_a_ladder_have_the_view_too(tmp_path):
    factor = Estimate(0.5, 0.4, 0.6)
    rows = [Row("ours", {"ours_over": Estimate(1.0)}), Row("a peer's", {"ours_over": factor})]
    write_report(Report(tmp_path, "Beside peers", SIDES, rows))
    page = (tmp_path / "report.html").read_text()
    assert 'data-figure="ours_over" data-value="0.5" data-low="0.4" data-high="0.6"' in page
    places = [*map(float, re.findall(r' x[12]?="([^"]*)%"', page.split("data-figure", 1)[1]))]
    assert len(places) >= 3
    assert all(0 < place < 100 for place in places)
    assert 'href="#stage-a%20peer%27s"' in page
    assert 'id="stage-a peer&#39;s"' in page


def test_the_page_is_one_small_file_that_asks_for_nothing(ladder):
    page = (ladder / "report.html").read_text()
    assert len(page) < 1.5e6
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)


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
    title, why = explained(path)
    assert 3 < len(title) < 60, title
    assert not title.endswith(".")
    assert why[0]
    assert "Code:" not in "".join(why)


def card(stage, base):
    return card_of(stage, *(find_config(name).resolve() for name in (stage, base)))


def test_a_stage_over_an_earlier_one_is_named_so_unless_what_is_between_costs_no_time():
    assert card("speedup6_flash", "speedup5").title == "Flash attention"
    assert card("speedup5", "speedup3").title == "torch.compile"
    assert card("speedup6", "baseline").title == "A batch of 6, and all before it"


def test_a_stage_that_changes_two_things_names_both_and_has_the_options_and_code_of_both():
    both = card("speedup6", "speedup5_max_autotune")
    assert both.title == "Flash attention, and a batch of 6"
    assert both.yaml == "flash: true\nbatch_size: 6\n"
    assert any("scaled_dot_product_attention" in text for _, _, text in both.code)
    assert both.why[0].startswith("softmax(QK^T)V in one kernel")
    assert any(reason.startswith("Published log (RTX 3080)") for reason in both.why)


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


def test_a_browser_shows_it_and_it_answers(tab, ladder):
    tab.goto((ladder / "report.html").as_uri())
    assert tab.locator("#chart canvas").count() == 1
    labels = tab.locator(".u-series").count()
    tab.get_by_text("Choose curves").click()
    tab.locator(".pick").first.uncheck()
    assert tab.locator(".u-series").count() == labels - 1
    tab.get_by_role("button", name="over seconds").press("Enter")
    assert tab.get_by_role("button", name="over seconds").get_attribute("aria-pressed") == "true"
    tab.get_by_role("button", name="Guess first").click()
    figures, view = tab.locator("#stage-speedup2 .figures"), tab.locator("a.row .factor data")
    assert not figures.is_visible()
    assert view.evaluate_all(VISIBLE) == 0
    tab.locator("#stage-speedup2 .guess-button").click()
    assert figures.is_visible()
    assert view.evaluate_all(VISIBLE) == 1
    assert not tab.locator("#stage-speedup3 .figures").is_visible()


def test_the_view_leads_to_the_cards(tab, ladder):
    tab.goto((ladder / "report.html").as_uri())
    folded = tab.locator("article details > p, article details > pre")
    assert folded.evaluate_all(VISIBLE) == 0
    shown = tab.locator("body").inner_text()
    assert shown.count("a <made-up> machine") == 1
    assert "733cfaa" not in shown  # the commit
    tab.locator("a.row").nth(3).click(position={"x": 3, "y": 3})
    card = tab.locator(f"#stage-{SPEEDUP[3]}")
    assert card.evaluate("card => card.matches(':target')")
    code = card.locator("pre").all_inner_texts()
    assert any("bf16: true" in text for text in code)
    assert any("torch.autocast" in text for text in code)
    assert card.locator("canvas").count() == 0
    card.get_by_text("Loss curve").click()
    card.locator("canvas").wait_for()


def test_curves_without_times_or_with_an_infinite_loss_are_drawn(tab, tmp_path):
    curves = [curve_of("NaN, [Infinity]", {1: 5.0, 2: math.nan, 3: math.inf}, 7, {})]
    write_report(Report(tmp_path, "Curves", SIDES, [Row("any", {})], curves=curves))
    tab.goto((tmp_path / "report.html").as_uri())
    assert tab.locator("#chart canvas").count() == 1
    assert tab.locator(".axis").all_inner_texts() == ["over steps", "over tokens"]
    assert "NaN, [Infinity]" in tab.locator(".u-legend").inner_text()
