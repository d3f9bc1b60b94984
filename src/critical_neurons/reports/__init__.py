"""Report: comparison, plan and scores to a page, to what notebooks show, and to pictures."""

from critical_neurons.reports.content_assembly import assemble
from critical_neurons.reports.render import render_page

__all__ = ["assemble", "render_page"]
