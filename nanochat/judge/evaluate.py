"""Lets a model write code, judges it, and keeps what came out in a file that grows sample by sample.

The file is JSON lines: first the settings, then a record for each sample, in an order and with a content that depend on
nothing but the settings. An evaluation that was killed goes on where it stopped.
"""
import difflib
import json
import math
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from nanochat.common import BadInput
from nanochat.device.programs import one_program
from nanochat.infer import engine
from nanochat.judge.infilling import ONE_LINE_KINDS
from nanochat.judge.judge import NO_CODE, Verdict, has_code
from nanochat.judge.problems import STOP
from nanochat.model.layers import IGNORE_INDEX

FIELDS = {  # of a record, as far as scores and pages are made of them
    "name": str, "group": str, "text": str, "status": str | None, "message": str, "sample": int, "exact": bool,
    "similarity": int | float, "bits": int | float, "bytes": int, "bits_without_suffix": int | float, "method": str,
    "budget": int, "tokens": int, "calls": int}
SPARE_TOKENS = 8  # a text that was cut may have some more tokens than it had as a part of the whole


@dataclass(frozen=True)
class Sampling:
    num_samples: int  # besides the greedy one
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


class Writer:
    """Writes code with a model, and measures how well the model knows a text."""

    def __init__(self, model, tokenizer, dist, sampling):
        self.model, self.tokenizer, self.dist, self.sampling = model, tokenizer, dist, sampling
        self.engine = engine.Engine(model, tokenizer, dist)

    def write_functions(self, problem):
        """Returns the records of a problem: of the greedy sample, and of those that are drawn."""
        options = {"max_tokens": self.sampling.max_tokens, "stop": [STOP], "top_k": 0}
        samples = self.engine.completions(problem.prompt, num_samples=1, temperature=0, **options)
        if self.sampling.num_samples:
            samples += self.engine.completions(
                problem.prompt, num_samples=self.sampling.num_samples, temperature=self.sampling.temperature,
                top_p=self.sampling.top_p, seed=self.sampling.seed, **options)
        records = [{"name": problem.name, "group": problem.difficulty, "sample": i, "text": sample.text}
                   for i, sample in enumerate(samples)]
        if problem.solution:
            records[0] |= {"bits": self.bits(problem.prompt, problem.solution), "bytes": size(problem.solution)}
        return records

    def fill_gap(self, task):
        """Returns the record of an infilling task, in a list: what the model writes into the gap."""
        room = self.model.config.max_seq_len - self.sampling.max_tokens - SPARE_TOKENS
        prefix, suffix = self.cut(task.prefix, task.suffix, room)
        parts = ["<|bos|>", "<|fim_prefix|>", prefix, "<|fim_suffix|>", suffix, "<|fim_middle|>"]
        parts = [engine.Special(part) if part.startswith("<|") else part for part in parts]
        [sample] = self.engine.completions(
            parts, num_samples=1, max_tokens=self.sampling.max_tokens, temperature=0, top_k=0,
            stop=["\n"] if task.kind in ONE_LINE_KINDS else [])
        ids = [id for part in parts for id in (
            [self.tokenizer.special(part.name)] if isinstance(part, engine.Special) else self.tokenizer.encode(part))]
        middle = self.tokenizer.encode(task.middle)[:self.sampling.max_tokens]
        num_bytes = len(self.tokenizer.decode_bytes(middle))
        return [{"name": task.name, "group": task.kind, "sample": 0, "text": sample.text,
                 "exact": sample.text.strip() == task.middle.strip(),
                 "similarity": similarity(sample.text, task.middle),
                 "bits": self.bits_of(ids + middle, len(ids)), "bytes": num_bytes,
                 "bits_without_suffix": self.bits(prefix, self.tokenizer.decode(middle))}]

    def cut(self, prefix, suffix, room):
        """Returns the end of the prefix and the beginning of the suffix, which together have about `room` tokens. The
        suffix gets a quarter, as in llama.cpp's server, and either gets what the other leaves."""
        before, after = self.tokenizer.encode(prefix), self.tokenizer.encode(suffix)
        num_after = min(len(after), max(room // 4, room - len(before)))
        num_before = min(len(before), room - num_after)
        kept = before[len(before) - num_before:], after[:num_after]
        return [text if len(ids) == len(all_ids) else self.tokenizer.decode(ids).strip("\ufffd")
                for text, ids, all_ids in zip((prefix, suffix), kept, (before, after), strict=True)]

    def bits(self, prompt, text):
        """Returns the bits that the model needs for `text` after `prompt`: those of both less those of the prompt, so
        that it does not matter where tokens end."""
        bos, alone = self.tokenizer.bos_id, self.tokenizer.encode(prompt)
        together = self.tokenizer.encode(prompt + text)
        common = len(os.path.commonprefix([together, alone]))
        return self.bits_of([bos, *together], 1 + common) - self.bits_of([bos, *alone], 1 + common)

    @torch.no_grad()
    def bits_of(self, ids, num_known):
        """Returns the bits of ids[num_known:] given what is before; of a longer text, the model sees the last part."""
        context = self.model.config.max_seq_len
        if len(ids) == num_known:
            return 0.0
        ids, num_known = ids[-context - 1:], max(1, num_known - max(0, len(ids) - context - 1))
        length = min(max(128, 1 << (len(ids) - 2).bit_length()), context)  # few lengths, because XLA compiles each
        inputs = torch.zeros(1, length, dtype=torch.long)
        targets = torch.full((1, length), IGNORE_INDEX)
        inputs[0, :len(ids) - 1] = torch.tensor(ids[:-1])
        targets[0, num_known - 1:len(ids) - 1] = torch.tensor(ids[num_known:])
        with one_program(self.dist, f"bits {length}"):
            nats = self.model(inputs.to(self.dist.device), targets.to(self.dist.device)).sum()
        return round(nats.item() / math.log(2), 3)


def size(text):
    return len(text.encode(errors="replace"))


def similarity(text, other):
    """Returns how similar two texts are, from 0 to 1: twice the characters in common over all (Ratcliff, Obershelp)."""
    return round(difflib.SequenceMatcher(None, text.strip(), other.strip(), autojunk=False).ratio(), 4)


# -----------------------------------------------------------------------------
# Judging


def judge_function(judge, problem, text):
    """Returns the Verdict of a completion of a problem."""
    if not has_code(text):
        return Verdict(NO_CODE, "")
    return judge.judge(problem.program(text + problem.closing()), problem.tests)


def judge_gap(judge, task, problem, text):
    """Returns the Verdict of a text in the gap of a task, or None if the whole file does not compile by itself."""
    if problem:
        return judge.judge(f"{problem.preamble}{task.prefix}{text}{task.suffix}\n", problem.tests)
    if not judge.check_syntax(task.prefix + task.middle + task.suffix).passed:
        return None
    return judge.check_syntax(task.prefix + text + task.suffix)


# -----------------------------------------------------------------------------
# The file of results


class Results:
    """The records of an evaluation, in a file. A context manager."""

    def __init__(self, path, settings):
        """Opens the file `path`, or makes it. Raises BadInput if it holds the results of other settings."""
        self.records = []
        self._known = 0
        if path.exists() and path.stat().st_size and not is_begun(path, settings):
            found, self.records, length = read_results(path)
            if found != settings:
                raise BadInput(f"{path} holds the results of another evaluation ({difference(found, settings)}): move "
                               "it away, or choose another --out_dir")
            os.truncate(path, length)
        elif path.exists():
            os.truncate(path, 0)
        self._known = len(self.records)
        self._file = open(path, "a", encoding="utf-8")
        if not path.stat().st_size:
            self._write(settings)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def add(self, record):
        self.records.append(record)
        self._write(record)

    def _write(self, line):
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def is_begun(path, settings):
    """Returns whether a file holds no more than a part of its first line: a kill or a full disk cut it."""
    try:
        return (json.dumps(settings) + "\n").encode().startswith(path.read_bytes())
    except OSError:
        return False


def read_results(path):
    """Returns (settings, records, length in bytes) of a file of results, up to its last whole line. Raises BadInput if
    it is another file."""
    try:
        data = path.read_bytes()
        data = data[:data.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in data.splitlines()]
        if not all(isinstance(line, dict) for line in lines) or not lines or "format" not in lines[0]:
            raise ValueError("it has no settings in its first line")
        for number, line in enumerate(lines[1:], 2):
            if not {"name", "group", "text", "status"} <= line.keys():
                raise ValueError(f"line {number} is no sample with its verdict")
            for key in line.keys() & FIELDS.keys():
                if not isinstance(line[key], FIELDS[key]):
                    raise ValueError(f"line {number} has {key} = {json.dumps(line[key])[:40]}")
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not a file of results of code_eval ({error}): name another, or move it away"
                       ) from None
    return lines[0], lines[1:], len(data)


def difference(settings, others):
    """Returns in words the first setting that is not the same."""
    for key in {**settings, **others}:
        if settings.get(key) != others.get(key):
            return f"{key} is {settings.get(key)} there and {others.get(key)} here"
    return "the order of the settings"


def evaluate(items, write, judge, results, workers, show=lambda num_done: None):
    """Completes `results` for all items, a problem or task each.

    write(item): returns the records of its samples, each with a `text`. judge(item, text): returns a Verdict or None;
    it is called in `workers` threads, while the model already writes the next ones. show(num_done): called with the
    number of items that were there before, and with 1 after each one.
    """
    names = [record["name"] for record in results.records]
    last = names[-1] if names else None
    todo = [item for item in items if item.name == last or item.name not in set(names)]
    num_written = names.count(last)  # of the item at which an earlier evaluation stopped
    pending = deque()

    def finish():
        item, records, verdicts = pending.popleft()
        for record, verdict in list(zip(records, verdicts, strict=True))[num_written if item.name == last else 0:]:
            found = verdict.result()
            results.add(record | ({"status": found.status, "message": found.message} if found else {"status": None}))
        show(1)

    show(len(items) - len(todo))
    with ThreadPoolExecutor(workers) as pool:
        for item in todo:
            records = write(item)
            pending.append((item, records, [pool.submit(judge, item, record["text"]) for record in records]))
            while pending and (len(pending) > 2 * workers or all(verdict.done() for verdict in pending[0][2])):
                finish()
        while pending:
            finish()
