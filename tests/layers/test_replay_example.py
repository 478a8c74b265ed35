"""The example of router replay: with the sampler's experts the trainer is close to it, with its own it is not."""

import pytest

import router_replay


def test_replay_brings_the_two_together(capsys: pytest.CaptureFixture[str]) -> None:
    found = router_replay.main()
    assert 0.9 < found["same experts"] < 1.0  # some choices differ, or there is nothing to show
    assert found["difference, replay"] < 0.25 * found["difference, own choice"]
    assert capsys.readouterr().out.count("\n") == 3
