"""Scripts that measured the figures in docs: `python -m vkbackend.tools.studies.NAME`, from a checkout."""
