"""The collectives' programs."""
import re
from types import SimpleNamespace

import torch
import torch_xla

from nanochat.device.collectives import all_gather, all_reduce_sum, reduce_scatter_sum


def test_nothing_is_added_to_what_a_reduce_scatter_sums():
    """torch_xla would add its token, an argument of the program."""
    device = torch_xla.device()
    tensor = torch.ones(8, 3, 5).to(device)
    part = reduce_scatter_sum(tensor, SimpleNamespace(world_size=4, device=device))
    assert part.shape == (2, 3, 5)
    program = torch_xla._XLAC._get_xla_tensors_hlo([part])
    assert re.search(r"ENTRY \S+ \((.*)\) ->", program)[1] == "p0.1: f32[8,3,5]"
    assert "reduce-scatter(" in program


def test_collectives_are_the_same_program_in_every_step(monkeypatch):
    monkeypatch.setattr("torch_xla.runtime.world_size", lambda: 4)  # torch_xla leaves all-reduces of one rank out
    device, programs = torch_xla.device(), []
    dist = SimpleNamespace(world_size=4, device=device, is_xla=True)
    for _ in range(3):
        torch_xla._XLAC._set_all_reduce_token(str(device), None)  # as at the end of a step
        total, tensor = torch.ones(3).to(device), torch.ones(8, 3, 7).to(device)
        all_reduce_sum([total], dist)
        gathered = all_gather(reduce_scatter_sum(tensor, dist), dist)
        programs.append(torch_xla._XLAC._get_xla_tensors_hlo([total, gathered]))
    torch_xla._XLAC._set_all_reduce_token(str(device), None)
    assert "all-reduce(" in programs[0] and programs[0] == programs[1] == programs[2]
