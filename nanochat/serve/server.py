"""The completion server: three protocols that editors speak, above one function and one model.

| path                    | whose protocol                               | clients                                |
|-------------------------|----------------------------------------------|----------------------------------------|
| `/infill`               | llama.cpp's                                  | llama.vim, llama.vscode, the page at / |
| `/v1/completions`       | OpenAI's; with `segments` in it, Tabby's     | openai, minuet, Tabby                  |
| `/v1/fim/completions`   | Codestral's                                  | Continue, minuet                       |

No text of a user is logged or kept: the engine holds the tokens of the last prompt, and nothing else remains.
"""
import asyncio
import contextlib
import hmac
import json
import logging
import os
import platform
from importlib.resources import files

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from nanochat.serve import protocols
from nanochat.serve.counters import Counters, CountRequests
from nanochat.serve.model_thread import ModelThread, Refused

MAX_BODY_BYTES = 1 << 20  # a model reads some 10 kB of text at most
BODY_TIMEOUT_S = 10
LOOPBACK = ("127.0.0.1", "localhost", "::1")

log = logging.getLogger(__name__)


class Server:
    """The handlers of all paths, and what they share."""

    def __init__(self, completer, *, name, device, max_tokens, timeout_s, body_timeout_s=BODY_TIMEOUT_S):
        """name: what the clients call the model. max_tokens, timeout_s: limits of each request. body_timeout_s: how
        long a request's body may take to arrive."""
        self.completer = completer
        self.name = name
        self.device = device
        self.max_tokens = min(max_tokens, completer.context // 2)
        self.timeout_s = timeout_s
        self.body_timeout_s = body_timeout_s
        self.thread = ModelThread()
        self.counters = Counters(self.thread.num_waiting)

    # --- one function below all protocols

    async def events(self, request, prefix, suffix, extra, options, client=None):
        """Yields (sample, text) for each piece of text, and at last the Completion. Raises Refused."""
        def work(job):
            return self.completer.complete(prefix, suffix, extra, options, job.on_text, job.keep_going)

        if client is not None:
            # A client is a program on a machine. Two people who complete in the same protocol do not replace each
            # other's requests.
            client = (request.client and request.client.host, request.headers.get("user-agent"), client)
        job = self.thread.start(work, client, self.timeout_s)
        # If this generator is closed, so is job.events at once, which cancels the job.
        async with contextlib.aclosing(job.events(request)) as events:
            async for event in events:
                if not isinstance(event, tuple):
                    self.count(request.url.path, event)
                yield event

    def count(self, path, completion):
        self.counters.count(completion)
        timings = completion.timings
        log.info("%s: %d tokens of prompt, %d of them read in %.0f ms; %d generated in %.0f ms", path,
                 timings.prompt_tokens, timings.read_tokens, timings.prompt_ms, completion.num_tokens,
                 timings.predicted_ms)

    # --- llama.cpp

    async def infill(self, request: Request):
        body = await read_body(request, protocols.InfillBody, self.body_timeout_s)
        options = body.options(self.max_tokens)
        samples = range(options.sampling.num_samples)
        is_warm_up = body.n_predict == 0
        if is_warm_up and not (body.input_prefix or body.prompt or self.completer.extra_tokens):
            return JSONResponse({})  # llama.vim's other files, which would only replace what the model has read

        def chunk(i, text):
            return {"index": i, "content": text, "stop": False}

        def last(completion):
            return [protocols.infill_answer(completion, i, self.name) | {"content": ""} for i in samples]

        events = self.events(request, body.input_prefix + body.prompt, body.input_suffix,
                             [file.text for file in body.input_extra], options,
                             client=None if is_warm_up else f"infill {body.id_slot}")
        if body.stream:
            return await stream(events, chunk, last)
        completion = await finished(events)
        answers = [protocols.infill_answer(completion, i, self.name) for i in samples]
        if body.response_fields:
            answers = [protocols.only_fields(answer, body.response_fields) for answer in answers]
        return JSONResponse(answers if len(samples) > 1 else answers[0])

    # --- OpenAI and Tabby

    async def completions(self, request: Request):
        body = await read_body(request, protocols.CompletionBody, self.body_timeout_s)
        answer = protocols.new_answer("text_completion", self.name)
        if body.segments:
            return await self.tabby(request, body, answer)
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

        events = self.events(request, prompt, body.suffix, [], body.options(self.max_tokens), client=body.user)
        if body.stream:
            return await stream(events, chunk, last, [chunk(i, shown) for i in range(body.n)] if shown else [])
        completion = await finished(events)
        choices = [protocols.completion_choice(i, shown + completion.texts[i], completion.reasons[i])
                   for i in range(body.n)]
        return JSONResponse(answer | {"usage": protocols.usage(completion), "choices": choices})

    async def tabby(self, request, body, answer):
        segments = body.segments
        extra = [snippet.body for snippet in segments.relevant_snippets_from_changed_files]
        options = body.tabby_options(self.max_tokens)
        completion = await finished(self.events(request, segments.prefix, segments.suffix, extra, options, "tabby"))
        choice = protocols.completion_choice(0, completion.texts[0], completion.reasons[0])
        return JSONResponse(answer | {"choices": [choice]})

    # --- Codestral

    async def fim(self, request: Request):
        body = await read_body(request, protocols.FimBody, self.body_timeout_s)
        events = self.events(request, body.prompt, body.suffix, [], body.options(self.max_tokens), client="fim")
        answer = protocols.new_answer("chat.completion.chunk" if body.stream else "chat.completion", self.name)

        def chunk(i, text):
            return answer | {"choices": [protocols.fim_chunk(i, text)]}

        def last(completion):
            chunk = protocols.fim_chunk(0, "", completion.reasons[0])
            return [answer | {"usage": protocols.usage(completion), "choices": [chunk]}]

        if body.stream:
            return await stream(events, chunk, last)
        completion = await finished(events)
        choice = protocols.fim_choice(0, completion.texts[0], completion.reasons[0])
        return JSONResponse(answer | {"usage": protocols.usage(completion), "choices": [choice]})

    # --- what needs no model

    async def models(self):
        return {"object": "list", "data": [{"id": self.name, "object": "model", "created": 0,
                                            "owned_by": "nanochat-tpu"}]}

    async def health(self):
        return {"status": "ok"}

    async def tabby_health(self):
        return {"model": self.name, "device": self.device, "arch": platform.machine(), "cpu_info": "",
                "cpu_count": os.cpu_count(), "cuda_devices": [],
                # A Tabby client asks versions from 0.9 on for settings, which this server does not have.
                "version": {"build_date": "", "build_timestamp": "", "git_sha": "", "git_describe": "v0.1.0"}}

    async def show_metrics(self):
        return Response(self.counters.text(), media_type=self.counters.CONTENT_TYPE)

    async def page(self):
        return HTMLResponse(files("nanochat.serve").joinpath("page.html").read_text(encoding="utf-8"), headers={
            "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                                       "connect-src 'self'; frame-ancestors 'none'"})


def make_app(server, *, api_key=None, hosts=LOOPBACK):
    """Returns the FastAPI application.

    api_key: what clients must send as a bearer token; the page and /health need none. hosts: without a key, requests
    must name one of these hosts, so that no page of another site that a browser shows can use the server.
    """
    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        server.thread.stop()

    async def check_key(request: Request):
        sent = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        # The comparison takes equally long for every key, so its time does not tell how much of a guess is right.
        if api_key and not hmac.compare_digest(sent, api_key.encode()):
            raise Refused(401, "this server needs its --api_key, as the header Authorization: Bearer KEY")

    app = FastAPI(lifespan=lifespan, openapi_url=None)  # whose page of documentation loads scripts of another site
    app.add_middleware(CountRequests, counters=server.counters)
    if not api_key:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts, "[::1]"], www_redirect=False)
    app.get("/")(server.page)
    app.get("/health")(server.health)
    with_key = {"dependencies": [Depends(check_key)]}
    app.post("/infill", **with_key)(server.infill)
    app.post("/v1/completions", **with_key)(server.completions)
    app.post("/v1/fim/completions", **with_key)(server.fim)
    app.get("/v1/models", **with_key)(server.models)
    app.get("/v1/health", **with_key)(server.tabby_health)
    app.get("/metrics", **with_key)(server.show_metrics)
    app.add_exception_handler(Refused, answer_refused)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(Exception, answer_failure)
    return app


# -----------------------------------------------------------------------------
# Requests and answers


def error_answer(status, message):
    kind = "invalid_request_error" if status < 500 else "server_error"
    # A client whose body was not read to its end would go on sending it.
    headers = {"Connection": "close"} if status in (408, 413) else None
    return JSONResponse({"error": {"message": message, "code": status, "type": kind}}, status, headers)


def answer_refused(request, error):
    return error_answer(error.status, error.message)


def answer_http_error(request, error):
    return error_answer(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}")


def answer_failure(request, error):
    return error_answer(500, f"the server failed ({type(error).__name__}): its log says where")


async def read_body(request, model, timeout_s):
    """Returns the request's JSON as an object of the data class `model`. Raises Refused; what it says does not repeat
    what was sent."""
    try:
        data = json.loads(await asyncio.wait_for(read_bytes(request), timeout_s))
    except asyncio.TimeoutError:
        raise Refused(408, f"the request's body did not arrive within {timeout_s:g} s") from None
    except (ValueError, RecursionError):  # of which bytes that are not UTF-8 and endless numbers are kinds
        raise Refused(400, "the request's body is not JSON in UTF-8") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(422, f"{where}: {first['msg']}") from None


async def read_bytes(request):
    """Returns the body. Raises Refused as soon as it is too long, or if the client hangs up."""
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
    """Returns the answer that sends each chunk(sample, text) as it comes, and the chunks of last(completion) at the
    end, as server-sent events. Raises Refused if the model could not begin."""
    # The first event is awaited before the answer begins, because an answer that has begun cannot change its status: a
    # request that is refused gets the status of the refusal, and not 200 with an error in its stream.
    event = await anext(events)

    async def lines():
        nonlocal event
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

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
