"""The log: an engine's thread records numbers, a thread of the log formats and writes lines."""

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
    from msgspec.json import encode  # comes with vLLM and SGLang; ten times as fast as json
except ImportError:

    def encode(value):
        return json.dumps(value, separators=(",", ":")).encode()


SCHEMA, VERSION = "dsim-steplog", 1
FLUSH = 0.5  # s
TURN = 8  # lines
ENDED = 4096  # ended requests that stay known: rows may be in flight
LONGEST = 200  # characters of an error
# Of a configuration, the texts and the objects that say something of a shape.
TEXTS, NESTED = ("architectures", "layer_types", "model_type"), ("text_config", "per_layer_config")
_REPORTED = set()  # kinds reported as left out


def log_path():
    """None without DSIM_STEPLOG."""
    path = os.environ.get("DSIM_STEPLOG")
    return path.replace("{pid}", str(os.getpid())) if path else None


def leave_out(kind, error):
    """Say on stderr what the log leaves out, once a kind."""
    if kind in _REPORTED:
        return
    _REPORTED.add(kind)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
    with contextlib.suppress(Exception):
        sys.stderr.write(f"dsim-hooks: the step log leaves out {kind}: {reason}\n")


def read(kind, get):
    """None, and left out of the log, if `get` raises."""
    try:
        return get()
    except Exception as error:
        leave_out(kind, error)
        return None


def readable(fields):
    """{name: reader} read, without None and unreadable values."""
    values = {name: read(name, get) for name, get in fields.items()}
    return {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def harmless(kind):
    """Errors do not reach the engine: the log leaves `kind` out."""
    try:
        yield
    except Exception as error:
        leave_out(kind, error)


class Entry:
    """A logged request. num_tokens: prompt and completed steps' tokens."""

    __slots__ = ("input_length", "num_tokens", "number")

    def __init__(self, number, input_length):
        self.number, self.input_length, self.num_tokens = number, input_length, input_length


class StepLog:
    """An engine's log: s since it was opened, on a monotonic clock. header: more of the first line."""

    def __init__(self, path, header):
        self.on = os.environ.get("DSIM_STEPLOG_SIGNAL") != "1"
        self._skip = int(os.environ.get("DSIM_STEPLOG_SKIP", "20"))
        self._zero, self._wall = time.perf_counter(), time.time()
        self._lines = queue.SimpleQueue()
        self._requests = {}
        self._num_requests = 0
        self._ended = collections.deque()
        self._step = 0
        self._file = open(path, "wb")  # noqa: SIM115 - while the engine runs
        first = {"schema": SCHEMA, "version": VERSION, **header, "started": self._wall}
        first.setdefault("workload", os.environ.get("DSIM_STEPLOG_WORKLOAD", "live"))
        self._file.write(json.dumps(first, separators=(",", ":"), default=str).encode() + b"\n")
        self._file.flush()
        self._writer = threading.Thread(target=self._write, name="dsim-steplog", daemon=True)
        self._writer.start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._toggle)
        atexit.register(self.close)

    def now(self):
        """s since the log was opened."""
        return time.perf_counter() - self._zero

    def at(self, moment):
        """time.perf_counter's reading as s of the log."""
        return moment - self._zero

    def request(self, name, input_length, output_length=None, received=None, arrival=None, **extra):
        """Log a request that arrives now or at `arrival` (s of the log).

        received: by the server, s since 1970; extra: other keys. A request that arrives while the log is off stays
        unknown; its steps are left out.
        """
        if name in self._requests or not self.on or self._step < self._skip:
            return
        number = self._num_requests
        self._num_requests += 1
        self._requests[name] = Entry(number, input_length)
        arrival = self.now() if arrival is None else arrival
        line = {"kind": "request", "request": number, "id": name, "input_length": input_length, "arrival": arrival}
        if output_length is not None:
            line["output_length"] = output_length
        if received is not None:
            line["received"] = received - self._wall
        self._lines.put(line | extra)

    def step(self, start, latency, rows, **extra):
        """Log a step; rows: (request's name, phase, tokens, keys, emitted tokens); extra: other keys.

        Returns its number, or None if it is not logged.
        """
        self._step += 1
        if not self.on or not rows:
            return None
        line = self._line(self._step, start, latency, map(list, zip(*rows, strict=True)), extra)
        if line is None:
            return None
        self._lines.put(line)
        return self._step

    def step_later(self, start, latency, make):
        """Log a step whose line the log's thread makes, to save the engine's time.

        make: returns the columns names, phases, tokens, keys, emitted, the other keys, and ended requests' names.
        """
        self._step += 1
        if self.on:
            self._lines.put((self._step, start, latency, make))

    def _line(self, number, start, latency, columns, extra):
        requests = self._requests
        names, phases, tokens, keys, emitted = columns
        try:
            numbers = [requests[name].number for name in names]
        except KeyError:
            return None
        if latency <= 0:
            return None
        return {
            "kind": "step",
            "step": number,
            "start": start,
            "latency": latency,
            "batch": len(names),
            "tokens": sum(tokens),
            "sum_kv": sum(keys),
            "requests": numbers,
            "phases": alike(phases),
            "row_tokens": alike(tokens),
            "row_keys": keys,
            "emitted": alike(emitted),
            **extra,
        }

    def _records(self, number, start, latency, make):
        """Lines of `step_later`."""
        *columns, extra, ended = make()
        line = self._line(number, start, latency, columns, extra)
        if line is not None:
            yield line
        for name in ended:
            yield from self._end(name, start + latency)

    def entry(self, name):
        """Without tokens if unknown."""
        return self._requests.get(name) or Entry(None, 0)

    def _end(self, name, moment):
        request = self._requests.get(name)
        if request is None:
            return
        yield {"kind": "finish", "request": request.number, "time": moment}
        self._ended.append(name)
        if len(self._ended) > ENDED:
            self._requests.pop(self._ended.popleft(), None)

    def sequence(self, step, name, block_start, committed):
        """A step's effect on a sequence's block: positions from 0."""
        if step is None or name not in self._requests:
            return
        line = {
            "kind": "sequence",
            "request": self._requests[name].number,
            "step": step,
            "block_start": block_start,
            "committed": committed,
        }
        self._lines.put(line)

    def finished(self, name):
        for line in self._end(name, self.now()):
            self._lines.put(line)

    @contextlib.contextmanager
    def step_left_out(self):
        """On an error drop the step and all requests in flight: their tokens can no longer be counted."""
        try:
            yield
        except Exception as error:
            leave_out("a step and the requests in flight", error)
            self.forget()

    def forget(self):
        """All known requests; their steps are left out from now on."""
        self._requests.clear()

    def close(self):
        """Write the rest."""
        self._lines.put(None)
        self._writer.join(timeout=5)

    def _toggle(self, _signum, _frame):
        self.on = not self.on
        if not self.on:
            self.forget()  # tokens are not counted while off

    def _write(self):
        try:
            self._write_lines()
        except Exception as error:  # a full disk
            self.on = False
            self.forget()
            leave_out("all that comes", error)

    def _write_lines(self):
        while True:
            time.sleep(FLUSH)  # lines gather, so the engine's thread is woken less
            num = 0
            while not self._lines.empty():
                line = self._lines.get()
                if line is None:
                    self._file.close()
                    return
                data = []
                with self.step_left_out():
                    data = [encode(record) for record in (self._records(*line) if isinstance(line, tuple) else (line,))]
                self._file.writelines(record + b"\n" for record in data)
                num += 1
                if num % TURN == 0:  # it waits for the interpreter for a few lines at most
                    time.sleep(0)
            self._file.flush()


def hook_class(kind, name, around):
    """Replace a method by `around`, which gets the original."""
    original = getattr(kind, name)
    if inspect.iscoroutinefunction(original):

        async def hooked(self, *args, **kwargs):
            return await around(self, original, *args, **kwargs)
    else:

        def hooked(self, *args, **kwargs):
            return around(self, original, *args, **kwargs)

    setattr(kind, name, functools.wraps(original)(hooked))


def alike(column):
    """One value if all rows have the same."""
    return column[0] if column.count(column[0]) == len(column) else column


def config_of(config):
    """A model's Hugging Face configuration as config.json has it: whole numbers, flags, and the words of TEXTS."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    elif not isinstance(config, dict):
        config = vars(config)
    values = {}
    for key, value in config.items():
        kind = str if key in TEXTS else int
        if value is not None and (key in NESTED or str(key).isdigit()):
            values[key] = config_of(value)
        elif all(isinstance(item, kind) for item in (value if isinstance(value, list | tuple) else [value])):
            values[key] = value
    return values


def machine():
    """Readers of the header's device keys (from torch, or of the machine without a GPU)."""

    def device():
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(torch.cuda.current_device())
        return None

    def memory():
        return device().total_memory if device() else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def torch_version():
        import torch

        return torch.__version__

    return {"device": lambda: device().name if device() else "CPU", "memory_bytes": memory, "torch": torch_version}


def pairs(tokens, keys, bidirectional=False):
    """Query-key pairs: each query sees all keys (bidirectional), or its own and earlier ones."""
    return tokens * keys if bidirectional else tokens * (2 * keys - tokens + 1) // 2
