"""A report as one page of HTML that needs no other file, no script and no network."""

from __future__ import annotations

from collections.abc import Mapping

from embedctl_bench.report import plots
from embedctl_bench.report.report import Report
from embedctl_bench.report.text import fact, is_number, marks, pieces
from embedctl_config.errors import MissingExtra

_PACKAGE = "embedctl_bench.report"


def page(report: Report, pictures: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        pictures: each plot as :func:`plots.draw` drew it, by its name.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup, escape
    except ModuleNotFoundError as error:
        raise MissingExtra("bench", "a report") from error

    def marked_up(text: str) -> Markup:
        tags = {"plain": Markup("{}"), "bold": Markup("<strong>{}</strong>"), "code": Markup("<code>{}</code>")}
        # No line break between a factor and its sign.
        return Markup().join(tags[kind].format(part) for kind, part in pieces(text.replace(" ×", "\u00a0×")))

    environment = Environment(
        loader=PackageLoader(_PACKAGE, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["number_in"] = is_number
    environment.filters |= {"marked_up": marked_up, "fact": fact, "marks": marks}
    # The picture is ours; drawing it has escaped the users' texts.
    drawn = [
        (plot, Markup(plots.inline(pictures[plot.name], f"plot-{plot.name}", str(escape(plot.title)))))  # noqa: S704
        for plot in report.plots
    ]
    return environment.get_template("page.html").render(report=report, drawn=drawn) + "\n"
