"""Scripts behind the figures in docs: `python -m vkbackend.tools.studies.NAME`."""
