"""``fa2tune report``: a page to read."""

from __future__ import annotations

from pathlib import Path

import click

from fa2tune.cli._options import check_folder, told

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--cache", type=_FILE, help="Cache file to show.  [default: the user's, unless --studies is given]")
@click.option("--studies", type=_FILE, help="Optuna studies of `fa2tune tune` to show; alone, with the rows that run crowned.  "
              "[default: studies.sqlite beside the cache, where there is one]")  # fmt: skip
@click.option("--bench", type=_FILE, help="bench.json of `fa2tune bench`, for the comparison with the peers.")
@click.option("--out", type=_FILE, default=Path("fa2tune-report.html"), show_default=True, help="The page.")
def report(cache: Path | None, studies: Path | None, bench: Path | None, out: Path) -> None:
    """Write one self-contained HTML page on a cache file, on the searches behind it, or on both.

    Winners with their evidence, gains over the default, speed and roofline, the searches, what was pruned and why, predicted
    against measured times, peers, environment. The page asks for nothing from the network; a page that is there is replaced.
    """
    from fa2tune.page.page import render
    from fa2tune.page.sources import gather

    if out.suffix.lower() not in (".html", ".htm"):
        raise click.BadParameter(f"got {out}, its name must end in .html or .htm", param_hint="--out")
    check_folder(out, "--out")
    with told():
        sources = gather(cache, studies, bench)
    page = render(sources)
    with told():
        out.write_text(page, encoding="utf-8")
    for kind, path in sources.files.items():
        click.echo(f"{kind}: {path}")
    trials = sum(len(search.trials) for search in sources.searches)
    held = f"{len(sources.rows)} rows" + (f", {trials} trials of {len(sources.searches)} searches" if trials else "")
    click.echo(f"{out}: {held}, {len(page.encode()) / 1e6:.1f} MB")
