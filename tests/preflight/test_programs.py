"""A change of the code leaves the programs of a training run as they are, unless it says so (program_texts.py)."""
import importlib.util
import re
from collections import Counter

import pytest

from tests.preflight.program_texts import RUNS, read_kept, trace

pytestmark = pytest.mark.skipif(not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax")),
                                reason="needs libtpu and jax: pip install '.[tpu]'")


def counted(text):
    """Returns how often each instruction is in a text, without the numbers of instructions."""
    return Counter(re.sub(r"%\w+", "%", line).strip() for line in text.splitlines())


def first_lines(counts):
    return "\n".join(f"{count} x {line[:300]}" for line, count in list(counts.items())[:20])


@pytest.mark.slow
@pytest.mark.parametrize("accelerator, products", RUNS)
def test_the_programs_at_depth_16_are_the_kept_ones_instruction_for_instruction(tmp_path, accelerator, products):
    path = tmp_path / "programs.txt"
    trace(accelerator, products, path)
    now, kept = path.read_text(), read_kept(accelerator, products)
    if now != kept:
        gone, new = counted(kept) - counted(now), counted(now) - counted(kept)
        pytest.fail(f"kept alone:\n{first_lines(gone)}\nnow alone:\n{first_lines(new)}\n(if neither has any, the order "
                    "or the operands differ) On purpose? python3 -m tests.preflight.program_texts", pytrace=False)
