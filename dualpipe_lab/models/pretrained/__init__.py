"""Weights from elsewhere: models by their Hugging Face names, read and written in slices."""
