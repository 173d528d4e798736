"""A trained model whose weights the chips of one machine divide."""
import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext

import pytest
import torch
import torch_xla

from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.mesh import Mesh
from nanochat.device.ranks import Dist
from nanochat.device.xla_ops import wait_for
from nanochat.infer import on_mesh
from scripts import base_eval, generate
from tests.conftest import run_python
from tests.infer.test_engine import CONTEXT, make_model, save_model

MESH = ["--mesh_fsdp=2", "--mesh_tensor=2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, byte_tokenizer_dir):
    """Flags that name a checkpoint with its tokenizer."""
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    model = make_model(vocab_size=tokenizer.n_vocab)  # which 4 chips do not divide
    path = save_model(tmp_path_factory.mktemp("saved"), model, tokenizer)
    return [f"--checkpoint={path}", f"--tokenizer_dir={byte_tokenizer_dir}"]


def run_on_mesh(script, *flags, **env):
    done = run_python("-m", f"scripts.{script}", "--device_type=xla", *flags, *MESH, devices=4, **env)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_mesh_finds_the_bits_per_byte_of_one_device(saved, corpus_dir, capsys):
    flags = [*saved, f"--data_dir={corpus_dir}/val", "--eval_tokens=4000", "--kernel=chunked"]
    base_eval.main([*flags, "--device_type=cpu"])
    one, num_bytes = re.search(r"([\d.]+) bits per byte over ([\d,]+) bytes", capsys.readouterr().out).groups()
    found = run_on_mesh("base_eval", *flags)
    assert found.count("\n") == 1 and f" {one} bits per byte over {num_bytes} bytes" in found


@pytest.mark.slow
@pytest.mark.parametrize("shell, status, said", [
    ("generate --prompt=int --max_tokens=3 > /dev/full", 1, "error: the disk is full"),
    ("generate --prompt=int --max_tokens=3 --echo | true; exit ${PIPESTATUS[0]}", 141, "")])
def test_output_that_cannot_be_written_is_as_on_one_device(shell, status, said, saved):
    script = " ".join([sys.executable, "-m", "scripts.generate", "--device_type=xla", *saved, "--mesh_fsdp=2"])
    done = subprocess.run(["bash", "-c", shell.replace("generate", script)], capture_output=True, text=True,
                          timeout=300, env={**os.environ, "CPU_NUM_DEVICES": "2"})
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    assert said in done.stderr


@pytest.mark.slow
def test_a_mesh_draws_the_tokens_of_one_device(saved, capsys):
    """Also to an output that knows ASCII alone."""
    prompt = "#include <vector> // größe"
    flags = [*saved, f"--prompt={prompt}", "--echo", f"--max_tokens={CONTEXT // 3}", "--seed=1"]
    generate.main([*flags, "--device_type=cpu"])
    text = capsys.readouterr().out
    assert len(text) > len(prompt) + CONTEXT // 8
    in_ascii = text.encode("ascii", "backslashreplace").decode()
    assert r"// gr\xf6\xdfe" in in_ascii and run_on_mesh("generate", *flags, PYTHONIOENCODING="ascii") == in_ascii


@pytest.mark.parametrize("script", [base_eval, generate])
@pytest.mark.parametrize("flags, message", [
    (["--mesh_fsdp=3", "--device_type=xla"], "--mesh_fsdp=3 --mesh_tensor=1 need 3 chips or a multiple of "
     "that, and there are 4 (device type xla): give two numbers whose product divides 4"),
    (["--mesh_fsdp=2", "--device_type=cpu"], "and there are 1 (device type cpu): leave both out"),
    (["--mesh_tensor=4", "--device_type=xla"], "4 chips along tensor do not divide the heads of keys and values "
     "(--num_kv_heads), 2: use"),
    (["--mesh_fsdp=0"], "--mesh_fsdp=0 is not a whole number of at least 1")])
def test_a_mesh_that_does_not_fit_is_refused_before_any_process_starts(script, flags, message, saved, corpus_dir,
                                                                       monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    monkeypatch.setattr("nanochat.infer.on_mesh.run_as_ranks", None)
    mine = [f"--data_dir={corpus_dir}/val", "--kernel=chunked"] if script is base_eval else ["--prompt=x"]
    with pytest.raises(BadInput, match=re.escape(message)):
        script.main([*saved, *mine, *flags])


def test_one_host_of_several_is_refused(saved, monkeypatch):
    monkeypatch.setattr("nanochat.infer.flags.count_tpu_chips", lambda *_: 4)
    monkeypatch.setattr("nanochat.device.ranks.count_tpu_chips", lambda *_: 4)
    monkeypatch.setattr("nanochat.device.tpu.detect_accelerator", lambda: "v4-32")
    with pytest.raises(BadInput, match="on the chips of one host, and this one is part of a v4-32: leave both out"):
        generate.main([*saved, "--prompt=x", "--device_type=tpu", "--mesh_fsdp=4"])


def test_a_process_that_was_killed_is_said(monkeypatch, capsys):
    def kill(*_, **__):
        raise BrokenProcessPool

    monkeypatch.setattr("nanochat.run.processes.spawn_ranks", kill)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert on_mesh.run_on_mesh(print, Mesh(fsdp=2), "xla") == 1
    assert capsys.readouterr().err == (
        "error: a process of this command was killed: has the machine too little memory?\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_only_one_rank_says_what_all_of_them_refuse(rank, monkeypatch):
    def refuse(dist):
        raise BadInput("the checkpoint is damaged")

    monkeypatch.setattr(on_mesh, "compute_init", lambda _: Dist("xla", torch.device("cpu"), rank, 2))
    with pytest.raises(BadInput) if rank == 0 else nullcontext():
        assert on_mesh._as_rank(refuse, "xla") == 2


def test_weights_are_gathered_when_a_layer_needs_them():
    """Without it the TPU compiler gathers all layers first: a token of 6.98B parameters on v5litepod-8 with
    --mesh_fsdp=8 has its peak at 14.4 GiB, and with it at 4.3."""
    device = torch_xla.device()
    x, part = torch.ones(3).to(device) * 2, torch.ones(5).to(device)
    wait_for(x, [part])
    program = torch_xla._XLAC._get_xla_tensors_hlo([part + 1])
    assert "opt-barrier(" in program and "multiply(" in program  # part waits for the product
