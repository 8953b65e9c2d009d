"""Fill in the templates of reports, pages and pictures, which are in web/."""

import math
from collections.abc import Mapping
from typing import Any

import jinja2


def render(template: str, parts: Mapping[str, Any]) -> str:
    """Fill in a template in web/ with the parts of a report or picture.

    page.html is one web page, which is opened from the disk, without a network. At its top a view:
    all factors in one picture. Each row has a card with its figures; a stage's card also its
    technique's name, the YAML's changes, the code that does it, and why it helps. The loss curves
    come last, or first in a report on learning. Pictures (.svg) are light or dark, as the reader's
    screen is.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("measure.report", "web"),
        autoescape=jinja2.select_autoescape(("html", "svg")),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(parts, log=math.log)
