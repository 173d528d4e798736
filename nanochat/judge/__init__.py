"""Does the C++ work that a model writes? A sandbox with g++, problems with tests, the evaluation of a checkpoint, and a
search that asks the compiler. scripts/code_eval.py and scripts/solve.py run it."""
