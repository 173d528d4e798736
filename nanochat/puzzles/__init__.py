"""The second task of the trainer: a tiny recursive model learns to solve Sudokus.
scripts/puzzle_train.py runs it."""
