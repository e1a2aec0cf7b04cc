"""What the Flower dashboard says about a job is what embedctl says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from embedctl import JobState, enqueue_embeddings
from embedctl_config.celery_app import TASK, broker_url
from embedctl_config.settings import Settings
from tests.e2e.conftest import eventually


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_flower_and_status_agree_about_a_running_job(
    settings: Settings, environment, start_worker, short_folder: Path
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "celery", "-b", broker_url(settings.redis_url), "flower"]
    command += ["--address=127.0.0.1", f"--port={port}"]
    own = {**environment, "FLOWER_UNAUTHENTICATED_API": "1"}
    with (short_folder / "flower.log").open("wb") as log:
        flower = subprocess.Popen(command, env=own, cwd=short_folder, stdout=log, stderr=log)

    def ask(path: str) -> dict:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return json.load(answer)

    def answers() -> bool:
        try:
            ask("/api/tasks")
        except OSError:
            return False
        return True

    try:
        eventually(answers, timeout_s=30)
        environment["EMBEDCTL_REISSUE_S"] = "60"  # one ticket a chunk
        worker = start_worker("slow")
        texts = [f"secret {i} " + "word " * 60 for i in range(60)]
        job = enqueue_embeddings(texts, hardware="slow", chunk_size=5, settings=settings.replace(reissue_s=60))

        def agree() -> bool:
            tasks = [task for task in ask("/api/tasks").values() if job.id in (task["args"] or "")]
            status = job.status()
            states = [task["state"] for task in tasks]
            return (
                status.state is JobState.RUNNING
                and 2 <= status.chunks_done < status.chunks
                and states.count("SUCCESS") == status.chunks_done
                and states.count("STARTED") >= 1
                and all(task["name"] == TASK and task["worker"] == worker.row().name for task in tasks)
            )

        eventually(agree, timeout_s=30)
        job.wait(timeout=60)

        def tasks_of_job() -> list[dict]:
            return [task for task in ask("/api/tasks").values() if job.id in (task["args"] or "")]

        eventually(lambda: len(tasks_of_job()) == 12 and {task["state"] for task in tasks_of_job()} == {"SUCCESS"})
        tasks = tasks_of_job()
        assert sorted(task["args"] for task in tasks) == sorted(f"('{job.id}', {i})" for i in range(12))
        assert "secret" not in json.dumps(tasks)
    finally:
        flower.terminate()
        flower.wait(30)
