"""Run a model on N devices as on one device, independently of architectures, token ids and file formats."""
