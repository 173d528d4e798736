import io
import json
import os
import re
import sys
from dataclasses import asdict

import pytest
import torch

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput
from nanochat.data.hub_tokenizer import HubTokenizer
from nanochat.data.tokenizer import Tokenizer, load_tokenizer
from nanochat.device.ranks import Dist, compute_init
from nanochat.infer.engine import Engine
from nanochat.infer.load import load_model
from nanochat.infer.sample import Sample, Sampling, choose_token, ignore
from nanochat.kernels.choose import get_kernels
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from scripts.generate import main
from tests.checkpoint.states import make_meta
from tests.data.hub import qwen

BYTES = Tokenizer({bytes([byte]): byte for byte in range(256)}, r"(?s).", {"<|bos|>": 256, "<|pad|>": 257})
CONTEXT = 96
PROMPT = "int main(int argc, char** argv) {"


def make_model(device_type="cpu", device="cpu", vocab_size=BYTES.n_vocab):
    """A model that learned nothing but is far from uniform, with windows and grouped queries."""
    config = GPTConfig(vocab_size=vocab_size, max_seq_len=CONTEXT, n_layer=2, n_embd=64, n_head=4, n_kv_head=2,
                       window_pattern="SL", short_window=48)
    model = GPT(config, get_kernels("current", device_type)).init_weights(seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for matrix in (model.attn_o, model.mlp_out, model.lm_head):
            matrix.normal_(0.0, 0.3, generator=generator)
    return model.to(device)


def save_model(run_dir, model, tokenizer, step=1, **fields):
    """Saves a checkpoint of a model for a tokenizer, with these fields of its Meta, and returns its path."""
    meta = make_meta(step, config=asdict(model.config), tokenizer_sha256=tokenizer.sha256, **fields)
    return save_checkpoint(run_dir, model.state_dict(), {}, meta, num_lanes=0)


@pytest.fixture(scope="module")
def cpu_engine():
    return Engine(make_model(), BYTES, Dist("cpu", torch.device("cpu")))


@pytest.fixture(scope="module")
def xla_engine():
    dist = compute_init("xla")
    return Engine(make_model("xla", dist.device), BYTES, dist)


@pytest.fixture(params=["cpu", "xla"])
def engine(request):
    return request.getfixturevalue(f"{request.param}_engine")


@torch.no_grad()
def complete_without_cache(model, prompt, max_tokens, temperature, seed):
    """The whole text through the eager model again for every token. Tokens, not text: no byte may hide."""
    ids, generator = [BYTES.bos_id] + BYTES.encode(prompt), torch.Generator().manual_seed(seed)
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids]))[0, -1]
        ids.append(choose_token(logits, generator, temperature, top_k=50, top_p=0.95))
    return ids[-max_tokens:]


def note_tokens(monkeypatch):
    """Returns {Sample: ids that were drawn for it}, of all Samples from now on."""
    drawn, add = {}, Sample.add

    def add_and_note(self, token):
        if not self.ended:
            drawn.setdefault(self, []).append(token)
        add(self, token)

    monkeypatch.setattr(Sample, "add", add_and_note)
    return drawn


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_with_the_cache_every_token_is_the_one_drawn_without_it(engine, temperature, monkeypatch):
    model, drawn = make_model(), note_tokens(monkeypatch)
    for prompt, count in ((PROMPT, 50), (PROMPT[:9], 9)):  # the second is shorter than what is in the cache
        sampling = Sampling(num_samples=2, max_tokens=count, temperature=temperature, top_p=0.95, seed=5)
        for i, sample in enumerate(engine.completions(prompt, sampling)):
            found, expected = drawn[sample], complete_without_cache(model, prompt, count, temperature, seed=5 + i)
            assert found == expected[:len(found)] and (len(found) == count or sample.reason == "end")
            assert temperature == 0 or len(set(found)) > len(found) / 3


def test_xla_compiles_a_program_for_the_cache_the_prompt_and_a_token_and_no_more(xla_engine):
    import torch_xla.debug.metrics as met

    def compilations():
        return (met.metric_data("CompileTime") or [0])[0]

    met.clear_counters()  # of other tests in this process
    before = compilations()
    xla_engine.completions(PROMPT, Sampling(num_samples=4, max_tokens=20))  # 4: no other test has these shapes
    assert compilations() - before == 3
    xla_engine.completions("another prompt, shorter", Sampling(num_samples=4, max_tokens=10, temperature=0, seed=9))
    assert compilations() - before == 3
    assert not met.executed_fallback_ops()


def test_a_prompt_longer_than_the_model_sees_is_read_from_its_end(cpu_engine):
    long, same_end = "x" * 500 + "y" * 100, "z" * 300 + "y" * 100
    assert cpu_engine.complete(long, max_tokens=20) == cpu_engine.complete(same_end, max_tokens=20)
    assert len(cpu_engine.complete(long, max_tokens=CONTEXT - 1).encode()) > 0
    cut = []
    for prompt in (long, PROMPT):
        cpu_engine.completions(prompt, Sampling(max_tokens=20), on_cut=lambda *counts: cut.append(counts))
    assert cut == [(1 + len(long), CONTEXT - 20)]


def test_the_tokens_that_are_counted_are_those_that_were_drawn(cpu_engine):
    """One byte is one token here, and bytes that are no UTF-8 become another character, of three bytes."""
    [sample] = cpu_engine.completions(PROMPT, Sampling(num_samples=1, max_tokens=30, temperature=5.0))
    assert sample.num_tokens == 30 != len(BYTES.encode(sample.text))


def test_an_empty_prompt_begins_a_document(cpu_engine):
    assert cpu_engine.complete("", max_tokens=10) == cpu_engine.complete(b"", max_tokens=10) != ""


def test_a_completion_as_long_as_the_context_is_refused(cpu_engine):
    with pytest.raises(BadInput, match=f"--max_tokens={CONTEXT} leaves no room for a prompt"):
        cpu_engine.complete(PROMPT, max_tokens=CONTEXT)


# Drawing tokens


SEVENTHS = [0, 4 / 7, 0, 3 / 7]


@pytest.mark.parametrize("options, shares", [
    ({}, [0.1, 0.4, 0.2, 0.3]), ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
    *(({"temperature": temperature}, [0, 1, 0, 0]) for temperature in (0, 1e-320, 1e-9)),
    ({"top_k": 2}, SEVENTHS), ({"top_k": 1}, [0, 1, 0, 0]), ({"top_k": 100}, [0.1, 0.4, 0.2, 0.3]),
    ({"top_p": 0.6}, SEVENTHS), ({"top_p": 0.01}, [0, 1, 0, 0])])
def test_tokens_are_drawn_with_the_probabilities_of_the_model_and_the_options(options, shares):
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    drawn = [choose_token(logits, generator, **options) for _ in range(2000)]
    found = [drawn.count(token) / 2000 for token in range(4)]
    assert found == pytest.approx(shares, abs=0.04)
    assert [share > 0 for share in found] == [share > 0 for share in shares]


# The text of a sample


@pytest.mark.parametrize("written, stop, text, pieces", [
    ("a²b", [], "a²b", ["a", "²", "b"]),  # characters in one piece
    ("return 0;\n}\nint main", ["\n}\n", "int"], "return 0;", [*"return 0;"]),
    ("a\n}b\n", ["\n}\n"], "a\n}b\n", ["a", "\n}b", "\n"])])  # what only begins like a stop string
def test_text_is_shown_as_it_comes_and_nothing_of_a_stop_string(written, stop, text, pieces):
    shown = []
    sample = Sample(BYTES, stop, 1000, shown.append)
    for token in written.encode():
        sample.add(token)
    sample.end("length")
    assert (sample.text, shown) == (text, pieces)


@pytest.mark.parametrize("text", ["// 这是中文", "// 😀 🚀", "// ошибка", "// שלום"])
@pytest.mark.parametrize("stop", [[], ["x", "\n}\n"]])
def test_no_end_leaves_half_a_character(text, stop):
    """A limit of tokens, the caller, or the model itself ends the text, anywhere."""
    data = text.encode()
    for number in range(1, len(data) + 1):
        expected = data[:number].decode(errors="ignore")
        for reason, limit in (("length", number), ("stopped", 1000), ("end", 1000)):
            pieces = []
            sample = Sample(BYTES, stop, limit, pieces.append)
            for byte in data[:number]:
                sample.add(byte)
            sample.end(reason)
            assert (sample.text, "".join(pieces), sample.reason) == (expected, expected, reason)


def test_ids_that_no_token_has_are_never_drawn_and_each_control_token_ends():
    theirs, config = qwen()
    theirs.add_special_tokens([f"<|extra_{i}|>" for i in range(3)])
    found = json.loads(theirs.to_str())
    found["model"]["vocab"]["far"] = theirs.get_vocab_size() + 40
    tokenizer = HubTokenizer({"tokenizer.json": json.dumps(found).encode(),
                              "tokenizer_config.json": json.dumps(config).encode()})
    assert len(tokenizer.holes) == 40
    engine = Engine(make_model(vocab_size=tokenizer.n_vocab + 7), tokenizer, Dist("cpu", torch.device("cpu")))
    logits = torch.zeros(tokenizer.n_vocab + 7)
    logits[tokenizer.holes] = logits[tokenizer.n_vocab:] = 9.0
    sample = Sample(tokenizer, [], 1000, ignore)
    while not sample.ended:
        assert engine._draw(sample, logits, Sampling(top_k=0)) in {*tokenizer.tokens().values(), *tokenizer.ends}
    assert sample.reason == "end"
    for name in ("<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<tool_call>"):
        sample = Sample(tokenizer, [], 1000, ignore)
        sample.add(tokenizer.special(name))
        assert (sample.reason, sample.text) == ("end", "")


# scripts/generate.py


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Base directory with a checkpoint of a run called `tiny`."""
    base_dir, tokenizer = tmp_path_factory.mktemp("base"), load_tokenizer()
    save_model(base_dir / "checkpoints" / "tiny", make_model(vocab_size=tokenizer.n_vocab), tokenizer, step=20)
    return base_dir


@pytest.fixture
def generate(trained, monkeypatch, capsys):
    """Runs the script and returns what it printed to standard output and to standard error."""
    def run(*flags, stdin=b""):
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(trained))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        main([f"--prompt={PROMPT}" if flag == "--prompt" else flag for flag in flags])
        return capsys.readouterr()
    return run


def test_the_script_completes_from_a_flag_a_file_and_standard_input_alike(generate, tmp_path):
    (tmp_path / "half.cpp").write_text(PROMPT)
    common = ("--device_type=cpu", "--max_tokens=12", "--seed=3")
    outputs = [generate(*common, "--checkpoint=tiny", "--prompt"),
               generate(*common, f"--prompt-file={tmp_path / 'half.cpp'}"),
               generate(*common, stdin=PROMPT.encode())]
    assert len({output.out for output in outputs}) == 1 and len(outputs[0].out) > 12
    assert "step_000020: step 20" in outputs[0].err and "\n12 tokens in " in outputs[0].err


def test_a_prompt_that_is_not_utf_8_is_the_same_from_a_flag_and_from_standard_input(generate):
    prompt = b"// caf\xe9 \xff" + 100 * b"x y "
    by_flag = generate("--device_type=cpu", "--max_tokens=12", "--echo", f"--prompt={os.fsdecode(prompt)}")
    by_stdin = generate("--device_type=cpu", "--max_tokens=12", "--echo", stdin=prompt)
    assert by_flag.out == by_stdin.out and "caf\N{REPLACEMENT CHARACTER} " in by_flag.out
    assert re.search(r"the prompt has \d+ tokens: only the last 84 are read", by_flag.err)


def test_with_no_heal_the_script_writes_the_likeliest_tokens_after_the_prompts_own(generate, trained):
    """As other programs do with an export. Otherwise it replaces the end of this prompt."""
    model, tokenizer, _ = load_model(trained / "checkpoints/tiny/step_000020", Dist("cpu", torch.device("cpu")))
    ids = [tokenizer.bos_id, *tokenizer.encode("int retu")]
    num_given = len(ids)
    for _ in range(8):
        ids.append(int(model(torch.tensor([ids]))[0, -1, :tokenizer.n_vocab].argmax()))
    flags = "--device_type=cpu", "--prompt=int retu", "--temperature=0", "--max_tokens=8"
    expected = tokenizer.decode_bytes(ids[num_given:]).decode(errors="replace") + "\n"
    assert generate(*flags, "--no_heal").out == expected != generate(*flags).out


def test_the_script_prints_several_samples_through_xla(generate):
    output = generate("--device_type=xla", "--prompt", "--num_samples=2", "--max_tokens=4", "--echo").out
    assert output.count(PROMPT) == output.count("--- sample") == 2


@pytest.mark.parametrize("flags, message", [
    (["--checkpoint=missing"], "no checkpoint at missing"),
    (["--prompt_file=missing.cpp"], "missing.cpp cannot be read"),
    (["--prompt", "--prompt_file=half.cpp"], "both given"),
    (["--prompt", "--top_p=7"], "--top_p=7 is not a number above 0"),
])
def test_the_script_refuses_bad_input(generate, flags, message):
    with pytest.raises(BadInput, match=message):
        generate("--device_type=cpu", *flags)


def test_another_tokenizer_is_refused(tmp_path):
    path = save_model(tmp_path, make_model(vocab_size=65536), BYTES)
    with pytest.raises(BadInput, match="is not the checkpoint's"):
        load_model(path, Dist("cpu", torch.device("cpu")))


def test_a_damaged_checkpoint_is_not_used(trained, tmp_path):
    path = save_model(tmp_path, make_model(), BYTES)
    with open(path / on_disk.MODEL, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(BadInput, match="damaged .model.safetensors does not match its checksum"):
        load_model(path, Dist("cpu", torch.device("cpu")))
