"""Training data and model of the demo: stories from a grammar, a vocabulary, a small llama in PyTorch."""
