"""Embeddings, reranking and classification: pooling of hidden states, and heads on the host."""
