"""What the files of a tokenizer in tiktoken's format contain, and their hash, by which checkpoints know it."""
import base64
import hashlib
import json

SPECIAL_TOKENS = (
    "<|bos|>",  # before every document
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",  # for fill in the middle
    "<|file_sep|>",  # between the files of one project
    "<|pad|>",
    # for chat and tools, as in karpathy/nanochat
    "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>",
    "<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>",
)

# Splits text as llama.cpp's "superbpe" does: into numbers, of which three digits each, counted from their end, and what
# is between numbers. A number of more than 300 digits stays whole, which keeps the time linear.
LLAMA_CPP_PATTERN = r"[^\p{N}]+|\p{N}{1,64}?(?=(?:[0-9]{3}){1,100}(?![0-9]))|\p{N}+"


def hash_of(ranks, pattern, special_tokens):
    """Returns the hex SHA-256 of a tokenizer's two files, see Tokenizer for the arguments."""
    return hashlib.sha256(config_json(pattern, special_tokens).encode() + vocabulary_lines(ranks)).hexdigest()


def vocabulary_lines(ranks):
    """Returns the content of `vocabulary.tiktoken`, as bytes."""
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in by_rank)


def config_json(pattern, special_tokens):
    """Returns the content of `tokenizer.json`, as text."""
    return json.dumps({"pattern": pattern, "special_tokens": special_tokens}, indent=2) + "\n"
