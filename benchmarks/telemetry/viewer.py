"""A viewer of the dashboard without a browser: it speaks Streamlit's protocol, asks for every part of the page again as
fast as it is served.

A browser that draws takes most of the time of an update; what a server holds after thousands of them is found sooner
without one."""

from __future__ import annotations

from typing import Any

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import connect


class Viewer:
    """One session on the page at `url`; `refresh` redraws each part that refreshes alone, as a browser's timers
    would."""

    def __init__(self, url: str) -> None:
        self._socket = connect(
            url.replace("http", "ws", 1) + "/_stcore/stream", origin=url, subprotocols=["streamlit"], max_size=None
        )  # type: ignore[arg-type, list-item]
        self.fragments: list[str] = []
        self.received = 0  # bytes
        self._page = ""
        self._rerun()

    def _rerun(self, fragment: str = "") -> None:
        """Have the page, or one part of it, run, and take all that it sends until it has finished."""
        message = BackMsg()
        state = message.rerun_script
        state.query_string = ""
        if fragment:
            state.fragment_id = fragment
            state.is_auto_rerun = True
            state.page_script_hash = self._page
        self._socket.send(message.SerializeToString())
        while True:
            data: Any = self._socket.recv(timeout=60)
            self.received += len(data)
            answer = ForwardMsg.FromString(data)
            kind = answer.WhichOneof("type")
            if kind == "new_session" and not fragment:
                self._page = answer.new_session.page_script_hash
            elif kind == "auto_rerun" and answer.auto_rerun.fragment_id not in self.fragments:
                self.fragments.append(answer.auto_rerun.fragment_id)
            elif kind == "script_finished":
                return

    def refresh(self) -> None:
        """Every part once."""
        for fragment in self.fragments:
            self._rerun(fragment)

    def close(self) -> None:
        """Leave."""
        self._socket.close()
