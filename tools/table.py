"""Put the figures of a benchmark run into the README, between its two markers.

make bench ARGS="--out benchmarks/results"
.venv/bin/python tools/table.py
"""

import json
from pathlib import Path

from moeroute import bench

ROOT = Path(__file__).parent.parent
MARKERS = "<!-- benchmark table -->", "<!-- end of the benchmark table -->"


def table() -> str:
    """The table in Markdown, from benchmarks/results/bench.json."""
    found = json.loads((ROOT / "benchmarks/results/bench.json").read_text())
    about, lines = found["about"], found["lines"]
    rows = [
        f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, {about['date']}:",
        "",
        "| case | time | GB/s | of the roof | × torch, kernel | × torch, as called | × torch, tuned |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for summary in bench.summarise(lines):
        kernel, called, tuned = (summary.by_mode[mode] for mode in ("kernel", "called", "tuned"))
        if summary.case.operator == "one token":
            continue
        memory = f"{kernel['GB/s']:.1f} | {kernel['roof']:.2f}" if "roof" in kernel else "– | –"
        times = " | ".join(f"{line['times']:.1f}" for line in (kernel, called, tuned))
        rows.append(f"| {summary.case.name} | {kernel['ours_s'] * 1e6:,.0f} µs | {memory} | {times} |")
    one = next(line for line in lines if line["case"].startswith("one token") and line["mode"] == "called")
    extra = next(line for line in lines if line["case"] == "memory")
    rows += [
        "",
        f"One token (K = 8, H = 2048, bfloat16), gating, plan, permute, unpermute: {one['ours_s'] * 1e6:.0f} µs, "
        f"{1 / one['times']:.1f} times one `index_select` of its 8 rows.",
        f"Memory of permute and unpermute, forward and backward, (1024, 8, 7168) bfloat16, besides "
        f"{extra['inputs_outputs_gradients_bytes'] / 2**20:.0f} MiB of inputs, outputs and gradients: "
        f"{max(extra['besides_share'], 0):.1%}.",
    ]
    return "\n".join(rows)


def main() -> None:
    """Replace what stands between the markers in README."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    readme.write_text(f"{before}{MARKERS[0]}\n{table()}\n{MARKERS[1]}{after}")


if __name__ == "__main__":
    main()
