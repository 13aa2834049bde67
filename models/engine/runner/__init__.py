"""The runner: it loads a model on the devices, runs steps, and saves and restores states."""
