"""An agent that cheats gets no reward and no secret, and leaves nothing; nor does one that is killed."""

from __future__ import annotations

import json

import pytest
from mender import DONE, call
from test_agents import FEW, LIGHT, MANY, explained
from workshop import DEADLINE_S, DECOY, Workshop

from interchange_helpers import eventually
from tinkerscript.access_tokens import claim_key, load_secret
from tinkerscript.trainer_link.messages import EpisodeAccepted

FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

REWRITE = """
echo 'print("the test passed")' > test_calc.py; cp test_calc.py conftest.py; cp test_calc.py sitecustomize.py
rm test_calc.py && ln -s /dev/null test_calc.py
site=~/.local/lib/python3.11/site-packages; mkdir -p $site
echo 'import os; os._exit(0)' > $site/usercustomize.py
rm -f /bin; mkdir /bin; printf '#!/usr/bin/sh\\nexit 0\\n' > /bin/python3; /usr/bin/chmod +x /bin/python3
/usr/bin/cp /usr/bin/sh /usr/bin/bash /bin
readlink test_calc.py
"""
DAEMON = """
(setsid sh -c 'while :; do rm -f /work/test_calc.py; echo "print(1)" > /work/test_calc.py; sleep 0.02; done' &
setsid nohup sh -c 'trap "" TERM INT HUP; while :; do sleep 0.1; done' &) > /dev/null 2>&1; echo started
"""
SPY = """
MARKS='key|token|secret|bearer|decoy'
cat /proc/*/environ /proc/*/cmdline 2> /dev/null | tr '\\0' '\\n' | grep -aiE "$MARKS"
env | grep -aiE "$MARKS"
find / \\( -path /usr -o -path /proc -o -name 'python3*' -o -name node_modules \\) -prune \\
    -o -type f -print 2> /dev/null |
    xargs grep -aihE "$MARKS" 2> /dev/null | head -100
ls -la / /root /home; echo looked around
"""
REACH = """
import itertools, json, urllib.error, urllib.request
server, own = "SERVER", "http://127.0.0.1:8000"
output = {"reward": 1.0, "is_success": True, "metadata": {}, "log_metrics": {}}
bodies = {
    "/claim_episode": {"client_uuid": "thief", "sends_key": True},
    "/end_episode": {"client_uuid": "thief", "episode_uuid": "OTHER", "workflow_output": output},
    "/agent/../end_episode": {"client_uuid": "thief", "episode_uuid": "OTHER", "workflow_output": output},
    "/agent/v1/%2e%2e/%2e%2e/claim_episode": {"client_uuid": "thief", "sends_key": True},
    "/v1/chat/completions": {"model": "policy", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/episodes/OTHER/chat/completions": {"model": "policy", "messages": []},
    "/register_episode": {}, "/get_engine_status": None, "/metrics": None, "/failed_episodes": None,
}
places = [(base, path, body) for base in (own, server) for path, body in bodies.items()]
places += [("http://192.0.2.1", "/", None), ("http://169.254.169.254", "/latest", None)]
for base, path, body in places:
    data = None if body is None else json.dumps(body).encode()
    key = {"Authorization": "Bearer KEY", "x-api-key": "KEY"}
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"} | key)
    try:
        print("REACHED", base, path, urllib.request.urlopen(request, timeout=2).read()[:300])
    except OSError as error:
        print("refused", path, error)
"""


def cheating(server: str, other: str, key: str) -> list[str]:
    """What it knows: the server's address, and another claim with its key."""
    reach = REACH.replace("SERVER", server).replace("OTHER", other).replace("KEY", key)
    steps = [REWRITE, DAEMON, SPY, f"python3 - <<'EOF'\n{reach}\nEOF\n", FINISH]
    return [call("bash", command=step) for step in steps]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(300)
async def test_a_cheating_agent_gets_no_reward_and_no_secret(workshop: Workshop) -> None:
    (other,) = await workshop.register(1)
    claimed = await workshop.stage.http.post(
        "/claim_episode", json={"client_uuid": "other", "sends_key": True}
    )
    others_key = claimed.json()["openai_api_key"]
    workshop.plays(cheating(str(workshop.stage.http.base_url).rstrip("/"), other, others_key))
    async with workshop.worker("mini-swe-agent", at_once=1) as worker:
        (result,) = await workshop.results(await workshop.register(1), worker)
    assert result.reward == 0.0
    verdict = explained(result)
    assert "AssertionError" in verdict["explanation"], verdict
    assert "setsid" not in verdict["explanation"]
    assert "trap" not in verdict["explanation"]
    heard = "\n".join(message for each in result.calls for message in _told(each.messages))
    assert "/dev/null" in heard
    assert heard.count("started") == 1
    assert heard.count("refused /") == 22
    assert "REACHED" not in heard
    for secret in (DECOY, others_key, _key(workshop, result)):
        assert secret
        assert secret not in heard
    assert "looked around" in heard
    ended = await workshop.stage.http.post(
        "/end_episode",
        json={"client_uuid": "other", "episode_uuid": other, "workflow_output": {"reward": 0.5}},
        headers={"Authorization": f"Bearer {others_key}"},
    )
    assert ended.json()["success"], ended.text
    (untouched,) = await workshop.results([other], worker)
    assert untouched.reward == 0.5
    assert not untouched.calls


def _told(messages: str) -> list[str]:
    return [str(message["content"]) for message in json.loads(messages) if message["role"] == "tool"]


def _key(workshop: Workshop, result: EpisodeAccepted) -> str:
    """The key of the agent's own claim."""
    return claim_key(load_secret(workshop.folder / "run/server.secret"), result.episode_uuid, result.attempt)


@pytest.mark.parametrize(("stop", "at_once"), [("reach the time limit", FEW), ("kill the worker", MANY)])
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(300)
async def test_nothing_stays_of_agents_that_are_ended(workshop: Workshop, stop: str, at_once: int) -> None:
    """The kill comes last: its episodes stay claimed until their leases expire."""
    wait = "(setsid sleep 600 &) > /dev/null 2>&1; sleep 600"
    workshop.plays([call("exec_command", cmd=wait, yield_time_ms=600_000), DONE])
    limit_s = 300.0 if stop == "kill the worker" else 20.0
    async with workshop.worker(LIGHT, at_once=at_once, time_limit_s=limit_s) as worker:
        uuids = await workshop.register(at_once)

        async def sleeps() -> bool:
            asleep = sum(line.startswith("sleep\x00600") for line in worker.sandboxed())
            return asleep >= (2 * at_once if stop == "kill the worker" else 2)

        await eventually(sleeps, "a command and a daemon of every agent", deadline_s=DEADLINE_S)
        if stop == "kill the worker":
            worker.process.kill()
            await worker.process.wait()
        else:
            for result in await workshop.results(uuids, worker):
                assert result.reward == 0.0
                assert "sleep 600" not in explained(result)["explanation"]
    if stop == "kill the worker":
        await eventually(worker.left_nothing, "the end of the killed worker's processes and files")
