"""Reports: comparison, plan, scores and curve as an HTML page, as notebook views, and as figures."""

from critical_neurons.reports.content_assembly import assemble
from critical_neurons.reports.render import render_page

__all__ = ["assemble", "render_page"]
