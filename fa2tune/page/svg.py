"""Small drawings as SVG text: scales, a panel with axes, and marks. Colours are classes of the page's style sheet, so that a
drawing follows light and dark; whatever text comes in is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Point = tuple[float, float]
Scale = Callable[[float], float]


def number(value: float) -> str:
    """A coordinate: a tenth of a unit is finer than any screen."""
    text = f"{value:.1f}"
    return text.removesuffix(".0")


def attributes(**values: object) -> str:
    """`` name="value"`` for each that is not None or ""; ``class_`` and the like lose their underscore, others turn into
    hyphens."""
    parts = []
    for name, value in values.items():
        if value is None or value == "":
            continue
        shown = number(value) if isinstance(value, float) else value
        parts.append(f' {name.rstrip("_").replace("_", "-")}="{escape(str(shown))}"')
    return "".join(parts)


@dataclass(frozen=True)
class _Scale:
    """From values ``low`` to ``high`` to places ``start`` to ``end``."""

    low: float
    high: float
    start: float = 0.0
    end: float = 1.0

    def share(self, value: float) -> float:
        """How far along the scale a value lies: 0 at ``low``, 1 at ``high``."""
        raise NotImplementedError

    def __call__(self, value: float) -> float:
        return self.start + self.share(value) * (self.end - self.start)


class Linear(_Scale):
    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values, ``about`` so many."""
        raw = (self.high - self.low) / about
        size = 10.0 ** math.floor(math.log10(raw))
        step = size * next(m for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(n * step, 10) for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


class Log(_Scale):
    def share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self, steps: Sequence[float] = (1, 2, 5)) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = [step * 10.0**decade for decade in decades for step in steps]
        return [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]


@dataclass(frozen=True)
class Band:
    """Places for words or lengths, evenly apart."""

    values: Sequence[object]
    start: float = 0.0
    end: float = 1.0

    @property
    def step(self) -> float:
        return (self.end - self.start) / max(1, len(self.values))

    def at(self, value: object, shift: float = 0.0) -> float:
        """Middle of its place; ``shift`` in places, from -0.5 to 0.5."""
        return self.start + (self.values.index(value) + 0.5 + shift) * self.step


class Panel:
    """One chart. Marks take coordinates of the drawing; ``tip`` is shown when pointed at, ``tokens`` are what filters know a
    mark by."""

    def __init__(
        self, width: int, height: int, title: str = "", label: str = "", left: int = 42, right: int = 10, top: int = 26,
        bottom: int = 34,
    ) -> None:  # fmt: skip
        self.width, self.height = width, height
        self.left, self.right, self.top, self.bottom = left, width - right, top, height - bottom
        self.title, self.label = title, label or title
        self._parts: list[str] = []

    # ---- marks

    def add(self, text: str) -> None:
        self._parts.append(text)

    def line(self, points: Iterable[Point], class_: str = "", tip: str = "", tokens: str = "") -> None:
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.add(f"<polyline{attributes(points=path, class_=f'line {class_}'.strip(), data_t=tip, data_f=tokens)}/>")

    def rule(self, x1: float, y1: float, x2: float, y2: float, class_: str = "rule") -> None:
        self.add(f"<line{attributes(x1=number(x1), y1=number(y1), x2=number(x2), y2=number(y2), class_=class_)}/>")

    def dot(self, x: float, y: float, class_: str = "", tip: str = "", tokens: str = "", shape: str = "circle",
            size: float = 3.5) -> None:  # fmt: skip
        common = attributes(class_=f"dot {class_}".strip(), data_t=tip, data_f=tokens)
        if shape == "circle":
            self.add(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(size)}"{common}/>')
            return
        corners = {
            "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
            "diamond": ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
            "triangle": ((0, -1.2), (1.15, 0.85), (-1.15, 0.85)),
        }[shape]
        path = " ".join(f"{number(x + size * dx)},{number(y + size * dy)}" for dx, dy in corners)
        self.add(f'<polygon points="{path}"{common}/>')

    def bar(
        self, x: float, y: float, width: float, height: float, class_: str = "", tip: str = "", tokens: str = ""
    ) -> None:
        self.add(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(max(0.0, width))}" height="{number(max(0.0, height))}"'
            f"{attributes(class_=f'bar {class_}'.strip(), data_t=tip, data_f=tokens)}/>"
        )

    def text(self, x: float, y: float, text: str, anchor: str = "", class_: str = "") -> None:
        place = {"middle": "m", "end": "e"}.get(anchor, "")
        classes = " ".join(filter(None, (place, class_)))
        self.add(f'<text x="{number(x)}" y="{number(y)}"{attributes(class_=classes)}>{escape(text)}</text>')

    # ---- axes

    def axis_y(self, scale: Scale, ticks: Iterable[float], show: Callable[[float], str], label: str = "") -> None:
        """Faint lines across with figures at the left; ``label`` above them."""
        for tick in ticks:
            y = scale(tick)
            self.rule(self.left, y, self.right, y, "grid")
            self.text(self.left - 5, y + 3.5, show(tick), "end", "tick")
        if label:
            self.text(2, self.top - 10, label, "", "axis")

    def axis_x(self, places: Iterable[tuple[float, str]], label: str = "", grid: bool = False) -> None:
        for x, shown in places:
            if grid:
                self.rule(x, self.top, x, self.bottom, "grid")
            self.text(x, self.bottom + 13, shown, "middle", "tick")
        if label:
            self.text((self.left + self.right) / 2, self.bottom + 27, label, "middle", "axis")

    def render(self) -> Markup:
        title = f'<text x="{self.left}" y="13" class="title">{escape(self.title)}</text>' if self.title else ""
        shape = attributes(viewBox=f"0 0 {self.width} {self.height}", width=self.width, role="img", aria_label=self.label,
                           style=f"max-width:{self.width * 5 // 4}px")  # fmt: skip
        return Markup(f'<svg class="chart"{shape}>{title}{"".join(self._parts)}</svg>')  # escaped above


def legend(entries: Mapping[str, str], shapes: Mapping[str, str] | None = None) -> Markup:
    """Names with their marks: name -> class; ``shapes``: name -> shape, where it is no dot."""
    shown = []
    for name, class_ in entries.items():
        key = Panel(14, 12, label=name)
        if class_.startswith("line "):
            key.line([(0, 6), (14, 6)], class_.removeprefix("line "))
        else:
            key.dot(7, 6, class_, shape=(shapes or {}).get(name, "circle"), size=4)
        shown.append(f'<span class="key">{key.render()}{escape(name)}</span>')
    return Markup(f'<p class="legend">{"".join(shown)}</p>')  # escaped above
