"""Every setting of the server, each declared once: name, type, parser, help, default and the reason of the default.

The outside names (flag, environment variable, file key) follow from the field's name, see `settings.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from opticnerve.integrations.sglang.frame import MODALITY_MODULES
from opticnerve.integrations.sglang.gate import parse_networks

from .settings import (
    ConfigError,
    Resolved,
    address,
    boolean,
    choice,
    integer,
    or_word,
    positive_seconds,
    resolve,
    seconds,
    setting,
)

MAX_QUEUE_ITEMS = 4096
"""Upper bound of `max_queue_items`: a Reserve of a call of that many items still fits in one message."""

GPU_TOKEN_CAP = 5120
CPU_TOKEN_CAP = 1024

_PATH_NAME = re.compile(r"[a-z][a-z0-9_]*")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def default_frontends() -> int:
    return max(1, min(8, cores() * 3 // 8))


def default_preprocess_threads(frontends: int) -> int:
    return max(1, cores() // frontends)


def parse_token_budgets(text: str) -> dict[str, tuple[int, ...]]:
    """Explicit budgets by path, ascending: "512,1024" is {"": (512, 1024)}, "" as a path standing for every path;
    "global=272,544 local=100,200" names the paths; "" is {}: automatic. Raises ValueError.
    """
    budgets: dict[str, tuple[int, ...]] = {}
    for group in text.split():
        path, equals, numbers = group.rpartition("=")
        if (equals and not _PATH_NAME.fullmatch(path)) or path in budgets or (budgets and "" in (path, *budgets)):
            raise ValueError("write 512,1024 for all paths, or one list a path: global=272,544 local=100,200")
        levels = [_budget(number) for number in numbers.split(",")]
        if len(set(levels)) != len(levels):
            raise ValueError(f"{numbers} names a budget twice: drop one")
        budgets[path] = tuple(sorted(levels))
    return budgets


def _budget(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise ValueError(f"{text!r} is no budget: write whole numbers with commas between, such as 512,1024")
    if int(text) < 1:
        raise ValueError(f"budget {text} is not positive: a graph of no units cannot be captured, drop it")
    return int(text)


def _token_budgets(text: str) -> str:
    parse_token_budgets(text)
    return text


def _modalities(text: str) -> str:
    words = text.split(",")
    if not set(words) <= {"image", "video"} or len(set(words)) != len(words):
        raise ValueError("write image, video or image,video")
    return text


def _color(text: str) -> str:
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise ValueError("write #rrggbb, such as #ffffff")
    return text.lower()


def _devices(text: str) -> str:
    words = text.split(",")
    numbers = [int(word) for word in words if re.fullmatch(r"[0-9]{1,3}", word)]
    if text != "all" and not len(words) == len(numbers) == len(set(numbers)):
        raise ValueError("write all, or the numbers of devices, 0 to 999, with commas between, each once, such as 0,1")
    return text


def _advertise(text: str) -> str:
    return text if text == "auto" else address(text)


def _receivers(text: str) -> str:
    parse_networks(text)
    return text


def _model(text: str) -> str:
    if not text:
        raise ValueError("write a directory, or preset:NAME")
    return text


_MODEL, _PORTS, _SECURITY = "model", "ports and processes", "security"
_GRAPHS, _LIMITS, _LIFE, _SGLANG = "graphs", "limits", "life", "SGLang"
_count = integer(1)
_optional_count = or_word("none", None, _count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The effective settings. Values made by hand are taken as they are; `load` reads and checks text."""

    model: str = setting(
        _model, _MODEL, "Checkpoint directory in Hugging Face layout, or preset:NAME.", "it must be named.", "DIR"
    )
    load_format: str = setting(
        choice("safetensors", "dummy"),
        _MODEL,
        "dummy: random weights from config.json alone.",
        "real weights unless asked otherwise.",
        "safetensors|dummy",
        default="safetensors",
    )
    device: str = setting(
        choice("auto", "cpu", "cuda"),
        _MODEL,
        "Where the tower runs.",
        "cuda where there is one, else cpu.",
        "auto|cpu|cuda",
        default="auto",
    )
    devices: str = setting(
        _devices,
        _MODEL,
        "Devices that run the tower, one engine process each: all, or numbers such as 0,1.",
        "all GPUs that CUDA shows, on a CPU one.",
        "LIST",
        default="all",
    )
    min_engines: int | Literal["all"] = setting(
        or_word("all", "all", _count),
        _MODEL,
        "Engines that must have started before the server serves; later one that works is enough.",
        "a server that has just started is as fast as it will be.",
        "N",
        default="all",
    )
    dtype: str = setting(
        choice("auto", "float32", "bfloat16", "float16"),
        _MODEL,
        "Number format of weights and activations.",
        "bfloat16 on a GPU as published models are, float32 on a CPU.",
        "DTYPE",
        default="auto",
    )
    attention_backend: str = setting(
        choice("auto", "sdpa", "torch_varlen", "flash_attn", "flashinfer"),
        _MODEL,
        "Implementation of attention.",
        "sdpa on a CPU and for dense attention; else flash_attn where FlashAttention 3 or 4 is, or torch_varlen.",
        "NAME",
        default="auto",
    )
    kernels: str = setting(
        choice("auto", "triton", "torch"),
        _MODEL,
        "Implementation of what lies between matrix products and attention.",
        "Triton compiles it into single passes where there is a GPU and a C compiler, torch runs everywhere.",
        "NAME",
        default="auto",
    )
    projector: bool = setting(
        boolean,
        _MODEL,
        "Rows behind the model's projector; --no-projector gives those before it, of Llama 4 alone.",
        "decoders take these, but that of transformers' Llama 4, which projects rows itself.",
        "",
        default=True,
    )
    modalities: str = setting(
        _modalities,
        _MODEL,
        "Media to take and to capture graphs for.",
        "all that the model reads.",
        "LIST",
        default="image,video",
    )
    alpha_background: str = setting(
        _color,
        _MODEL,
        "Colour behind transparent pixels.",
        "most transparent images are made for white pages.",
        "#RRGGBB",
        default="#ffffff",
    )

    listen: str = setting(
        address,
        _PORTS,
        "Address of the service.",
        "loopback: reaching out is a decision of the operator.",
        "HOST:PORT",
        default="127.0.0.1:50051",
    )
    advertise: str = setting(
        _advertise,
        _PORTS,
        "Address at which others reach this very server; held rows are fetched there.",
        "listen, with this host's name where that is a wildcard.",
        "HOST:PORT",
        default="auto",
    )
    health_listen: str = setting(
        address,
        _PORTS,
        "Address of health checks and GetServerInfo.",
        "a port of its own answers probes in time whatever the load.",
        "HOST:PORT",
        default="127.0.0.1:50052",
    )
    metrics_listen: str = setting(
        address,
        _PORTS,
        "Address of /metrics.",
        "loopback, and the usual port of a scrape target.",
        "HOST:PORT",
        default="127.0.0.1:9090",
    )
    frontends: int = setting(
        _count,
        _PORTS,
        "Processes that speak gRPC, on one port.",
        "three for 8 cores, at most 8: one streams 0.5 to 0.7 GB/s, a GPU makes up to 4.",
        "N",
        default_factory=default_frontends,
    )
    preprocess_threads: int = setting(
        _count,
        _PORTS,
        "Threads per front-end that decode and resize.",
        "the cores, split over the front-ends.",
        "N",
        default_factory=lambda: default_preprocess_threads(default_frontends()),
    )

    tls_cert: str = setting(
        str,
        _SECURITY,
        "Certificate chain of the service's port, PEM. Read again when it changes, as are the next two.",
        "plaintext: inside a cluster a mesh often encrypts.",
        "FILE",
        default="",
    )
    tls_key: str = setting(
        str,
        _SECURITY,
        "Key of tls_cert, PEM, without a password.",
        "it goes with tls_cert.",
        "FILE",
        default="",
    )
    tls_client_ca: str = setting(
        str,
        _SECURITY,
        "Authorities whose certificates callers must show, PEM.",
        "callers need no certificate.",
        "FILE",
        default="",
    )
    reflection: bool = setting(
        boolean,
        _SECURITY,
        "--no-reflection hides the list of calls from tools such as grpcurl.",
        "the contract is public.",
        "",
        default=True,
    )
    auth_token_file: str = setting(
        str,
        _SECURITY,
        "File of TENANT:TOKEN lines; calls need one of these bearer tokens. Read again when it changes.",
        "whoever reaches the port may call.",
        "FILE",
        default="",
    )

    graphs: bool = setting(
        boolean,
        _GRAPHS,
        "Capture CUDA graphs; --no-graphs runs every batch eagerly.",
        "they are why this exists.",
        "",
        default=True,
    )
    token_budgets: str = setting(
        _token_budgets,
        _GRAPHS,
        'Tokens of the graphs to capture: "512,1024", or "global=272,544 local=100,200".',
        "automatic, from the model's smallest and largest item.",
        "LIST",
        default="",
    )
    max_token_budget: int | Literal["auto"] | None = setting(
        or_word("auto", "auto", _optional_count),
        _GRAPHS,
        "Largest automatic budget in tokens; none: the largest item of the model.",
        f"{GPU_TOKEN_CAP} on a GPU, where larger batches gain little from graphs; "
        f"{CPU_TOKEN_CAP} on a CPU, where the self-test of more takes minutes.",
        "N",
        default="auto",
    )
    max_items_per_batch: int | None = setting(
        _optional_count,
        _GRAPHS,
        "Most items in one batch.",
        "largest budget // smallest automatic one.",
        "N",
        default=None,
    )
    graph_memory_bytes: int | None = setting(
        _optional_count,
        _GRAPHS,
        "Device bytes over which capturing is refused.",
        "the device is the limit.",
        "BYTES",
        default=None,
    )
    on_capture_failure: str = setting(
        choice("fail", "eager"),
        _GRAPHS,
        "What a failed capture means: no start, or eager from then on.",
        "never silently slower.",
        "fail|eager",
        default="fail",
    )

    max_queue_items: int = setting(
        integer(1, MAX_QUEUE_ITEMS),
        _LIMITS,
        "Items inside the server.",
        "a few seconds of work for one GPU; raise it for more.",
        "N",
        default=1024,
    )
    max_queue_tokens: int = setting(
        _count, _LIMITS, "Tokens inside the server.", "1024 items of an average of 1024.", "N", default=1 << 20
    )
    max_queue_bytes: int = setting(
        _count,
        _LIMITS,
        "Bytes of encoded media, pixels and rows inside the server; shared memory of that size is reserved.",
        "about 300 1080p images with their rows.",
        "BYTES",
        default=4 << 30,
    )
    store_bytes: int = setting(
        integer(0),
        _LIMITS,
        "Bytes of rows kept for callers with the same media, in shared memory beside the queue's; 0 keeps none.",
        "about 500 1080p images.",
        "BYTES",
        default=4 << 30,
    )
    max_lease: float = setting(
        seconds,
        _LIMITS,
        "Seconds that a lease on rows may last.",
        "longer than any prompt waits for its decoder.",
        "S",
        default=600.0,
    )
    max_image_pixels: int = setting(
        _count,
        _LIMITS,
        "Pixels of one image, or of one frame of a video, as sent.",
        "8192 x 8192: more than any model reads, 192 MiB decoded.",
        "N",
        default=8192 * 8192,
    )
    max_video_frames: int = setting(
        _count,
        _LIMITS,
        "Frames of one video as sent.",
        "ten minutes at 30 a second: all up to the last one sampled are decoded, by one thread.",
        "N",
        default=18_000,
    )
    max_video_seconds: float = setting(
        seconds,
        _LIMITS,
        "Seconds that one video lasts.",
        "an hour: more than any model samples well.",
        "S",
        default=3600.0,
    )
    max_item_tokens: int | None = setting(
        _optional_count, _LIMITS, "Tokens of one item.", "the model's own processor is the limit.", "N", default=None
    )
    max_request_bytes: int = setting(
        _count,
        _LIMITS,
        "Bytes of one request.",
        "a dozen photographs as cameras write them.",
        "BYTES",
        default=32 << 20,
    )

    default_timeout: float = setting(
        positive_seconds,
        _LIMITS,
        "Seconds that a call may take whose caller set no deadline.",
        "a caller that is gone without a word holds its share no longer than that.",
        "S",
        default=120.0,
    )
    stream_stall_timeout: float = setting(
        positive_seconds,
        _LIMITS,
        "Seconds that a caller may take none of the messages that wait for it, before its call ends.",
        "its rows hold memory that others wait for.",
        "S",
        default=60.0,
    )

    startup_timeout: float = setting(
        seconds,
        _LIFE,
        "Seconds from start to serving over which the server gives up.",
        "the window of the usual startup probe.",
        "S",
        default=900.0,
    )
    drain_delay: float = setting(
        seconds,
        _LIFE,
        "Seconds between not ready and refusing new calls, on SIGTERM.",
        "load balancers take that long to look elsewhere.",
        "S",
        default=5.0,
    )
    grace: float = setting(
        seconds,
        _LIFE,
        "Seconds that admitted calls have to finish, on SIGTERM.",
        "the default deadline of our client.",
        "S",
        default=30.0,
    )

    sglang_listen: str | None = setting(
        or_word("none", None, address),
        _SGLANG,
        "Address of a front that SGLang language servers call by HTTP.",
        "its protocol has neither encryption nor tokens.",
        "HOST:PORT",
        default=None,
    )
    sglang_grpc_listen: str | None = setting(
        or_word("none", None, address),
        _SGLANG,
        "The same by gRPC.",
        "SGLang's own default is HTTP.",
        "HOST:PORT",
        default=None,
    )
    sglang_version: str | None = setting(
        or_word("none", None, choice(*MODALITY_MODULES)),
        _SGLANG,
        "Release of those language servers.",
        "it must be named: what they take differs from release to release.",
        "VERSION",
        default=None,
    )
    sglang_receivers: str = setting(
        _receivers,
        _SGLANG,
        "Networks that rows may be sent to whoever asks, such as 10.0.0.0/8,fd00::/8.",
        "to the host that asks and no other.",
        "LIST",
        default="caller",
    )

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} is set without {missing}: set both for TLS, none for plaintext")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca is set without tls_cert and tls_key: callers' certificates need TLS")
        if self.max_request_bytes > self.max_queue_bytes:
            raise ConfigError(
                f"max_request_bytes = {self.max_request_bytes} is over max_queue_bytes = {self.max_queue_bytes}: "
                "such a request could never be admitted, lower the first or raise the second"
            )
        if isinstance(self.max_token_budget, int):
            for path, levels in parse_token_budgets(self.token_budgets).items():
                if levels[-1] > self.max_token_budget:
                    raise ConfigError(
                        f"budget {levels[-1]} of token_budgets{path and f' (path {path})'} is over max_token_budget = "
                        f"{self.max_token_budget}: drop the budget or raise the cap"
                    )

        self._check_sglang()

    def _check_sglang(self) -> None:
        opened = [name for name in ("sglang_listen", "sglang_grpc_listen") if getattr(self, name)]
        if opened and not self.sglang_version:
            raise ConfigError(
                f"{opened[0]} is set without sglang_version: name the release of the language servers, one of "
                f"{', '.join(MODALITY_MODULES)}"
            )
        secured = [name for name in ("tls_cert", "auth_token_file") if getattr(self, name)]
        if opened and secured:
            raise ConfigError(
                f"{opened[0]} would be a way around {secured[0]}, SGLang calls in plaintext and without a token: serve "
                "it from a server of its own, where none but its language servers reach it"
            )

    @property
    def arena_bytes(self) -> int:
        """Size of the shared memory."""
        return self.max_queue_bytes + self.store_bytes

    def token_cap(self, device: str) -> int | None:
        """The largest automatic budget in units on a device ("cpu" or a CUDA one); None: the largest item."""
        if isinstance(self.max_token_budget, str):
            return CPU_TOKEN_CAP if device == "cpu" else GPU_TOKEN_CAP
        return self.max_token_budget


def load(flags: Mapping[str, str], environ: Mapping[str, str]) -> Resolved[Config]:
    """The effective configuration. Raises ConfigError before anything is loaded."""
    resolved = resolve(Config, flags, environ)
    if resolved.sources["preprocess_threads"].startswith("default"):
        config = resolved.config
        threads = default_preprocess_threads(config.frontends)
        return replace(resolved, config=replace(config, preprocess_threads=threads))
    return resolved
