"""One completion while it is generated: choosing its tokens, its text, and where it ends."""
import codecs

import torch

from nanochat.common import BadInput


class BrokenModel(BadInput):
    """A model gave logits that are no numbers."""

    def __init__(self):
        super().__init__("the model's predictions are not finite, so its training went wrong: take an earlier "
                         "checkpoint, or train it again with lower learning rates")


def choose_token(logits, generator, temperature, top_k, top_p):
    """Returns the id of a token, drawn by its logits (V,). Raises BrokenModel if one of them is no number."""
    if logits.isnan().any():
        raise BrokenModel
    if temperature == 0:
        return int(logits.argmax())
    logits, ids = logits.topk(min(top_k or len(logits), len(logits)))  # the likeliest first
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    likelier = probabilities.cumsum(0) - probabilities  # the sum of the tokens before each one
    probabilities[likelier >= top_p] = 0
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def end_tokens(tokenizer):
    """Returns the ids that end a completion: <|bos|> begins the next document, <|file_sep|> ends a middle or a file."""
    try:
        return {tokenizer.bos_id, tokenizer.special("<|file_sep|>")}
    except BadInput:  # a tokenizer of nanochat's own
        return {tokenizer.bos_id}


class Sample:
    """A completion: its `text`, `num_tokens`, the number of tokens that it has, and the `reason` why it ended: "end"
    (the model ended it), "stop" (a stop string), "length" (enough tokens) or "stopped" (the caller did).

    `num_drawn` counts all tokens that were drawn for it, also those that only repeat the end of the prompt. `log_prob`
    is the sum of the natural logarithms of the probabilities that the model gave to its tokens, if the engine was asked
    for it.
    """

    def __init__(self, tokenizer, stop, max_tokens, show, known=b""):
        """show: called with each piece of text that no stop string can remove any more. known: the end of the prompt,
        which the first tokens repeat; it is no part of the text, and tokens that add nothing to it are not counted."""
        self.text, self.num_tokens, self.reason, self.known = "", 0, None, known
        self.num_drawn, self.log_prob = 0, 0.0
        self._tokenizer, self._ends = tokenizer, end_tokens(tokenizer)
        self._stop, self._max_tokens, self._show = [string for string in stop if string], max_tokens, show
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span tokens
        self._num_shown = 0
        if max_tokens == 0:
            self.end("length")

    @property
    def ended(self):
        return self.reason is not None

    def add(self, token):
        """Adds the next token; after the end, tokens are ignored."""
        if self.ended:
            return
        self.num_drawn += 1
        if token in self._ends:
            self.num_tokens += 1
            self.end("end")
            return
        data = self._tokenizer.decode_bytes([token])
        self.known, data = self.known[len(data):], data[len(self.known):]
        if not data:
            return
        self.num_tokens += 1
        self.text += self._decoder.decode(data)
        found = [self.text.find(string) for string in self._stop if string in self.text]
        if found:
            self.text = self.text[:min(found)]
            self._decoder.reset()
            self.end("stop")
        elif self.num_tokens == self._max_tokens:
            self.end("length")
        else:
            self._show_up_to(len(self.text) - self._len_of_possible_stop())

    def add_log_prob(self, log_prob):
        if not self.ended:
            self.log_prob += log_prob

    def end(self, reason):
        """Ends the sample, if it has not ended before."""
        if not self.ended:
            self.reason = reason
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
