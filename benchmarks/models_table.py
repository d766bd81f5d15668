"""Which published models' attention fa2tune computes, for docs/serve.md: what `fa2tune cache coverage` says of their configs.

    python benchmarks/models_table.py tests/fixtures/models/*.json --page docs/serve.md

Needs Transformers (pip install '.[models]') and no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import marked

from fa2tune.fleet import coverage, modelconfig

SCRIPT, PART = "models_table", "models"


def line(path: Path) -> str:
    """One model's row: head dims, then the verdict on inference and on training, with reasons where it is not "covered"."""
    model = modelconfig.model(modelconfig.read(path))
    dims = sorted({(found.head_dim, found.head_dim_v) for found in model.attentions})
    shown = ", ".join(str(dim) if dim == dim_v else f"{dim} / {dim_v}" for dim, dim_v in dims) or "-"
    inference, training = (coverage.verdict(model, training=training) for training in (False, True))
    both = inference.line if training == inference else training.line
    return f"| {path.stem} | {shown} | {inference.word} | {training.word} | {both.partition(': ')[2]} |"


def markdown(paths: Sequence[Path]) -> str:
    head = [
        "| model | head dims (of Q and K / of V) | inference | training | what is not computed |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(line(path) for path in sorted(paths))])


@click.command(help=__doc__)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@marked.page_option
def main(paths: tuple[Path, ...], page: Path | None) -> None:
    try:
        text = markdown(paths)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    marked.publish(page, PART, SCRIPT, text)


if __name__ == "__main__":
    main()
