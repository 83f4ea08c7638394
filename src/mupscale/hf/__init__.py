"""Hugging Face checkpoints: upscale one on disk, verify it, and train it on with the right parameter groups."""
