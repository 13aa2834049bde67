"""What the demo model is made of: stories from a grammar, a vocabulary, a small llama in PyTorch."""
