"""Low-rank adapters (LoRA): reads their files, checks them against a model, and stacks them for devices."""
