"""Tokenizers of Hugging Face's library as small as tests need, in the ways of SmolLM2, Qwen, Llama 3 and Llama 2."""
import io
import json
import zipfile

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nanochat.data.hub_tokenizer import HubTokenizer, byte_of_character
from tests.data.headers import HEADERS

QWEN_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
              r"|\s+(?!\S)|\s+")
LLAMA3_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SMOLLM2_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
    "<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>",
    "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>")
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_OTHER = ("<tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
              "<|file_sep|>")  # not marked as special
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def train(split, special=(), without=()):
    """Returns a byte-level BPE. without: bytes that get no token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    alphabet = [character for character, byte in byte_of_character().items() if byte not in without]
    tokenizer.train_from_iterator(HEADERS[::4], trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False))
    return tokenizer


def smollm2():
    """Its special tokens come first, each digit is a token, and some bytes have none."""
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                      pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer = train(digits, SMOLLM2_SPECIAL, without={2, 4, 0xC0, 0xC1, *range(0xF1, 0x100)})
    return tokenizer, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def qwen():
    """Its text is NFC first, no token begins a text, and the tokens for gaps are not marked as special."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"), BYTE_LEVEL])
    tokenizer = train(split)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(list(QWEN_SPECIAL))
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in QWEN_OTHER])
    return tokenizer, {"bos_token": None, "add_bos_token": False, "eos_token": "<|im_end|>"}


def llama3():
    """A whole word that is a token skips the merges, and some of its words could not be merged."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), BYTE_LEVEL])
    config = json.loads(train(split).to_str())
    config["model"] |= {"ignore_merges": True}
    config["model"]["vocab"] |= {"zqzq": 900, "\u0120zqzq": 901}
    tokenizer = Tokenizer.from_str(json.dumps(config))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


def llama2():
    """Sentencepiece's: a space is U+2581, and a byte without a token of its text is <0xNN>."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    lines = [line for text in HEADERS[::4] for line in text.split("\n") if line.isascii()]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=900, special_tokens=names, max_token_length=9,
                                                             show_progress=False))
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = config["added_tokens"][:3]  # bytes are tokens of the vocabulary
    return Tokenizer.from_str(json.dumps(config)), {"bos_token": {"content": "<s>"}, "add_bos_token": True}


def files_of(tokenizer, config, **generation_config):
    """Returns the files of HubTokenizer."""
    found = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config)}
    if generation_config:
        found["generation_config.json"] = json.dumps(generation_config)
    return {name: content.encode() for name, content in found.items()}


def zipped(files):
    """Returns the content of a checkpoint's source.zip."""
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as source:
        for name, content in {"config.json": b"{}", **files}.items():
            source.writestr(name, content)
    return found.getvalue()


def hub_tokenizer(make, **generation_config):
    return HubTokenizer(files_of(*make(), **generation_config))
