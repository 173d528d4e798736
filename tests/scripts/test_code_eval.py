"""scripts/code_eval.py with the real compiler, and models that have learnt nothing."""
import json
import re

import pytest
import torch

from nanochat.checkpoint.on_disk import MODEL
from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.sample import Sampling
from nanochat.judge.writer import Writer
from scripts.code_eval import main
from tests.conftest import last_of_each
from tests.infer.test_engine import make_model, save_model
from tests.judge.test_sandbox import require_sandbox

PROBLEM = {"prompt": "int f(int x) {\n", "declaration": "int f(int x) {\n", "canonical_solution": "    return x;\n}\n",
           "test": "int main() { return f(1) != 1; }\n"}


@pytest.fixture
def code_eval(base_dir, byte_tokenizer_dir, tmp_path, capsys):
    """Runs the script on two problems with one of two checkpoints, "a" and "b", and returns the path of the samples."""
    require_sandbox()
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    for name in "ab":
        model = make_model(vocab_size=tokenizer.n_vocab)
        with torch.no_grad():
            model.lm_head *= 1 if name == "a" else 0.5
        save_model(base_dir / "checkpoints" / name, model, tokenizer, step=7)
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(PROBLEM | {"task_id": name}) + "\n" for name in "xy"))

    def run(name, out_dir, *flags):
        main(last_of_each(
            f"--checkpoint={name}", f"--tokenizer_dir={byte_tokenizer_dir}", "--device_type=cpu", "--max_tokens=10",
            f"--problems={tmp_path / 'problems.jsonl'}", "--num_samples=2", f"--out_dir={tmp_path / out_dir}", *flags))
        run.output = capsys.readouterr().out
        return tmp_path / out_dir / "samples.jsonl"
    return run


def test_an_evaluation_is_repeated_exactly_and_others_are_compared_with_it(code_eval, tmp_path):
    whole = code_eval("a", "whole").read_bytes()
    assert code_eval("a", "whole").read_bytes() == whole
    lines = whole.splitlines()
    assert len(lines) == 1 + 2 * 3
    records = [json.loads(line) for line in lines[1:]]
    assert all(record["status"] in ("no code", "does not compile", "failed", "passed") for record in records)
    assert "pass@2, drawn" in code_eval.output and "bits per byte" in code_eval.output
    assert "bits per byte" in (tmp_path / "whole/scores.txt").read_text()

    code_eval("b", "other", f"--against={tmp_path / 'whole'}")
    assert "the difference to --against" in code_eval.output and "p = " in code_eval.output
    with pytest.raises(BadInput, match="--against=.*temperature is 0.8 there and 0.5 here"):
        code_eval("b", "third", f"--against={tmp_path / 'whole'}", "--temperature=0.5")
    with pytest.raises(BadInput, match=r"results of another evaluation \(checkpoint is a/step_000007 there"):
        code_eval("b", "whole")


def test_several_sets_have_one_score_together_and_one_each(code_eval, tmp_path):
    (tmp_path / "more.jsonl").write_text(json.dumps(PROBLEM | {"task_id": "z"}))
    both = f"{tmp_path}/problems.jsonl,{tmp_path}/more.jsonl"
    code_eval("a", "both", f"--problems={both}", "--num_samples=0", "--max_tokens=1")
    counts = re.findall(r"^bits per byte +(\w+) .* of (\d+)$", code_eval.output, re.MULTILINE)
    assert counts == [("all", "3"), ("problems", "2"), ("more", "1")]
    with pytest.raises(BadInput, match="--problems=.*,.* has two problems with the name z"):
        code_eval("a", "twice", f"--problems={both},{tmp_path}/more.jsonl")


@pytest.mark.parametrize("flags, message", [
    (["--max_tokens=90"], "--max_tokens=90 is more than half of the 96"),
    (["--task=chat"], "--task.*chat.*functions.*infill"),
    (["--problems=missing.jsonl"], "--problems=missing.jsonl cannot be read: No such file"),
    (["--problems=/dev/zero"], "--problems=/dev/zero cannot be read: it is no ordinary file"),
    (["--problems=,"], "--problems=, names no set: give own, or a file or folder"),
    (["--against=missing"], "missing has no results of code_eval"),
])
def test_bad_input_is_refused_before_the_work(code_eval, tmp_path, flags, message):
    with pytest.raises(BadInput, match=message):
        code_eval("a", "out", *flags)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_its_weights_is_one_line(code_eval, base_dir):
    (base_dir / "checkpoints/a/step_000007" / MODEL).unlink()
    with pytest.raises(BadInput, match="checkpoint .* is damaged .model.safetensors: No such file"):
        code_eval("a", "out")


def test_gaps_in_solutions_are_filled(code_eval):
    lines = code_eval("a", "gaps", "--task=infill_functions", "--num_tasks=1").read_text().splitlines()
    for record in map(json.loads, lines[1:]):
        assert record["bits"] > 0 and 0 <= record["similarity"] <= 1 and not record["exact"]
    assert "bits per byte without suffix" in code_eval.output and "pass@1" in code_eval.output


def test_bits_of_a_text_are_those_of_the_models_probabilities(byte_tokenizer_dir):
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    model = make_model(vocab_size=tokenizer.n_vocab)
    writer = Writer(model, tokenizer, Dist("cpu", torch.device("cpu")), Sampling(0, 10, 1.0))
    ids = [tokenizer.bos_id, *b"int main() { return 0; }"]
    with torch.no_grad():
        log_probabilities = torch.log_softmax(model(torch.tensor([ids]))[0].double(), -1)
    expected = -sum(log_probabilities[i - 1, ids[i]] for i in range(11, len(ids))) / torch.tensor(2.0).log()
    assert writer.bits("int main()", " { return 0; }") == pytest.approx(expected.item(), abs=1e-2)
    long = "x" * 500
    assert writer.bits(long, "y") > 0  # longer than the model's context
    assert writer.bits("", 4 * long) == pytest.approx(4 * writer.bits("", long), rel=0.05)  # so is the text itself


def test_solutions_are_checked_without_a_model(code_eval, tmp_path, capsys):
    assert main(["--check", f"--problems={tmp_path / 'problems.jsonl'}"]) == 0
    assert "2 of 2 solutions pass\n" in capsys.readouterr().out
    (tmp_path / "wrong.jsonl").write_text(json.dumps(PROBLEM | {"task_id": "w", "test": "int main() { return 1; }"}))
    assert main(["--check", f"--problems={tmp_path / 'wrong.jsonl'}"]) == 1
    assert "w: failed\nended with status 1" in capsys.readouterr().out
