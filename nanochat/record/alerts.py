"""Alerts for a run that nobody watches: $WEBHOOK is an address that gets each as {"text": …}, as Slack takes them."""
import http.client
import json
import os
import socket
import urllib.request

from nanochat.common import say

TIMEOUT_S = 5


def alert(text):
    """Sends `text` to $WEBHOOK, if it is set. A failure is a warning."""
    url = os.environ.get("WEBHOOK")
    if not url:
        return
    if problem := post(url, f"{socket.gethostname()}: {text}"):
        say(f"warning: $WEBHOOK did not take an alert ({problem})")


def post(url, text):
    """Sends {"text": text} to an address. Returns the kind of error, or "". The address may be secret, so it is not in
    what is returned."""
    body = json.dumps({"text": text}).encode()
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return type(error).__name__
    return ""
