"""What `status` and `doctor` say beside a damaged store: what is damaged and how to fix it, and all the rest."""

import json

import pytest
from integration.damage import damage_message
from integration.test_cli import Run, run
from unit.ledger.test_audit import make_entries

from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.subjects import LEDGER

__all__ = ["run"]  # the fixture


@pytest.mark.slow
async def test_a_damaged_newest_entry_is_told_and_the_rest_is_shown(run: Run) -> None:
    await run.lachesis("init")
    entries = make_entries(3, run="demo")
    for at, entry in enumerate(entries):
        headers = {PREVIOUS_HEADER: str(at)}
        await run.bus.publish(subjects.ledger("demo", "main"), encode(entry), msg_id=str(at), headers=headers)
    record = PolicyRecord(run="demo", version="3-a-b", weights="w", tokenizer_hash="h", written_ns=1)
    await run.bus.put(keys.POLICY, encode(record))
    done = await run.lachesis("doctor", "--json")
    findings = {row["check"]: row for row in json.loads(done.stdout)}
    assert "of ROLLOUTS, but it ends at sequence 0" in findings["streams fit each other"]["text"]  # there are none
    assert findings["ledger"]["level"] == "OK"
    assert "3 entries follow one another" in findings["ledger"]["text"]

    assert entries[2].batch is not None
    await damage_message(run.server, LEDGER, entries[2].batch.groups[0].group.encode())
    done = await run.lachesis("doctor", "--json")
    assert done.returncode == 1
    findings = {row["check"]: row for row in json.loads(done.stdout)}
    assert findings["ledger"]["level"] == "FAIL"
    assert "counts 3 messages and cannot read 1 of them" in findings["ledger"]["text"]
    assert "Restore the server's store from a backup" in findings["ledger"]["mend"]

    status = await run.json("status")
    assert status["ledger"] is None
    assert status["policy"]["step"] == 3
    (problem,) = [problem for problem in status["problems"] if "damaged" in problem]
    assert "it counts 3 messages on rl.ledger.demo.main" in problem
    assert b"is damaged: it counts 3 messages" in (await run.lachesis("status")).stdout
