"""What several test files draw."""

from hypothesis import strategies as st

from moeroute import dispatch

AVAILABLE = tuple(name for name in dispatch.NAMES if dispatch.unavailable(name) is None)

# All backends of a drawn example. Triton's interpreter takes some 10 ms a program: it joins every tenth example.
BACKENDS = st.sampled_from([tuple(name for name in AVAILABLE if name != "triton")] * 9 + [AVAILABLE])
