"""The second task of the trainer: a tiny recursive model learns to solve Sudokus, mazes and the tasks of ARC-AGI.
scripts/puzzle_train.py runs it."""
