"""Parts that architectures share: linear, embedding, attention sub-layer."""
