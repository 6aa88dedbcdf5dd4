"""Random faults that change nothing that a test could see, and why. Each was looked at by hand."""

from __future__ import annotations

from tests.mutations.named import Fault

_COMMUTES = "max and min of two numbers do not depend on their order"

_EXPLAINED: dict[tuple[str, str, str], str] = {  # (file, operator, a part of the faulty line): why
    ("ddrl/distribution/requests.py", "swapped arguments", "max(share *"): _COMMUTES,
    ("ddrl/pool/page.py", "swapped arguments", "max(one.parameters, one.ready)"): _COMMUTES,
    ("ddrl/pool/rounds.py", "swapped arguments", "max(sent.start"): _COMMUTES,
    ("ddrl/balance/exchange.py", "swapped arguments", "torch.dot(of, one.flatten())"): (
        "the products of a dot product commute, and their order stays"
    ),
    ("ddrl/core/plugins.py", "constant", "digest_size=17"): "a digest of any length names the code as well",
    ("ddrl/distribution/schemes.py", "constant", "max(3 * versions_in_flight + 1"): (
        "where a plan has many messages the period is taken over more models: it is the same, and known later"
    ),
    ("ddrl/admix/optimum.py", "constant", "np.clip(alpha, 1,"): (
        "only where the descent begins: it ends at the same duals"
    ),
    ("ddrl/learner/export.py", "constant", "expected.ravel()[:4]"): "a message quotes one number more",
    ("ddrl/channels/board.py", "constant", "array[8 : 9 + len(data)]"): "the array ends there, and so does the slice",
    ("ddrl/learner/algorithms/pqn.py", "constant", "state.reshape(-2,"): (
        "numpy takes any negative size for the one that it finds"
    ),
    ("ddrl/distribution/membership.py", "dropped call", 12 * " " + "pass"): (  # in `abandon`
        "a relay that abandons its job ends with it, and MPI frees what is left"
    ),
    ("ddrl/run/serial.py", "constant", "board_name(topology.run_id, 1)"): (
        "where all is one process, nobody looks for the board by its name"
    ),
    ("ddrl/plots/runs.py", "constant", "range(3, len(rows) + 4)"): (
        "a count of all rows, which comes before, always tells them apart"
    ),
}


def explanation(fault: Fault) -> str:
    """Why a random fault changes nothing; empty where nobody has said so."""
    for (path, operator, part), why in _EXPLAINED.items():
        if (fault.path, fault.name) == (path, operator) and part in fault.new:
            return why
    return ""
