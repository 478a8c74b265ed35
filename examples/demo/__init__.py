"""The demo: the same bits everywhere, the speed of the operators, and a language model that learns real text.

`make demo` from the project's folder, or `PYTHONPATH=examples python -m demo` where moeroute is installed. In order:

    bits.py        one layer, computed in several ways, its results hashed; moeroute beside plain PyTorch
    speed.py       a few operators against torch and the memory
    training.py    one training process; model.py, data.py and measures.py are what it is made of
    turns.py       two training processes take turns; each is killed once and resumes from its checkpoint
    run.py         all of it, one after the other
    screen.py      tables and bars on the terminal; charts.py draws the pictures
"""
