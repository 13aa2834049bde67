"""meta: makes N devices behave like one. It knows no architectures, token ids or file formats."""
