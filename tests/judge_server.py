"""A small OpenAI-like server on loopback: it grades, or does what a test asks for instead."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer:
    """`reply` makes the text of an answer from the request's last message; `faults` come before.

    A fault is a status, or None to close the connection without an answer; each is used once, in their order.
    """

    def __init__(self, reply: Callable[[str], str] = lambda asked: "4") -> None:
        self.reply = reply
        self.faults: list[int | None] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        handler = type("JudgeHandler", (_Handler,), {"judge": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    judge: JudgeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr: tests read it."""

    def do_POST(self) -> None:
        self.close_connection = True
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers.get("Authorization", "")
        self.judge.keys.append(key)
        self.judge.requests.append(asked)
        fault = self.judge.faults.pop(0) if self.judge.faults else 200
        if fault is None:
            return
        if self.path != "/v1/chat/completions":
            fault = 404
        if fault != 200:
            # A careless server repeats what it was sent.
            self._send(fault, {"error": {"message": f"Asked for by the test, of {key}"}})
            return
        content = self.judge.reply(asked["messages"][-1]["content"])
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        made = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"], "choices": [choice]}
        self._send(200, made)

    def _send(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        for name, each in {**headers, "retry-after-ms": "5"}.items():
            self.send_header(name, each)
        self.end_headers()
        self.wfile.write(body)
