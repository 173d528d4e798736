"""One completion while it is generated: its choice of tokens, its text, and its end."""
import codecs
from dataclasses import dataclass

from nanochat.common import BadInput, flag

GREEDY_BELOW = 1e-9  # such a temperature always takes the likeliest token: logits over a smaller one may be infinite


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. Fields made with flag() are flags of scripts/generate.py."""
    num_samples: int = flag(1, "number of completions", at_least=1)
    max_tokens: int = flag(-1, "tokens per completion; -1: 256, at most half of the context", at_least=1, unset=-1)
    temperature: float = flag(0.8, "0: always the likeliest token", at_least=0)
    top_k: int = flag(50, "draw from the k likeliest tokens; 0: from all", at_least=0)
    top_p: float = flag(1.0, "draw from the likeliest tokens with this probability together", above=0, at_most=1)
    stop: list | tuple | None = flag(None, "text before which to stop, as in --stop=$'\\n}'; may be repeated",
                                     action="append")
    # Sample i is drawn with seed + i, so it does not depend on the number of samples.
    seed: int = flag(0, "the same seed gives the same text", at_least=0)
    no_heal: bool = flag(False, "never replace the prompt's last tokens, as in other programs (docs/export.md)")
    score: bool = False  # sums the `log_prob` of each sample


def ignore(*_):
    """A callback that does nothing."""


def never_stop():
    """Returns whether a completion goes on: always."""
    return True


def overlaps(text, following):
    """Returns the lengths of all ends of `text` that are beginnings of `following`."""
    following = following[:len(text)]
    return [length for length in range(1, len(following) + 1) if text.endswith(following[:length])]


def default_max_tokens(context):
    """Returns the default number of tokens of a completion, by a model of this context."""
    return min(256, context // 2)


def checked_max_tokens(max_tokens, context):
    """Returns --max_tokens, or its default for -1. Raises BadInput if it leaves a prompt less than half of the context.
    """
    if max_tokens > context // 2:
        raise BadInput(f"--max_tokens={max_tokens} is more than half of the {context} tokens that the model sees: give "
                       f"at most {context // 2}")
    return default_max_tokens(context) if max_tokens == -1 else max_tokens


class BrokenModel(BadInput):
    """A model gave logits that are not finite."""

    def __init__(self):
        super().__init__("the model's predictions are not finite, so its training went wrong: take an earlier "
                         "checkpoint, or train it again with lower learning rates")


def choose_token(logits, generator, temperature, top_k, top_p):
    """Returns the id of a token, drawn from logits (V,). Raises BrokenModel if one of them is NaN."""
    if logits.isnan().any():
        raise BrokenModel
    if temperature < GREEDY_BELOW:
        return int(logits.argmax())
    logits, ids = logits.topk(min(top_k or len(logits), len(logits)))  # the likeliest first
    probabilities = (logits.double() / temperature).softmax(dim=0)
    # A token stays unless the tokens before it reach top_p, so the likeliest always stays.
    likelier = probabilities.cumsum(0) - probabilities  # the sum of the tokens before each one
    probabilities[likelier >= top_p] = 0
    return int(ids[probabilities.multinomial(1, generator=generator)])


class Sample:
    """A completion: its `text`, its number of tokens `num_tokens`, and the `reason` why it ended: "end" (the model
    ended it), "stop" (a stop string), "length" (enough tokens) or "stopped" (the caller did).

    `num_drawn` counts all drawn tokens, including those that only repeat the end of the prompt. `log_prob` is the sum
    of the natural logarithms of its tokens' probabilities, if Sampling.score is on. `generator` draws its tokens.
    """

    def __init__(self, tokenizer, stop, max_tokens, show, known=b"", seed=0):
        """show: called with each piece of text that no stop string can remove any more. known: the end of the prompt,
        which the first tokens repeat; it is excluded from the text, and tokens that only repeat it are not counted."""
        import torch  # here, so that scripts with these flags print --help at once
        self.text = ""
        self.num_tokens = 0
        self.num_drawn = 0
        self.log_prob = 0.0
        self.reason = None
        self.known = known
        self.generator = torch.Generator().manual_seed(seed)
        self._tokenizer = tokenizer
        # <|bos|> begins the next document, <|file_sep|> ends a middle or a file, and no other special token is text.
        self._ends = tokenizer.ends
        self._stop = [string for string in stop or () if string]
        self._max_tokens = max_tokens
        self._show = show
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span tokens
        self._num_shown = 0
        if max_tokens == 0:
            self.end("length")

    @property
    def ended(self):
        return self.reason is not None

    def add(self, token):
        """Adds the next token. Ignores tokens after the end."""
        if self.ended:
            return
        self.num_drawn += 1
        if token in self._ends:
            self.num_tokens += 1
            self.end("end")
            return
        # The first bytes may repeat the end of the prompt, which is drawn again: they are no new text.
        data = self._tokenizer.decode_bytes([token])
        num_known = len(self.known)
        self.known = self.known[len(data):]
        data = data[num_known:]
        if not data:
            return
        self.num_tokens += 1
        self.text += self._decoder.decode(data)
        found = [self.text.find(string) for string in self._stop if string in self.text]
        if found:
            self.text = self.text[:min(found)]
            self.end("stop")
        elif self.num_tokens == self._max_tokens:
            self.end("length")
        else:
            self._show_up_to(len(self.text) - self._len_of_possible_stop())

    def add_log_prob(self, log_prob):
        if not self.ended:
            self.log_prob += log_prob

    def end(self, reason):
        """Ends the sample, unless it has ended. The first bytes of a character that is not whole are no text."""
        if not self.ended:
            self.reason = reason
            self._show_up_to(len(self.text))

    def _len_of_possible_stop(self):
        """Returns the length of the longest end of the text that begins a stop string."""
        return max((length for string in self._stop for length in overlaps(self.text, string)), default=0)

    def _show_up_to(self, length):
        if length > self._num_shown:
            self._show(self.text[self._num_shown:length])
            self._num_shown = length
