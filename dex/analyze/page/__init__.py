"""report.html: a `Report` as one page that needs nothing else, no network and no other file.

    content.py        what stands where: the sections in their order, the models side by side
    written.py        numbers as the page writes them
    data.py           the numbers that report.js draws, as compact JSON
    report.html.jinja the words and tables, which are there without JavaScript
    report.css, .js   inlined into the page

Whatever a model, a tokenizer or a user named is escaped: by jinja2 in the words, by `tojson` in the data.
"""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dex import __version__
from dex.analyze.page import written
from dex.analyze.page.content import Page, is_numeric, rows, summary, tokens
from dex.analyze.page.data import data_of
from dex.analyze.records import Report


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
    environment.globals |= {"is_numeric": is_numeric, "rows": rows, "summary": summary, "tokens": tokens}
    page = Page(report)
    return environment.get_template("report.html.jinja").render(
        page=page, data=data_of(page), style=_own("report.css"), script=_own("report.js"), version=__version__
    )


def _own(name: str) -> Markup:
    """A file of this folder as it is: it is ours, and holds no `</style>` or `</script>`."""
    return Markup(files(__name__).joinpath(name).read_text(encoding="utf-8"))
