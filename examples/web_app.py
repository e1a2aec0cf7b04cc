"""A web application that embeds the texts it receives without blocking: one process serves any number of clients.

    python web_app.py --port 8000

    curl --data-binary @texts.txt localhost:8000/jobs    one text per line; answers with a job once they are queued
    curl localhost:8000/jobs/JOB                         the job's progress
    curl --no-buffer localhost:8000/jobs/JOB/vectors     a JSON line for each text, in order, as soon as it is encoded
    curl --request DELETE localhost:8000/jobs/JOB        frees the job

Needs a Redis, a worker, and tornado, which comes with Flower: pip install 'embedctl[flower]'. It has no users and no
passwords, so it accepts connections only from this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler

from embedctl import (
    AsyncJob,
    BrokerUnavailable,
    CorpusChanged,
    EmbedctlError,
    InputError,
    JobCancelled,
    JobNotFound,
    aenqueue_embeddings,
)

#: The HTTP status for each error; the first entry that matches counts.
STATUS_OF_ERROR = {CorpusChanged: 409, InputError: 400, JobNotFound: 404, JobCancelled: 410, BrokerUnavailable: 503}
LARGEST_BODY = 16 * 1024 * 1024


@contextmanager
def told_to_the_client() -> Iterator[None]:
    """Turn the library's errors into HTTP errors: their messages tell the client what to fix."""
    try:
        yield
    except EmbedctlError as error:
        statuses = (status for kind, status in STATUS_OF_ERROR.items() if isinstance(error, kind))
        raise HTTPError(next(statuses, 500)) from error


class Handler(RequestHandler):
    """The base of all handlers."""

    def write_error(self, status_code: int, **details: Any) -> None:
        """Answer with the library's message."""
        self.finish({"error": str(details["exc_info"][1].__cause__ or self._reason)})


class Jobs(Handler):
    """`/jobs`."""

    async def post(self) -> None:
        """Queue the texts of the body."""
        texts = self.request.body.decode(errors="replace").splitlines()
        # A client that missed the answer sends the same request again, and gets the same job.
        key = self.request.headers.get("Idempotency-Key")
        with told_to_the_client():
            job = await aenqueue_embeddings(texts, idempotency_key=key)
        self.set_status(202)
        self.set_header("Location", f"/jobs/{job.id}")
        self.write({"job": job.id})


class OneJob(Handler):
    """`/jobs/JOB`."""

    async def get(self, job_id: str) -> None:
        """Answer with the job's progress."""
        with told_to_the_client():
            status = await (await AsyncJob.get(job_id)).status()
        self.write({"state": status.state, "records": status.records, "done": status.done, "failed": status.failed})

    async def delete(self, job_id: str) -> None:
        """Free the job."""
        with told_to_the_client():
            await (await AsyncJob.get(job_id)).discard()
        self.set_status(204)


class Vectors(Handler):
    """`/jobs/JOB/vectors`."""

    _answering: asyncio.Task[None] | None = None

    async def get(self, job_id: str) -> None:
        """Send vectors as workers make them."""
        with told_to_the_client():
            # Before anything is waited for: a client may hang up at once.
            self._answering = asyncio.create_task(self._answer(job_id))
            await asyncio.wait([self._answering])
            if not self._answering.cancelled():
                self._answering.result()

    async def _answer(self, job_id: str) -> None:
        """Send chunk by chunk: memory stays small, whatever the job's size."""
        job = await AsyncJob.get(job_id)
        self.set_header("Content-Type", "application/x-ndjson")
        async for chunk in job.iter_results():
            failed = {error.position: error.code for error in chunk.errors}
            for position, vector in zip(chunk.positions.tolist(), chunk.vectors, strict=True):
                found = {"error": failed[position]} if position in failed else {"vector": vector.tolist()}
                self.write(json.dumps({"position": position, **found}) + "\n")
            await self.flush()  # waits for a client that reads slowly

    def on_connection_close(self) -> None:
        """Stop answering a client that hung up; its job goes on."""
        if self._answering is not None:
            self._answering.cancel()


async def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    # Ids in full: the library also takes shortened ones, with which a client could find the jobs of others.
    job = r"/jobs/(\d{8}-\d{6}-[0-9a-f]{10})"
    application = Application([("/jobs", Jobs), (job, OneJob), (f"{job}/vectors", Vectors)])
    sockets = bind_sockets(parser.parse_args().port, "127.0.0.1")
    HTTPServer(application, max_buffer_size=LARGEST_BODY).add_sockets(sockets)
    print(f"http://127.0.0.1:{sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
