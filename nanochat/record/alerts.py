"""Alerts for a run that nobody watches: $WEBHOOK is an address that gets each as {"text": …}, as Slack takes them."""
import http.client
import json
import os
import socket
import urllib.request

from nanochat.common import say

TIMEOUT_S = 5


def alert(text):
    """Sends `text` to $WEBHOOK, if it is set. A failure is a warning, which does not show the address: it is secret."""
    url = os.environ.get("WEBHOOK")
    if not url or os.environ.get("RANK", "0") != "0":  # torchrun starts all ranks alike
        return
    body = json.dumps({"text": f"{socket.gethostname()}: {text}"}).encode()
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        say(f"warning: $WEBHOOK did not take an alert ({type(error).__name__})")
