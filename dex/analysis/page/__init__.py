"""report.html: a `Report` as one page that needs nothing else, no network and no other file.

    content.py        what stands where: the sections in their order, the models side by side
    written.py        numbers as the page writes them
    data.py           the numbers that the scripts draw, as compact JSON
    report.html.jinja the words and tables, which are there without JavaScript
    report.css        inlined into the page
    *.js              inlined too, as one script in the order of SCRIPTS; start.js says what each file is for

Whatever a model, a tokenizer or a user named is escaped: by jinja2 in the words, by `tojson` in the data.
"""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dex import __version__
from dex.analysis.page import written
from dex.analysis.page.content import Page, apart, is_numeric, meanings_of, rows, summary, tokens
from dex.analysis.page.data import data_of
from dex.analysis.records import Report

# One module: a constant has to stand before what uses it while the page starts.
SCRIPTS = ("base.js", "colours.js", "drawing.js", "cells.js", "maps.js", "charts.js", "tokens.js", "start.js")


def render(report: Report) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader(__name__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {"number": written.number, "setting": written.setting}
    environment.globals |= {each.__name__: each for each in (apart, is_numeric, meanings_of, rows, summary, tokens)}
    page = Page(report)
    return environment.get_template("report.html.jinja").render(
        page=page,
        data=data_of(page),
        style=_own("report.css"),
        scripts=[_own(name) for name in SCRIPTS],
        version=__version__,
    )


def _own(name: str) -> Markup:
    """A file of this folder as it is: it is ours, and holds no `</style>` or `</script>`."""
    return Markup(files(__name__).joinpath(name).read_text(encoding="utf-8"))
