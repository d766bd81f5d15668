"""The page of ``fa2tune report`` in Chromium: its charts are drawn under its policy, at once and without a request."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, chromium
from click.testing import CliRunner
from test_report import EVIL, file_study

from fa2tune.cli import main
from fa2tune.rows import reader
from fa2tune.rows.store import export

ROOT = Path(__file__).parents[2]
#: How many charts are drawn, of how many that can be seen.
DRAWN = (
    "(() => { const all = [...document.querySelectorAll('figure.chart')]; "
    "const seen = all.filter((f) => !f.closest('details:not([open])')); "
    "return [seen.filter((f) => f.querySelector('.plot svg')).length, seen.length]; })()"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        assert "FA2TUNE_CI" not in os.environ, "Chromium is missing: .ci/run installs it"
        pytest.skip("needs Chromium")
    with chromium(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything: rows, searches with hostile text, a benchmark, another cache."""
    folder = tmp_path_factory.mktemp("page")
    rows = [row for row in reader.read(ROOT / "cache" / "h200.sqlite") if row.key.head_dim in (64, 128)]
    export(rows, folder / "cache.sqlite")
    for key in sorted({row.key for row in rows if (row.key.kernel, row.key.mask) == ("fwd", "full")})[:2]:
        file_study(folder / "studies.sqlite", key)
    other = folder / "a_name_without_a_space_that_is_wider_than_a_phone_is.sqlite"  # headings say it
    shutil.copy(ROOT / "cache" / "h200-triton3.9.sqlite", other)
    options = ["--bench", ROOT / "docs" / "bench" / "h200_bf16.json", "--compare", other]
    arguments = ["report", "--cache", folder / "cache.sqlite", *options, "--out", folder / "page.html"]
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return folder / "page.html"


def drawn(page: Page) -> None:
    """Wait until every chart that can be seen is drawn."""
    page.until(f"(({DRAWN})[0] === ({DRAWN})[1])")


@pytest.mark.parametrize("width", [1440, 390])
def test_every_chart_is_drawn_under_the_policy_and_nothing_is_requested(page: Page, file: Path, width: int) -> None:
    page.said.clear()
    page.asked.clear()
    page.open(file, width=width, height=20_000 if width > 500 else 60_000)
    drawn(page)
    assert page.value(DRAWN)[0] >= 8
    assert [text for text in page.said if "fit-y" not in text] == []
    assert set(page.asked) - {"about:blank"} == {file.as_uri()}
    assert page.value("document.querySelectorAll('.plot .warn').length") == 0
    assert page.value("document.documentElement.scrollWidth") <= width
    described = (
        "[...document.querySelectorAll('.plot [role=graphics-document]')].map((e) => e.getAttribute('aria-label'))"
    )
    texts = page.value(described)
    assert len(texts) == page.value(DRAWN)[0] and all("the table below has the same figures" in text for text in texts)


def test_the_policy_refuses_code_and_requests_that_are_not_the_pages(page: Page, file: Path) -> None:
    page.open(file)
    page.said.clear()
    page.asked.clear()
    for code in ("eval('window.ran = 1')", "new Function('window.ran = 1')()"):
        assert page.value(f"(() => {{ try {{ {code}; return false; }} catch {{ return true; }} }})()"), code
    page.value(
        "document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.ran = 1' }))"
    )
    page.value(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x\" onerror=\"window.ran = 1\">')"
    )
    page.value("fetch('http://127.0.0.1:9/x').then(() => { window.ran = 1; }, () => 0)")
    page.value("new Promise((done) => setTimeout(done, 300))")
    assert page.value("window.ran === undefined")
    assert len([text for text in page.said if "Content Security Policy" in text]) >= 4, page.said


def test_the_winners_show_all_their_columns_at_1440(page: Page, file: Path) -> None:
    page.open(file)
    size = (
        "(() => { const s = document.querySelector('.block[open] .scroll'); return [s.scrollWidth, s.clientWidth]; })()"
    )
    wide, there = page.value(size)
    assert wide <= there


def test_the_bar_covers_no_heading_on_a_phone(page: Page, file: Path) -> None:
    page.open(file, "#limits", width=390, height=844)
    page.until("Math.abs(document.getElementById('limits').getBoundingClientRect().top) < 60")
    covered = (
        "(() => { const { left, top } = document.querySelector('#limits h2').getBoundingClientRect(); "
        "return document.elementFromPoint(left + 5, top + 5).closest('nav') !== null; })()"
    )
    assert page.value(covered) is False


def test_the_state_of_the_page_is_in_its_address(page: Page, file: Path) -> None:
    page.open(file)
    page.value("document.querySelector('[data-token=\"dim:128\"]').click()")
    page.value("document.querySelector('[data-token=\"mask:causal\"]').click()")
    page.value("[...document.querySelectorAll('.block')].forEach((block) => { block.open = true; })")
    visible = "[...document.querySelectorAll('table.winners tr[data-n]')].filter((row) => row.offsetParent)"
    count = page.value(f"{visible}.length")
    page.value(f"{visible}[3].querySelector('button').click()")
    heads = "document.querySelector('#ask').elements.heads"
    page.value(f"{heads}.value = '32'; {heads}.dispatchEvent(new Event('input', {{ bubbles: true }}))")
    where = page.value("location.hash")
    assert {"dim=128", "mask=causal", "my.heads=32"} <= set(where[1:].split("&"))
    opened = page.value("document.querySelector('tr.detail').textContent")
    page.open(file, where)
    assert page.value("document.querySelector('tr.detail').textContent") == opened
    assert page.value(f"{visible}.length") == count and 0 < count < 200
    assert page.value("document.querySelector('#askmore').textContent").startswith(
        "Times are for 16k tokens a call and 32 query"
    )
    assert page.value("document.querySelectorAll('.filters [aria-pressed=true]').length") == 2


@pytest.mark.parametrize("fragment", ["#%E0%A4%A", "#%"])
def test_a_link_that_was_cut_off_opens_the_page(page: Page, file: Path, fragment: str) -> None:
    page.said.clear()
    page.open(file, fragment, height=20_000)
    drawn(page)
    assert page.value(DRAWN)[0] >= 8
    assert [text for text in page.said if "fit-y" not in text] == []


@pytest.mark.parametrize("width", [1440, 390])
def test_placeholders_are_not_clipped(page: Page, file: Path, width: int) -> None:
    """A number has buttons, 16 px wide, on a computer."""
    page.open(file, width=width)
    inputs = """[...document.querySelectorAll("input[placeholder]")].map((field) => {
        const style = getComputedStyle(field), pen = document.createElement("canvas").getContext("2d");
        pen.font = style.font;
        const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
        return [pen.measureText(field.placeholder).width + (field.type === "number" ? 16 : 0), room];
    })"""
    found = page.value(inputs)
    assert len(found) == 4 and all(needed <= room for needed, room in found), found


def test_charts_follow_the_filters_and_their_tables_say_the_same(page: Page, file: Path) -> None:
    page.open(file, "#dim=64&mask=full&len=512|4096&dtype=bf16&gains.kernel=bwd", height=20_000)
    drawn(page)
    gains = "document.querySelector('[data-chart=gains]')"
    points = f"[...{gains}.querySelectorAll('.mark-symbol path[aria-label]')].map((p) => p.getAttribute('aria-label'))"
    shown = page.value(points)
    assert len(shown) == 2 and all("bwd bf16 64 full" in label for label in shown)
    page.value(f"{gains}.querySelector('.figures summary').click()")
    page.until(f"{gains}.querySelectorAll('.figures tbody tr').length === 2")


def test_hostile_text_is_drawn_as_text(page: Page, file: Path) -> None:
    page.open(file, height=20_000)
    drawn(page)
    assert page.value("typeof window.alert") == "function"
    slices = page.value("document.querySelector('[data-chart=slices-0] .plot').textContent")
    assert "BLOCK_M" in slices
    assert EVIL in page.value("document.querySelector('.reasons').textContent")
    assert page.value("document.querySelectorAll('main script').length") == 0
