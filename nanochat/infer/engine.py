"""Completes text with a KV cache whose shape never changes.

XLA compiles two programs, whatever the text: one reads the prompt, padded to a power of two; the other reads one token
of each sample, at a position that is a tensor. The next tokens are drawn on the host.
"""
import codecs

import torch

from nanochat.common import BadInput
from nanochat.device.programs import one_program
from nanochat.model.gpt import KVCache

MIN_PREFILL_LEN = 64


class Engine:
    def __init__(self, model, tokenizer, dist):
        """model: a GPT on the device of `dist`."""
        self.model, self.tokenizer, self.dist = model, tokenizer, dist

    def complete(self, prompt, **options):
        """Returns the completion of `prompt`, without the prompt; options as in completions."""
        return self.completions(prompt, num_samples=1, **options)[0].text

    def completions(self, prompt, *, num_samples, max_tokens=-1, temperature=0.8, top_k=50, top_p=1.0, stop=(), seed=0,
                    on_text=lambda sample, text: None, on_cut=lambda num_tokens, num_read: None):
        """Returns `num_samples` completions of `prompt` (str or bytes), as Samples, whose `text` is without the prompt.

        A completion ends with the document, before the first of the strings `stop`, or after `max_tokens` tokens (-1:
        256, or half of the model's context if that is less). If the prompt leaves no room for them, only its last part
        is read. Sample i is drawn with seed + i, so it does not depend on the number of samples.

        temperature: 0 always takes the likeliest token. top_k > 0: draws from the k likeliest tokens only; top_p < 1:
        draws from the likeliest tokens that have this probability together. on_text(sample, text): called with each
        new piece of text. on_cut(num_tokens, num_read): called if only the last `num_read` tokens of the prompt's
        `num_tokens` are read. Raises BadInput if `max_tokens` is the whole context.
        """
        context = self.model.config.max_seq_len
        max_tokens = min(256, context // 2) if max_tokens == -1 else max_tokens
        if max_tokens >= context:
            raise BadInput(f"--max_tokens={max_tokens} leaves no room for a prompt: the model sees {context} tokens")
        ids = [self.tokenizer.bos_id] + self.tokenizer.encode(prompt)
        if len(ids) > context - max_tokens:
            on_cut(len(ids), context - max_tokens)
            ids = ids[-(context - max_tokens):]
        samples = [Sample(self.tokenizer, stop, lambda text, i=i: on_text(i, text)) for i in range(num_samples)]
        generators = [torch.Generator().manual_seed(seed + i) for i in range(num_samples)]
        logits, cache = self.prefill(ids, num_samples)
        for position in range(len(ids), len(ids) + max_tokens):
            chosen = [choose_token(row, generator, temperature, top_k, top_p)
                      for row, generator in zip(logits, generators, strict=True)]
            for sample, token in zip(samples, chosen, strict=True):
                sample.add(token)
            if all(sample.ended for sample in samples) or position == len(ids) + max_tokens - 1:
                break
            logits = self.decode(chosen, position, cache)
        for sample in samples:
            sample.end()
        return samples

    @torch.no_grad()
    def prefill(self, ids, num_samples):
        """Reads the prompt `ids`. Returns the next token's logits (num_samples, V), on the CPU, and the KVCache."""
        config, device = self.model.config, self.dist.device
        length = min(max(MIN_PREFILL_LEN, 1 << (len(ids) - 1).bit_length()), config.max_seq_len)
        padded = torch.tensor([ids + [0] * (length - len(ids))]).to(device)
        last = torch.tensor([len(ids) - 1]).to(device)
        with one_program(self.dist, f"prefill {length} {num_samples}"):
            cache = KVCache(config, 1, config.max_seq_len, self.model.compute_dtype, device)
            # The padding writes to cache positions after the prompt. The tokens that are generated there overwrite
            # them before any position looks at them.
            hidden = self.model.hidden(padded, cache, torch.arange(length, device=device))  # (1, length, C)
            logits = self.model.logits(hidden.index_select(1, last))[:, 0]  # (1, V)
            cache.keys = [keys.repeat(num_samples, 1, 1, 1) for keys in cache.keys]
            cache.values = [values.repeat(num_samples, 1, 1, 1) for values in cache.values]
        return logits.cpu().expand(num_samples, -1), cache

    @torch.no_grad()
    def decode(self, ids, position, cache):
        """Reads one token of each sample, `ids`, at `position`. Returns the next tokens' logits (num_samples, V) on the
        CPU."""
        ids = torch.tensor(ids)[:, None].to(self.dist.device)
        positions = torch.tensor([position]).to(self.dist.device)
        with one_program(self.dist, f"decode {len(ids)}"):
            logits = self.model.logits(self.model.hidden(ids, cache, positions))[:, 0]
        return logits.cpu()


def choose_token(logits, generator, temperature, top_k, top_p):
    """Returns the id of a token, drawn by its logits (V,)."""
    if temperature == 0:
        return int(logits.argmax())
    logits, ids = logits.topk(min(top_k or len(logits), len(logits)))  # the likeliest first
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    likelier = probabilities.cumsum(0) - probabilities  # the sum of the tokens before each one
    probabilities[likelier >= top_p] = 0
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


class Sample:
    """A completion while it is generated: its `text`, and `num_tokens`, the number of tokens that were drawn for it."""

    def __init__(self, tokenizer, stop, show):
        """show: called with each piece of text that no stop string can remove any more."""
        self.text, self.num_tokens, self.ended = "", 0, False
        self._tokenizer, self._stop, self._show = tokenizer, [string for string in stop if string], show
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span tokens
        self._num_shown = 0

    def add(self, token):
        """Adds the next token; after the end, tokens are ignored."""
        if self.ended:
            return
        self.num_tokens += 1
        if token == self._tokenizer.bos_id:  # the next document
            self.end()
            return
        self.text += self._decoder.decode(self._tokenizer.decode_bytes([token]))
        found = [self.text.find(string) for string in self._stop if string in self.text]
        if found:
            self.text = self.text[:min(found)]
            self._decoder.reset()
            self.end()
        else:
            self._show_up_to(len(self.text) - self._len_of_possible_stop())

    def end(self):
        if not self.ended:
            self.ended = True
            self.text += self._decoder.decode(b"", final=True)
            self._show_up_to(len(self.text))

    def _len_of_possible_stop(self):
        """Returns the length of the longest end of the text that is the beginning of a stop string."""
        return max((length for string in self._stop for length in range(1, len(string))
                    if self.text.endswith(string[:length])), default=0)

    def _show_up_to(self, length):
        if length > self._num_shown:
            self._show(self.text[self._num_shown:length])
            self._num_shown = length
