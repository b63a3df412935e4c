"""A ComfyUI server as a child process: start it, run graphs through its HTTP API, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from packages import Failed

ADDRESS = "127.0.0.1"  # never reachable from another machine
START_SECONDS = 300  # a first start reads torch from a cold disk
STOP_SECONDS = 5
LOG_LINES = 25
PROGRESS_BAR = re.compile(r"\d+/\d+ \[.*\]$")

Graph = dict[str, dict[str, Any]]
Progress = Callable[[int, int], None]


class Server:
    """ComfyUI in a base directory of its own; a context manager that always stops it.

    Args:
        comfyui: the ComfyUI tree; nothing is written there.
        base: folder with `custom_nodes`, `models` and room for everything the server writes.
        packs: names in `base/custom_nodes` to load; no other pack is.
        log: file for the server's output.
        options: of ComfyUI's command line, beside those that every server here gets.
    """

    def __init__(
        self, comfyui: Path, base: Path, packs: list[str], log: Path, *options: str
    ) -> None:
        self.comfyui = comfyui
        self.base = base
        self.packs = packs
        self.log = log
        self.options = options
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        return f"http://{ADDRESS}:{self.port}"

    def __enter__(self) -> Server:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        """Start the process and wait until it answers."""
        with socket.socket() as probe:
            probe.bind((ADDRESS, 0))
            self.port = probe.getsockname()[1]
        (self.base / "user").mkdir(exist_ok=True)
        database = (self.base / "user" / "comfyui.db").as_posix()
        command = [sys.executable, str(self.comfyui / "main.py")]
        command += ["--listen", ADDRESS, "--port", str(self.port), "--disable-auto-launch"]
        command += ["--base-directory", str(self.base), "--database-url", f"sqlite:///{database}"]
        command += ["--disable-all-custom-nodes", "--whitelist-custom-nodes", *self.packs]
        command += ["--disable-api-nodes"]  # they, and the page with them, talk to the internet
        command += self.options
        if not _has_accelerator():
            command.append("--cpu")
        quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
        # A process group of its own: Ctrl-C reaches this process alone, which then stops the
        # whole group.
        group: dict[str, Any] = (
            {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
            if sys.platform == "win32"
            else {"start_new_session": True}
        )
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.base,
                env={**os.environ, **quiet},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **group,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None:
                raise self.failed(f"ComfyUI ended at once (exit code {self._process.returncode})")
            if time.monotonic() > deadline:
                raise self.failed(f"ComfyUI did not answer within {START_SECONDS} s")
            time.sleep(0.2)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return bool(self.ask("GET", "/system_stats")[0] == 200)
        return False

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """One request; returns the status and the decoded JSON answer."""
        connection = http.client.HTTPConnection(ADDRESS, self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text or b"null")
        finally:
            connection.close()

    def require(self, *nodes: str) -> None:
        """Make sure that the server knows `nodes`: a pack that fails to load only logs it."""
        known = self.ask("GET", "/object_info")[1]
        if missing := [node for node in nodes if node not in known]:
            raise self.failed(f"ComfyUI did not load {', '.join(missing)}")

    def defaults(self, node: str) -> dict[str, Any]:
        """The defaults of a node's widgets: the API takes no graph that leaves one out."""
        required = self.ask("GET", f"/object_info/{node}")[1][node]["input"]["required"]
        extras = {name: spec[1] for name, spec in required.items() if len(spec) > 1}
        return {name: extra["default"] for name, extra in extras.items() if "default" in extra}

    def run(self, graph: Graph, progress: Progress) -> dict[str, Any]:
        """Run `graph` (API format) to its end; returns what its output nodes report, by node id.

        Args:
            progress: called with (step, steps) while a node works.

        Raises:
            Failed: the server refuses the graph, a node fails, or the server dies.
        """
        return asyncio.run(self._run(graph, progress))

    async def _run(self, graph: Graph, progress: Progress) -> dict[str, Any]:
        client = uuid.uuid4().hex
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{self.url}/ws?clientId={client}", max_msg_size=0) as socket_,
        ):
            # after the connection, or the first messages would be lost
            status, answer = self.ask("POST", "/prompt", {"prompt": graph, "client_id": client})
            if status != 200:
                raise Failed(f"ComfyUI refuses the graph: {_refusal(answer)}.")
            prompt = answer["prompt_id"]
            async for message in socket_:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue  # preview pictures
                event = json.loads(message.data)
                data = event.get("data", {})
                if event["type"] == "progress":
                    progress(data["value"], data["max"])
                elif event["type"] == "executing" and data.get("prompt_id") == prompt:
                    if data["node"] is None:
                        break
            else:
                raise self.failed("ComfyUI ended while it worked on a graph")
        record = self.ask("GET", f"/history/{prompt}")[1][prompt]
        for kind, details in record["status"]["messages"]:
            if kind == "execution_error":
                where = f"{details['node_type']} (node {details['node_id']!r})"
                raise self.failed(f"{where} failed: {details['exception_message'].strip()}")
        return record["outputs"]

    def failed(self, what: str) -> Failed:
        """An error with the last lines of the server's log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        telling = [line for line in lines if line and not PROGRESS_BAR.search(line)][-LOG_LINES:]
        return Failed("\n  | ".join([f"{what}. The end of {self.log}:", *telling]))

    def wait(self) -> None:
        """Wait until the server ends by itself."""
        if self._process:
            self._process.wait()

    def stop(self) -> None:
        """End the server and all that it started: asked first, then forced."""
        process, self._process = self._process, None
        if process is None:
            return
        with _no_interruption():
            for request in ("SIGINT", "SIGTERM", "SIGKILL"):
                _signal_group(process, request)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                    break
            _signal_group(process, "SIGKILL")  # children that outlived it


def _has_accelerator() -> bool:
    import torch  # here: it takes seconds, and only a start needs it

    return (
        torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()
    )


def _refusal(answer: Any) -> str:
    """The first concrete complaint in the answer of a refused graph."""
    for node, complaint in (answer.get("node_errors") or {}).items():
        for error in complaint["errors"]:
            return f"node {node!r} ({complaint['class_type']}): {error['details']}"
    return str(answer.get("error"))


def _signal_group(process: subprocess.Popen[bytes], request: str) -> None:
    """Signal the process and its children; nothing happens where they are gone."""
    if sys.platform == "win32":
        if process.poll() is None:
            subprocess.run(
                ["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False
            )
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, getattr(signal, request))


@contextlib.contextmanager
def _no_interruption():
    """Let a second Ctrl-C not leave a server behind."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
