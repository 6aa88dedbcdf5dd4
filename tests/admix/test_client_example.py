"""The client in docs/examples, against a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.admix.material import env_config, save_run
from tests.admix.test_server import serving
from tests.sources import ROOT
from tests.waiting import PATIENCE


def test_the_client_says_why_an_ad_was_chosen_and_reports_billing(tmp_path: Path) -> None:
    save_run(tmp_path / "run", env_config(mode="contracts", billed=0.8), penalty=1.0)
    with serving(tmp_path / "run") as server:
        client, url = ROOT / "docs" / "examples" / "serve_client.py", f"http://127.0.0.1:{server.port}"
        done = subprocess.run([sys.executable, str(client), url], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        assert ", alpha " in done.stdout
        assert "bid 900001" in done.stdout
        assert "does not target this visitor" in done.stdout
        assert "contracts shown in 100 requests: {" in done.stdout
        status, contracts = server.ask("GET", "/v1/contracts")
    assert status == 200
    assert sum(one["shown"] for one in contracts) == sum(one["billed_known"] for one in contracts) > 0
