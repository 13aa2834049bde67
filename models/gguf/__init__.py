"""Reading GGUF files: bounded, checked before anything is loaded."""
