"""The example that trains a Hugging Face model with our layers in the place of its own."""

import pytest

import finetune_hf


def test_it_learns_and_gives_the_model_back(capsys: pytest.CaptureFixture[str]) -> None:
    found = finetune_hf.main()
    assert found["last"] < 0.5 * found["first"]
    assert found["exchanged"] < 1e-5
    assert found["given back"] < 1e-4
    assert capsys.readouterr().out.count("\n") == 6
