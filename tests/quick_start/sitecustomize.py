"""Every Python process of the tests runs this as it starts: tests/conftest.py adds this folder to PYTHONPATH.

Importing torch_xla makes a million objects that stay. By default Python looks through them for garbage again and again,
and twice more at its end: that takes 40% of what a process that only imports torch_xla computes.
"""
import atexit
import gc

gc.set_threshold(50_000, 10, 10)
atexit.register(gc.freeze)  # what is frozen is not looked through
