"""Pictures as SVG, drawn in placeholder colours, which a page replaces with its own for light and dark."""

from __future__ import annotations

import io
import math
import re
import statistics
import textwrap
from typing import TYPE_CHECKING, Any

from embedctl_bench.report.report import Plot
from embedctl_config.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

#: Placeholder colour → (its name on a page, its colour in a file).
_INK, _GRID, _PAPER = "#010203", "#020304", "#fdfcfb"
_SERIES = ("#0b62c4", "#c2410c", "#15803d", "#8b2fd6", "#b4173b", "#0e7490", "#946200", "#5b6470")
_ON_PAGE = {
    _INK: "var(--ink)",
    _GRID: "var(--grid)",
    _PAPER: "var(--paper)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, start=1)},
}
_IN_FILE = {_INK: "#24292f", _GRID: "#d0d7de", _PAPER: "#ffffff"}
_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", ":", "-.")
#: Inches: as wide as text stays readable when it is scaled down to a phone.
_WIDTH, _LINE_HEIGHT, _ROW_HEIGHT, _GROUP_GAP = 5.6, 3.6, 0.24, 0.16
_TITLE_CHARACTERS, _LEGEND_CHARACTERS = 52, 64
#: matplotlib's names of options; mypy would want a literal type of them.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.facecolor": "none",
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar is a dollar
}


def draw(plot: Plot) -> str:
    """The picture, in colours that :func:`inline` and :func:`standalone` replace.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtra("bench", "a report") from error
    # The salt makes the same picture of the same figures.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": plot.name}):
        figure = Figure(figsize=(_WIDTH, _height(plot)), layout="constrained", facecolor=_PAPER)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        # The title is the figure's: the axes begin only where the names of bars end.
        title = textwrap.fill(plot.title, _TITLE_CHARACTERS)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        if plot.kind == "bars":
            _bars(axes, plot)
        else:
            _lines(axes, plot)
        if len(plot.series) > 1:
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower left", ncols=_legend_columns(plot))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", facecolor=_PAPER, metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def standalone(picture: str) -> str:
    """The picture as a file, on white."""
    return _recoloured(picture, _IN_FILE)


def inline(picture: str, name: str, title: str) -> str:
    """The picture as a part of a page: with the page's colours, ids that begin with the name, and a title for readers.

    Args:
        title: plain text that may stand in an attribute and in markup, escaped.
    """
    svg = picture[picture.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height|xmlns(:\w+)?|version)="[^"]*"', "", head)
    head = f'{head} role="img" aria-label="{title}">'
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    return _recoloured(head + rest.replace("xlink:href", "href"), _ON_PAGE)


def _recoloured(picture: str, colours: dict[str, str]) -> str:
    for drawn, wanted in colours.items():
        picture = picture.replace(drawn, wanted)
    return picture


def _height(plot: Plot) -> float:
    legend = 0.22 * math.ceil(len(plot.series) / _legend_columns(plot)) if len(plot.series) > 1 else 0.0
    if plot.kind == "line":
        return _LINE_HEIGHT + legend
    bars = sum(1 for series in plot.series for value in series.y if not math.isnan(value))
    return 0.9 + legend + bars * _ROW_HEIGHT + len(plot.ticks) * _GROUP_GAP


def _legend_columns(plot: Plot) -> int:
    """The number of entries that fit side by side; a key takes the room of six characters."""
    longest = max(len(series.label) for series in plot.series)
    return max(1, min(len(plot.series), _LEGEND_CHARACTERS // (6 + longest)))


def _lines(axes: Axes, plot: Plot) -> None:
    """A line for each series, with a band from the least to the largest of its rounds."""
    for number, series in enumerate(plot.series):
        colour = _SERIES[number % len(_SERIES)]
        axes.plot(
            series.x,
            series.y,
            label=series.label,
            color=colour,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            linestyle=_DASHES[number // len(_SERIES) % len(_DASHES)],
            linewidth=1.8,
        )
        if series.low and series.high:
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, linewidth=0)
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
    if plot.log_x:
        axes.set_xscale("log", base=2)
    values = sorted({x for series in plot.series for x in series.x})
    if plot.ticks or len(values) <= 10:
        axes.set_xticks(values, plot.ticks or [f"{value:,g}" for value in values])
        axes.set_xticks([], minor=True)
    logarithmic = plot.log_y and _spans_a_decade(plot)
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    _number(axes.yaxis, log=logarithmic)


def _spans_a_decade(plot: Plot) -> bool:
    """Whether a logarithmic axis would have more than one number to read."""
    values = [y for series in plot.series for y in series.y if y > 0]
    return bool(values) and max(values) >= 10 * min(values)


def _bars(axes: Axes, plot: Plot) -> None:
    """Horizontal bars, so that long names fit, each with its value; a missing value leaves no gap."""
    places = _places(plot)
    for number, series in enumerate(plot.series):
        drawn = [(places[number, group], i) for i, group in enumerate(series.x) if (number, group) in places]
        at, values = [place for place, _ in drawn], [series.y[i] for _, i in drawn]
        ends = values
        if series.low and series.high:
            lows, ends = ([each[i] for _, i in drawn] for each in (series.low, series.high))
            errors = [
                [b - a for a, b in zip(lows, values, strict=True)],
                [b - a for a, b in zip(values, ends, strict=True)],
            ]
            axes.errorbar(values, at, xerr=errors, fmt="none", ecolor=_INK, elinewidth=1, capsize=2, zorder=3)
        axes.barh(at, values, height=0.84, color=_SERIES[number % len(_SERIES)], label=series.label)
        for place, value, end in zip(at, values, ends, strict=True):
            axes.annotate(_short(value), (end, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    middles = [
        statistics.mean([place for (_, of), place in places.items() if of == group]) for group in _groups(places)
    ]
    axes.set_yticks(middles, [plot.ticks[int(group)] for group in _groups(places)])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel=plot.y_label, ylabel=plot.x_label)
    if plot.log_y:
        axes.set_xscale("log")
    axes.margins(x=0.12, y=0.4 / max(1, len(places)))
    _number(axes.xaxis, log=plot.log_y)


def _places(plot: Plot) -> dict[tuple[int, float], float]:
    """The place of each series' bar in each group, from the top down (bars); a bar without a value has none."""
    found: dict[tuple[int, float], float] = {}
    at = 0.0
    for group in range(len(plot.ticks)):
        before = len(found)
        for number, series in enumerate(plot.series):
            if any(x == group and not math.isnan(y) for x, y in zip(series.x, series.y, strict=True)):
                found[number, float(group)] = at
                at += 1
        at += _GROUP_GAP / _ROW_HEIGHT if len(found) > before else 0
    return found


def _groups(places: dict[tuple[int, float], float]) -> list[float]:
    return sorted({group for _, group in places})


def _number(axis: Axis, *, log: bool) -> None:
    """Numbers as people write them, at 1, 2 and 5 of each decade of a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if log:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
