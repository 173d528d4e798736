"""Measures how many characters completions save a person who types C++:

    python3 -m dev.bench_replay --checkpoint=RUN --quantize=int8 --data_dir=some/parquet

A script removes blocks of lines from held-out files, and types them again as a person would: it makes mistakes and
deletes them, pauses, and jumps from block to block. At each pause it asks for a completion, as an editor does. It
accepts a completion, or the first line of one, with one key, if exactly this text comes next, and if it came before
the next key. The typing is simulated; the time of a completion is measured.

The model completes with copies of the file, as scripts.serve does, and without; copies are offered without a model; and
nothing is completed. With --patient, the person waits for each completion: what it says counts, and not the machine,
and no limit cuts it, so its times compare two servers. With --llama_cpp=http://127.0.0.1:PORT, a server of llama.cpp
stands for the model, and no checkpoint is read.
"""
import json
import random
import string
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from http.client import HTTPException

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import BadInput, flag, read_flags, run_script
from nanochat.data.shards import TextFlags, open_text, whole_texts
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.flags import ModelFlags, resolve_inference_device_type
from nanochat.infer.sample import Sampling
from nanochat.serve.completer import Options, copied, is_word, load_completer

# Pauses before a key: the medians inside of a word and elsewhere, and the deviation of the logarithm.
PAUSE_IN_WORD_S = 0.15
PAUSE_S = 0.5
SIGMA = 0.7
EDITOR_WAITS_S = 0.1  # without a key, before it asks
MISTAKES = 0.02  # of keys
LINES_BEFORE, LINES_AFTER = 64, 16  # that llama.cpp sees


@dataclass(frozen=True)
class Flags(TextFlags):
    blocks: int = flag(20, "blocks of lines that are typed", at_least=1, at_most=10_000)
    lines: int = flag(8, "lines of a block", at_least=1, at_most=1000)
    max_tokens: int = flag(48, "most tokens of a completion", at_least=1, at_most=1024)
    llama_cpp: str = flag("", "address of llama.cpp's server, whose completions are tried instead of the checkpoint's")
    patient: bool = flag(False, "the person waits for each completion")
    no_gaps: bool = flag(False, "show the model the text before the cursor only")


@dataclass(frozen=True)
class Block:
    """Lines that are typed, and the file's text before and after them."""
    number: int
    before: str
    text: str
    after: str


def read_texts(flags, least_characters):
    """Returns the texts in the first shards of TextFlags that have so many characters. Raises BadInput if none has."""
    shards = open_text(flags)[:4]
    texts = [text for text in whole_texts(shards) if len(text.strip()) > least_characters]
    if not texts:
        raise BadInput(f"--data_dir={flags.data_dir} has no document of {least_characters} characters: name another")
    return texts


def choose_blocks(texts, flags):
    """Returns Blocks of random texts. Each begins with a line that is not blank."""
    generator = random.Random(0)
    blocks = []
    for number in range(flags.blocks):
        lines = generator.choice(texts).splitlines(keepends=True)
        begin = generator.choice([i for i, line in enumerate(lines) if line.strip()])
        chosen = "".join(lines[begin:begin + flags.lines])
        text = chosen.rstrip()
        after = chosen[len(text):] + "".join(lines[begin + flags.lines:])
        blocks.append(Block(number, "".join(lines[:begin]), text, after))
    return blocks


def kind_of_place(line):
    """Returns what is typed next in a line that begins with `line`."""
    text = line.strip()
    if not text:
        return "start of a line"
    if text.startswith(("#", "/*", "*")) or "//" in text:
        return "comment or directive"
    if text.endswith((".", "->", "::")):
        return "member"
    if is_word(text[-1] + "x") and line == line.rstrip():
        return "rest of a name"
    if text.count("(") > text.count(")"):
        return "argument"
    return "elsewhere"


def pause_before(generator, typed):
    """Returns the seconds before the key that follows `typed`."""
    median_s = PAUSE_IN_WORD_S if typed[-1:].isalnum() else PAUSE_S
    return median_s * generator.lognormvariate(0, SIGMA)


def accepted_length(offered, coming):
    """Returns how many characters of a completion are accepted: all, those of its first line, or 0."""
    for text in (offered, offered.partition("\n")[0]):
        if text and coming.startswith(text):
            return len(text)
    return 0


class Person:
    """Types blocks. complete(before, after) -> (text, the seconds that it took)."""

    def __init__(self, complete, patient=False):
        self.complete = complete
        self.patient = patient
        self.num_characters = 0
        self.seconds = []  # of each completion
        self.num_shown = 0
        self.asked = Counter()  # {kind of place: number}
        self.accepted = Counter()
        self.saved = Counter()  # characters, less the keys that accepted them

    def type(self, block):
        self.num_characters += len(block.text)
        at = 0
        while at < len(block.text):
            # Pauses and mistakes depend on the place alone, so they are the same whoever completes. So a difference
            # between two contenders comes from their completions, and not from the luck of the typing.
            generator = random.Random(f"{block.number} {at}")
            typed = block.before + block.text[:at]
            if generator.random() < MISTAKES:
                wrong = typed + generator.choice(string.ascii_lowercase)
                self.offer(wrong, block, pause_before(generator, wrong))
            offered = self.offer(typed, block, pause_before(generator, typed))
            length = accepted_length(offered, block.text[at:])
            if length:
                kind = kind_of_place(typed.rpartition("\n")[2])
                self.accepted[kind] += 1
                self.saved[kind] += length - 1
            at += max(length, 1)

    def offer(self, typed, block, pause_s):
        """Returns the completion that the person sees before the next key, or ""."""
        if pause_s < EDITOR_WAITS_S:
            return ""
        text, seconds = self.complete(typed, block.after)
        self.seconds.append(seconds)
        self.asked[kind_of_place(typed.rpartition("\n")[2])] += 1
        if EDITOR_WAITS_S + seconds > pause_s and not self.patient:
            return ""
        self.num_shown += bool(text)
        return text


def asks(completer, tokens):
    """Returns a function (before, after) -> (the completion of a model, seconds)."""
    @cache
    def ask(before, after):
        line = before.rpartition("\n")[2]
        options = Options(Sampling(max_tokens=tokens, temperature=0), min_indent=len(line) - len(line.lstrip()))
        begun = time.perf_counter()
        completion = completer.complete(before, after, [], options)
        return completion.texts[0], time.perf_counter() - begun
    return ask


def asks_llama_cpp(flags):
    """Returns a function (before, after) -> (the completion of llama.cpp's server, seconds). Like llama.vim after its
    first completion, it takes the tokens of a quarter of a second."""
    def post(path, **body):
        try:
            request = urllib.request.Request(f"{flags.llama_cpp}{path}", json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["content"]
        except (OSError, ValueError) as error:  # what is no address is a ValueError
            raise BadInput(f"--llama_cpp={flags.llama_cpp}: no server of llama.cpp answers ({error}): give its "
                           "address, such as http://127.0.0.1:8080") from None

    try:
        urllib.request.urlopen(f"{flags.llama_cpp}/health", timeout=60).close()
    except (OSError, ValueError, HTTPException) as error:
        raise BadInput(f"--llama_cpp={flags.llama_cpp} is no server that answers ({error}): give the address of "
                       "llama-server, such as http://127.0.0.1:8080") from None

    @cache
    def ask(before, after):
        before = "".join(before.splitlines(keepends=True)[-LINES_BEFORE:])
        after = "".join(after.splitlines(keepends=True)[:LINES_AFTER])
        head, newline, line = before.rpartition("\n")
        options = {"n_predict": flags.max_tokens, "temperature": 0, "cache_prompt": True}
        if not flags.patient:
            options["t_max_predict_ms"] = 250
        begun = time.perf_counter()
        if flags.no_gaps:
            text = post("/completion", prompt=before, **options)
        else:
            text = post("/infill", input_prefix=head + newline, prompt=line, input_suffix=after, **options)
        return text, time.perf_counter() - begun
    return ask


def with_copies(ask):
    """Returns `ask` with a copy from the file, where there is one, instead of what it asks for."""
    def either(before, after):
        copy = copied(before, after)[0]
        return (copy, 0.0) if copy else ask(before, after)
    return either


def show(name, person):
    """Prints what a Person saved."""
    total = person.num_characters
    seconds = sorted(person.seconds) or [0.0]
    p50 = seconds[50 * (len(seconds) - 1) // 100]
    p95 = seconds[95 * (len(seconds) - 1) // 100]
    print(f"{name}: {sum(person.saved.values()) / total:.1%} of {total:,} characters saved; "
          f"{sum(person.accepted.values())} of {person.num_shown} shown completions accepted; "
          f"p50 {p50:.3f} s, p95 {p95:.3f} s")


def main(argv=None):
    of_model, flags = read_flags(argv, __doc__, {ModelFlags: "model", Flags: "flags"})
    blocks = choose_blocks(read_texts(flags, least_characters=2000), flags)
    dist = None
    if flags.llama_cpp:
        alone = asks_llama_cpp(flags)
        ask = with_copies(alone)
    else:
        device_type = resolve_inference_device_type(of_model.device_type)
        prepare_xla_environment(device_type)
        path = find_checkpoint(of_model.checkpoint)
        dist = compute_init(device_type)
        completer = load_completer(of_model, path, 0, dist)
        if flags.no_gaps:
            completer.fim = False
        ask = asks(completer, flags.max_tokens)
        alone = asks(replace(completer, copies=False, windows={}), flags.max_tokens)
    contenders = {
        "the model, with copies": ask,
        "the model alone": alone,
        "copies alone": lambda *place: (copied(*place)[0], 0.0),
        "nothing": lambda *place: ("", 0.0),
    }
    people = {name: Person(complete, flags.patient) for name, complete in contenders.items()}
    for name, person in people.items():
        for block in blocks:
            person.type(block)
        show(name, person)
    model = people["the model, with copies"]
    for kind, number in model.asked.most_common():
        print(f"  {kind}: {model.saved[kind] / model.num_characters:.1%} of all characters saved, "
              f"{model.accepted[kind]} of {number} accepted")
    if dist:
        compute_cleanup(dist)


if __name__ == "__main__":
    run_script(main)
