"""Traces on vLLM's engine in this process, on the clock of its CPU time: `drive.py NAME=TRACE ... -- OPTION ...`

For a shared machine: other work does not count, and idle time is skipped. OPTION: of `vllm serve`; --eos: answers may
end at an EOS; --pages=FILE,S: append the page of metrics to FILE every S seconds of that clock, as JSON lines;
--set=NAME,ATTRIBUTE,N: set the scheduler's attribute to N when run NAME begins. The hook writes the log. With
asynchronous scheduling forwards run in a thread, as on a device.
"""

import json
import os
import random
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


class Clock:
    """The CPU time of the engine's threads, and skipped idle time. Only the main thread moves it.

    The log's writer is a thread, too; its work is not the engine's.
    """

    def __init__(self):
        self._main, self._last, self._skipped, self._set = threading.main_thread(), 0.0, 0.0, None
        self._worked = 0.0
        self._threads = [time.pthread_getcpuclockid(self._main.ident)]

    def count(self, thread):
        """Count a thread's CPU time from now on."""
        clock = time.pthread_getcpuclockid(thread)
        self._skipped -= time.clock_gettime(clock)
        self._threads.append(clock)

    def perf_counter(self):
        if self._set is not None:
            return self._set
        if threading.current_thread() is self._main:
            self._last = sum(map(time.clock_gettime, self._threads)) + self._skipped
        return self._last

    @contextmanager
    def standing(self):
        """Exclude the main thread's work: in a server the front end does it, in another process."""
        self.set(self.perf_counter())
        try:
            yield
        finally:
            self.set(None)

    def skip_to(self, when):
        """Go on at `when`, unless it is past."""
        self._skipped += max(0.0, when - self.perf_counter())

    def set(self, when):
        """Stop the clock at `when`; None: go on from there, without the main thread's work in between."""
        if when is None:
            self._skipped -= time.thread_time() - self._worked
        self._worked, self._set = time.thread_time(), when

    def __getattr__(self, name):  # other things that the hook needs of `time`
        return getattr(time, name)


class Times:
    """`time` for vLLM's metrics, on the clock."""

    def __init__(self, clock):
        self.time = self.monotonic = self.perf_counter = clock.perf_counter

    def __getattr__(self, name):
        return getattr(time, name)


class Pages:
    """The engine's pages of metrics, on the clock."""

    def __init__(self, path, every, clock):
        self._path, self._every, self._clock = path, every, clock
        self.next = None
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm.v1.") and getattr(module, "time", None) is time:
                module.time = Times(clock)

    def upto(self, now):
        """Record the pages that are due by now. A page does not change while the engine is idle."""
        from prometheus_client import generate_latest

        self.next = now if self.next is None else self.next
        while self.next <= now:
            with self._clock.standing():
                page = generate_latest().decode()
                with open(self._path, "a") as file:
                    file.write(json.dumps({"time": round(self.next, 3), "page": page}) + "\n")
            self.next += self._every


def open_engine(options, clock):
    """vLLM's engine; a forward that must not block has its own thread. The clock stops for the front end."""
    from vllm import EngineArgs, LLMEngine
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    engine = LLMEngine.from_engine_args(
        EngineArgs.from_cli_args(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(options))
    )
    core = engine.engine_core.engine_core
    if engine.vllm_config.scheduler_config.async_scheduling:
        device = ThreadPoolExecutor(1)
        clock.count(device.submit(threading.get_ident).result())
        for name in ("execute_model", "sample_tokens"):
            own = getattr(core.model_executor, name)

            def call(*args, own=own, non_block=False):
                future = device.submit(own, *args)
                return future if non_block else future.result()

            setattr(core.model_executor, name, call)
    get_output = engine.engine_core.get_output

    def step():
        clock.set(None)
        try:
            return get_output()
        finally:
            clock.set(clock.perf_counter())

    engine.engine_core.get_output = step  # of LLMEngine.step, which stands still, the engine's own part
    return engine


def request_of(line, eos):
    """A trace's line as vLLM's prompt and parameters."""
    from dsim_hooks.vllm import STATED
    from vllm import SamplingParams

    stated = {key: line[key] for key in STATED if key in line}
    params = SamplingParams(max_tokens=line["output_length"], ignore_eos=not eos, extra_args=stated or None)
    tokens = [t for one in line["hash_ids"] for t in random.Random(str(one)).choices(range(3, 259), k=16)]
    return {"prompt_token_ids": tokens[: line["input_length"]]}, params


def serve(engine, clock, run, lines, eos, pages=None):
    """Send a trace's requests at their times."""
    core = engine.engine_core.engine_core
    zero, coming = clock.perf_counter(), deque(enumerate(lines))

    def due():
        return zero + 1e-3 * coming[0][1]["timestamp"]

    def busy():  # an ended request must still reach the worker, in an empty step
        return engine.has_unfinished_requests() or core.scheduler.has_requests() or bool(core.batch_queue)

    while coming or busy():
        if pages is not None:
            pages.upto(clock.perf_counter() if busy() or not coming else max(due(), clock.perf_counter()))
        if coming and not busy():
            clock.skip_to(due())
        while coming and due() <= clock.perf_counter():
            # The engine's own loop, too, looks for requests between two steps. In a server the front end's work on a
            # request is another process's.
            sent = due()
            clock.set(sent)
            number, line = coming.popleft()
            engine.add_request(f"{run}.{number}", *request_of(line, eos), sent)
            clock.set(None)
            clock.skip_to(sent)  # two clocks measure the front end's work: the next step must not begin before it
        with clock.standing():
            engine.step()


def main():
    between = sys.argv.index("--")
    runs, options = sys.argv[1:between], sys.argv[between + 1 :]
    import dsim_hooks.log
    import dsim_hooks.vllm

    clock = dsim_hooks.log.time = dsim_hooks.vllm.time = Clock()
    given = [option.removeprefix("--pages=") for option in options if option.startswith("--pages=")]
    changes = [option.removeprefix("--set=").split(",") for option in options if option.startswith("--set=")]
    engine = open_engine([o for o in options if o != "--eos" and not o.startswith(("--pages=", "--set="))], clock)
    warm = {"timestamp": 0, "input_length": 30, "output_length": 128, "hash_ids": ["warm", "up"]}
    serve(engine, clock, "warm", [warm] * 3, False)  # allocates memory; the hook leaves out the first 20 steps
    pages = None
    if given:
        path, _, every = given[0].rpartition(",")
        pages = Pages(path, float(every), clock)
    for run in runs:
        name, _, trace = run.partition("=")
        for _, attribute, value in (change for change in changes if change[0] == name):
            scheduler = engine.engine_core.engine_core.scheduler
            print(name, f"{attribute} {getattr(scheduler, attribute)} -> {value}", flush=True)
            setattr(scheduler, attribute, int(value))
        with open(trace) as file:
            serve(engine, clock, name, [json.loads(line) for line in file], "--eos" in options, pages)
        print(name, f"{clock.perf_counter():.1f} s", flush=True)
    time.sleep(2)  # the log's thread writes twice a second
    log = os.environ["DSIM_STEPLOG"]
    with open(log) as file:
        held = [json.loads(line) for line in file]
    with open(log, "w") as file:  # the front end's receipt of a request is on another clock
        file.writelines(json.dumps({k: v for k, v in line.items() if k != "received"}) + "\n" for line in held)
    os._exit(0)  # the engine's threads would delay it


if __name__ == "__main__":
    main()
