"""The metadata that depends on the project's address: its URLs, and absolute links in the README.

The address is ``tool.fa2tune.address`` in pyproject.toml and empty until the project is published. While it is empty the
package names no URL and the README keeps its relative links. An address is that of a repository whose host serves
``/blob/TAG/path`` and ``/raw/TAG/path``, as GitHub does.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
IMAGES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")
#: where a link's target stands: [text](target), [name]: target, <img src="target">, <source srcset="target">, <a href="target">
TARGET = re.compile(
    r"""(?P<before> \]\(\s*<? | ^\ {0,3}\[[^\]\n]+\]:\s+<? | \b(?:src|srcset|href)\s*=\s*["'] )(?P<target>[^\s<>()"']+)""",
    re.MULTILINE | re.VERBOSE,
)
CODE = re.compile(r"^(```+|~~~+).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def urls(address: str, version: str) -> dict[str, str]:
    if not address:
        return {}
    return {
        "Homepage": address,
        "Source": address,
        "Issues": f"{address}/issues",
        "Documentation": f"{address}/tree/v{version}/docs",
        "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
    }


def absolute(markdown: str, address: str, version: str) -> str:
    """``markdown`` with every relative link made absolute, outside code; the text as it is without an address."""
    if not address:
        return markdown

    def rewrite(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:|//|#", target):
            return match[0]
        kind = "raw" if target.partition("#")[0].lower().endswith(IMAGES) else "blob"
        return f"{match['before']}{address}/{kind}/v{version}/{target.removeprefix('./').removeprefix('/')}"

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [TARGET.sub(rewrite, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, TARGET.sub(rewrite, markdown[end:])])


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "fa2tune" / "__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def main() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    address = tool["fa2tune"]["address"].rstrip("/")
    setup(
        long_description=absolute((ROOT / "README.md").read_text("utf-8"), address, version()),
        long_description_content_type="text/markdown",
        project_urls=urls(address, version()),
    )


main()
