"""``fa2tune report``: an HTML page of a cache file."""

from __future__ import annotations

from pathlib import Path

import click

from fa2tune.cli import _tables
from fa2tune.cli._options import check_folder, shown_errors

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--cache", type=_FILE, help="Cache file to show.  [default: the user's, unless --studies is given]")
@click.option("--studies", type=_FILE, help="Optuna studies of `fa2tune tune` to show; alone, with the winning rows of that "
              "run.  [default: studies.sqlite next to the cache, where there is one]")  # fmt: skip
@click.option(
    "--bench", type=_FILE, help="bench.json of `fa2tune bench`: adds the comparison with other implementations."
)
@click.option("--compare", type=_FILE, help="Another cache file: adds gains and losses against it, key by key.")
@click.option("--out", type=_FILE, default=Path("fa2tune-report.html"), show_default=True, help="The page.")
def report(cache: Path | None, studies: Path | None, bench: Path | None, compare: Path | None, out: Path) -> None:
    """Write one self-contained HTML page of a cache file, of the searches behind it, or of both.

    It shows what a given model would get, the winning configs with their evidence, and speed against the portable default
    config and the GPU's limits. Of the searches it shows trials, what was pruned and why, predicted and measured times, and the
    versions used. Charts can be zoomed and saved as SVG or PNG. The page needs no network: it holds the chart library, about
    0.9 MB, and a content security policy that allows no request. An existing page is replaced.
    """
    from fa2tune.report.contents import render
    from fa2tune.report.document import chart_library
    from fa2tune.report.sources import gather
    from fa2tune.rows.store import write_text

    if out.suffix.lower() not in (".html", ".htm"):
        raise click.BadParameter(f"got {out}, its name must end in .html or .htm", param_hint="--out")
    check_folder(out, "--out")
    with shown_errors():
        sources = gather(cache, studies, bench, compare)
    page = render(sources)
    with shown_errors():
        write_text(out, page)
    for kind, path in sources.files.items():
        _tables.say(f"{kind}: {path}")
    trials = sum(len(search.trials) for search in sources.searches)
    held = f"{len(sources.rows)} rows" + (f", {trials} trials of {len(sources.searches)} searches" if trials else "")
    charts = (
        f", of which {len(chart_library().encode()) / 1e6:.1f} MB are the chart library"
        if chart_library() in page
        else ""
    )
    _tables.say(f"{out}: {held}, {len(page.encode()) / 1e6:.1f} MB{charts}")
