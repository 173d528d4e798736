"""The server's protocols, as clients see them."""
import json
import re
from dataclasses import replace

import httpx
import pytest

from nanochat.serve.completer import copied
from nanochat.serve.model_thread import MAX_WAITING
from nanochat.serve.protocols import CompletionBody, split_gap
from tests.serve.conftest import AFTER, BEFORE, REST, SOURCE, Requests, SlowCompleter, serving, wait_until

LINE = "    ret"
VIM = {  # as llama.vim sends it
    "id_slot": 0, "input_prefix": BEFORE, "input_suffix": AFTER, "prompt": LINE, "n_predict": 128, "stop": [],
    "input_extra": [{"text": "int x;\n", "time": 1.0, "filename": "tmp"}], "n_indent": 4, "top_k": 40, "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60_000,
    "response_fields": ["content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
                        "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
                        "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated",
                        "tokens_cached"]}


def post(client, path, status=200, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def events_of(client, path, **body):
    """The data of the server-sent events of an answer."""
    with client.stream("POST", path, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return list(map(json.loads, lines))


# The protocols


def prompt_n(client, **body):
    """How many tokens of the prompt the model reads for an /infill."""
    return post(client, "/infill", **body)["timings/prompt_n"]


def test_llama_vim_gets_the_fields_that_it_asks_for_and_llama_vscode_all_in_each_of_several_completions(client):
    answer = post(client, "/infill", **VIM)
    assert answer.keys() == set(VIM["response_fields"])
    assert answer["content"] == REST and answer["timings/predicted_n"] > 0 and answer["truncated"] is False
    body = VIM | {"response_fields": []}
    answer = post(client, "/infill", **body)
    assert answer["content"] == REST and answer["timings"]["predicted_ms"] > 0 and answer["stop_type"] == "eos"
    answers = post(client, "/infill", **body | {"n_cmpl": 2, "seed": 3})
    assert [answer["index"] for answer in answers] == [0, 1]
    chunks = events_of(client, "/infill", **body | {"stream": True})
    assert "".join(chunk["content"] for chunk in chunks) == REST
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_character_or_a_new_line_makes_the_model_read_at_most_16_tokens(client):
    suffix = "\n}\n" + 8 * "// a line\n"
    typed = "  x;\n  y;\n  r"
    for at in range(2, len(typed)):
        above, newline, line = typed[:at].rpartition("\n")
        body = VIM | {"input_prefix": BEFORE + above + newline, "prompt": line, "input_suffix": suffix}
        read = prompt_n(client, **body)
        assert 0 < read <= 16 or at == 2
    # Somewhere else, it reads that place's prompt.
    moved = body | {"input_prefix": BEFORE, "prompt": "  x", "input_suffix": typed[3:] + suffix}
    assert prompt_n(client, **moved) > 16


def test_a_warm_up_reads_the_prompt_and_answers_nothing(client):
    post(client, "/infill", **VIM | {"input_prefix": "int x;\n"})
    assert post(client, "/infill", **VIM | {"n_predict": 0, "response_fields": [""]}) == {}
    assert prompt_n(client, **VIM) <= 16
    other_files = {"input_prefix": "", "prompt": "", "input_suffix": "", "n_predict": 0, "response_fields": [""]}
    assert post(client, "/infill", **VIM | other_files) == {}
    assert prompt_n(client, **VIM) <= 16  # they have not replaced what was read


def text_of(answer):
    [choice] = answer.get("choices", [answer])
    return choice.get("content", choice.get("text"))


@pytest.mark.parametrize("path, name", [("/infill", "n_predict"), ("/v1/completions", "max_tokens")])
def test_no_tokens_are_no_text_whole_and_streamed(client, path, name):
    body = {"prompt": BEFORE, name: 0, "temperature": 0}
    assert text_of(post(client, path, **body)) == ""
    assert [text_of(event) for event in events_of(client, path, **body, stream=True)] == [""]
    assert text_of(post(client, path, **body | {name: 3})) != ""


@pytest.mark.parametrize("path, body, message", [
    ("/infill", {"stop": 5}, "stop: Input should be a valid list"), ("/infill", {"input_extra": [3]}, "extra.0: "),
    ("/infill", {"input_prefix": 3}, "input_prefix: Input should be a valid string"), ("/infill", [], "the body: "),
    ("/infill", {"n_predict": 1.5}, "n_predict: "), ("/infill", {"n_predict": -2}, "greater than or equal to -1"),
    ("/infill", {"stream": "x"}, "valid boolean"), ("/infill", {"temperature": 3}, "less than or equal to 2"),
    ("/infill", {"temperature": []}, "temperature: "), ("/infill", {"stop": ["a"] * 17}, "at most 16 items"),
    ("/infill", {"n_predict": 1e300}, "exceeded maximum size"), ("/infill", {"seed": 2**64}, "Input should be less"),
    ("/v1/completions", {"prompt": []}, "at least 1"),
    ("/infill", b'{"n_predict": 1e999}', "n_predict: Input should be a finite number"),
    ("/infill", b'{"n_predict": ', "the request's body is not JSON"),
])
def test_a_refusal_names_the_field_and_what_it_should_be(client, path, body, message):
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    said = answer.json()["error"]["message"]
    assert answer.status_code in (400, 422) and message in said


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_a_file_gets_its_own_ends_of_lines(client, newline):
    """The model reads and writes LF."""
    def own(text):
        return text.replace("\n", newline)

    middle = "    return a + b;\n}\n\nint twice(int a) {"
    before, after = SOURCE.split(middle)
    texts = []
    for turned in (str, own):
        body = {"prompt": turned(before), "suffix": turned(after), "max_tokens": 64, "temperature": 0}
        texts.append(post(client, "/v1/completions", **body)["choices"][0]["text"])
        streamed = events_of(client, "/v1/completions", **body, stream=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == texts[-1]
        vim = VIM | {"input_prefix": turned(before), "prompt": "", "input_suffix": turned(after), "n_indent": 0}
        assert post(client, "/infill", **vim)["content"] == texts[-1]
    assert texts[1] == own(texts[0]) != texts[0]
    stopped = post(client, "/v1/completions", **body, stop=own(";\n}"))["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("    return a + b", "stop")


def test_openais_completion_with_a_suffix(client):
    body = {"model": "any", "prompt": BEFORE + LINE, "suffix": AFTER, "max_tokens": 40, "temperature": 0}
    answer = post(client, "/v1/completions", **body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["object"]) == (REST, "stop", "text_completion")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    cut = post(client, "/v1/completions", **body | {"max_tokens": 3})["choices"][0]
    assert REST.startswith(cut["text"]) and cut["finish_reason"] == "length"
    stopped = post(client, "/v1/completions", **body | {"stop": " +"})["choices"][0]
    assert stopped["text"] == "urn a" and stopped["finish_reason"] == "stop"


def test_openais_stream_gives_the_same_text_and_usage_where_it_is_asked_for(client):
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 40, "temperature": 1, "n": 2, "seed": 5}
    whole = post(client, "/v1/completions", **body)
    chunks = events_of(client, "/v1/completions", **body, stream=True, stream_options={"include_usage": True})
    assert chunks.pop()["usage"] == whole["usage"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for i in range(2):
        assert "".join(c["text"] for c in choices if c["index"] == i) == whole["choices"][i]["text"]
        assert [c["finish_reason"] for c in choices if c["index"] == i][-1] == whole["choices"][i]["finish_reason"]


def test_a_line_that_stands_in_the_file_is_copied_where_the_model_agrees(untrained):
    """This model agrees with everything that repeats for so long."""
    begin, rest = "() {\n    int total = 0;\n", "gress(total, last);"
    copied_from = f"void f{begin}    report_pro{rest}\n}}\n"
    body = VIM | {"input_prefix": f"{copied_from}\nvoid g{begin}", "prompt": "    report_pro"}
    without = body | {"input_prefix": f"void g{begin}"}
    with serving(replace(untrained, windows={})) as (client, _):
        alone = post(client, "/infill", **without)["content"]
        assert post(client, "/infill", **body)["content"] == rest
        assert "".join(chunk["content"] for chunk in events_of(client, "/infill", **body | {"stream": True})) == rest
        assert post(client, "/infill", **body | {"temperature": 0.8, "seed": 1})["content"] != rest
        below = without | {"input_suffix": f"\n}}\n\n{copied_from}"}
        assert post(client, "/infill", **below)["content"] == rest != alone
    with serving(replace(untrained, copies=False, windows={})) as (client, _):
        assert post(client, "/infill", **body)["content"] != rest


def test_a_copy_that_the_model_finds_unlikely_is_refused(completer):
    body = VIM | {"input_suffix": "\n}\n\nint other() {\n    ret@#~;\n}\n"}
    assert copied(BEFORE + LINE, body["input_suffix"]) == ("@#~;", 8)
    texts = []
    for copies in (True, False):
        with serving(replace(completer, copies=copies, windows={})) as (client, _):
            texts.append(post(client, "/infill", **body)["content"])
    assert texts[0] == texts[1] != "@#~;"


def test_without_a_suffix_text_is_continued_with_the_same_seed_alike(client):
    body = {"prompt": "int main(", "max_tokens": 16, "seed": 1, "temperature": 1.0}
    texts = [post(client, "/v1/completions", **body | {"seed": seed})["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("form", ["<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>",
                                  "<fim_prefix>{}<fim_suffix>{}<fim_middle>"])
def test_a_prompt_with_the_tokens_of_a_gap_is_a_gap_as_zed_and_continue_send_it(client, form):
    prompt = form.format(BEFORE + LINE, AFTER)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 256, "stop": ["<|endoftext|>", "<fim_prefix>"]}
    answer = post(client, "/v1/completions", **body)
    assert answer["choices"][0]["text"] == REST and answer["choices"][0]["finish_reason"] == "stop"
    assert {"id", "object", "created", "model", "usage"} <= answer.keys()  # without which Zed takes no answer
    whole = post(client, "/v1/completions", prompt=BEFORE + LINE, suffix=AFTER, max_tokens=64, temperature=0)
    assert answer["usage"] == whole["usage"]


def test_names_of_tokens_inside_a_text_stay_text():
    prefix, suffix, middle = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
    assert split_gap(f"{prefix}{suffix}{middle}") == ["", ""]
    assert split_gap(f"{prefix}a{prefix}{middle}\n{suffix}b<|bos|>{middle}{middle}") == [
        f"a{prefix}{middle}\n", f"b<|bos|>{middle}"]
    for text in (f" {prefix}a{suffix}b{middle}", f"{prefix}a{suffix}b{middle}\n", f"{prefix}a{suffix}b{suffix}{middle}",
                 f"{prefix}a{middle}", f"{suffix}b{prefix}a{middle}", f"<fim_prefix>a{suffix}b{middle}", prefix, ""):
        assert split_gap(text) is None
    body = CompletionBody(prompt=f"{prefix}a{suffix}b{middle}", suffix="c")
    assert (body.prompt, body.suffix) == ([f"{prefix}a{suffix}b{middle}"], "c")


def test_models_health_and_the_page(client):
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/health").json() == {"status": "ok"}
    page = client.get("/").text
    assert "<textarea" in page and not re.findall(r"(?:src|href)=\"(?!data:)|https?://", page)


# One model, several requests


LONG = {"prompt": "int main() {", "max_tokens": 48, "seed": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_the_model(slow, stream):
    slow, client, server = slow
    with httpx.Client(base_url=client.base_url, timeout=60) as other:
        def hang_up():
            with other.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
                next(answer.iter_lines())

        def give_up():
            with pytest.raises(httpx.ReadTimeout):
                other.post("/v1/completions", json=LONG, timeout=1)  # 48 tokens take 2 s

        hang_up() if stream else give_up()
    assert slow.begun.is_set()
    [job] = server.thread._jobs
    wait_until(lambda: job._is_cancelled)
    asked = slow.asked
    wait_until(job.future.done)
    assert slow.asked - asked <= 2 and slow.asked < 47
    assert client.get("/health").status_code == 200


def test_a_newer_request_of_the_same_slot_replaces_the_one_that_waits_and_no_other(slow):
    """A user is a person, who may ask for several texts at the same time."""
    slow, client, server = slow
    requests = Requests(client)
    requests.send("running", "/v1/completions", LONG)
    slow.begun.wait(30)
    requests.send("old", "/infill", VIM | {"prompt": "    r"})
    wait_until(lambda: server.thread.num_waiting() == 1)
    without_slot = {name: value for name, value in VIM.items() if name != "id_slot"}
    others = [("/infill", VIM | {"id_slot": 1}), *2 * [("/infill", without_slot)],
              *2 * [("/v1/completions", LONG | {"user": "team"})]]
    for number, (path, body) in enumerate(others):
        requests.send(number, path, body)
        wait_until(lambda waiting=number + 2: server.thread.num_waiting() == waiting)
    requests.send("new", "/infill", VIM)
    wait_until(lambda: "old" in requests.answers)
    assert "newer request" in requests.answers["old"].json()["error"]["message"]
    slow.go_on.set()
    assert requests.statuses() == {**dict.fromkeys(["running", *range(5), "new"], 200), "old": 499}
    assert BEFORE + LINE in slow.prefixes and BEFORE + "    r" not in slow.prefixes


def test_more_requests_than_may_wait_are_refused_and_the_server_answers_while_the_model_generates(slow):
    slow, client, server = slow
    requests = Requests(client)
    requests.send("running", "/v1/completions", LONG)
    slow.begun.wait(30)
    for number in range(MAX_WAITING):
        requests.send(number, "/v1/completions", LONG | {"max_tokens": 1})
    wait_until(lambda: server.thread.num_waiting() == MAX_WAITING)
    assert "are waiting" in post(client, "/v1/completions", 503, **LONG)["error"]["message"]
    assert client.get("/health").status_code == 200 and not requests.answers
    slow.go_on.set()
    assert set(requests.statuses().values()) == {200}


def test_a_request_gets_what_is_there_when_its_time_is_up(untrained):
    with serving(SlowCompleter(untrained), timeout_s=1) as (client, _):
        requests = Requests(client)
        for number in range(2):
            requests.send(number, "/v1/completions", LONG)
        requests.statuses()
    ran, waited = sorted(requests.answers.values(), key=lambda answer: answer.status_code)
    assert ran.json()["choices"][0]["finish_reason"] == "length" and 0 < ran.json()["usage"]["completion_tokens"] < 47
    assert waited.status_code in (200, 503)  # 200: its turn came at the very end of its time
    assert waited.status_code == 200 or "--timeout_s" in waited.json()["error"]["message"]
