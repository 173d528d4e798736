"""Finds documents that contain a part of a text that must not be trained on, such as the prompt of a test problem.

A document overlaps with a text if both have the same 13 words in a row, as in GPT-3's evaluation (Brown et al., arXiv
2005.14165, appendix C). Lines that include headers are left out of both, because many programs share them, and so are
sequences of numbers and single letters.
"""
import re

NUM_WORDS = 13
MIN_LONG_WORDS = 5  # of two letters or more, so that a list of numbers is no overlap
_COMMON_LINE = re.compile(rb"^[ \t]*(?:#[ \t]*include\b|using namespace\b).*$", re.MULTILINE)
_LONG_WORD = re.compile(rb"[A-Za-z_]\w")


def sequences(data):
    """Returns an iterator of all sequences of NUM_WORDS words in `data`, bytes, as tuples."""
    words = re.findall(rb"\w+", _COMMON_LINE.sub(b"", data))
    return zip(*(words[i:] for i in range(NUM_WORDS)), strict=False)


def telling_sequences(texts):
    """Returns the set of the sequences of all `texts` (str) that hardly occur by chance."""
    return frozenset(words for text in texts for words in sequences(text.encode(errors="replace"))
                     if len({word for word in words if _LONG_WORD.match(word)}) >= MIN_LONG_WORDS)


def overlaps(data, excluded):
    """Returns whether `data` has one of the sequences `excluded`."""
    return bool(excluded) and not excluded.isdisjoint(sequences(data))
