"""The completion server: two protocols of editors, above one function and one model.

| path                    | whose protocol | clients                                             |
|-------------------------|----------------|-----------------------------------------------------|
| `/infill`               | llama.cpp's    | llama.vim, llama.vscode, scripts.lsp, the page at / |
| `/v1/completions`       | OpenAI's       | openai, Zed, Continue, minuet                       |

It logs and keeps no text of a user, except the tokens of the last prompt, which the engine holds until another client
asks.
"""
import asyncio
import json
import logging
import math
from importlib.resources import files

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from nanochat.serve import protocols
from nanochat.serve.access import Refused, check_access, error_answer
from nanochat.serve.model_thread import ModelThread

MAX_BODY_BYTES = 1 << 20  # a model reads some 10 kB of text at most
BODY_TIMEOUT_S = 10

log = logging.getLogger(__name__)


class Server:
    """The handlers of all paths, and what they share."""

    def __init__(self, completer, *, name, max_tokens, timeout_s, body_timeout_s=BODY_TIMEOUT_S):
        """name: of the model, for clients. The others limit each request; max_tokens: at most half of the context;
        body_timeout_s: the arrival of its body."""
        self.completer = completer
        self.name = name
        self.max_tokens = max_tokens
        self.timeout_s = timeout_s
        self.body_timeout_s = body_timeout_s
        self.thread = ModelThread()

    def events(self, request, prefix, suffix, extra, options, slot=None):
        """Returns the Job.events of a completion, whose last one is a Completion. slot: of the program that asks; its
        newer request replaces a waiting one of the same slot. Raises Refused."""
        program = request.client and request.client.host, request.headers.get("user-agent")

        def work(job):
            completion = self.completer.complete(prefix, suffix, extra, options, job.on_text, job.keep_going, program)
            # Here, because most completions of editors are aborted, and those are logged, too.
            timings = completion.timings
            log.info("%s: %d tokens of prompt, %d of them read in %.0f ms; %d generated of at most %d in %.0f ms",
                     request.url.path, timings.prompt_tokens, timings.read_tokens, timings.prompt_ms,
                     completion.num_tokens, options.sampling.max_tokens, timings.predicted_ms)
            return completion

        client = None if slot is None else (program, slot)
        return self.thread.start(work, client, self.timeout_s).events(request)

    # --- llama.cpp

    async def infill(self, request: Request):
        body = await read_body(request, protocols.InfillBody, self.body_timeout_s)
        options = body.options(self.max_tokens)
        samples = range(options.sampling.num_samples)
        is_warm_up = body.n_predict == 0
        slot = None if is_warm_up or body.id_slot < 0 else body.id_slot
        if is_warm_up and not (body.input_prefix or body.prompt or self.completer.extra_tokens):
            return JSONResponse({})  # llama.vim's other files, which would only evict what the model has read

        def chunk(i, text):
            return {"index": i, "content": text, "stop": False}

        def last(completion):
            return [protocols.infill_answer(completion, i, self.name) | {"content": ""} for i in samples]

        events = self.events(request, body.input_prefix + body.prompt, body.input_suffix,
                             [(file.filename, file.text) for file in body.input_extra], options, slot)
        if body.stream:
            return await stream(events, chunk, last)
        completion = await finished(events)
        answers = [protocols.infill_answer(completion, i, self.name) for i in samples]
        if body.response_fields:
            answers = [protocols.only_fields(answer, body.response_fields) for answer in answers]
        return JSONResponse(answers if len(samples) > 1 else answers[0])

    # --- OpenAI

    async def completions(self, request: Request):
        body = await read_body(request, protocols.CompletionBody, self.body_timeout_s)
        answer = protocols.new_answer("text_completion", self.name)
        [prompt] = body.prompt
        shown = prompt if body.echo else ""

        def chunk(i, text):
            return answer | {"choices": [protocols.completion_choice(i, text)]}

        def last(completion):
            chunks = [answer | {"choices": [protocols.completion_choice(i, "", reason)]}
                      for i, reason in enumerate(completion.reasons)]
            if body.stream_options.include_usage:
                chunks.append(answer | {"choices": [], "usage": protocols.usage(completion)})
            return chunks

        events = self.events(request, prompt, body.suffix, [], body.options(self.max_tokens))
        if body.stream:
            first = []
            if shown:
                first = [chunk(i, shown) for i in range(body.n)]
            return await stream(events, chunk, last, first)
        completion = await finished(events)
        choices = [protocols.completion_choice(i, shown + completion.texts[i], completion.reasons[i])
                   for i in range(body.n)]
        return JSONResponse(answer | {"usage": protocols.usage(completion), "choices": choices})

    # --- without the model

    async def models(self):
        return {"object": "list", "data": [{"id": self.name, "object": "model", "created": 0,
                                            "owned_by": "nanochat-tpu"}]}

    async def health(self):
        return {"status": "ok"}

    async def page(self):
        return HTMLResponse(files("nanochat.serve").joinpath("page.html").read_text(encoding="utf-8"), headers={
            "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                                       "connect-src 'self'; frame-ancestors 'none'"})


def make_app(server, api_key=None):
    """Returns the FastAPI application. api_key: the bearer token of clients, except for the page and /health."""
    async def check(request: Request):
        check_access(request, api_key)

    # openapi_url: its documentation loads scripts of another site.
    app = FastAPI(openapi_url=None, dependencies=[Depends(check)])
    for path, handler in {"/": server.page, "/health": server.health, "/v1/models": server.models}.items():
        app.api_route(path, methods=["GET", "HEAD"])(handler)
    app.post("/infill")(server.infill)
    app.post("/v1/completions")(server.completions)
    app.add_exception_handler(Refused, answer_refused)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(Exception, answer_failure)
    return app


# Requests and answers


def answer_refused(request, error):
    return error_answer(error.status, error.message)


def answer_http_error(request, error):
    return error_answer(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}")


def answer_failure(request, error):
    return error_answer(500, f"the server failed ({type(error).__name__}): its log says where")


async def read_body(request, model, timeout_s):
    """Returns the request's JSON as a `model`. Raises Refused, whose message repeats nothing of the request."""
    try:
        # Python makes no int of more than 4300 digits.
        data = json.loads(await asyncio.wait_for(read_bytes(request), timeout_s),
                          parse_int=lambda digits: int(digits) if len(digits) < 4300 else math.inf)
    except asyncio.TimeoutError:
        raise Refused(408, f"the request's body did not arrive within {timeout_s:g} s") from None
    except (ValueError, RecursionError):  # ValueError also for other bytes than UTF-8
        raise Refused(400, "the request's body is not JSON in UTF-8") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise Refused(422, protocols.refusal(error)) from None


async def read_bytes(request):
    """Returns the body. Raises Refused once it is too long, or if the client hangs up."""
    body = b""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Refused(499, "you hung up")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, f"the request's body is longer than {MAX_BODY_BYTES:,} bytes: send less text")
        if not message.get("more_body"):
            return body


async def finished(events):
    """Returns the Completion that comes last. Raises Refused."""
    async for event in events:
        completion = event
    return completion


async def stream(events, chunk, last, first=()):
    """Returns the answer that streams `first`, each chunk(sample, text) and last(completion) as server-sent events.
    Raises Refused if the model could not begin."""
    async def lines(event):
        for data in first:
            yield f"data: {json.dumps(data)}\n\n"
        try:
            while isinstance(event, tuple):
                yield f"data: {json.dumps(chunk(*event))}\n\n"
                event = await anext(events)
            for data in last(event):
                yield f"data: {json.dumps(data)}\n\n"
        except Refused as error:
            yield f"data: {error_answer(error.status, error.message).body.decode()}\n\n"
        finally:
            await events.aclose()
        yield "data: [DONE]\n\n"

    # The first event comes before the answer begins. So a refused request gets the status of the refusal, and not 200
    # with an error in its stream.
    event = await anext(events)
    return StreamingResponse(lines(event), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
