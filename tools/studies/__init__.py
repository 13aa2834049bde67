"""Scripts that measured the figures in docs/. `python -m vkbackend.tools.studies.NAME` runs a script from a
checkout."""
