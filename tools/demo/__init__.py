"""The demo model's training data (stories from a grammar), its vocabulary, and a small llama in PyTorch."""
