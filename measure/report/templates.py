"""Fill in the templates of reports, pages and pictures, which are in web/."""

from collections.abc import Mapping
from typing import Any

import jinja2

from measure.report.estimate import three_digits


def render(template: str, parts: Mapping[str, Any]) -> str:
    """Fill in a template in web/ with the parts of a report or picture.

    page.html is one file, which needs no network; speed.html is the page of a ladder of speeds.
    Pages and pictures (.svg) are light or dark, as the reader's screen is.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("measure.report", "web"),
        autoescape=jinja2.select_autoescape(("html", "svg")),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["three_digits"] = three_digits
    return environment.get_template(template).render(parts)
