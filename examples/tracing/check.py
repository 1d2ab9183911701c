"""Checks the spans of three requests: check.py TRACE SPAN FILE...

The first one came with that position, the others without a valid one. A request has five spans: those of the services
in Go, Rust and Python, and those of the calls between them.
"""

import json
import sys
from collections import defaultdict


def spans(path: str) -> list[dict[str, str]]:
    found = []
    for line in open(path):
        for resource in json.loads(line)["resourceSpans"]:
            (service,) = (one["value"]["stringValue"] for one in resource["resource"]["attributes"])
            for scope in resource["scopeSpans"]:
                found += [{"service": service, **span} for span in scope["spans"]]
    return found


def main(trace: str, span: str, *paths: str) -> None:
    traces = defaultdict(list)
    for one in (one for path in paths for one in spans(path)):
        assert len(one["traceId"]) == 32 and len(one["spanId"]) == 16, one
        assert 0 < int(one["startTimeUnixNano"]) <= int(one["endTimeUnixNano"]), one
        traces[one["traceId"]].append(one)
    assert len(traces) == 3 and trace in traces, traces
    for identity, of in traces.items():
        by_kind = {(one["service"], one["kind"]): one for one in of}
        chain = [by_kind[key] for key in (("go", 2), ("go", 3), ("rust", 2), ("rust", 3), ("python", 2))]
        assert len(of) == len(chain), of
        parents = [one.get("parentSpanId") or None for one in chain]
        assert parents == [span if identity == trace else None, *(one["spanId"] for one in chain[:-1])], of


main(*sys.argv[1:])
