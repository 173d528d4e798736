"""Makes pages and cards of templates."""
from jinja2 import Environment, FileSystemLoader, StrictUndefined


def fill(template, **values):
    """Returns the text of a Jinja template (a Path) with these values, which are escaped in HTML and SVG."""
    environment = Environment(loader=FileSystemLoader(template.parent), autoescape=template.suffix in (".html", ".svg"),
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                              keep_trailing_newline=True)
    return environment.get_template(template.name).render(values)
