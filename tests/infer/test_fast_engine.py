"""What makes the engine fast changes no text: 8 bits, drafts, what is remembered from the last call. And healing."""
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from nanochat.checkpoint.on_disk import MODEL
from nanochat.common import BadInput, read_flags
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.engine import Engine, guess_next
from nanochat.infer.flags import ModelFlags
from nanochat.infer.load import load_model
from nanochat.infer.prompt import Special, Vocabulary
from nanochat.infer.quantize import Int8GPT, Int8Matrix
from nanochat.infer.readers import Reader
from nanochat.infer.sample import Sample, Sampling
from nanochat.model.config import GPTConfig
from tests.infer.test_engine import BYTES, CONTEXT, PROMPT, make_model, note_tokens, save_model
from tests.model.test_gpt import TINY, build, some_ids

CPU = Dist("cpu", torch.device("cpu"))
CODE = '''#include <vector>

/// Computes the mean of some numbers, "naïvely".
double mean(const std::vector<double>& numbers) {
    double sum = 0.0;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        sum += numbers[i];   // no Kahan
    }
    return numbers.empty() ? 0.0 : sum / static_cast<double>(numbers.size());
}
'''


@pytest.fixture(scope="module")
def shipped():
    return load_tokenizer()


@pytest.fixture(scope="module")
def int8_model():
    return Int8GPT(make_model())


@pytest.fixture
def engine(int8_model):
    return Engine(int8_model, BYTES, CPU)


# 8 bits


@pytest.mark.parametrize("is_input_positive", [False, True])
def test_products_with_8_bits_are_near_the_exact_ones(is_input_positive):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 2, 300) * 10 ** torch.randn(5, 2, 1), torch.randn(70, 300)
    x[3] = 0
    x = x.abs() if is_input_positive else x
    found = Int8Matrix(weight, is_input_positive)(x)
    expected = torch.nn.functional.linear(x, weight)
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert (found[3] == 0).all()


@pytest.mark.parametrize("options", [{}, {"layer_gates": True, "key_shift": True, "value_embeddings": "shared"}])
def test_without_rounding_it_computes_what_the_gpt_does(options, monkeypatch):
    config = GPTConfig(**{**TINY, "n_kv_head": 2, "window_pattern": "SL", "short_window": 3, **options})
    model, ids = build(config).requires_grad_(False), some_ids(config)
    monkeypatch.setattr("nanochat.infer.quantize.Int8Matrix",
                        lambda weight, is_input_positive=False: partial(F.linear, weight=weight))
    torch.testing.assert_close(Int8GPT(model)(ids), model(ids), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_position_has_the_same_logits_to_the_last_bit_whatever_is_read_with_it(int8_model, has_bf16, monkeypatch):
    """Otherwise a draft could change the text: rounding to 8 bits makes a small difference a large one."""
    if not has_bf16:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    generator = random.Random(1)
    ids = [generator.randrange(256) for _ in range(CONTEXT)]
    one_by_one = Reader(int8_model, "cpu")
    expected = torch.cat([one_by_one.read(ids[:length]) for length in range(1, CONTEXT + 1)])
    reader = Reader(int8_model, "cpu")
    for _ in range(60):
        length = generator.randint(1, CONTEXT)
        num_last = generator.randint(1, min(length, 20))
        assert torch.equal(reader.read(ids[:length], num_last), expected[length - num_last:length])
        if generator.random() < 0.3:
            reader.read([*ids[:length - 1], 7])


@pytest.mark.parametrize("has_bf16", [True, False])
def test_keys_and_values_of_16_bits_change_the_logits_by_no_more_than_8_bits_do(int8_model, has_bf16, monkeypatch):
    if not has_bf16:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    ids = torch.randint(256, (CONTEXT,), generator=torch.Generator().manual_seed(0))
    reader = Reader(int8_model, "cpu")
    assert reader.cache.keys[0].dtype == torch.bfloat16
    found, expected = reader.read(ids.tolist(), CONTEXT), int8_model(ids[None])[0]  # the latter without a cache
    assert 0 < (found - expected).norm() < 0.02 * expected.norm()


def test_the_cache_of_samples_gets_memory_for_no_more_than_the_prompt(int8_model):
    reader = Reader(int8_model, "cpu")
    reader.read(list(range(1, 31)))
    reader.prefill(list(range(1, 11)), 2, lambda: True)
    for keys in reader._samples.keys:
        assert keys[:, :, :10].any() and not keys[:, :, 10:].any()


def test_a_checkpoint_is_loaded_with_8_bits_on_the_cpu_only(tmp_path, shipped):
    model = make_model(vocab_size=shipped.n_vocab)
    with torch.no_grad():
        model.resid_scale.copy_(torch.tensor([0.7, 1.2]))
        model.x0_scale.copy_(torch.tensor([0.4, -0.3]))
    path = save_model(tmp_path, model, shipped)
    loaded, _, _ = load_model(path, CPU, quantize="int8")
    ids = torch.tensor([shipped.encode(CODE)[:CONTEXT]])
    with torch.no_grad():
        exact, found = model(ids), loaded(ids)
        bound = 0.03 if torch.cpu._is_vnni_supported() else 0.06  # without VNNI, activations have 7 bits and not 8
        assert 0 < (found - exact).norm() < bound * exact.norm()
        assert loaded(ids, ids).mean().item() == pytest.approx(model(ids, ids, "mean").item(), rel=0.01)
    with pytest.raises(BadInput, match="--quantize=int8 is for the CPU, not for xla"):
        load_model(path, Dist("xla", torch.device("cpu")), quantize="int8")
    with pytest.raises(BadInput, match="--quantize: invalid choice: 'int3'"):
        read_flags(["--quantize=int3"], "", {ModelFlags: "model"})


@pytest.mark.parametrize("options", [{}, {"layer_gates": False, "key_shift": False, "value_embeddings": "off"}])
def test_weights_are_rounded_from_the_files_to_the_bits_of_the_rounded_model(tmp_path, shipped, options):
    config = replace(make_model(vocab_size=shipped.n_vocab).config, **options)
    model = build(config)
    loaded, _, _ = load_model(save_model(tmp_path, model, shipped), CPU, quantize="int8")
    expected = Int8GPT(model)
    assert torch.equal(loaded.wte, expected.wte)
    ids = torch.tensor([shipped.encode(CODE)[:CONTEXT]])
    assert torch.equal(loaded(ids), expected(ids))  # logits depend on every other weight


@pytest.mark.slow
def test_loading_8_bits_never_holds_the_model_in_fp32(tmp_path, byte_tokenizer_dir):
    """It holds the rounded weights and one fp32 stack: 62% of the file. With the fp32 model it held 130%."""
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    sizes = {"small": {"n_layer": 1, "n_embd": 64}, "large": {"n_layer": 24, "n_embd": 512}}  # 302 MB
    paths = {}
    for name, size in sizes.items():
        config = GPTConfig(vocab_size=tokenizer.n_vocab, max_seq_len=64, n_head=4, n_kv_head=4, **size)
        paths[name] = save_model(tmp_path / name, build(config), tokenizer)
    program = f"""
import torch
from pathlib import Path
from nanochat.device.ranks import Dist
from nanochat.infer.load import load_model
from tests.memory import peak_bytes

def load(path):
    load_model(Path(path), Dist("cpu", torch.device("cpu")), tokenizer_dir="{byte_tokenizer_dir}", quantize="int8")
    return peak_bytes()

before = load("{paths["small"]}")  # with all modules
print(load("{paths["large"]}") - before)
"""
    # With this threshold, malloc keeps nothing that was freed, which would count.
    result = subprocess.run([sys.executable, "-c", program], env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
                            capture_output=True, text=True, check=True, timeout=120)
    assert int(result.stdout) < os.path.getsize(paths["large"] / MODEL)


# Drafts, and what is remembered


def test_guesses_are_what_followed_the_longest_repetition():
    assert guess_next([1, 2, 3, 9, 2, 3]) == [9, 2, 3]
    assert guess_next([5, 2, 3, 7, 8, 2, 3, 1, 5, 2, 3]) == [7, 8, 2, 3, 1, 5, 2]
    assert guess_next([7, 7]) == [7]
    assert guess_next([1, 2, 3]) == guess_next([1]) == guess_next([]) == []
    assert guess_next([0xD800, 65535, 4, 0xD800]) == [65535, 4, 0xD800]  # ids that are no characters


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_drafts_are_taken_and_change_no_text(engine, temperature, monkeypatch):
    """A correct guess saves a reading."""
    readings = []
    read = Reader.read
    monkeypatch.setattr(Reader, "read", lambda *arguments: readings.append(1) or read(*arguments))

    def complete():
        readings.clear()
        texts = []
        for seed in range(4):
            prompt = "".join(random.Random(seed).choices(["ab", "cab;", "x = ", "\n"], k=18))
            texts.append(engine.complete(prompt, max_tokens=50, temperature=temperature, seed=seed))
        return texts, len(readings)

    texts, with_drafts = complete()
    monkeypatch.setattr("nanochat.infer.engine.guess_next", lambda ids: [])
    assert complete()[0] == texts and with_drafts < len(readings) - 4


def test_a_copy_is_taken_whole_where_the_model_agrees_and_otherwise_changes_no_text(shipped):
    engine = Engine(Int8GPT(make_model(vocab_size=shipped.n_vocab)), shipped, CPU)
    sampling = Sampling(max_tokens=12, temperature=0)
    prompt = "int f() {\n    retu"  # whose end is drawn again
    alone = engine.complete(prompt, max_tokens=12, temperature=0)
    for copy, nats, text in [("rn value;", 1000, "rn value;"), ("rn value;", 0, alone), (20 * "value ", 1000, alone)]:
        [sample] = engine.completions(prompt, sampling, copy=(copy, nats))
        assert sample.text == text
        assert sample.reason == "end" or text == alone
        assert 0 < engine.timings.read_tokens <= engine.timings.prompt_tokens
    [sample] = engine.completions(prompt, sampling, keep_going=lambda: False, copy=("rn value;", 1000))
    assert (sample.text, sample.reason, engine.timings.read_tokens) == ("", "stopped", 0)


def test_a_prompt_that_begins_like_the_last_one_is_not_read_again(int8_model, engine):
    prompts = [PROMPT, PROMPT + "\n  ret", PROMPT + "\n  retu", PROMPT[:20] + "x", "", PROMPT + "\n  return 0;"]
    read = []
    for prompt in prompts:
        text = engine.complete(prompt, max_tokens=10, temperature=0)
        read.append(engine.timings.read_tokens)
        assert text == Engine(int8_model, BYTES, CPU).complete(prompt, max_tokens=10, temperature=0)
        assert engine.timings.prompt_tokens == 1 + len(prompt)
    common = len(PROMPT) + 1
    assert read[0] == common and read[3:5] == [1, 1] and 1 <= read[1] <= 6 and 1 <= read[2] <= 6
    together = engine.completions(PROMPT, Sampling(num_samples=3, max_tokens=10, seed=3))
    assert engine.timings.read_tokens < common
    assert together[1].text == Engine(int8_model, BYTES, CPU).complete(PROMPT, max_tokens=10, seed=4)


# How a call ends


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_sample_says_why_it_ended(engine, num_samples):
    def ends(keep_going=lambda: True, **options):
        sampling = Sampling(**{"num_samples": num_samples, "temperature": 0, "max_tokens": 10, **options})
        samples = engine.completions(PROMPT, sampling, keep_going=keep_going)
        return {(sample.reason, sample.num_tokens) for sample in samples}

    assert ends() == {("length", 10)}
    assert ends(max_tokens=0) == {("length", 0)}
    third = engine.complete(PROMPT, temperature=0, max_tokens=3)[2:]
    assert {reason for reason, _ in ends(stop=[third])} == {"stop"}
    answers = iter([True] * 5 + [False] * 9)
    [(reason, num_tokens)] = ends(keep_going=lambda: next(answers))
    assert reason == "stopped" and num_tokens in (2, 3, 4)
    assert ends(keep_going=lambda: False) == {("stopped", 0)}
    assert ends() == {("length", 10)}


@pytest.mark.parametrize("name", ["<|bos|>", "<|file_sep|>", "<|fim_middle|>", "<|pad|>", "<|assistant_end|>"])
def test_a_special_token_ends_a_sample_and_is_no_text_and_its_name_is_text(shipped, name):
    sample = Sample(shipped, [], 100, lambda text: None)
    for token in [*shipped.encode(f"a {name} b"), shipped.special(name), *shipped.encode("c")]:
        sample.add(token)
    assert (sample.text, sample.reason) == (f"a {name} b", "end")


def test_a_list_is_read_as_it_stands(engine):
    plain = engine.complete(PROMPT, max_tokens=10, temperature=0)
    assert engine.complete([Special("<|bos|>"), PROMPT.encode()], max_tokens=10, temperature=0) == plain
    assert engine.complete([PROMPT], max_tokens=10, temperature=0) != plain
    assert engine.timings.prompt_tokens == len(PROMPT)
    for prompt, message in [([], "the prompt is an empty list"), ([""], "empty list"),
                            (["x" * (CONTEXT - 9)], "the prompt has 87 tokens"), ([Special("<|no|>")], "no special")]:
        with pytest.raises(BadInput, match=message):
            engine.complete(prompt, max_tokens=10)


# Healing


def cuts(text, step):
    return [text[:end] for end in range(1, len(text), step)]


def test_wherever_a_prompt_ends_the_tokens_of_the_whole_text_are_possible(shipped):
    """Nearly: a comment of many equal characters may be cut into tokens in another way from its beginning."""
    vocabulary, whole, good = Vocabulary(shipped), shipped.encode(CODE), []
    for prompt in cuts(CODE, 1):
        ids = shipped.encode(prompt)
        number = vocabulary.num_taken_back([shipped.decode_bytes([token]) for token in ids[-3:]])
        kept, known = ids[:len(ids) - number], shipped.decode_bytes(ids[len(ids) - number:])
        is_possible = kept == whole[:len(kept)]
        for token in whole[len(kept):]:
            if not known:
                break
            is_possible &= token in vocabulary.fitting(known)
            known = known[len(shipped.decode_bytes([token])):]
        good.append(is_possible)
    assert sum(good) >= 0.98 * len(good)


@pytest.mark.parametrize("quantized", [True, False])
def test_the_tokens_drawn_go_on_with_the_prompt_wherever_it_ends(shipped, quantized, monkeypatch):
    model = make_model(vocab_size=shipped.n_vocab)
    engine = Engine(Int8GPT(model) if quantized else model, shipped, CPU)
    drawn = note_tokens(monkeypatch)
    num_healed = 0
    for prompt in cuts(CODE.encode()[:200], 7):
        texts = []
        for num_samples in (1, 2):
            for sample in engine.completions(prompt, Sampling(num_samples=num_samples, max_tokens=2, seed=3)):
                assert sample.reason == "end" or sample.num_tokens == 2
                texts.append(sample.text)
                data = shipped.decode_bytes(drawn.pop(sample))
                repeated = len(data) - len(sample.text.encode())
                if sample.reason == "length" and data.decode(errors="ignore").encode() == data:
                    assert data.decode()[repeated:] == sample.text
                    assert prompt.endswith(data[:repeated])
                    num_healed += repeated > 0
        assert texts[0] == texts[1]
    assert num_healed > 20
