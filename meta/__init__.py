"""Run a model on N devices as on one device. This layer knows no architectures, token ids or file formats."""
