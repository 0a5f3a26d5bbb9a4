"""Tell a web hook how a run goes. Whatever becomes of the message, the run goes on.

The URL is a secret (who has it can post), so configurations and logs name only the environment variable that holds it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from clusterrun.config.schema import NotifyConfig
from clusterrun.errors import ConfigError


@dataclass(frozen=True)
class Message:
    """What is posted, as JSON. ``text`` is what chat services show."""

    event: str  # done, failed, requeued, stopped, cancelled
    run: str
    text: str
    job_id: str
    attempt: int
    ending: str
    exit_code: int | None
    saved_step: int | None


def check(notify: NotifyConfig) -> None:
    """Whether there is a URL to post to. Raises ConfigError, without the URL."""
    name = notify.webhook_env
    if name is None:
        return
    url = os.environ.get(name)
    if not url:
        raise ConfigError(f"notify.webhook_env={name}: no such variable in the environment; export {name}=https://...")
    if not url.startswith(("https://", "http://")):
        raise ConfigError(f"notify.webhook_env={name}: what the variable holds is no http(s) URL")


def send(notify: NotifyConfig, message: Message, say: Callable[[str], None]) -> bool:
    """Post within the time limit. Returns whether the hook took it; says so when not. Never raises."""
    name = notify.webhook_env
    url = os.environ.get(name, "") if name else ""
    if not name:
        return False
    if not url.startswith(("https://", "http://")):
        say(f"notify: {name} holds no http(s) URL here, so nobody was told")
        return False
    result: list[str] = []
    # In a thread: looking up a host name knows no time limit.
    thread = threading.Thread(target=_post, args=(url, message, notify.timeout_s, result), daemon=True, name="notify")
    thread.start()
    thread.join(notify.timeout_s)
    problem = result[0] if result else f"no answer in {notify.timeout_s:g} s"
    if problem:
        say(f"notify: the web hook of {name} was not told ({problem})")
    return not problem


def _post(url: str, message: Message, timeout_s: float, result: list[str]) -> None:
    try:
        body = json.dumps(asdict(message)).encode()
        import urllib.request  # every start of a run would pay for it

        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s):
            result.append("")
    except Exception as error:  # of the type alone: a text may hold the URL
        code = getattr(error, "code", None)
        result.append(f"{type(error).__name__}{f' {code}' if code else ''}")
