"""The log: an engine's thread takes numbers down, and a thread of its own makes lines of them and writes them."""

import atexit
import collections
import contextlib
import functools
import inspect
import json
import os
import queue
import signal
import sys
import threading
import time

try:
    from msgspec.json import encode  # vLLM and SGLang have it; a tenth of json's time
except ImportError:

    def encode(value):
        return json.dumps(value, separators=(",", ":")).encode()


SCHEMA, VERSION = "dsim-steplog", 3
FLUSH = 0.5  # s
TURN = 8  # lines
ENDED = 4096  # requests that are over and still known: an engine may have a row of them in flight


def wanted():
    """The file to write, or None where nobody asked for a log."""
    path = os.environ.get("DSIM_STEPLOG")
    return path.replace("{pid}", str(os.getpid())) if path else None


class StepLog:
    """One engine's log. Times are seconds since it was opened, on a monotonic clock.

    header: what the first line says beside the schema.
    """

    def __init__(self, path, header):
        self.on = os.environ.get("DSIM_STEPLOG_SIGNAL") != "1"
        self._skip = int(os.environ.get("DSIM_STEPLOG_SKIP", "20"))
        self._zero, self._wall = time.perf_counter(), time.time()
        self._lines = queue.SimpleQueue()
        self._requests = {}  # name -> number, input length
        self._num_requests = 0
        self._ended = collections.deque()
        self._step = 0
        self._file = open(path, "wb")  # noqa: SIM115 - for as long as the engine runs
        first = {"schema": SCHEMA, "version": VERSION, **header, "started": self._wall}
        first.setdefault("workload", os.environ.get("DSIM_STEPLOG_WORKLOAD", "live"))
        self._file.write(json.dumps(first, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._toggle)
        self._writer = threading.Thread(target=self._write, name="dsim-steplog", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    def now(self):
        """s since the log was opened."""
        return time.perf_counter() - self._zero

    def at(self, moment):
        """A reading of time.perf_counter as s since the log was opened."""
        return moment - self._zero

    def request(self, name, input_length, output_length=None, received=None, arrival=None):
        """An engine's request has arrived, now or at `arrival` (s since the log was opened).

        received: when its server took it, s since 1970.

        One that comes while nothing is logged stays unknown, and so do the steps that it takes part in.
        """
        if name in self._requests or not self.on or self._step < self._skip:
            return
        number = self._num_requests
        self._num_requests += 1
        self._requests[name] = number, input_length
        arrival = self.now() if arrival is None else arrival
        line = {"kind": "request", "request": number, "id": name, "input_length": input_length, "arrival": arrival}
        if output_length is not None:
            line["output_length"] = output_length
        if received is not None:
            line["received"] = received - self._wall
        self._lines.put(line)

    def step(self, start, latency, rows, **more):
        """A step. rows: (request's name, phase, tokens, keys, tokens emitted) of each sequence; more: other keys.

        Returns the step's number, or None where it is not logged.
        """
        self._step += 1
        if not self.on or not rows:
            return None
        line = self._line(self._step, start, latency, *map(list, zip(*rows, strict=True)), more)
        if line is None:
            return None
        self._lines.put(line)
        return self._step

    def step_later(self, start, latency, make):
        """A step whose line the log's own thread makes, so that the engine's spends little time on it.

        make: called there; it returns the columns names, phases, tokens, keys and tokens emitted, the other keys, and
        who is over.
        """
        self._step += 1
        if self.on:
            self._lines.put((self._step, start, latency, make))

    def _line(self, number, start, latency, names, phases, tokens, keys, emitted, more):
        known = self._requests
        try:
            numbers = [known[name][0] for name in names]
        except KeyError:
            return None
        if latency <= 0:
            return None
        return {
            "kind": "step", "step": number, "start": start, "latency": latency, "batch": len(names),
            "tokens": sum(tokens), "sum_kv": sum(keys), "requests": numbers, "phases": alike(phases),
            "row_tokens": alike(tokens), "row_keys": keys, "emitted": alike(emitted), **more,
        }  # fmt: skip

    def _made(self, number, start, latency, make):
        """The lines of a step that was left for later."""
        *rows, more, over = make()
        line = self._line(number, start, latency, *rows, more)
        if line is not None:
            yield line
        for name in over:
            yield from self._end(name, start + latency)

    def input_length(self, name):
        """A request's, 0 where it is not known."""
        return self._requests.get(name, (0, 0))[1]

    def _end(self, name, when):
        """The line of a request that is over."""
        if name not in self._requests:
            return
        yield {"kind": "finish", "request": self._requests[name][0], "time": when}
        self._ended.append(name)
        if len(self._ended) > ENDED:
            self._requests.pop(self._ended.popleft(), None)

    def sequence(self, step, name, block_start, committed, computed=None):
        """The effect of a step on a sequence's block: positions in it, from 0."""
        if step is None or name not in self._requests:
            return
        line = {
            "kind": "sequence", "request": self._requests[name][0], "step": step, "block_start": block_start,
            "committed": committed,
        }  # fmt: skip
        self._lines.put(line if computed is None else line | {"computed": computed})

    def finished(self, name):
        """A request is over."""
        for line in self._end(name, self.now()):
            self._lines.put(line)

    @contextlib.contextmanager
    def harmless(self):
        """What goes wrong inside ends the log and leaves the engine alone."""
        try:
            yield
        except Exception as error:
            self.on = False
            sys.stderr.write(f"dsim-hooks: no more steps are logged: {type(error).__name__}: {error}\n")

    def close(self):
        """Write what is left."""
        self._lines.put(None)
        self._writer.join(timeout=5)

    def _toggle(self, _signum, _frame):
        self.on = not self.on

    def _write(self):
        while True:
            time.sleep(FLUSH)  # lines gather: the engine's thread is woken for none of them
            num = 0
            while not self._lines.empty():
                line = self._lines.get()
                if line is None:
                    self._file.close()
                    return
                with self.harmless():
                    for each in self._made(*line) if isinstance(line, tuple) else (line,):
                        self._file.write(encode(each) + b"\n")
                num += 1
                if num % TURN == 0:  # the engine's thread, where it wants the interpreter, waits for a few lines alone
                    time.sleep(0)
            self._file.flush()


def hook_class(kind, name, around):
    """Replace a method by `around`, which is given the method."""
    original = getattr(kind, name)
    if inspect.iscoroutinefunction(original):

        async def hooked(self, *args, **kwargs):
            return await around(self, original, *args, **kwargs)
    else:

        def hooked(self, *args, **kwargs):
            return around(self, original, *args, **kwargs)

    setattr(kind, name, functools.wraps(original)(hooked))


def alike(column):
    """A column of rows as the log has it: one value where all of them have the same."""
    return column[0] if column.count(column[0]) == len(column) else column


def shape_of(config, context_limit=None):
    """A model's dimensions, from the attributes of its Hugging Face configuration."""
    config = getattr(config, "text_config", None) or config

    def known(*names, default=None):
        for name in names:
            value = getattr(config, name, None)
            if value is not None:
                return value
        return default

    heads, hidden = known("num_attention_heads"), known("hidden_size")
    return {
        "name": str(known("_name_or_path", "model_type", default="model") or "model"),
        "layers": known("num_hidden_layers"), "hidden": hidden, "heads": heads,
        "kv_heads": known("num_key_value_heads", default=heads), "head_dim": known("head_dim", default=hidden // heads),
        "ffn": known("intermediate_size"), "vocab": known("vocab_size"),
        "context_limit": context_limit or known("max_position_embeddings"),
        "tied": bool(known("tie_word_embeddings", default=False)),
        "qk_norm": "qwen3" in str(known("model_type", default="")),
        "qkv_bias": bool(known("attention_bias", default=False)), "experts": None,
    }  # fmt: skip


def device_of(torch):
    """The device's name and memory, as torch knows them; the machine's where it knows none."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return found.name, found.total_memory
    return "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
