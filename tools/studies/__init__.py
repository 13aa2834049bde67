"""Scripts that measured the figures in docs/: `python -m vkbackend.tools.studies.NAME` in a checkout."""
