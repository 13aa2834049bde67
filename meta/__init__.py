"""Run a model on N devices as on one device. It knows no architectures, token ids or file formats."""
