"""A client of a served policy: asks for ads, says why the first was chosen, and reports what was billed.

python -m ddrl.serve RUN --port 8700          # in another shell
python docs/examples/serve_client.py http://127.0.0.1:8700
"""

import http.client
import json
import sys
from urllib.parse import urlsplit


class Client:
    """One connection, kept open."""

    def __init__(self, url: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)

    def ask(self, method: str, path: str, **fields):
        """The answer's JSON; RuntimeError with the server's words where it refuses."""
        self.connection.request(method, path, json.dumps(fields) if fields else None)
        answer = self.connection.getresponse()
        body = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {body['error']}")
        return body


client = Client(sys.argv[1])
contracts = [one["ad"] for one in client.ask("GET", "/v1/contracts")]
candidates = {  # lists by column: your contracts, then two bids
    "ad": [*contracts, 900001, 900002],
    "kind": [0] * len(contracts) + [1, 1],
    "ecpm": [0.0] * len(contracts) + [2.5, 1.0],
    "ctr": [0.02] * (len(contracts) + 2),
}
shown: dict[int, int] = {}
for request_id in range(100):
    visitor = {"region": request_id % 2, "gender": request_id // 2 % 2, "age": 0}
    decision = client.ask("POST", "/v1/decide", request_id=request_id, **visitor, **candidates, explain=not request_id)
    if not request_id:
        why = decision["explanation"]
        for one in sorted(why["candidates"], key=lambda one: -(one["score"] or 0)):
            name = f"{'bid' if one['kind'] else 'contract'} {one['ad']}"
            alpha = "" if one["alpha"] is None else f", alpha {1000 * one['alpha']:.2f}"
            print(f"{name:16} {one['reason'] or format(one['score'], '.2f')}{alpha}")
        print(f"chosen: {decision['ad']}, by policy {decision['version']}")
    if decision["kind"] == 0:
        shown[decision["ad"]] = shown.get(decision["ad"], 0) + 1
if shown:  # here everything that was shown counts
    client.ask("POST", "/v1/billing", ad=list(shown), shown=list(shown.values()), billed=list(shown.values()))
print(f"contracts shown in 100 requests: {shown}")
