"""The closed list of what the memory suite can find, one sentence for each name."""

from __future__ import annotations

from collections.abc import Mapping

MAP: Mapping[str, str] = {
    "duplicate-name": "two entries of one rank or graph have the same name",
    "rank-numbers": "the ranks of a map are not numbered 0, 1, 2 ... once each",
    "unknown-category": "an allocation has a category that no inventory row counts",
    "misaligned": "an offset is not a multiple of the alignment it claims",
    "size-not-from-shape": "an allocation's bytes are not those of its shape and dtype",
    "allocations-overlap": "two fixed mappings of one arena share bytes",
    "persistent-in-transient-arena": "something that lives across steps lies among temporaries",
    "outside-arena": "a temporary is not inside any mapping of the temporaries arena",
    "straddles-pools": "a temporary begins in one pool and ends in another",
    "life-inverted": "a buffer's last access comes before its first write",
    "alias-unknown": "an alias names a base that the map does not hold, or itself in a circle",
    "alias-outside-base": "an alias reaches past the bytes of its base",
    "overlap": "two buffers share bytes and neither is over before the other begins",
    "touching-overlap": "one op reads a buffer while it writes another on the same bytes",
    "scratch-shared": "two ops that may run at the same time share scratch bytes",
    "empty-at-live-offset": "a tensor without bytes points into a live buffer",
    "inventory-mismatch": "the inventory is not the sum of the allocations",
    "over-budget": "a rank's fixed memory exceeds its budget",
    "ranks-unbalanced": "the fixed memory of the ranks differs by more than allowed",
    "ranks-differ": "ranks disagree about something that must be the same on all",
    "not-repeatable": "the same input has another layout the second time",
    "schema": "a document does not have the form its version promises",
}

GRAPH: Mapping[str, str] = {
    "temporary-missing": "the graph has a temporary that the map does not place",
    "temporary-unknown": "the map places a temporary that the graph does not have",
    "size-too-small": "the map gives a tensor fewer bytes than its shape, strides and dtype need",
    "size-too-large": "the map gives a tensor more bytes than its shape, strides and dtype need",
    "stream-mismatch": "the map names another stream than that of the op that writes first",
    "alias-mismatch": "the map's alias edge is not the graph's",
    "alias-misplaced": "an alias does not lie at its offset inside its base",
    "life-ends-early": "the map lets a buffer go before its last access",
    "life-ends-late": "the map holds a buffer after its last access",
    "life-starts-late": "the map has a buffer begin after its first write",
    "life-starts-early": "the map has a buffer begin before its first write",
    "inplace-not-shared": "an output declared in place does not lie on its input's bytes",
    "inplace-shifted": "an output in place starts at another byte than its input",
    "inplace-undeclared": "an op writes over bytes that it reads without declaring it",
    "inplace-second-reader": "a tensor is used after an op has written over it in place",
    "inplace-grows": "an output in place has larger items or more bytes than its input",
    "inplace-foreign": "an in-place pair names tensors that its op does not read and write",
    "missing-wait-raw": "an op may read before another stream has written",
    "missing-wait-war": "an op may write before another stream has read",
    "missing-wait-waw": "an op may write before another stream's write",
    "wait-unknown": "an op waits for an op that the graph does not have",
    "wait-not-issued": "an op waits for an op that is issued after it",
    "read-before-write": "the first access of a temporary is a read",
    "persistent-alias": "a tensor that outlives the graph lies in a temporary, or the reverse",
    "scratch-elsewhere": "an op's scratch is touched by another op",
    "graph-unknown": "the map has temporaries of a graph that was not handed over, or the reverse",
}

KV: Mapping[str, str] = {
    "kv-tokens": "the KV total is not what budget, fixed part and bytes per token give",
    "kv-page": "the KV total is not a whole number of pages",
    "kv-not-minimum": "the KV total is not the minimum over the ranks",
    "kv-units": "a figure fits only if GB and GiB are confused",
    "kv-bytes-per-token": "the KV bytes per token are not what the formats give",
    "cache-clamped": "less cache was granted than requested and nothing says so",
}

LEDGER: Mapping[str, str] = {
    "package-size": "a package file is not as large as its tensors and header",
    "weights-mismatch": "the map and the package disagree about the bytes of the weights",
    "unaccounted": "process memory exceeds what map, package and metrics explain",
    "metric-mismatch": "a server metric disagrees with the map",
}

ALL: Mapping[str, str] = {**MAP, **GRAPH, **KV, **LEDGER}
