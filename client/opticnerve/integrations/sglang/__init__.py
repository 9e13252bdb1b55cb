"""The encoder that an SGLang language server (`--language-only`) calls, in front of an Opticnerve service.

    SGLang --HTTP or gRPC: media, where to--> front --Encode--> service
    SGLang <--ZMQ: pickled head, rows-------- front <---rows---

A process of its own and a caller like any other: what goes wrong in here costs SGLang's requests and nobody else's. It
is off unless it is asked for, and it serves one release of SGLang, by name, since the format of the pickle is that of
the release's own classes (`frame.py`).

What it trusts: SGLang's protocol has no authentication and no encryption, so whoever reaches the front may encode, and
whoever is between may read. It fetches no URL and opens no file for its callers, loads no pickle, and sends rows only
to the host that asked for them, or to networks that the operator named (`gate.py`).
"""
