"""Reports: comparison, plan and scores as a page, as views in notebooks, and as pictures."""

from critical_neurons.reports.content_assembly import assemble
from critical_neurons.reports.render import render_page

__all__ = ["assemble", "render_page"]
