"""How the dashboard is started: from any folder, on loopback alone, without usage statistics, by either command."""

import subprocess
import sys
import urllib.request

import psutil
import pytest

pytest.importorskip("streamlit", reason="needs the extra [dashboard]")

from tests.dashboard.webdriver import dashboard_of
from tests.sources import ROOT
from tests.waiting import PATIENCE


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def listening(others: set[psutil.Process]) -> set[str]:
    """Addresses at which children of this process listen, but for those of other tests."""
    return {
        connection.laddr.ip
        for child in children() - others
        for connection in child.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("command", ["python -m ddrl.dashboard", "streamlit run dashboard/app.py"])
def test_from_any_folder_it_listens_on_loopback_alone_and_sends_no_statistics(tmp_path, command):
    runs = str(tmp_path / "runs")
    words = ("-m", "ddrl.dashboard", runs)
    if command.startswith("streamlit"):
        words = ("-m", "streamlit", "run", str(ROOT / "dashboard" / "app.py"), runs)
    others = children()
    with dashboard_of(tmp_path, *words) as url:
        assert listening(others) == {"127.0.0.1"}
        with urllib.request.urlopen(f"{url}/_stcore/health", timeout=PATIENCE) as answer:
            assert answer.read() == b"ok"
    assert "usage statistics" not in (tmp_path / "streamlit.log").read_text()


def test_its_help_names_the_folder_and_needs_no_streamlit():
    code = "import sys; sys.modules['streamlit'] = None; from ddrl.dashboard.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    assert "FOLDER" in done.stdout.upper()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("pip install 'ddrl[dashboard]'")
    assert len(done.stderr.splitlines()) == 1
