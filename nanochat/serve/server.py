"""The completion server: two protocols of editors, above one function and one model.

| path                    | whose protocol | clients                                             |
|-------------------------|----------------|-----------------------------------------------------|
| `/infill`               | llama.cpp's    | llama.vim, llama.vscode, scripts.lsp, the page at / |
| `/v1/completions`       | OpenAI's       | openai, Zed, Continue, minuet                       |

It logs and keeps no text of a user, except the tokens of the last prompt.
"""
import asyncio
import json
import logging
import socket
from importlib.resources import files

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from nanochat.common import BadInput
from nanochat.serve import protocols
from nanochat.serve.access import Refused, check_access, error_answer
from nanochat.serve.model_thread import ModelThread

MAX_BODY_BYTES = 1 << 20  # a model reads some 10 kB of text at most
BODY_S = 10  # for a request's body to come
KEEP_ALIVE_S = 75  # longer than a person's pause, after which an editor reuses its connection

log = logging.getLogger(__name__)


class Server:
    """The handlers of all paths, and what they share."""

    def __init__(self, completer, *, name, max_tokens, timeout_s):
        """name: of the model, for clients. The others limit each request; max_tokens: at most half of the context."""
        self.completer = completer
        self.name = name
        self.max_tokens = max_tokens
        self.timeout_s = timeout_s
        self.thread = ModelThread()

    def events(self, request, prefix, suffix, extra, options, slot=None):
        """Returns the Job.events of a completion, whose last one is a Completion. slot: of the program that asks; its
        newer request replaces a waiting one of the same slot. Raises Refused."""
        def work(job):
            completion = self.completer.complete(prefix, suffix, extra, options, job.on_text, job.keep_going)
            # Here, because most completions of editors are aborted, and those are logged, too.
            timings = completion.timings
            log.info("%s: %d tokens of prompt, %d of them read in %.0f ms; %d generated of at most %d in %.0f ms",
                     request.url.path, timings.prompt_tokens, timings.read_tokens, timings.prompt_ms,
                     timings.predicted_tokens, options.sampling.max_tokens, timings.predicted_ms)
            return completion

        client = None if slot is None else (request.headers.get("user-agent"), slot)
        return self.thread.start(work, client, self.timeout_s).events(request)

    # --- llama.cpp

    async def infill(self, request: Request):
        body = await read_body(request, protocols.InfillBody)
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
        body = await read_body(request, protocols.CompletionBody)
        answer = protocols.new_answer(self.name)
        [prompt] = body.prompt

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
            return await stream(events, chunk, last)
        completion = await finished(events)
        choices = [protocols.completion_choice(i, completion.texts[i], completion.reasons[i]) for i in range(body.n)]
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


def listen(port):
    """Returns a socket that listens at 127.0.0.1. Raises BadInput."""
    # With IPPROTO_TCP, asyncio sets TCP_NODELAY. Without it, some answers wait 40 ms for the client.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise BadInput(f"--port={port}: {error.strerror}: choose another port; 0: a free one") from None
    return listening


def make_runner(server):
    """Returns the uvicorn.Server of a Server: run(sockets=[…]) serves until a signal, or until `should_exit`."""
    # uvicorn's log of requests would show queries; the server logs each completion itself. A lifespan, which the
    # application does without, would log a second Ctrl-C as a failure.
    return uvicorn.Server(uvicorn.Config(
        make_app(server), log_config=None, access_log=False, log_level="warning", ws="none", lifespan="off",
        timeout_graceful_shutdown=2, timeout_keep_alive=KEEP_ALIVE_S))


def make_app(server):
    """Returns the FastAPI application."""
    # openapi_url: its documentation loads scripts of another site.
    app = FastAPI(openapi_url=None, dependencies=[Depends(check_access)])
    for path, handler in {"/": server.page, "/health": server.health, "/v1/models": server.models}.items():
        app.get(path)(handler)
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


async def read_body(request, model):
    """Returns the request's JSON as a `model`. Raises Refused, whose message repeats nothing of the request."""
    try:
        data = json.loads(await asyncio.wait_for(read_bytes(request), BODY_S))
    except asyncio.TimeoutError:
        raise Refused(408, f"the request's body did not come within {BODY_S} s") from None
    except (ValueError, RecursionError):  # ValueError also for other bytes than UTF-8, and an int of 4300 digits
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


async def stream(events, chunk, last):
    """Returns the answer that streams each chunk(sample, text) and last(completion) as server-sent events. Raises
    Refused if the model could not begin."""
    async def lines(event):
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
