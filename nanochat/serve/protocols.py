"""The requests and answers of editors' protocols.

Fields of a client that are not here are ignored, and null counts as a missing field.
"""
import secrets
import time
import uuid
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from nanochat.infer.sample import Sampling
from nanochat.serve.completer import Options

SAMPLING_TEMPERATURE = 0.8  # for several completions without a temperature: at 0 they would be equal


def without_surrogates(text):
    """Replaces half surrogate pairs, which JavaScript clients send when they cut a text."""
    if not isinstance(text, str):
        return text
    return text.encode("utf-8", "replace").decode()


def as_list(value):
    return [value] if isinstance(value, str) else value


def refusal(error):
    """Returns what a ValidationError finds wrong first, in words that repeat nothing of the request."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "the body"
    return f"{where}: {first['msg']}"


Text = Annotated[str, BeforeValidator(without_surrogates)]
Stop = Annotated[list[Annotated[Text, Field(max_length=200)]], BeforeValidator(as_list), Field(max_length=16)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=8)]
Seed = Annotated[int, Field(ge=-2**63, lt=2**64)]


class Body(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data):
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


def make_options(max_tokens, num_samples=1, temperature=None, seed=None, top_p=1.0, top_k=40, stop=(), **others):
    """Returns the Options of a request; None: the client left it out. others: fields of Options."""
    if temperature is None:
        temperature = SAMPLING_TEMPERATURE if num_samples > 1 else 0.0
    # In llama.cpp's protocol, -1 leaves the seed to the server.
    if seed is None or seed < 0:
        seed = secrets.randbits(31)
    sampling = Sampling(num_samples, max_tokens, temperature, top_k, max(top_p, 1e-6), tuple(stop), seed % 2**31)
    return Options(sampling, **others)


# llama.cpp's /infill: llama.vim, llama.vscode, scripts.lsp


class ExtraFile(Body):
    filename: Text = ""
    text: Text = ""


class InfillBody(Body):
    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: list[ExtraFile] = Field([], max_length=256)
    prompt: Text = ""  # the beginning of the line at the cursor
    n_predict: int = Field(-1, ge=-1)
    n_cmpl: Count = 1
    n_indent: int = Field(0, ge=0)
    temperature: Temperature | None = None
    top_k: int = 40
    top_p: Probability = 1.0
    seed: Seed | None = None
    stop: Stop = []
    stream: bool = False
    t_max_predict_ms: float = -1.0
    response_fields: list[Text] = Field([], max_length=64)
    id_slot: int = -1

    def options(self, most_tokens):
        max_tokens = most_tokens if self.n_predict < 0 else min(self.n_predict, most_tokens)
        max_ms = self.t_max_predict_ms if self.t_max_predict_ms > 0 else None
        return make_options(max_tokens, self.n_cmpl, self.temperature, self.seed, self.top_p, max(self.top_k, 0),
                            self.stop, min_indent=self.n_indent, max_ms=max_ms)


def infill_answer(completion, index, model):
    """Returns the answer for one sample."""
    timings = completion.timings
    return {
        "index": index, "content": completion.texts[index], "stop": True, "model": model,
        "stop_type": {"end": "eos", "stop": "word", "length": "limit"}[completion.reasons[index]],
        "tokens_predicted": timings.predicted_tokens, "tokens_evaluated": timings.prompt_tokens,
        "tokens_cached": timings.prompt_tokens + timings.predicted_tokens, "truncated": completion.is_cut,
        "timings": {**rate("prompt", timings.read_tokens, timings.prompt_ms),
                    **rate("predicted", timings.predicted_tokens, timings.predicted_ms)}}


def rate(name, count, ms):
    return {f"{name}_n": count, f"{name}_ms": float(ms), f"{name}_per_token_ms": ms / max(count, 1),
            f"{name}_per_second": 1000 * count / ms if ms > 0 else 0.0}


def only_fields(answer, names):
    """Returns the fields of these names, as in response_fields: {"timings/prompt_n": …}."""
    found = {}
    for name in names:
        value = answer
        for key in name.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found


# OpenAI's /v1/completions

# The tokens of gaps before the prefix, before the suffix and at the end, as Zed and others write them into the prompt.
GAP_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # this model, Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, and Continue for other models
)


def split_gap(prompt):
    """Returns (prefix, suffix) if `prompt` is a gap with the tokens of one family, else None. Only the first and the
    last token, and the one token between that separates two texts, are taken away; everything else is text."""
    for before_prefix, before_suffix, end in GAP_TOKENS:
        if prompt.startswith(before_prefix) and prompt.endswith(end):
            texts = prompt[len(before_prefix):-len(end)].split(before_suffix)
            if len(texts) == 2:
                return texts
    return None


class StreamOptions(Body):
    include_usage: bool = False


class CompletionBody(Body):
    prompt: Annotated[list[Text], BeforeValidator(as_list), Field(min_length=1, max_length=1)] = [""]
    suffix: Text | None = None
    max_tokens: int = Field(16, ge=0)
    temperature: Temperature | None = None
    top_p: Probability = 1.0
    n: Count = 1
    stop: Stop = []
    seed: Seed | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="after")
    def _read_gap(self):
        if self.suffix is None and (texts := split_gap(self.prompt[0])):
            self.prompt[0], self.suffix = texts
            if self.temperature is None and self.n == 1:
                self.temperature = 0.0  # an editor asks, which wants no chance
        return self

    def options(self, most_tokens):
        temperature = 1.0 if self.temperature is None else self.temperature  # OpenAI's default
        return make_options(min(self.max_tokens, most_tokens), self.n, temperature, self.seed, self.top_p, top_k=0,
                            stop=self.stop)


FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


def new_answer(model):
    """Returns the fields that all parts of one answer share."""
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model}


def completion_choice(index, text, reason=None):
    return {"index": index, "text": text, "logprobs": None, "finish_reason": FINISH_REASONS.get(reason)}


def usage(completion):
    timings = completion.timings
    return {"prompt_tokens": timings.prompt_tokens, "completion_tokens": timings.predicted_tokens,
            "total_tokens": timings.prompt_tokens + timings.predicted_tokens}
