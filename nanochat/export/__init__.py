"""A checkpoint becomes a folder that transformers can load, with a model card. scripts/export.py runs it."""
