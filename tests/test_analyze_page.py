"""report.html: what stands on the page without JavaScript, and, in a real browser, what it does with it."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from browser import complaints, emulate
from numpy.typing import NDArray

from dex.analysis import sections
from dex.analysis.differences import differences
from dex.analysis.page import SCRIPTS, render, written
from dex.analysis.page.content import SECTIONS, Page, layer_values, summary
from dex.analysis.page.data import data_of
from dex.analysis.records import (
    NEWLINE,
    Curve,
    Example,
    Findings,
    ModelReport,
    Report,
    Statistic,
    Table,
    numbers,
)

pytest_plugins = ("browser",)

WORDS = (
    "The|special|magic|number|of|the|quiet|harbour|is|48152|.|A|module|may|define|its|own|loader|,|and|each|loader|"
    "returns|the|same|object|for|one|name|.|\n|See|also|the|notes|on|import|hooks|.|What|is|the|special|magic|"
    "number|of|the|quiet|harbour|?|It|is|4815"
)


# ---- reports made up for the page ---------------------------------------------------------------------------------


def head_statistic(values: NDArray[Any], name: str, title: str, **fields: Any) -> Statistic:
    meaning = fields.pop("meaning", f"What {title.lower()} is, in a sentence about a head’s attention to the text.")
    return Statistic(name=name, title=title, meaning=meaning, over="head", values=numbers(values), **fields)


def attention(random: np.random.Generator, layers: int, heads: int, *, sharper: float, signed: bool) -> Findings:
    depth = np.linspace(0, 1, layers)[:, None]
    entropy = 4.4 - 2.6 * np.sin(np.pi * depth) + random.normal(0, 0.45, (layers, heads)) - sharper
    entropy = np.abs(entropy)
    first = np.clip(0.72 * depth**0.5 + random.normal(0, 0.16, (layers, heads)), 0.002, 0.97)
    answer = random.gamma(0.35, 0.05, (layers, heads))
    signs: Any = {"signs": "renormalised"} if signed else {}
    return Findings(
        statistics=[
            head_statistic(
                entropy,
                "entropy",
                "Attention entropy",
                unit="nats",
                headline=True,
                first_token="counted",
                meaning="The entropy of a head’s attention, as a mean over queries: 0 where it looks at one token.",
                **signs,
            ),
            head_statistic(first, "first_token", "Attention to the first token", unit="share"),
            head_statistic(answer, "answer", "Attention to the answer", unit="share", headline=True),
            Statistic(
                name="entropy_layer",
                title="Spread of the entropy",
                meaning="The standard deviation of the heads’ entropies.",
                unit="nats",
                over="layer",
                values=numbers(entropy.std(1)),
            ),
        ],
        remarks=[
            f"The mean entropy is {entropy.mean():.2f} nats; the sharpest head has {entropy.min():.2f}.",
            f"{(first > 0.5).mean():.0%} of the heads give the first token more than half of their attention.",
        ],
    )


def branch(random: np.random.Generator, layers: int, heads: int) -> Findings:
    lam = 0.3 * np.linspace(0.6, 1.3, layers) + random.normal(0, 0.02, layers)
    ratio = [[None] * heads if layer % 3 else list(random.gamma(2.0, 0.03, heads)) for layer in range(layers)]
    steps = [float(step) for step in range(0, 2001, 100)]
    lines: Any = {
        f"layer {layer}": numbers(0.8 - (0.8 - lam[layer]) * np.minimum(1, np.array(steps) / 1200))
        for layer in range(layers)
    }
    return Findings(
        statistics=[
            Statistic(
                name="lam",
                title="λ(t) of the branch",
                meaning="The weight of what the branch subtracts.",
                over="layer",
                values=numbers(lam),
                headline=True,
            ),
            Statistic(
                name="branch_ratio",
                title="Branch ratio of each head",
                meaning="‖branch‖ over ‖output‖; only heads that were selected have one.",
                over="head",
                values=[[None if value is None else round(value, 5) for value in row] for row in ratio],
            ),
            Statistic(
                name="branch_mean",
                title="Mean branch ratio",
                meaning="The mean over the selected heads.",
                over="model",
                values=0.0612,
                headline=True,
            ),
        ],
        curves=[
            Curve(
                name="lam_over_steps",
                title="λ over the steps of training",
                meaning="λ of each layer while it was annealed, from the run’s log.",
                x_label="step",
                y_label="λ",
                x=steps,
                lines=lines,
            )
        ],
        remarks=[f"λ ends between {lam.min():.3f} and {lam.max():.3f}."],
    )


def importance(random: np.random.Generator, layers: int, heads: int, label: str) -> Findings:
    values = random.gamma(0.3, 0.004, (layers, heads))
    values[0, 1 % heads] = 0.9  # one head far from all others
    shares = np.sort(values.ravel())[::-1] / values.sum()
    return Findings(
        statistics=[
            head_statistic(values, "importance", "Importance of heads", unit="nats", headline=True),
            Statistic(
                name="gini",
                title="Inequality of importance over all heads",
                meaning="The Gini coefficient: 0 where all heads matter alike, 1 where one alone does.",
                over="model",
                values=0.8123,
            ),
        ],
        curves=[
            Curve(
                name="by_rank",
                title="Importance by rank",
                meaning="All heads of the model, the most important first.",
                x_label="rank of the head",
                y_label="share of the total importance",
                x=[float(rank) for rank in range(1, len(shares) + 1)],
                lines={label: numbers(shares)},
            )
        ],
    )


def landscape(random: np.random.Generator) -> Findings:
    ritz = np.sort(random.normal(0, 1, 24) ** 3 * 40)
    return Findings(
        statistics=[
            Statistic(
                name="largest", title="Largest eigenvalue", meaning="Of the Hessian.", over="model", values=412.7
            )
        ],
        curves=[
            Curve(
                name="spectrum",
                title="Spectrum of the Hessian",
                meaning="Ritz values of each sequence’s Hessian and their weights.",
                x_label="Ritz value",
                y_label="weight",
                x=numbers(ritz),
                lines={f"sequence {i}": numbers(np.exp(-np.abs(ritz) / 9) * random.random(24)) for i in range(2)},
                points=True,
            )
        ],
        tables=[
            Table(
                name="hessian",
                title="Hessian of each sequence",
                meaning="Values after at most 24 Lanczos steps.",
                columns=["sequence", "largest", "smallest", "note"],
                rows=[[0, 412.7, -12.25, "converged"], [1, 380.1, -9.5e-5, "converged"], [2, 401.0, None, "stopped"]],
            )
        ],
    )


def example(
    random: np.random.Generator, layers: int, heads: int, *, signed: bool, length: int, start: int = 0
) -> Findings:
    """start: tokens before the part that is shown, which take 0.3 of each head's mass, the first of them 0.2."""
    tokens = [" " * (place > 0 and word.isalnum()) + word for place, word in enumerate(WORDS.split("|"))]
    tokens = (tokens * (length // len(tokens) + 1))[:length]
    span = (10, 11) if length < 20 else (10, 13)
    masses = random.dirichlet(np.full(length, 0.15), (layers, heads))
    masses[..., 0] += random.random((layers, heads))
    masses[..., span[0] : span[1]] += random.gamma(0.3, 0.08, (layers, heads, 1))
    masses /= masses.sum(-1, keepdims=True)
    if signed:
        masses -= 0.6 * random.dirichlet(np.full(length, 0.3), (layers, heads))
    before = 0.3 if start else 0.0
    masses = np.round((1 - before) * masses, 4)
    return Findings(
        example=Example(
            title="Who attends to the answer",
            meaning="How much of each head’s attention from the 4 tokens that ask for the answer goes to each token.",
            start=start,
            tokens=[token.replace("\n", NEWLINE) for token in tokens],
            span=span,
            queries=[length - 4, length - 3, length - 2, length - 1],
            masses=masses.tolist(),
            on_answer=numbers(masses[..., slice(*span)].sum(-1)),
            on_first=np.full((layers, heads), 0.2).tolist() if start else numbers(masses[..., 0]),
            on_all=numbers(before + masses.sum(-1)),
        )
    )


def made_up_model(
    label: str,
    kind: str,
    *,
    layers: int = 30,
    heads: int = 9,
    seed: int = 0,
    dex: bool = False,
    signed: bool = False,
    length: int = 120,
    start: int = 0,
    more: int = 0,
) -> ModelReport:
    """more: further head statistics."""
    random = np.random.default_rng(seed)
    sections = {
        "attention": attention(random, layers, heads, sharper=0.5 * dex + 0.3 * signed, signed=signed),
        "example": example(random, layers, heads, signed=signed, length=length, start=start),
        "importance": importance(random, layers, heads, label),
        "landscape": landscape(random),
    }
    if dex:
        sections["branch"] = branch(random, layers, heads)
    if more:
        titles = [f"Statistic number {i} of the maps" for i in range(more)]
        sections["maps"] = Findings(
            statistics=[
                head_statistic(random.normal(0, 1, (layers, heads)), f"more_{i}", title, diverging=i % 2 == 1)
                for i, title in enumerate(titles)
            ]
        )
    return ModelReport(
        label=label,
        kind=kind,
        identity={"path": label, "dtype": "float32", "revision": "12ab34cd"},
        layers=layers,
        heads=heads,
        overview=[
            f"{label} is {kind}: {layers} layers of {heads} heads, 134,515,008 parameters, analysed in float32.",
            *(remark for found in sections.values() for remark in found.remarks),
        ],
        sections=sections,
        left_out={} if dex else {"branch": "It has no Dex branch."},
        seconds=dict.fromkeys(sections, 1.5),
    )


def made_up_report(*models: ModelReport) -> Report:
    differences, apart = [], []
    if len(models) == 2:
        for found in models[0].sections.values():
            for one in found.statistics:
                other = models[1].statistic(one.name)
                first, second = (np.array(each.values, dtype=float) if each else None for each in (one, other))
                if other is None or first is None or second is None or first.shape != second.shape:
                    apart.append(f"{one.title} cannot be compared.")
                else:
                    change = {"values": numbers(second - first), "diverging": True}
                    differences.append(one.model_copy(update=change))
    return Report(
        settings={"data": "pydoc", "sequences": 4, "length": 1024, "span": None, "count_first_token": True},
        text={"source": "pydoc", "fingerprint": "9f2c", "sequences": 4},
        models=list(models),
        differences=differences,
        not_compared=apart,
        environment={"python": "3.11", "torch": "2.13.0", "threads": 2},
    )


def base(**fields: Any) -> ModelReport:
    return made_up_model("SmolLM2-135M", "a stock Llama", **fields)


def adapter(**fields: Any) -> ModelReport:
    return made_up_model("runs/dex-adapter", "a Dex adapter", seed=1, dex=True, **fields)


def diff_model(**fields: Any) -> ModelReport:
    return made_up_model(
        "diff-v1-small", "a DIFF Transformer V1", seed=2, signed=True, **{"layers": 12, "heads": 6, **fields}
    )


# ---- the page as text ---------------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """Tags that are open, and whatever is wrong with their nesting; the words outside of scripts and styles."""

    VOID = frozenset({"meta", "link", "br", "input", "hr", "img"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        own = dict(attrs)
        self.ids += [own["id"]] if own.get("id") else []
        self.links += [link for name in ("src", "href") if (link := own.get(name)) is not None]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.wrong.append(f"</{tag}> in {self.open[-3:]}, line {self.getpos()[0]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def reports() -> dict[str, Report]:
    return {
        "one": made_up_report(adapter(layers=4, heads=3, length=30)),
        "two": made_up_report(
            base(layers=4, heads=3, length=30, more=2), adapter(layers=4, heads=3, length=30, more=2)
        ),
        "other shapes": made_up_report(base(layers=4, heads=3, length=30), diff_model(layers=3, heads=2, length=30)),
    }


@pytest.mark.parametrize("which", ["one", "two", "other shapes"])
def test_the_page_is_well_formed_and_asks_for_nothing_outside_of_it(which: str) -> None:
    page = render(reports()[which])
    outline = Outline(page)
    assert outline.wrong == []
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert [link for link in outline.links if not link.startswith(("#", "data:,"))] == []
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)
    # SVG's namespace is a name, and nothing is fetched from it.
    assert re.findall(r"(?:https?:)?//[a-z][\w.-]*\.[a-z]+", page.replace("http://www.w3.org/2000/svg", "")) == []
    assert "@import" not in page
    assert "url(" not in page


def test_words_and_tables_stand_there_without_javascript() -> None:
    report = reports()["two"]
    outline = Outline(render(report))
    for model in report.models:
        for sentence in (*model.overview, *model.left_out.values()):
            assert sentence in outline.text
        for found in model.sections.values():
            for one in found.statistics:
                assert one.meaning in outline.text
            for table in found.tables:
                assert all(name in outline.words for name in table.columns)
    for sentence in report.not_compared:
        assert sentence in outline.text
    entropy = report.models[1].statistic("entropy")
    assert entropy is not None
    assert summary(entropy) in outline.text
    for value in written.column([*layer_values(report.models[0].statistic("entropy")), *layer_values(entropy)]):  # type: ignore[arg-type]
        assert value in outline.words


def test_the_overview_comes_first_and_then_what_was_left_out() -> None:
    report = reports()["two"]
    text = Outline(render(report)).text
    places = [text.index(words) for words in (report.models[0].overview[0], report.models[1].overview[0])]
    places += [text.index("It has no Dex branch."), text.index("The main numbers.")]
    assert places == sorted(places)


def test_every_section_of_the_command_has_a_place_on_the_page() -> None:
    assert list(SECTIONS) == list(sections.SECTIONS)


def test_sections_have_their_order_and_headlines_come_first() -> None:
    model = adapter(layers=4, heads=3, length=30)
    shuffled = {"landscape": model.sections["landscape"], **model.sections}
    page = Page(made_up_report(model.model_copy(update={"sections": shuffled})))
    names = ["branch", "attention", "example", "importance", "landscape"]
    assert [section.name for section in page.sections] == names
    headlines = [each.one.headline for each in page.sections[1].measures]
    assert headlines == sorted(headlines, reverse=True)
    assert [each.one.name for each in page.sections[1].over("head")] == ["entropy", "answer", "first_token"]


def with_other_meanings(model: ModelReport, meaning: str) -> ModelReport:
    """All that the model says of its statistics, curves, tables and example is `meaning`, with the name before it."""
    change: dict[str, Findings] = {}
    for section, found in model.sections.items():
        change[section] = found.model_copy(
            update={
                kind: [one.model_copy(update={"meaning": f"{one.name}: {meaning}"}) for one in getattr(found, kind)]
                for kind in ("statistics", "curves", "tables")
            }
        )
        if found.example is not None:
            own = found.example.model_copy(update={"meaning": f"example: {meaning}"})
            change[section] = change[section].model_copy(update={"example": own})
    return model.model_copy(update={"sections": change})


def test_what_means_the_same_for_both_models_is_said_once_and_what_does_not_of_each() -> None:
    size: dict[str, Any] = {"layers": 4, "heads": 3, "length": 30}
    first, alike, other = base(**size), base(**size), with_other_meanings(diff_model(**size), "Other.")
    alike = alike.model_copy(update={"label": "tuned"})
    named = ["entropy", "entropy_layer", "largest", "spectrum", "hessian"]  # of a head, layer, model; curve, table
    own = {one.name: one.meaning for found in first.sections.values() for one in _all_of(found)}
    found = first.sections["example"].example
    assert found is not None
    own["example"] = found.meaning
    once, apart = (Outline(render(made_up_report(first, second))).text for second in (alike, other))
    for name in [*named, "example"]:
        assert once.count(own[name]) == 1
        assert f"SmolLM2-135M : {own[name]}" not in once
        assert f"SmolLM2-135M : {own[name]} diff-v1-small : {name}: Other." in apart


def _all_of(found: Findings) -> list[Statistic | Curve | Table]:
    return [*found.statistics, *found.curves, *found.tables]


def test_treatments_that_differ_are_said_of_each_model() -> None:
    one = Statistic(name="s", title="S", meaning="M.", over="layer", values=[1.0], first_token="counted", signs=None)
    two = one.model_copy(update={"first_token": "left out", "signs": "clipped"})
    size: dict[str, Any] = {"layers": 1, "heads": 2, "length": 30}
    models = [
        model.model_copy(update={"sections": {"maps": Findings(statistics=[own])}})
        for model, own in ((base(**size), one), (diff_model(**size), two))
    ]
    (measure,) = Page(made_up_report(*models)).sections[0].measures
    assert measure.meanings == [(None, "M.")]
    assert measure.treatment == [
        (None, "Negative weights count as 0."),
        (0, "A text’s first token is counted."),
        (1, "A text’s first token is left out."),
    ]


def test_a_difference_says_what_both_models_mean_where_it_is_not_the_same() -> None:
    size: dict[str, Any] = {"layers": 2, "heads": 2, "length": 30}
    first = base(**size)
    made, _ = differences(first, with_other_meanings(diff_model(**size), "Other."))
    largest = next(one for one in made if one.name == "largest")
    assert largest.meaning == (
        "diff-v1-small minus SmolLM2-135M. SmolLM2-135M: Of the Hessian. diff-v1-small: largest: Other."
    )
    made, _ = differences(first, first.model_copy(update={"label": "tuned"}))
    assert next(one for one in made if one.name == "largest").meaning == "tuned minus SmolLM2-135M. Of the Hessian."


def test_the_table_of_layers_has_the_models_difference_with_its_own_decimals() -> None:
    one = Statistic(name="s", title="S", meaning="M.", over="head", values=[[1.25, None], [3.0, 5.0]])
    two = one.model_copy(update={"values": [[1.2512, 2.0], [3.0, 5.004]]})
    size: dict[str, Any] = {"layers": 2, "heads": 2, "length": 30}
    models = [
        model.model_copy(update={"sections": {"maps": Findings(statistics=[own])}})
        for model, own in ((base(**size), one), (adapter(**size), two))
    ]
    report = made_up_report(*models)
    change = one.model_copy(update={"values": [[0.0012, None], [0.0, 0.004]]})
    page = Page(report.model_copy(update={"differences": [change]}))
    (group,) = page.sections[0].layers
    # Of heads that both have: not the difference of the two means, which are over other heads in layer 0.
    assert group.columns == [(0, ["1.250", "4.000"]), (1, ["1.626", "4.002"]), (None, ["0.001200", "0.002000"])]
    (without,) = Page(report.model_copy(update={"differences": []})).sections[0].layers
    assert [index for index, _ in without.columns] == [0, 1]


def test_every_script_of_the_folder_is_on_the_page() -> None:
    folder = files("dex.analysis.page")
    assert sorted(SCRIPTS) == sorted(each.name for each in folder.iterdir() if each.name.endswith(".js"))
    page = render(reports()["one"])
    places = [page.index(folder.joinpath(name).read_text(encoding="utf-8")) for name in SCRIPTS]
    assert places == sorted(places)


NASTY = "</script><script>alert(1)</script>"


def test_whatever_models_and_tokenizers_say_is_escaped() -> None:
    model = adapter(layers=2, heads=2, length=30)
    example = model.sections["example"].example
    assert example is not None
    tokens = [NASTY, "<!--", "]]>", "&amp;", '"', "'", "\u2028", "⏎", "", "   ", "\x00", *example.tokens[11:]]
    nasty = model.model_copy(
        update={
            "label": NASTY,
            "kind": f"a <b>bold</b> {NASTY}",
            "overview": [NASTY],
            "left_out": {"maps": NASTY},
            "identity": {NASTY: NASTY},
            "sections": {
                **model.sections,
                "example": Findings(example=example.model_copy(update={"tokens": tokens})),
                "importance": Findings(
                    statistics=[head_statistic(np.ones((2, 2)), "one", NASTY, meaning=NASTY, unit=NASTY)],
                    tables=[Table(name="t", title=NASTY, meaning=NASTY, columns=[NASTY], rows=[[NASTY]])],
                    curves=[
                        Curve(name="c", title=NASTY, meaning="", x_label=NASTY, y_label="", x=[0], lines={NASTY: [1]})
                    ],
                ),
            },
        }
    )
    page = render(made_up_report(nasty))
    outline = Outline(page)
    assert (outline.wrong, outline.open) == ([], [])
    assert NASTY not in page
    assert page.lower().count("<script") == 3  # the class, the data, the code
    assert NASTY in outline.text
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert block is not None
    assert json.loads(block[1])["models"][0]["label"] == NASTY


def test_a_large_report_stays_below_five_megabytes() -> None:
    size: dict[str, Any] = {"layers": 32, "heads": 32, "length": 300, "more": 21}
    report = made_up_report(base(**size), adapter(**size))
    assert sum(one.over == "head" for found in report.models[0].sections.values() for one in found.statistics) == 25
    assert len(render(report).encode()) < 5e6


def test_masses_of_the_page_are_those_of_the_report() -> None:
    report = reports()["one"]
    data = data_of(Page(report))["examples"]["example"][0]
    found = np.frombuffer(base64.b64decode(data["masses"]), dtype="<f2").reshape(data["shape"])
    example = report.models[0].sections["example"].example
    assert example is not None
    np.testing.assert_allclose(found, example.masses, rtol=1e-3, atol=1e-7)


def test_where_there_is_no_value_the_page_has_null_and_means_leave_it_out() -> None:
    one = Statistic(
        name="s", title="S", meaning="M.", over="head", values=[[1.0, None], [None, None], [0.123456, 0.5]]
    )
    model = adapter(layers=3, heads=2, length=30)
    page = Page(made_up_report(model.model_copy(update={"sections": {"maps": Findings(statistics=[one])}})))
    assert data_of(page)["measures"]["s"]["of"] == [[[1, None], [None, None], [0.1235, 0.5]]]
    assert layer_values(one) == [1.0, None, pytest.approx(0.311728)]
    assert summary(one) == (
        "median 0.500; lowest 0.123 (layer 2, head 0), highest 1 (layer 0, head 0); 3 heads without a value"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.12345, "0.123"),
        (-12.345, "−12.3"),
        (9.996, "10.00"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (3.0, "3"),
        (-1.5e-5, "−1.50e−5"),
        (2.5e12, "2.50e12"),
    ],
)
def test_numbers_are_written_with_three_digits(value: float | None, text: str) -> None:
    assert written.number(value) == text


def test_numbers_of_a_column_line_up_and_never_lose_what_is_not_zero() -> None:
    assert written.column([1.25, None, -12.5, 10]) == ["1.25", "–", "−12.50", "10.00"]
    assert written.column([1, 20, 0]) == ["1", "20", "0"]
    assert written.column([412.5, 2e-5]) == ["412.5", "2.000e−5"]


# ---- the page in a browser ----------------------------------------------------------------------------------------


LAYERS, HEADS = 6, 4
SIZE: dict[str, Any] = {"layers": LAYERS, "heads": HEADS, "length": 40}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of the pages of one model, of two, of a DIFF model, of a base beside it, and of parts of a text."""
    folder = tmp_path_factory.mktemp("pages")
    made = {
        "one": made_up_report(adapter(**SIZE)),
        "two": made_up_report(base(more=2, **SIZE), adapter(more=2, **SIZE)),
        "diff": made_up_report(diff_model(**SIZE)),
        "base and diff": made_up_report(base(**SIZE), with_other_meanings(diff_model(**SIZE), "Other.")),
        "part": made_up_report(base(start=1090, **SIZE), adapter(start=1100, **SIZE)),
    }
    for name, report in made.items():
        (folder / f"{name}.html").write_text(render(report), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


def visit(driver: Any, address: str, **screen: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    emulate(driver, **screen)
    driver.get("about:blank")  # a part of a page that is there already would not load it anew
    driver.get(address)
    WebDriverWait(driver, 20).until(lambda d: d.execute_script("return document.documentElement.dataset.drawn"))


def find(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def point_at(driver: Any, selector: str, layer: int, head: int, *, click: bool = False) -> None:
    """Move the mouse to the middle of a cell, and click there if `click`."""
    from selenium.webdriver import ActionChains

    canvas = find(driver, f"{selector} .cells canvas")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width, height = canvas.size["width"] / HEADS, canvas.size["height"] / LAYERS
    right, down = width * (head + 0.5) - canvas.size["width"] / 2, height * (layer + 0.5) - canvas.size["height"] / 2
    chain = ActionChains(driver).move_to_element_with_offset(canvas, round(right), round(down))
    (chain.click() if click else chain).perform()


def press(driver: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def value_of(model: ModelReport, name: str, layer: int, head: int) -> str:
    """As a reader sees it."""
    statistic = model.statistic(name)
    assert statistic is not None
    return written.number(statistic.values[layer][head])  # type: ignore[index]


@pytest.mark.parametrize(
    ("which", "screen"),
    [
        ("one", {}),
        ("two", {}),
        ("base and diff", {"dark": True}),
        ("part", {}),
        ("one", {"width": 360}),
        ("two", {"width": 360}),
    ],
    ids=str,
)
def test_a_browser_draws_the_page_without_complaints(
    browser: Any,
    pages: dict[str, str],
    which: str,
    screen: dict[str, Any],
) -> None:
    visit(browser, pages[which], **screen)
    assert complaints(browser) == []
    browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= screen.get("width", 1280)  # the page never scrolls sideways
    drawn = "return [...document.querySelectorAll('.panel')].map(each => each.querySelectorAll('canvas').length)"
    assert all(count >= 2 for count in browser.execute_script(drawn))
    assert browser.find_elements("css selector", ".plot svg path.line")
    asked = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert [name for name in asked if not name.startswith("data:")] == []


def test_pointing_at_a_head_says_its_value(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["one"])
    model = adapter(**SIZE)
    point_at(browser, "#section-attention .panel", 3, 2)
    expected = f"layer 3, head 2: {value_of(model, 'entropy', 3, 2)} nats"
    assert find(browser, "#section-attention .head-maps > .readout").text == expected
    assert find(browser, "#tip").text == expected
    point_at(browser, "#section-branch .panel", 1, 0)
    assert find(browser, "#tip").text == "layer 1, head 0: no value"


def test_of_two_models_pointing_says_both_and_their_difference(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["two"])
    report = made_up_report(base(**SIZE), adapter(**SIZE))
    point_at(browser, "#section-attention .panel", 5, 1)
    change = next(each for each in report.differences if each.name == "entropy").values[5][1]  # type: ignore[index]
    first, second = (value_of(model, "entropy", 5, 1) for model in report.models)
    expected = f"SmolLM2-135M {first} nats, runs/dex-adapter {second} nats, difference {written.number(change)} nats"
    assert find(browser, "#section-attention .head-maps > .readout").text == f"layer 5, head 1: {expected}"
    marked = browser.find_elements("css selector", "#section-attention .panel .cursor:not(.chosen):not([hidden])")
    assert len(marked) == 3


def test_arrow_keys_move_over_the_heads_and_between_statistics(browser: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver import Keys

    visit(browser, pages["one"])
    model = adapter(**SIZE)
    readout = "#section-attention .head-maps > .readout"
    find(browser, "#section-attention .picker input:checked").send_keys(Keys.TAB)  # from the choice to its map
    press(browser, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert find(browser, readout).text == f"layer 2, head 1: {value_of(model, 'entropy', 2, 1)} nats"
    press(browser, Keys.END, Keys.ARROW_RIGHT)  # the last head stays the last
    assert find(browser, readout).text.startswith("layer 2, head 3: ")
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert browser.execute_script(outline) == "solid"
    press(browser, Keys.ESCAPE)
    assert not find(browser, "#tip").is_displayed()

    find(browser, "#section-attention .picker input:checked").send_keys(Keys.ARROW_RIGHT)
    shown = browser.find_elements("css selector", "#section-attention .about:not([hidden]) h3")
    assert [each.text for each in shown] == ["Attention to the answer share"]
    point_at(browser, "#section-attention .panel", 0, 0)
    assert find(browser, readout).text == f"layer 0, head 0: {value_of(model, 'answer', 0, 0)} share"


def test_a_card_leads_to_its_statistic(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["one"])
    find(browser, "#glance a[href='#measure-answer']").click()
    assert find(browser, "#section-attention .about:not([hidden])").get_attribute("id") == "measure-answer"
    assert find(browser, "#section-attention .panel").is_displayed()


def test_the_button_changes_the_theme(browser: Any, pages: dict[str, str]) -> None:
    look = "return getComputedStyle(document.body).backgroundColor"
    cell = "return [...document.querySelector('.cells canvas').getContext('2d').getImageData(4, 4, 1, 1).data]"
    visit(browser, pages["diff"], dark=True)
    dark, dark_cell = browser.execute_script(look), browser.execute_script(cell)
    visit(browser, pages["diff"])
    light = browser.execute_script(look)
    button = find(browser, "#theme")
    assert (light, button.text) != (dark, "Light theme")
    button.click()
    assert (browser.execute_script(look), button.text) == (dark, "Light theme")
    assert browser.execute_script(cell) == dark_cell  # what is drawn follows too
    button.click()
    assert browser.execute_script(look) == light


def test_the_text_shows_the_masses_of_the_chosen_head(browser: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver import Keys
    from selenium.webdriver.support.ui import Select

    visit(browser, pages["one"])
    found = adapter(**SIZE).sections["example"].example
    assert found is not None
    masses = np.array(found.masses)
    layer, head = (Select(each) for each in browser.find_elements("css selector", ".choices select"))
    answer = masses[..., slice(*found.span)].sum(-1)
    strongest = np.unravel_index(answer.argmax(), answer.shape)
    chosen = [each.first_selected_option.text for each in (layer, head)]
    assert chosen == [str(place) for place in strongest]

    def background() -> list[str]:
        return browser.execute_script(  # type: ignore[no-any-return]
            "return [...document.querySelectorAll('[data-token]')].map(each => each.style.background)"
        )

    before = background()
    layer.select_by_visible_text("4")
    head.select_by_visible_text("1")
    assert background() != before
    sums = find(browser, ".sums").text
    assert sums.startswith(f"Layer 4, head 1: {written.number(float(f'{answer[4, 1]:.3g}'))} on the answer")

    tokens = browser.find_elements("css selector", "[data-token]")
    browser.execute_script("arguments[0].focus()", tokens[0])
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    expected = f"token 2 “magic”: {written.number(masses[4, 1, 2])}"
    assert find(browser, ".example .readout").text == expected
    assert browser.switch_to.active_element.get_attribute("data-token") == "2"

    point_at(browser, ".example-map", 2, 3, click=True)
    assert find(browser, ".sums").text.startswith("Layer 2, head 3: ")
    layer.select_by_visible_text("all layers (mean)")
    assert find(browser, ".sums").text.startswith("Mean of all heads: ")


def test_of_a_part_of_a_text_positions_and_sums_are_those_of_the_whole_text(
    browser: Any, pages: dict[str, str]
) -> None:
    from selenium.webdriver.support.ui import Select

    visit(browser, pages["part"])
    found = base(start=1090, **SIZE).sections["example"].example
    assert found is not None
    answer, every = np.array(found.on_answer), np.array(found.on_all)
    layer, head = (Select(each) for each in browser.find_elements("css selector", ".choices select")[:2])

    def sums(who: str, answer: float, every: float) -> str:
        on, rest = (written.number(float(f"{mass:.3g}")) for mass in (answer, every - answer - 0.2))
        return f"{who}: {on} on the answer, 0.200 on the first token, {rest} on all other tokens."

    layer.select_by_visible_text("4")
    head.select_by_visible_text("1")
    assert find(browser, ".sums").text == sums("Layer 4, head 1", answer[4, 1], every[4, 1])
    head.select_by_visible_text("all heads (mean)")
    assert find(browser, ".sums").text == sums("Layer 4, mean of its heads", answer[4].mean(), every[4].mean())
    layer.select_by_visible_text("all layers (mean)")
    assert find(browser, ".sums").text == sums("Mean of all heads", answer.mean(), every.mean())

    for which, place in ((0, 1092), (1, 1102)):
        token = find(browser, f"[data-example='{which}'] [data-token='2']")
        browser.execute_script("arguments[0].focus()", token)
        assert find(browser, f"[data-example='{which}'] .readout").text.startswith(f"token {place} “magic”: ")


def test_the_ink_of_every_token_can_be_read_on_its_colour(browser: Any, pages: dict[str, str]) -> None:
    """WCAG's contrast of black or white ink, whichever is larger: 4.58 to 1 at the least."""
    looks = """return [...document.querySelectorAll("[data-token]")].map((each) => {
        const {color, backgroundColor} = getComputedStyle(each);
        return [color, backgroundColor].map((text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number));
    })"""

    def luminance(rgb: list[float]) -> float:
        shares = (each / 255 for each in rgb)
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for which, dark in (("one", False), ("one", True), ("diff", False), ("diff", True)):
        visit(browser, pages[which], dark=dark)
        for ink, ground in browser.execute_script(looks):
            low, high = sorted((luminance(ink), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= 4.5


def test_two_models_have_a_chart_of_their_difference_below_their_lines(browser: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver import Keys

    visit(browser, pages["two"])
    report = made_up_report(base(**SIZE), adapter(**SIZE))
    change = next(each for each in report.differences if each.name == "entropy_layer").values
    chart = "#section-attention [data-layers=entropy_layer]"
    names = [each.text for each in browser.find_elements("css selector", f"{chart} .plot-name")]
    assert names == ["Difference"]
    drawing = browser.find_elements("css selector", f"{chart} .plot > svg")[1]
    browser.execute_script("arguments[0].focus()", drawing)
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    heard = browser.find_elements("css selector", f"{chart} .heard")[1].get_attribute("textContent")
    assert heard == f"layer 2: {written.number(float(f'{change[2]:.4g}'))} nats"  # type: ignore[index]


def test_negative_masses_have_a_mark_beside_their_colour(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["diff"])
    negative = browser.find_elements("css selector", ".tokens .token.negative")
    assert negative
    assert "dotted" in negative[0].value_of_css_property("text-decoration")


def test_a_chart_says_its_values_by_keys(browser: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver import Keys

    visit(browser, pages["one"])
    chart = "#section-branch [data-layers=lam]"
    browser.execute_script("arguments[0].focus()", find(browser, f"{chart} svg"))
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    lam = adapter(**SIZE).statistic("lam")
    assert lam is not None
    heard = find(browser, f"{chart} .heard").get_attribute("textContent")
    assert heard == f"layer 3: {written.number(lam.values[3])}"  # type: ignore[index]
