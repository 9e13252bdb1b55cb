"""SGLang's own receiver, run from its wheel: its module is executed as it is, over stand-ins for the rest of SGLang.

What is real: the receiver, the list of what it unpickles, the enum of modalities, its environment, its sockets. The
wheel is fetched, not installed (`make .sglang/wheel`): SGLang as a whole needs a GPU.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import io
import pickle
import sys
import types
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
import zmq.asyncio

RELEASE = "0.5.23"

WHEELS = Path(__file__).parents[1] / ".sglang"

RECEIVER = "sglang.srt.disaggregation.encoder.receiver"
REAL = {RECEIVER, "sglang.srt.multimodal.modality", "sglang.srt.environ", "sglang.srt.utils.network"}
COMMON = "sglang.srt.utils.common"
UNPICKLER = {"SafeUnpickler", "safe_pickle_loads"}
"""What is taken of COMMON, which imports half of SGLang."""

NOT_INSTALLED = {"uvicorn", "fastapi", "psutil"}


class _StandIn(types.ModuleType):
    """Has every name: a class that keeps what it is given. A package of others like it."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (SimpleNamespace,), {})


class _Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, path: Path) -> None:
        self._files = zipfile.ZipFile(path)

    def _source(self, module: str) -> str:
        return self._files.read(module.replace(".", "/") + ".py").decode()

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        ours = name.split(".")[0] in NOT_INSTALLED | {"sglang"}
        return importlib.machinery.ModuleSpec(name, self, is_package=name not in REAL) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None if spec.name in REAL else _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name in REAL:
            exec(compile(self._source(name), name, "exec"), module.__dict__)
        elif name == COMMON:
            tree = ast.parse(self._source(name))
            tree.body = [node for node in tree.body if getattr(node, "name", "") in UNPICKLER]
            module.__dict__.update(pickle=pickle, io=io)
            exec(compile(tree, name, "exec"), module.__dict__)
        elif name == "sglang.srt.managers.schedule_batch":
            from sglang.srt.multimodal.modality import Modality  # type: ignore[import-not-found]

            module.__dict__["Modality"] = Modality
        elif name == "sglang.srt.multimodal.cache":
            module.__dict__["media_preprocess_kwargs"] = lambda item, defaults=None: {}
        elif name == "psutil":
            module.__dict__["virtual_memory"] = lambda: SimpleNamespace(total=64 << 30, available=32 << 30)

    def close(self) -> None:
        self._files.close()


@contextmanager
def receiver_of(release: str) -> Iterator[Any]:
    """The receiver's module of a release, importable until the end as unpickling needs it."""
    path = next(WHEELS.glob(f"sglang-{release}-*.whl"), None)
    if path is None:
        pytest.skip(f"no wheel of SGLang {release}: make .sglang/wheel fetches it")
    wheel = _Wheel(path)
    sys.meta_path.insert(0, wheel)
    try:
        yield functools.reduce(getattr, RECEIVER.split(".")[1:], __import__(RECEIVER))
    finally:
        sys.meta_path.remove(wheel)
        for name in [name for name in sys.modules if name.split(".")[0] in NOT_INSTALLED | {"sglang"}]:
            del sys.modules[name]
        wheel.close()


class Processor:
    """What SGLang's processor of a model is given to lay out a prompt with."""

    prefer_tokenized_input = False
    embeddings: dict[str, torch.Tensor]  # by modality
    meta: dict[str, Any]

    def get_validated_mm_data(self, prompt: str, embeddings: dict[Any, torch.Tensor], **meta: Any) -> SimpleNamespace:
        self.embeddings, self.meta = {modality.name: rows for modality, rows in embeddings.items()}, meta
        return SimpleNamespace(input_ids=[1, 2, 3])


class LanguageServer:
    """SGLang's side: its receivers, without what they make of a whole server's settings."""

    def __init__(self, receiver: Any) -> None:
        self.code = receiver
        self._contexts: list[zmq.Context[Any]] = []
        self._runner = receiver._ReceiveRegistrationRunner("registration")

    def tokenizer(self, *urls: str, grpc: bool = False) -> Any:
        """The receiver of its tokenizer, with these encoders."""
        made = object.__new__(self.code.MMReceiverGrpc if grpc else self.code.MMReceiverHTTP)
        made.encode_urls, made.host, made.model_type, made.recv_timeout = list(urls), "127.0.0.1", "qwen3_vl", 20.0
        made.context = zmq.asyncio.Context()
        self._contexts.append(made.context)
        return made

    def rank(self, rid: str, assigned: dict[Any, list[int]], urls: list[str], ranks: int = 1) -> Any:
        """What one of the ranks of its scheduler waits with for a request. It has told nobody yet."""
        request = SimpleNamespace(rid=rid, num_items_assigned=assigned, input_ids=None, input_text="prompt")
        context: zmq.Context[Any] = zmq.Context()
        self._contexts.append(context)
        return self.code.WaitingZmqRequest(
            rid,
            request,
            Processor(),
            urls,
            "qwen3_vl",
            "127.0.0.1",
            ranks,
            zmq_context=context,
            registration_runner=self._runner,
        )

    def close(self) -> None:
        for context in self._contexts:
            context.destroy(linger=0)
        self._runner.loop.call_soon_threadsafe(self._runner.loop.stop)
        self._runner.thread.join()
        self._runner.loop.close()
