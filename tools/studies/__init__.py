"""Scripts that measured the figures in docs/. They run from a checkout with `python -m
vkbackend.tools.studies.NAME`."""
