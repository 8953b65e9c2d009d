"""The documentation: its links resolve, and its factors are those of the files that it links."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from measure.interleaved.comparison import Comparison
from measure.interleaved.ratio import median_ratio
from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "logs/reference/README.md", "docs/index.html")),
    *DOCS.glob("*.md"),
]
FACTOR = re.compile(r"[\d.]+ \([\d.]+ to [\d.]+\)(?:, (?:no difference|unclear))?")
LINK = re.compile(r"""\]\((?!http)([^)\s]*)\)|(?:src|href)="(?!http|data:)([^"]*)\"""")


def links(text: str) -> list[str]:
    """Targets inside this repository of a page's links and pictures."""
    return [markdown or html for markdown, html in LINK.findall(text)]


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives the headings of a Markdown page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_resolve(page):
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert page.suffix != ".html" or DOCS in target.parents, link  # GitHub Pages serves docs/
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


def comparisons(values: Any) -> list[Comparison]:
    """All interleaved comparisons in a JSON file."""
    if isinstance(values, list):
        return [found for value in values for found in comparisons(value)]
    if not isinstance(values, dict):
        return []
    if "sides" in values:
        return [Comparison.model_validate(values)]
    return comparisons([*values.values()])


def factors(path: Path) -> set[str]:
    """All factors with intervals that a file states, or whose rounds it has."""
    if path.suffix != ".json":
        return {*FACTOR.findall(path.read_text())}
    pairs = (
        (one.tokens_per_sec, other.tokens_per_sec)
        for comparison in comparisons(json.loads(path.read_text()))
        for one, other in itertools.permutations(comparison.sides, 2)
    )
    return {str(median_ratio(*pair)) for pair in pairs if len(pair[0]) == len(pair[1])}


def test_the_factors_of_the_results_are_in_the_files_that_they_link():
    page = DOCS / "results.md"
    lines = page.read_text().replace("\n  ", " ").splitlines()  # a list's item is one line
    known = {
        line: {
            factor
            for link in links(line)
            if (path := page.parent / link).suffix in (".md", ".txt", ".json") and path != page
            for factor in factors(path)
        }
        for line in lines
    }
    everything = set().union(*known.values())
    stated = 0
    for line in lines:
        found = {*FACTOR.findall(line)}
        assert found <= (known[line] if " | " in line else everything), line
        stated += len(found)
    assert stated > 50
    assert {*FACTOR.findall((ROOT / "README.md").read_text())} <= {
        *FACTOR.findall(page.read_text())
    }
