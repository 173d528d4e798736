"""The collectives' programs."""
import re
from types import SimpleNamespace

import torch
import torch_xla

from nanochat.device.collectives import reduce_scatter_sum


def test_nothing_is_added_to_what_a_reduce_scatter_sums():
    """torch_xla would add its token, an argument of the program."""
    device = torch_xla.device()
    tensor = torch.ones(8, 3, 5).to(device)
    part = reduce_scatter_sum(tensor, SimpleNamespace(world_size=4, device=device))
    assert part.shape == (2, 3, 5)
    program = torch_xla._XLAC._get_xla_tensors_hlo([part])
    assert re.search(r"ENTRY \S+ \((.*)\) ->", program)[1] == "p0.1: f32[8,3,5]"
    assert "reduce-scatter(" in program
