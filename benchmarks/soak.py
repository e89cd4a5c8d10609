"""Soak `dsim serve --twin`: many connections, half of them idle, until a number of requests is served.

    python -m dsim.benchmarks.soak --connections 2000 --requests 100000

The server is another process on the loopback. Half of the connections send requests in turn, whole and streamed; the
others reopen when the server closes them. Prints replies, and resident memory after a tenth and at the end. Exit 1 if a
request lacked tokens, or memory grew by more than `--growth` MB.
"""

import argparse
import asyncio
import json
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

TOKENS = 16  # of a reply
WARM = 0.1  # of the requests, before memory is first read


@dataclass
class Soak:
    """Load and results."""

    port: int
    pid: int
    requests: int
    sent: int = 0
    answered: int = 0
    reopened: int = 0
    lost: Counter[str] = field(default_factory=Counter)  # by the reply instead
    memory: dict[int, float] = field(default_factory=dict)  # requests answered -> MB

    def read_memory(self) -> None:
        """Resident, of the server."""
        words = Path(f"/proc/{self.pid}/status").read_text().split()
        self.memory[self.answered] = int(words[words.index("VmRSS:") + 1]) / 1e3


async def busy(soak: Soak) -> None:
    """Requests in turn on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", soak.port)
    while soak.sent < soak.requests:
        soak.sent += 1
        stream = soak.sent % 2 == 1
        body = json.dumps({"prompt": "a prompt of some words", "max_tokens": TOKENS, "stream": stream}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + body)
        try:
            status, reply = await _reply(reader)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            soak.lost[type(error).__name__] += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", soak.port)
            continue
        if status == 200 and f'"completion_tokens":{TOKENS}'.encode() in reply:
            soak.answered += 1
        else:
            soak.lost[f"{status} {reply[:100]!r}"] += 1
        if soak.answered == int(WARM * soak.requests):
            soak.read_memory()
        if soak.answered % (soak.requests // 10) == 0:
            print(f"{soak.answered:,} requests answered", flush=True)
    writer.close()


async def _reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    if b"transfer-encoding: chunked" not in head:
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return status, await reader.readexactly(length)
    data = bytearray()
    while length := int(await reader.readline(), 16):
        data += (await reader.readexactly(length + 2))[:-2]
    await reader.readline()
    return status, bytes(data)


async def idle(soak: Soak) -> None:
    """Reopened when the server closes it."""
    while True:
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", soak.port)
            await reader.read()
            writer.close()
        soak.reopened += 1


async def soaked(soak: Soak, connections: int) -> None:
    """Until all requests are answered."""
    idlers = []
    for _ in range(connections // 2):
        idlers.append(asyncio.create_task(idle(soak)))
        await asyncio.sleep(0)
    await asyncio.gather(*(busy(soak) for _ in range(connections - connections // 2)))
    soak.read_memory()
    for task in idlers:
        task.cancel()
    await asyncio.gather(*idlers, return_exceptions=True)


def main() -> int:
    given = argparse.ArgumentParser(prog="python -m dsim.benchmarks.soak", description=__doc__)
    given.add_argument("--connections", type=int, default=2000)
    given.add_argument("--requests", type=int, default=100_000)
    given.add_argument("--growth", type=float, default=20.0, help="MB that the server may grow by")
    given.add_argument("--profile", default="a100-sdar-8b")
    given.add_argument("--policy", default="optimus")
    given.add_argument("--speed", type=float, default=200.0, help="of the twin")
    given.add_argument("-o", "--out", default=None, help="the server's journal goes there")
    args = given.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    words = ["--twin", args.profile, "--policy", args.policy, "--speed", str(args.speed), "--port", "0"]
    # None is refused.
    words += ["--max-requests", str(args.requests + 1), "--max-waiting", str(args.connections)]
    words += [] if args.out is None else ["-o", args.out]
    server = subprocess.Popen([sys.executable, "-m", "dsim", "serve", *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    soak = Soak(int(server.stdout.readline().rsplit(":", 1)[1]), server.pid, args.requests)
    begin = time.monotonic()
    try:
        asyncio.run(soaked(soak, args.connections))
    finally:
        took = time.monotonic() - begin
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=120)
    first, last = soak.memory[min(soak.memory)], soak.memory[max(soak.memory)]
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{args.connections:,} connections, half of them idle and opened again {soak.reopened:,} times; "
        f"{soak.answered:,} of {soak.sent:,} requests answered in {took:.0f} s, {soak.sent - soak.answered} lost\n"
        f"server: {first:.1f} MB after {min(soak.memory):,} requests, {last:.1f} MB at the end ({last - first:+.1f}), "
        f"{spent.ru_utime + spent.ru_stime:.0f} s of the CPU, exit code {server.returncode}"
    )
    for what, count in soak.lost.most_common(5):
        print(f"  {count} times {what}")
    return int(soak.answered < args.requests or last - first > args.growth or server.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
