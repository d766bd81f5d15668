"""The page's HTML out of its parts: template, style sheet, scripts, the chart library and the data, all inline, under a
content security policy that names each script and the style sheet by its hash and allows nothing else, no request included.

The chart library (vega-embed with Vega and Vega-Lite, as vl-convert bundles them) runs without ``eval``: charts are drawn with
its expression interpreter (``ast: true``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from markupsafe import Markup

from fa2tune.report import charts, facts

SCRIPTS = ("report.js", "charts.js", "model.js")


def columnar(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Records with their field names once; a script makes objects of them again."""
    fields = list(dict.fromkeys(name for record in records for name in record))
    return {"fields": fields, "rows": [[_short(record.get(name)) for name in fields] for record in records]}


def _short(value: Any) -> Any:
    """Five significant digits are finer than any screen; what is not finite is no point of a chart."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def to_script(value: Any) -> Markup:
    """JSON that can stand in a script element: what would end that, or begin a comment in it, never stands there."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@cache
def chart_library() -> str:
    """The chart library as one script."""
    import vl_convert

    script = str(vl_convert.javascript_bundle("globalThis.vegaEmbed = vegaEmbed;"))
    # in a script element these would end it or begin a comment; in JavaScript's strings and patterns they mean the same
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def versions() -> str:
    """Of the chart library."""
    import altair
    import vl_convert

    return f"Vega {vl_convert.get_vega_version()}, Vega-Lite {altair.SCHEMA_VERSION.lstrip('v')}, vega-embed " + str(
        vl_convert.get_vega_embed_version()
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """A content security policy for these inline scripts and style sheets, and nothing else."""
    return "; ".join((
        "default-src 'none'", f"script-src {' '.join(map(_hash, scripts))}", f"style-src {' '.join(map(_hash, styles))}",
        "base-uri 'none'", "form-action 'none'",
    ))  # fmt: skip


def assemble(view: Mapping[str, Any], embedded: Mapping[str, Any]) -> str:
    """The page. ``embedded``: what its scripts read, each as JSON in an element of that id."""
    import jinja2

    folder = resources.files("fa2tune.report")

    def text(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"figure": facts.figure, "key_title": charts.title_of}
    scripts, style = [text(name) for name in SCRIPTS], text("report.css")
    charted = bool(embedded["charts"])
    inline = [chart_library(), *scripts] if charted else scripts
    return environment.from_string(text("report.html")).render(
        **view, css=Markup(style), scripts=[Markup(script) for script in inline], policy=policy(inline, [style]),
        embedded={name: to_script(value) for name, value in embedded.items()}, library=versions() if charted else "",
    )  # fmt: skip
