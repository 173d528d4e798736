"""The real llama.cpp reads what the export writes: the same ids of texts, and the same greedy completions."""
import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest
import torch

from nanochat.data.tokenizer import Infill, load_tokenizer
from nanochat.kernels.choose import get_kernels
from nanochat.model.llama import LlamaConfig
from nanochat.model.llama_layer import Llama
from scripts import export, tok_train
from tests.data import hub
from tests.data.headers import HEADERS
from tests.infer.test_engine import save_model

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")

SERVE = """
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.port = sys.argv[1], 2048, 1, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.warmup = False
params.verbosity = 0  # else its log fills the pipe
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
TEXTS = [*HEADERS[:60], "1 12 123 1234 1234567 0x12345 3.14159f", "a\u0663\u0664\u0665\u0666" + "7654321",
         "\n\n \t x  y\r\n", "<|bos|> is text, as is <|file_sep|>"]


@contextmanager
def served(file, log):
    """Yields ask(path, **body) of llama.cpp's server of a file, which runs in a process of its own."""
    with open(log, "w") as errors, subprocess.Popen([sys.executable, "-c", SERVE, str(file)], stdin=subprocess.PIPE,
                                                    stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        address = process.stdout.readline().strip()
        assert address, log.read_text()[-2000:]

        def ask(path, **body):
            request = urllib.request.Request(f"{address}{path}", json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        try:
            yield ask
        finally:
            process.kill()


def folder_of_tokenizer(name, folder):
    if name == "shipped":
        tok_train.main(["--tokens_of=tokenizer", "--llama_cpp", f"--out_dir={folder}"])
    else:
        folder.mkdir()
        for file, content in hub.files_of(*getattr(hub, name)()).items():
            (folder / file).write_bytes(content)
    return folder


@pytest.mark.parametrize("name, options", [
    ("smollm2", {}), pytest.param("shipped", {"tied_head": False}, marks=pytest.mark.slow),
    pytest.param("qwen", {"qkv_bias": True, "n_head": 2, "n_kv_head": 1}, marks=pytest.mark.slow),
    pytest.param("llama3", {"qk_norm": True}, marks=pytest.mark.slow)])
def test_ids_completions_and_gaps_are_ours(tmp_path, base_dir, name, options):
    folder = folder_of_tokenizer(name, tmp_path / "tokenizer")
    tokenizer = load_tokenizer(folder)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_kv_head": 2, "head_dim": 32, "mlp_dim": 96}
    config = LlamaConfig(vocab_size=tokenizer.n_vocab, max_seq_len=512, max_positions=512, **{**sizes, **options})
    torch.manual_seed(1)
    model = Llama(config, get_kernels("current", "cpu"))
    model.init_weights()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
            weight.copy_(weight.half())
    save_model(base_dir / "checkpoints" / "small", model, tokenizer, flags={"fim_rate": 0.5})
    export.main(["--checkpoint=small", f"--tokenizer_dir={folder}", f"--out={tmp_path / 'a.gguf'}"])

    def require_greedy(ids, found):
        with torch.no_grad():
            logits = model(torch.tensor([ids + found]))[0, len(ids) - 1:-1].float()
        # Or two tokens that are as good as equal in 16 bits.
        assert found and (logits.amax(1) - logits.gather(1, torch.tensor(found)[:, None])[:, 0]).max() < 0.02

    with served(tmp_path / "a.gguf", tmp_path / "log") as ask:
        for text in TEXTS:
            found = ask("/tokenize", content=text, add_special=False, parse_special=False)["tokens"]
            assert found == tokenizer.encode(text), text[:100]
        for text in HEADERS[:10]:
            ids = [tokenizer.bos_id, *tokenizer.encode(text)[:60]]
            found = ask("/completion", prompt=ids, n_predict=16, temperature=0, return_tokens=True,
                               cache_prompt=False)["tokens"]
            require_greedy(ids, found)
        if "<|fim_middle|>" in tokenizer.special_tokens:
            gap = Infill("int add(int a, ", ") {}", "")
            [(tokens, _, _)] = tokenizer.encode_infills([gap])
            ids = tokens.tolist()[:-1]
            answer = ask("/infill", input_prefix=gap.prefix, input_suffix=gap.suffix, n_predict=4, temperature=0,
                                return_tokens=True)
            assert answer["tokens_evaluated"] == len(ids)  # and no names of files
            if not tokenizer.suffix_first:  # --spm-infill of llama-server, which xllamacpp cannot set
                require_greedy(ids, answer["tokens"])
