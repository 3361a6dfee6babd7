"""The server as it is started: two tensor-parallel ranks behind one port, ended by a signal."""

import psutil

from tests.parity.hostile_requests import ATTACKS, answer_of, besiege, running_server


def test_two_ranks_serve_outlive_hostile_clients_and_end_together(tmp_path):
    with running_server(tmp_path, "--receive-timeout-s", "1") as (port, launcher):
        besiege(port, len(ATTACKS), every=7)
        sampled = {"model": "model", "prompt": [4, 7], "max_tokens": 5, "seed": 3, "n": 2}
        texts = [choice["text"] for choice in answer_of(port, sampled)["choices"]]
        assert texts == [choice["text"] for choice in answer_of(port, sampled)["choices"]]
        assert texts[0] != texts[1]
        assert len(psutil.Process(launcher).children()) == 2
    assert "Traceback" not in (tmp_path / "server.log").read_text()
