"""What serving is measured beside: the same bodies decoded, the same network, the same answer encoded, no more.

`Bare.decide` is plain msgspec, numpy and ONNX Runtime. As a program it is a bare ASGI application on uvicorn:
`python -m benchmarks.serve.bare RUN path|empty`; "empty" reads the body and gives a fixed answer."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import uvicorn

from ddrl.admix.environment import Book
from ddrl.admix.mixer import Decision, DisplayRequest, ServedPolicy
from ddrl.admix.serving import open_mixer


class Bare:
    """Scores every candidate of a request with fixed features, beside its eCPM and click rate, and takes the best."""

    def __init__(self, book: Book, policy: ServedPolicy) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(policy.model.onnx, options, providers=["CPUExecutionProvider"])
        slots = len(book.contracts.ad_id) + book.bids
        nothing = np.zeros(book.contracts.count)
        rows = book.layout.rows(nothing, nothing)
        self._ad = np.concatenate([rows, np.tile(book.layout.bid_row(), (book.bids, 1))])[None].copy()
        self._columns = book.layout.ad_fields.index("ecpm"), book.layout.ad_fields.index("ctr")
        self._scores = np.zeros((1, slots), np.float32)
        self._held = policy.model.layout.views(policy.vector)
        arrays = {**self._held, "ad": self._ad, "overall": np.zeros((1, len(book.play.overall_fields)), np.float32)}
        self._arrays = arrays
        self._binding = self._session.io_binding()
        for given in self._session.get_inputs():
            array = arrays[given.name]
            self._binding.bind_input(given.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._binding.bind_output("mean", "cpu", 0, np.float32, self._scores.shape, self._scores.ctypes.data)
        self._decode = msgspec.json.Decoder(DisplayRequest).decode
        self._encode = msgspec.json.Encoder().encode

    def decide(self, body: bytes) -> bytes:
        """Bytes in, bytes out."""
        request = self._decode(body)
        ecpm, ctr = self._columns
        self._ad[0, :, ecpm] = request.ecpm
        self._ad[0, :, ctr] = request.ctr
        self._session.run_with_iobinding(self._binding)
        best = int(self._scores.argmax())
        return self._encode(
            Decision(
                request.request_id,
                "bare",
                request.ad[best],
                request.kind[best],
                best,
                float(self._scores[0, best]),
                request.ecpm[best],
                request.creative[best],
            )
        )


def application(decide: Any) -> Any:
    """A bare ASGI application."""
    head = [(b"content-type", b"application/json")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        answer = decide(body)
        headers = [*head, (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


def main(run: Path, kind: str) -> None:
    """Serve until killed; the first line names the port."""
    fixed = msgspec.json.encode(Decision(1, "bare", 900001, 1, 2, 5.0, 2.5, "x" * 90))
    if kind == "path":
        mixer = open_mixer(run)
        decide: Any = Bare(mixer.book, mixer.policy).decide
    else:
        decide = lambda body: fixed  # noqa: E731
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    config = uvicorn.Config(
        application(decide),
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    print(f"bare server on http://127.0.0.1:{port}", flush=True)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
