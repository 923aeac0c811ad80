"""HTML pages of plots, without scripts and without anything to fetch."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from ps_cli.console.svg import LegendEntry


@dataclass(frozen=True, slots=True)
class Plot:
    """A section of a page: an SVG image below its title and its legend."""

    title: str
    svg: str
    legend: tuple[LegendEntry, ...] = ()


def page(package: str, template: str, **values: object) -> str:
    """A page from a template that extends `page.html.j2`.

    Args:
        package: where the template is.
        template: its file.
        values: its variables; `title`, `head` and `cells` of the table, and `plots` are the page's.
    """
    loaders = [PackageLoader(each, "") for each in (package, "ps_cli.console")]
    environment = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(values)
