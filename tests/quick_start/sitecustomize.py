"""Every Python process of the tests runs this as it starts: tests/conftest.py adds this folder to PYTHONPATH.

Importing torch_xla makes a million objects that stay. By default Python looks through them for garbage again and again,
which takes a quarter of the import's time.
"""
import gc

gc.set_threshold(50_000, 10, 10)
